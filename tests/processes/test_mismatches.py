"""Two processes that do different things stop: both, soon, before any update, each with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes.worker_runs import FinishedRun, run_workers

MAX_SECONDS = 20.0  # a tenth of a second on an idle machine; the patience of 120 s must not expire
Side = tuple[str, tuple[str, ...]]
"""The error in a process, and parts of its text."""


def expect_both(error: str, *parts: str) -> tuple[Side, Side]:
    return ((error, parts), (error, parts))


ABSENT = "input 'y' is None in this process, but stage 'c1' of cluster 'c1' reads it here"
EXPLODED = ("the hidden values exploded", "stage 'c1'", "start all workers again")
SCENARIOS: dict[str, tuple[Side, Side]] = {
    "seeds": expect_both("ConfigError", "c0/0: 1, c1/0: 2"),
    "order": expect_both("InputMismatchError", "input 'x' differs", "c0/0", "c1/0", "shuffle"),
    "rows": expect_both("InputMismatchError"),
    "width": expect_both("PlanMismatchError", "'taught.train_step'", "8", "9"),
    "rate": expect_both("PlanMismatchError", "/learning_rate: ", "0.01 ", "0.5 "),
    "rate later": expect_both("PlanMismatchError", "/learning_rate' is ", "0.01 in c0/0", "0.5 in c1/0", "at step 1"),
    # one process reads, the other trains: both report the lines of the script
    "stopped and read": expect_both("PlanMismatchError", "c0/0", "c1/0", "step 2 of 'taught.train_step'", "a read of",
                             "scenarios.py:", "two_cluster_model.py:"),
    "stopped and left": (
        ("LinkClosedError", ("worker 'c1/0' has closed its link", "c0/0 is at step 2 of 'taught.train_step'")),
        ("", ()),
    ),
    "asserting": (("RemoteFailureError", ("worker 'c1/0' failed", *EXPLODED)), ("StageFailedError", EXPLODED)),
    "ids unlike": expect_both("InputMismatchError", "input 'names' differs"),
    "configs": expect_both("ConfigError", "'weights': c0/0: everywhere; c1/0: own"),
    # detected before the step runs: the input, its reader, and the line to change
    "absent": (
        ("RemoteFailureError", (ABSENT, "yield 'y' in this cluster as well")),
        ("AbsentInputError", (ABSENT, "yield 'y' in this cluster as well", "two_cluster_model.py:")),
    ),
    "absent later": (
        ("RemoteFailureError", ()), ("AbsentInputError", ("input 'names' is None", "scenarios.py:")),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return run_workers("scenarios", 2, "run_mismatches", Path(tmp_path_factory.mktemp("pair")))


def check(report: dict[str, Any], error: str, parts: tuple[str, ...]) -> None:
    assert report["seconds"] < MAX_SECONDS
    assert report["type"] == error, report["text"]
    for part in parts:
        assert part in report["text"]
    assert report.get("untouched", True)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_mismatch_stops_both_processes_with_a_reason(pair: FinishedRun, scenario: str) -> None:
    for report, expected in zip(pair.get_all(scenario), SCENARIOS[scenario], strict=True):
        check(report, *expected)


def test_differences_in_unread_inputs_are_allowed(pair: FinishedRun) -> None:
    """Inputs that are not compared, or not read by a process, may differ or be absent there."""
    assert pair.get_common("ids alike") == 2.0 * (0 + 1 + 2 + 3)
    assert pair.get_common("absent and given") == [2.0 * (0 + 1 + 2 + 3)] * 3


def test_uncaught_error_reaches_the_other_process(pair: FinishedRun) -> None:
    message = "worker 'c1/0' failed: RuntimeError: no data on this site"
    check(pair.reports["c0/0"]["uncaught"], "RemoteFailureError", (message,))
    assert pair.result.culprit == "c1/0"
    assert pair.result.codes == {"c0/0": 0, "c1/0": 1}
