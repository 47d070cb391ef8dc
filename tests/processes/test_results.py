"""Results and metrics are the same in every process, and those of the uncut model, whichever worker computes them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.parity_harness import assert_same
from tests.processes.three_stage_models import run_case
from tests.processes.worker_runs import run_workers_and_reference

FEATURES, STAGES = ("regularizer", "add_loss", "output", "mask"), ("front", "middle", "last")
CASES = [case for case in itertools.product(FEATURES, STAGES) if case != ("output", "last")]
CASES.append(("raw loss", "last"))
DEADLINE = 280.0


@pytest.mark.grid
@pytest.mark.timeout(5 * DEADLINE)
@pytest.mark.parametrize("replicated", ["", *STAGES])
def test_results_equal_those_of_the_uncut_model(replicated: str) -> None:
    """The cluster whose stage is `replicated` has two workers."""
    counts = {f"c{number}": 1 + (place == replicated) for number, place in enumerate(STAGES)}
    workers = {f"{cluster}/{n}": cluster for cluster, count in counts.items() for n in range(count)}

    def alone() -> dict[tuple[str, str], Any]:
        return {case: run_case(*case, cut=False) for case in CASES}

    argv = ["report_results", json.dumps(CASES), replicated]
    found, uncut = run_workers_and_reference("scenarios", workers, *argv, deadline=4 * DEADLINE, alone=alone)
    found.result.check()
    for case, expected in uncut.items():
        for worker, report in found.reports.items():
            assert list(report[" ".join(case)]) == list(expected), (case, worker)
            assert_same(expected, report[" ".join(case)], "processes")
