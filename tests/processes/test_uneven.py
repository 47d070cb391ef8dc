"""Replicas that are not equally fast have shares by their speed, and leave what they leave in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import whale_nebula as nb
from tests.parity.zoo import ZOO
from tests.processes.running import Ended, ended, started
from tests.processes.telling import left
from tests.processes.workers.train import SPEEDS, slowed
from tests.same import Cut

DEADLINE = 300.0
pytestmark = pytest.mark.timeout(DEADLINE)
MODEL = "functional"
WORKERS = {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1", "c1/1": "c1"}


@pytest.fixture(scope="module")
def four() -> Iterator[tuple[Ended, Mapping[str, Any]]]:
    """Four processes; and the same in this one meanwhile."""
    with started("train", WORKERS, "uneven", MODEL, deadline=DEADLINE) as job:
        nb.shutdown()
        with nb.init(SPEEDS, links="10gbit,0ms"):
            expected = {MODEL: left(ZOO[MODEL].run(Cut(2, 1, replicas=(1, 2)))), "slowed": slowed({})}
        found = ended(job, DEADLINE)
    yield found, expected


def test_where_the_config_says_speeds_all_end_with_what_one_process_has(four: tuple[Ended, Mapping[str, Any]]) -> None:
    found, expected = four
    assert found.same(f"{MODEL} many") == 3
    for part in found.all(MODEL):
        assert {**part, "stages": None} == {**expected[MODEL], "stages": None}


def test_where_one_is_seen_to_be_faster_all_processes_give_it_more_at_the_same_step(
    four: tuple[Ended, Mapping[str, Any]],
) -> None:
    notes = four[0].same("notes")
    assert len(notes) == 1 and notes[0].startswith("plan version 2, from step 6 on: the replicas of c0 take "), notes
    assert notes[0].endswith("micro-batches, and took 3 : 3")
    slow, fast = map(int, notes[0].partition(" take ")[2].partition(" micro")[0].split(" : "))
    assert slow < fast and slow + fast == 6


def test_whoever_takes_them_and_by_whatever_way_the_losses_are_those_of_one_process(
    four: tuple[Ended, Mapping[str, Any]],
) -> None:
    found, expected = four
    assert found.same("slowed") == pytest.approx(expected["slowed"], rel=1e-3)
    assert expected["slowed"][-1] < 0.9 * expected["slowed"][0]


def test_what_replicas_compute_is_known_to_all(four: tuple[Ended, Mapping[str, Any]]) -> None:
    slow, fast = four[0].same("computed")
    assert slow > 0.04 and fast > 0.02
