"""Synchronized batch normalisation between replicas in separate processes: the results of the uncut step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.parity_harness import assert_same
from tests.processes.batch_normalization import CASES, TOLERANCE, WORKERS, enter_no_scopes
from tests.processes.worker_runs import FinishedRun, run_workers_and_reference

DEADLINE = 300.0
pytestmark = [pytest.mark.timeout(DEADLINE), pytest.mark.grid]  # sample: tests/unit/runtime/test_synchronized.py
CASES_TO_RUN = ["trained,3", "trained,2+2", "looped,3"]
"""A case of `CASES`, and the replicas of its stages."""
TOO_MANY = "trained,4"
"""More replicas than the three workers."""


@pytest.fixture(scope="module")
def run_and_reference() -> tuple[FinishedRun, Mapping[str, Any]]:
    """All cases in one run of three workers, and uncut in this process meanwhile."""

    def alone() -> dict[str, Any]:
        return {name: run(enter_no_scopes) for name, run in CASES.items()}

    cases = [*CASES_TO_RUN, TOO_MANY]
    return run_workers_and_reference("train", WORKERS, "train_normalized", *cases, deadline=DEADLINE, alone=alone)


@pytest.mark.parametrize("case", CASES_TO_RUN)
def test_processes_end_with_the_uncut_model(
    run_and_reference: tuple[FinishedRun, Mapping[str, Any]], case: str
) -> None:
    found, expected = run_and_reference
    for part in found.get_all(case):
        name = case.partition(",")[0]
        assert_same(expected[name], part, TOLERANCE[name])


def test_more_replicas_than_workers_are_refused(run_and_reference: tuple[FinishedRun, Mapping[str, Any]]) -> None:
    message = run_and_reference[0].get_common(TOO_MANY)
    assert "stage 's0' has 4 replicas, which need a worker each, but its cluster has 3" in message
