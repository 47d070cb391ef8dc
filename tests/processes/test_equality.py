"""Processes joined by sockets leave, bit for bit, what one process with actors over memory links leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import whale_nebula as nb
from tests.parity.zoo import ZOO, Cut
from tests.processes.running import Ended, ended, started
from tests.processes.telling import left, sent

# Sixteen programs and more, traced in each process, beside the reference: on two busy cores that takes its time.
DEADLINE = 900.0
Both = tuple[Ended, Mapping[str, Any]]


def reference(stages: int, micro_batches: int) -> dict[str, Any]:
    """What each model of the zoo leaves in this process, by actors."""
    found = {}
    for name, trial in ZOO.items():
        nb.shutdown()
        with nb.init(links="10gbit,0ms"):
            found[f"{name} {stages},{micro_batches}"] = left(trial.run(Cut(stages, micro_batches)))
            found[f"{name} {stages},{micro_batches} sent"] = sent()
    return found


def both(workers: int, *cuts: tuple[int, int]) -> Both:
    """The zoo in several processes, all in one run, and in one process meanwhile."""
    with started("zoo", workers, *(f"{stages},{micro_batches}" for stages, micro_batches in cuts)) as job:
        expected = {name: outcome for cut in cuts for name, outcome in reference(*cut).items()}
        found = ended(job, DEADLINE)
    found.result.check()
    return found, expected


SAMPLE = {"pair": (3,), "trio": (2,)}


def micro(config: pytest.Config, fixture: str) -> tuple[int, ...]:
    """One number of micro-batches in `make test`, all in `make soak`."""
    return (1, 2, 3) if config.getoption("--grid", default=False) else SAMPLE[fixture]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    fixture = "pair" if "pair" in metafunc.fixturenames else "trio"
    metafunc.parametrize("micro_batches", micro(metafunc.config, fixture))


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[Both]:
    yield both(2, *((2, m) for m in micro(request.config, "pair")))


@pytest.fixture(scope="module")
def trio(request: pytest.FixtureRequest) -> Iterator[Both]:
    yield both(3, *((3, m) for m in micro(request.config, "trio")))


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


@pytest.mark.parametrize("name", ZOO)
def test_two_processes(pair: Both, name: str, micro_batches: int) -> None:
    check(pair, f"{name} 2,{micro_batches}")


@pytest.mark.parametrize("name", ZOO)
def test_three_processes(trio: Both, name: str, micro_batches: int) -> None:
    check(trio, f"{name} 3,{micro_batches}")
