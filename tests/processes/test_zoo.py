"""Processes joined by sockets have, bit for bit, the results of one process with actors over memory links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import whale_nebula as nb
from tests.parity.zoo import ZOO
from tests.processes.worker_reports import left, sent
from tests.processes.worker_runs import Ended, beside
from tests.processes.workers.train import read_case

# Sixteen programs and more, traced in each process, beside the reference: on two busy cores that takes its time.
DEADLINE = 900.0
pytestmark = pytest.mark.timeout(DEADLINE)
WORKERS: Mapping[str, int | Mapping[str, str]] = {
    "pair": 2, "trio": 3, "replicas": {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1"},
    "parted": {"c0/0": "c0", "c1/0": "c1", "c1/1": "c1"},
}  # fmt: skip
SAMPLE = {"pair": ["gan,2,3,zero-bubble"]}
"""Models of the zoo, their stages and micro-batches, and the replicas of each stage: what `make test` runs."""
GRID = {
    "pair": [f"{name},2,{many}" for many in (1, 2, 3) for name in ZOO],
    "trio": [f"{name},3,{many}" for many in (1, 2, 3) for name in ZOO],
    "replicas": [f"{name},2,{many},2+1" for many in (1, 4, 6) for name in ZOO],
    "parted": [f"{name},2,4,1+2,zero-bubble" for name in ZOO],
}


def cases(config: pytest.Config) -> Mapping[str, list[str]]:
    """The sample, or the grid."""
    return GRID if config.getoption("--grid", default=False) else SAMPLE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        pairs = [(run, case) for run, chosen in cases(metafunc.config).items() for case in chosen]
        metafunc.parametrize(
            ("both", "case"), pairs, ids=[case for _, case in pairs], indirect=["both"], scope="module"
        )


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest) -> tuple[Ended, Mapping[str, Any]]:
    """All models of a run in several processes, and in this one meanwhile."""
    chosen = cases(request.config)[request.param]
    workers = WORKERS[request.param]
    return beside("train", workers, "zoo", *chosen, deadline=DEADLINE, alone=lambda: reference(chosen))


def reference(cases: list[str]) -> dict[str, Any]:
    """What models of the zoo leave in this process, by actors."""
    found: dict[str, Any] = {}
    for case in cases:
        name, cut = read_case(case)
        nb.shutdown()
        with nb.init(links="10gbit,0ms"):
            found |= {case: left(ZOO[name].run(cut)), f"{case} sent": sent()}
    return found


def test_every_process_ends_with_what_one_process_has(both: tuple[Ended, Mapping[str, Any]], case: str) -> None:
    """Each reports on its own stage, together on those of the plan; and on what it sent, as the emulated lines did."""
    found, expected = both
    parts: list[Mapping[str, Any]] = found.all(case)
    for part in parts:
        assert {**part, "stages": None} == {**expected[case], "stages": None}
    assert list(dict.fromkeys(stage for part in parts for stage in part["stages"])) == expected[case]["stages"]
    links = {link: count for part in found.all(f"{case} sent") for link, count in part.items() if count[0]}
    if "+" in case:
        assert links.keys() <= {"c0->c1", "c1->c0"}
    else:
        assert links == expected[f"{case} sent"]
