"""Results and metrics are the same in every process, and those of the uncut model, whichever worker computes them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.processes.three_stage_models import result_of
from tests.processes.worker_runs import beside
from tests.same import assert_same

EXTRAS, PLACES = ("regularizer", "add_loss", "output", "mask"), ("front", "middle", "last")
ALL = [case for case in itertools.product(EXTRAS, PLACES) if case != ("output", "last")]
DEADLINE = 280.0


@pytest.mark.grid
@pytest.mark.timeout(5 * DEADLINE)
@pytest.mark.parametrize("replicated", ["", *PLACES])
def test_results_of_every_combination(replicated: str) -> None:
    """The cluster whose stage is `replicated` has two workers."""
    counts = {f"c{number}": 1 + (place == replicated) for number, place in enumerate(PLACES)}
    workers = {f"{cluster}/{n}": cluster for cluster, count in counts.items() for n in range(count)}

    def alone() -> dict[tuple[str, str], Any]:
        return {case: result_of(*case, cut=False) for case in ALL}

    argv = ["results", json.dumps(ALL), replicated]
    found, uncut = beside("scenarios", workers, *argv, deadline=4 * DEADLINE, alone=alone)
    found.result.check()
    for case, expected in uncut.items():
        for worker, told in found.told.items():
            assert list(told[" ".join(case)]) == list(expected), (case, worker)
            assert_same(expected, told[" ".join(case)], "processes")
