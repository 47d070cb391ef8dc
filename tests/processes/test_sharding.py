"""Workers that read only their own rows have, bit for bit, the results of workers that read all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.processes.worker_runs import Ended, beside, told_alone
from tests.processes.workers import sharded_dataset

DEADLINE = 600.0
pytestmark = pytest.mark.timeout(DEADLINE)
THREE = {"c0/0": "c0", "c0/1": "c0", "c1/0": "c1"}
HALVES, WHOLE = ("c0/0", "c0/1"), "c1/0"
"""The workers of the stage in two replicas, and the one of the other stage, which takes all micro-batches."""
ROWS, AHEAD = 44, 3 * 8
"""The rows of an epoch, and those that tf.data may make before it is known who reads what."""


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest) -> tuple[Ended, dict[str, Any]]:
    """Three workers, and meanwhile one process that reads whole batches."""
    more = request.config.getoption("--grid")
    alone = partial(told_alone, sharded_dataset.whole, more)
    return beside("sharded_dataset", THREE, *["more"] * more, alone=alone, deadline=DEADLINE)


@pytest.fixture(scope="module")
def three(both: tuple[Ended, dict[str, Any]]) -> Ended:
    return both[0]


@pytest.mark.parametrize("way", ["fitted", "looped"])
def test_results_are_those_of_whole_batches(both: tuple[Ended, dict[str, Any]], way: str) -> None:
    found, alone = both
    assert found.same(way) == alone[way]


@pytest.mark.grid
def test_clusters_that_train_apart_leave_what_they_leave_on_whole_batches(three: Ended) -> None:
    assert three.all("apart") == three.all("apart whole")
    parsed = three.all("parsed apart")  # a third of two epochs, and what was made ahead of time
    assert all(2 * ROWS // 3 <= each <= 2 * ROWS // 3 + AHEAD for each in parsed), parsed


def test_each_worker_of_a_cluster_parses_about_half(three: Ended) -> None:
    for worker in HALVES:
        assert ROWS <= three.told[worker]["parsed in the loop"] <= ROWS + AHEAD
    assert three.told[WHOLE]["parsed in the loop"] == 2 * ROWS


def test_what_computes_with_a_batch_outside_the_step_is_refused(three: Ended) -> None:
    for worker, rows in zip(THREE, (4, 4, 0), strict=True):
        assert f"NB-306 <{rows} of 8 rows of float32[8, 6]> is read outside a step" in three.told[worker]["misread"]


def test_rows_in_orders_of_their_own_are_noticed(three: Ended) -> None:
    assert all("differs between" in each and "NB-304" in each for each in three.all("unlike"))
