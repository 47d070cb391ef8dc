"""Replicas that are processes of their own leave, bit for bit, what replicas in one process leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import whale_nebula as nb
from tests.parity.zoo import ZOO
from tests.processes.running import Ended, ended, started
from tests.processes.telling import left
from tests.same import Cut

DEADLINE = 900.0
pytestmark = pytest.mark.timeout(DEADLINE)
THREE = {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1"}
SAMPLE = [("subclassed", 2, 3, (2, 1))]
"""A model, its stages, its micro-batches, and the replicas of each stage: what `make test` runs."""
Case = tuple[str, int, int, tuple[int, ...]]


def cases(config: pytest.Config) -> list[Case]:
    """The sample, or the grid."""
    if not config.getoption("--grid", default=False):
        return SAMPLE
    return [(name, 2, many, copies) for name in ZOO for many in (1, 4, 6) for copies in ((2, 1),)]


def called(case: Case) -> str:
    """What a worker calls it."""
    name, stages, micro_batches, replicas = case
    return f"{name},{stages},{micro_batches},{'+'.join(map(str, replicas))}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases(metafunc.config), ids=called)


def alone(case: Case) -> dict[str, Any]:
    """What the same replicas leave in this process."""
    name, stages, micro_batches, replicas = case
    nb.shutdown()
    with nb.init(links="10gbit,0ms"):
        return left(ZOO[name].run(Cut(stages, micro_batches, replicas=replicas)))


@pytest.fixture(scope="module")
def three(request: pytest.FixtureRequest) -> Iterator[tuple[Ended, Mapping[str, Any]]]:
    """All models in one run of a cluster of two workers and one of a single one; the same in one process meanwhile."""
    chosen = cases(request.config)
    with started("train", THREE, "replicated", *map(called, chosen), deadline=DEADLINE) as job:
        expected = {called(case): alone(case) for case in chosen}
        found = ended(job, DEADLINE)
    yield found, expected


def test_every_process_ends_with_what_one_process_has(three: tuple[Ended, Mapping[str, Any]], case: Case) -> None:
    found, expected = three
    for part in found.all(called(case)):
        assert {**part, "stages": None} == {**expected[called(case)], "stages": None}


def test_the_stages_that_report_are_those_of_the_plan(three: tuple[Ended, Mapping[str, Any]], case: Case) -> None:
    found, expected = three
    seen = {stage for part in found.all(called(case)) for stage in part["stages"]}
    assert seen == set(expected[called(case)]["stages"])


def test_what_crosses_between_clusters_is_told_by_their_names(
    three: tuple[Ended, Mapping[str, Any]], case: Case
) -> None:
    found, _ = three
    names = {name for part in found.all(f"{called(case)} sent") for name in part}
    assert names <= {"c0->c1", "c1->c0"}


def test_replicas_that_are_no_longer_alike_are_found(three: tuple[Ended, Mapping[str, Any]]) -> None:
    said = three[0].all("spoiled")
    assert all("the replicas in c0/0, c0/1 no longer have the same variables" in each for each in said), said
