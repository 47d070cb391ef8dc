"""Workers that read only their own rows have, bit for bit, the results of workers that read all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.processes.worker_runs import FinishedRun, run_in_this_process, run_workers_and_reference
from tests.processes.workers import sharded_dataset

DEADLINE = 600.0
pytestmark = pytest.mark.timeout(DEADLINE)
THREE = {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1"}
REPLICA_WORKERS, STAGE_WORKER = ("c0/0", "c0/1"), "c1/0"
"""The workers of the stage in two replicas, and the one of the other stage, which takes all micro-batches."""
ROWS, AHEAD = 44, 3 * 8
"""The rows of an epoch, and those that tf.data may prefetch before the readers are known."""


@pytest.fixture(scope="module")
def sharded_and_whole(request: pytest.FixtureRequest) -> tuple[FinishedRun, dict[str, Any]]:
    """A run of three workers, and the results of one process that reads whole batches."""
    more = request.config.getoption("--grid")
    alone = partial(run_in_this_process, sharded_dataset.train_on_whole_batches, more)
    return run_workers_and_reference("sharded_dataset", THREE, *["more"] * more, alone=alone, deadline=DEADLINE)


@pytest.fixture(scope="module")
def sharded_run(sharded_and_whole: tuple[FinishedRun, dict[str, Any]]) -> FinishedRun:
    return sharded_and_whole[0]


@pytest.mark.parametrize("way", ["fitted", "looped"])
def test_results_equal_those_of_whole_batches(sharded_and_whole: tuple[FinishedRun, dict[str, Any]], way: str) -> None:
    found, alone = sharded_and_whole
    assert found.get_common(way) == alone[way]


@pytest.mark.grid
def test_local_sgd_results_equal_those_of_whole_batches(sharded_run: FinishedRun) -> None:
    assert sharded_run.get_all("apart") == sharded_run.get_all("apart whole")
    parsed = sharded_run.get_all("parsed apart")  # a third of two epochs, and prefetched rows
    assert all(2 * ROWS // 3 <= each <= 2 * ROWS // 3 + AHEAD for each in parsed), parsed


def test_replicas_parse_about_half_of_the_rows(sharded_run: FinishedRun) -> None:
    for worker in REPLICA_WORKERS:
        assert ROWS <= sharded_run.reports[worker]["parsed in the loop"] <= ROWS + AHEAD
    assert sharded_run.reports[STAGE_WORKER]["parsed in the loop"] == 2 * ROWS


def test_reading_a_sharded_batch_outside_a_step_is_refused(sharded_run: FinishedRun) -> None:
    for worker, rows in zip(THREE, (4, 4, 0), strict=True):
        assert (
            f"NB-306 <{rows} of 8 rows of float32[8, 6]> is read outside a step"
            in sharded_run.reports[worker]["misread"]
        )


def test_different_row_orders_are_reported(sharded_run: FinishedRun) -> None:
    assert all("differs between" in each and "NB-304" in each for each in sharded_run.get_all("unlike"))
