"""Replicas of unequal speed have shares by their speed, with the results of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import whale_nebula as nb
from tests.parity.zoo import ZOO
from tests.processes.worker_reports import encode_outcome
from tests.processes.worker_runs import FinishedRun, run_workers_and_reference
from tests.processes.workers.scenarios import train_on_few_rows
from tests.processes.workers.train import SPEEDS, read_case, train_slowed_replicas

DEADLINE = 300.0
pytestmark = [pytest.mark.timeout(DEADLINE), pytest.mark.grid]  # `tests/unit/runtime/test_shares.py` in one process
CASE = "token_loop,2,1,1+2"
WORKERS = {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1", "c1/1": "c1"}
RunAndReference = tuple[FinishedRun, Mapping[str, Any]]


def run_reference() -> dict[str, Any]:
    """The results in this process."""
    name, cut = read_case(CASE)
    with nb.init(SPEEDS, links="10gbit,0ms"):
        return {"model": encode_outcome(ZOO[name].run(cut)), "slowed": train_slowed_replicas({})}


@pytest.fixture(scope="module")
def four_workers() -> RunAndReference:
    return run_workers_and_reference(
        "train", WORKERS, "train_uneven_replicas", CASE, deadline=DEADLINE, alone=run_reference
    )


def test_configured_speeds_train_as_one_process(four_workers: RunAndReference) -> None:
    found, expected = four_workers
    assert found.get_common("many") == 3
    for part in found.get_all("model"):
        assert {**part, "stages": None} == {**expected["model"], "stages": None}


def test_measured_speeds_change_shares_at_the_same_step(four_workers: RunAndReference) -> None:
    (note,) = four_workers[0].get_common("notes")
    assert note.startswith("plan version 2, from step 6 on: the replicas of c0 now take ")
    assert note.endswith("micro-batches instead of 3 : 3")
    slow, fast = map(int, note.partition(" now take ")[2].partition(" micro")[0].split(" : "))
    assert slow < fast and slow + fast == 6


def test_changed_shares_do_not_change_losses(four_workers: RunAndReference) -> None:
    found, expected = four_workers
    assert found.get_common("slowed") == pytest.approx(expected["slowed"], rel=1e-3)
    assert expected["slowed"][-1] < 0.9 * expected["slowed"][0]


def test_replica_seconds_are_known_in_all_processes(four_workers: RunAndReference) -> None:
    slow, fast = four_workers[0].get_common("computed")
    assert slow > 0.04 and fast > 0.02


def test_diverged_replicas_are_reported(four_workers: RunAndReference) -> None:
    said = four_workers[0].get_all("spoiled")
    assert all("the replicas in c0/0, c0/1 no longer have the same variables" in each for each in said), said


def test_replica_without_rows_takes_part_in_sums() -> None:
    """Its zeros for a later stage are sums that an earlier stage of the other replica waits for."""
    workers = {"c0/0": "c0", "c1/0": "c1", "c1/1": "c1"}
    found, expected = run_workers_and_reference(
        "scenarios", workers, "report_few_rows", deadline=DEADLINE, alone=train_on_few_rows
    )
    assert found.get_common("weights") == expected
