"""Replicas of unequal speed have shares by their speed, with the results of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import whale_nebula as nb
from tests.parity.zoo import ZOO
from tests.processes.worker_reports import left
from tests.processes.worker_runs import Ended, beside
from tests.processes.workers.train import SPEEDS, read_case, slowed

DEADLINE = 300.0
pytestmark = [pytest.mark.timeout(DEADLINE), pytest.mark.grid]  # `tests/unit/runtime/test_shares.py` in one process
CASE = "token_loop,2,1,1+2"
WORKERS = {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1", "c1/1": "c1"}
Both = tuple[Ended, Mapping[str, Any]]


def alone() -> dict[str, Any]:
    """The same in this process."""
    name, cut = read_case(CASE)
    with nb.init(SPEEDS, links="10gbit,0ms"):
        return {"model": left(ZOO[name].run(cut)), "slowed": slowed({})}


@pytest.fixture(scope="module")
def four() -> Both:
    return beside("train", WORKERS, "uneven", CASE, deadline=DEADLINE, alone=alone)


def test_where_the_config_says_speeds_all_end_with_what_one_process_has(four: Both) -> None:
    found, expected = four
    assert found.same("many") == 3
    for part in found.all("model"):
        assert {**part, "stages": None} == {**expected["model"], "stages": None}


def test_where_one_is_seen_to_be_faster_all_processes_give_it_more_at_the_same_step(four: Both) -> None:
    notes = four[0].same("notes")
    assert len(notes) == 1 and notes[0].startswith("plan version 2, from step 6 on: the replicas of c0 take "), notes
    assert notes[0].endswith("micro-batches instead of 3 : 3")
    slow, fast = map(int, notes[0].partition(" take ")[2].partition(" micro")[0].split(" : "))
    assert slow < fast and slow + fast == 6


def test_whoever_takes_them_and_by_whatever_way_the_losses_are_those_of_one_process(four: Both) -> None:
    found, expected = four
    assert found.same("slowed") == pytest.approx(expected["slowed"], rel=1e-3)
    assert expected["slowed"][-1] < 0.9 * expected["slowed"][0]


def test_what_replicas_compute_is_known_to_all(four: Both) -> None:
    slow, fast = four[0].same("computed")
    assert slow > 0.04 and fast > 0.02


def test_replicas_that_are_no_longer_alike_are_found(four: Both) -> None:
    said = four[0].all("spoiled")
    assert all("the replicas in c0/0, c0/1 no longer have the same variables" in each for each in said), said
