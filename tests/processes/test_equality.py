"""Processes joined by sockets leave, bit for bit, what one process with actors over memory links leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import whale_nebula as nb
from tests.parity.zoo import ZOO
from tests.processes.running import Ended, ended, started
from tests.processes.telling import left, sent
from tests.same import Cut

# Sixteen programs and more, traced in each process, beside the reference: on two busy cores that takes its time.
DEADLINE = 900.0
Both = tuple[Ended, Mapping[str, Any]]
Case = tuple[str, int, int]
"""A model of the zoo, its number of stages, and of micro-batches."""


SAMPLE = {
    "pair": [(name, 2, 3) for name in ("subclassed", "control_flow", "gan", "frozen", "inference", "sequential")],
    "trio": [(name, 3, 2) for name in ("functional", "token_loop", "scaled")],
}
"""What `make test` runs: every model once, with two processes or with three. `make soak` runs all."""
STAGES = {"pair": 2, "trio": 3}


def cases(config: pytest.Config, fixture: str) -> list[Case]:
    """The sample, or the grid."""
    if not config.getoption("--grid", default=False):
        return SAMPLE[fixture]
    return [(name, STAGES[fixture], micro_batches) for micro_batches in (1, 2, 3) for name in ZOO]


def called(case: Case) -> str:
    """What a worker calls it."""
    name, stages, micro_batches = case
    return f"{name},{stages},{micro_batches}"


def reference(case: Case) -> dict[str, Any]:
    """What a model of the zoo leaves in this process, by actors."""
    name, *cut = case
    nb.shutdown()
    with nb.init(links="10gbit,0ms"):
        return {called(case): left(ZOO[name].run(Cut(*cut))), f"{called(case)} sent": sent()}


def both(workers: int, chosen: list[Case]) -> Both:
    """Models in several processes, all in one run, and in one process meanwhile."""
    with started("train", workers, "zoo", *map(called, chosen)) as job:
        expected = {name: outcome for case in chosen for name, outcome in reference(case).items()}
        found = ended(job, DEADLINE)
    found.result.check()
    return found, expected


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture in STAGES.keys() & set(metafunc.fixturenames):
        metafunc.parametrize("case", cases(metafunc.config, fixture), ids=called)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[Both]:
    yield both(2, cases(request.config, "pair"))


@pytest.fixture(scope="module")
def trio(request: pytest.FixtureRequest) -> Iterator[Both]:
    yield both(3, cases(request.config, "trio"))


def check(run: Both, name: str) -> None:
    found, expected = run
    parts: list[Mapping[str, Any]] = found.all(name)
    for part in parts:
        assert {**part, "stages": None} == {**expected[name], "stages": None}
    # Each process reports on its own stage: together they are those of the plan.
    assert [stage for part in parts for stage in part["stages"]] == expected[name]["stages"]
    # And on what it sent: the emulated lines carried the same bytes, an update's among them.
    sent = {link: count for part in found.all(f"{name} sent") for link, count in part.items() if count[0]}
    assert sent == expected[f"{name} sent"]


def test_two_processes(pair: Both, case: Case) -> None:
    check(pair, called(case))


@pytest.mark.grid
def test_three_processes(trio: Both, case: Case) -> None:
    check(trio, called(case))


def test_every_model_is_sampled() -> None:
    assert sorted(name for chosen in SAMPLE.values() for name, _, _ in chosen) == sorted(ZOO)
