"""Synchronized batch normalisation between replicas in separate processes: the results of the uncut step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.processes.batch_normalization import CASES, TOLERANCE, WORKERS, uncut
from tests.processes.worker_runs import Ended, beside
from tests.same import assert_same

DEADLINE = 300.0
pytestmark = [pytest.mark.timeout(DEADLINE), pytest.mark.grid]  # sample: tests/unit/runtime/test_synchronized.py
ASKED = ["trained,3", "trained,2+2", "looped,3"]
"""A lesson, and the replicas of its stages."""
LAST = "trained,4"
"""There are three workers."""


@pytest.fixture(scope="module")
def three() -> tuple[Ended, Mapping[str, Any]]:
    """All of them in one run of a cluster of three workers; and uncut in this process meanwhile."""

    def alone() -> dict[str, Any]:
        return {name: lesson(uncut) for name, lesson in CASES.items()}

    lessons = [*ASKED, LAST]
    return beside("train", WORKERS, "normalised", *lessons, deadline=DEADLINE, alone=alone)


@pytest.mark.parametrize("case", ASKED)
def test_every_process_ends_with_the_uncut_model(three: tuple[Ended, Mapping[str, Any]], case: str) -> None:
    found, expected = three
    for part in found.all(case):
        name = case.partition(",")[0]
        assert_same(expected[name], part, TOLERANCE[name])


def test_replicas_need_a_worker_each(three: tuple[Ended, Mapping[str, Any]]) -> None:
    said = three[0].same(LAST)
    assert "stage 's0' has 4 replicas, which need a worker each, but 3 worker(s) exist" in said
