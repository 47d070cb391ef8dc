"""Restarts of workers: the rule as data, and the loop with simulated jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from whale_nebula.config.schema import Restarts
from whale_nebula.errors import NebulaError
from whale_nebula.launch import Outcome, Result
from whale_nebula.launch.heartbeat import WorkerStatus
from whale_nebula.launch.restarts import LONG_SECONDS, RECURRING, Attempts, Failure, RestartPolicy, find_failure

KILLED = "ended by SIGKILL"


def create_failure(
    trained: float | None = 1.0, *signatures: str, recurring: str = "", saved: int | None = None
) -> Failure:
    return Failure("npu/0", KILLED, recurring, frozenset(signatures), trained, saved)


class TestRestartPolicy:
    def test_wait_doubles_up_to_a_minute(self) -> None:
        rule = RestartPolicy(Restarts(most=9))
        assert [rule.decide(create_failure()).wait for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]

    @pytest.mark.parametrize(
        ("first", "patience", "waits"),
        [(5.0, 120.0, [5, 10, 20, 40, 60]), (0.0, 120.0, [0, 0]), (1.0, 6.0, [1, 2, 3, 3])],
    )
    def test_wait_starts_at_the_configured_value_and_is_capped_by_patience(
        self, first: float, patience: float, waits: list[float]
    ) -> None:
        rule = RestartPolicy(Restarts(most=9, wait=first), patience)
        assert [rule.decide(create_failure()).wait for _ in waits] == waits

    def test_restarts_are_used_up(self) -> None:
        rule = RestartPolicy(Restarts(most=2))
        verdicts = [rule.decide(create_failure()) for _ in range(3)]
        assert [(each.should_restart, each.number, each.used_up) for each in verdicts] == [
            (True, 1, False),
            (True, 2, False),
            (False, 0, True),
        ]
        assert verdicts[2].why == "no restarts left: 2 of 2 were used"

    def test_long_training_resets_the_count(self) -> None:
        rule = RestartPolicy(Restarts(most=2))
        rule.decide(create_failure())
        rule.decide(create_failure())
        again = rule.decide(create_failure(LONG_SECONDS))
        assert (again.should_restart, again.wait, again.number) == (True, 1.0, 1)
        assert rule.decide(create_failure(LONG_SECONDS - 1)).number == 2

    def test_newer_saved_step_resets_the_count(self) -> None:
        rule = RestartPolicy(Restarts(most=2))
        starts = [create_failure(saved=step) for step in (None, 5, 5, 9, 7, 9)]
        verdicts = [rule.decide(each) for each in starts]
        assert [(each.number, each.wait) for each in verdicts[:5]] == [(1, 1), (1, 1), (2, 2), (1, 1), (2, 2)]
        assert verdicts[5].used_up

    def test_no_restart_and_no_reason_without_configured_restarts(self) -> None:
        verdict = RestartPolicy(Restarts()).decide(create_failure())
        assert (verdict.should_restart, verdict.why, verdict.used_up) == (False, "", False)

    def test_recurring_error_is_not_restarted(self) -> None:
        verdict = RestartPolicy(Restarts(most=2)).decide(create_failure(recurring="NB-500"))
        assert (verdict.should_restart, verdict.why) == (False, "not restarted: NB-500 would recur")
        assert not verdict.used_up

    @pytest.mark.parametrize(
        ("failures", "again"),
        [
            ([create_failure(None, "a"), create_failure(None, "a")], False),
            ([create_failure(None, "a", "b"), create_failure(None, "b", "c")], False),
            ([create_failure(None, "a"), create_failure(None, "b"), create_failure(None, "a")], True),
            ([create_failure(None, "a"), create_failure(1.0, "a"), create_failure(None, "a")], True),
            ([create_failure(1.0, "a"), create_failure(1.0, "a"), create_failure(1.0, "a")], True),
            ([create_failure(None), create_failure(None), create_failure(None)], True),
            ([create_failure(None, "a"), create_failure(None), create_failure(None, "a")], False),
        ],
        ids=[
            "the same twice",
            "one of several the same twice",
            "another one between",
            "a step between",
            "after the first step",
            "another worker is away",
            "and is away between",
        ],
    )
    def test_repeated_failure_before_the_first_step_is_not_restarted(
        self, failures: list[Failure], again: bool
    ) -> None:
        rule = RestartPolicy(Restarts(most=9))
        *before, last = [rule.decide(each).should_restart for each in failures]
        assert all(before) and last == again


def create_outcome(worker: str, code: int, err: str = "", **status: object) -> Outcome:
    return Outcome(worker, code, "", err, WorkerStatus(**status))  # type: ignore[arg-type]


def create_result(
    first: str | None, *outcomes: Outcome, frozen: tuple[str, ...] = (), trained: float | None = 1.0
) -> Result:
    return Result({each.worker: each for each in outcomes}, first, False, frozenset(frozen), trained)


class TestFindFailure:
    @pytest.mark.parametrize("first", [None, "gpu/0"], ids=["all ended well", "all were asked to leave"])
    def test_no_failure_without_a_failed_worker(self, first: str | None) -> None:
        code = 0 if first is None else 75
        assert find_failure(create_result(first, create_outcome("gpu/0", code), create_outcome("npu/0", code))) is None

    def test_failure_by_signal_and_of_a_frozen_worker(self) -> None:
        dead, gone = create_outcome("npu/0", -9), create_outcome("gpu/0", 1, "NB-401 npu/0 is gone", error="NB-401")
        found = find_failure(create_result("npu/0", dead, gone))
        assert found == Failure("npu/0", KILLED, signatures=frozenset({"npu/0: ended by SIGKILL"}), trained=1.0)
        stood = find_failure(create_result("npu/0", dead, gone, frozen=("npu/0",), trained=None))
        assert stood is not None and stood.description == "it was frozen, and was killed" and stood.trained is None

    def test_worker_killed_by_the_launcher_did_not_fail_itself(self) -> None:
        found = find_failure(create_result("npu/0", create_outcome("npu/0", 7), create_outcome("gpu/0", -9)))
        assert found is not None and found.signatures == {"npu/0: exit code #"}

    def test_ways_ignore_numbers(self) -> None:
        one, two = (
            find_failure(create_result("a/0", create_outcome("a/0", 1, f"ValueError: 0x{n}f of {n}"))) for n in (17, 23)
        )
        assert one is not None and two is not None and one.signatures == two.signatures

    @pytest.mark.parametrize("sent", [{"error": "NB-500"}, {"error": "NB-302", "cause": "NB-211"}], ids=str)
    def test_recurring_code_of_any_worker_counts(self, sent: dict[str, str]) -> None:
        """By itself, or of a worker of another launcher."""
        found = find_failure(
            create_result("gpu/0", create_outcome("gpu/0", 1, error="NB-302"), create_outcome("npu/0", 1, "no", **sent))
        )
        assert found is not None and found.recurring == sent.get("cause", sent["error"])

    def test_worker_that_reports_another_failure_is_not_the_first(self) -> None:
        repeating = create_outcome("gpu/0", 1, "NB-302 worker 'npu/0' failed: ValueError: no", error="NB-302")
        found = find_failure(create_result("gpu/0", repeating, create_outcome("npu/0", 1, "ValueError: no")))
        assert str(found) == "worker npu/0 failed first: exit code 1: ValueError: no"

    @pytest.mark.parametrize(
        ("sent", "lost", "follows"),
        [
            ({"error": "NB-402", "lost": ["npu/0", "npu/1"]}, ["npu/0", "npu/1"], True),
            ({"error": "NB-302", "cause": "NB-402"}, [], True),
            ({"error": "NB-500"}, [], False),
        ],
        ids=str,
    )
    def test_missed_workers_are_not_failures_of_this_one(
        self, sent: dict[str, Any], lost: list[str], follows: bool
    ) -> None:
        found = find_failure(create_result("gpu/0", create_outcome("gpu/0", 1, **sent)))
        assert found is not None and (sorted(found.lost), found.follows) == (lost, follows)

    def test_recurring_codes_include_script_errors_not_link_errors(self) -> None:
        assert {"NB-001", "NB-104", "NB-205", "NB-211", "NB-220", "NB-304", "NB-428", "NB-500", "NB-501"} <= RECURRING
        assert not {"NB-300", "NB-301", "NB-302", "NB-307", "NB-401", "NB-402", "NB-412", "NB-414"} & RECURRING
        assert NebulaError.code not in RECURRING


@dataclass
class SimulatedJobs:
    """Jobs that end one after the other with these results, and what was done meanwhile."""

    results: list[Result]
    stopped_after: int = 99
    rests: list[float] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def start(self, epoch: int) -> Iterator[SimulatedJobs]:
        self.epochs.append(epoch)
        yield self

    def wait(self, deadline: float, *, patience: float | None = None) -> Result:
        return self.results.pop(0)

    def pause(self, seconds: float) -> bool:
        self.rests.append(seconds)
        return len(self.rests) < self.stopped_after

    def attempts(self, most: int = 5, *, stopped: bool = False) -> Attempts:
        rule = RestartPolicy(Restarts(most=most))
        return Attempts(rule, self.start, wait=self.pause, is_stopped=lambda: stopped, report=self.lines.append)  # type: ignore[arg-type]


DEAD = create_result("npu/0", create_outcome("npu/0", -9), create_outcome("gpu/0", 1, error="NB-401"))
DONE = create_result(None, create_outcome("npu/0", 0), create_outcome("gpu/0", 0))


class TestAttempts:
    def test_attempts_restart_until_success(self) -> None:
        jobs = SimulatedJobs([DEAD, DEAD, DONE])
        ended = jobs.attempts().run(1.0)
        assert (ended.result, ended.epoch, ended.why) == (DONE, 2, "")
        assert (jobs.epochs, jobs.rests) == ([0, 1, 2], [1.0, 2.0])
        assert jobs.lines[1] == (
            "worker npu/0 failed first: ended by SIGKILL; restart 2 of 5 begins after 2 s, as epoch 2"
        )

    def test_used_up_attempts_report_the_first_failure(self) -> None:
        ended = SimulatedJobs([create_result("gpu/0", create_outcome("gpu/0", 3)), DEAD]).attempts(1).run(1.0)
        assert (ended.result, ended.used_up, str(ended.first)) == (DEAD, True, "worker gpu/0 failed first: exit code 3")

    def test_next_epoch_follows_the_one_that_workers_joined(self) -> None:
        joined = create_result("npu/0", create_outcome("npu/0", -9), create_outcome("gpu/0", 1, epoch=7))
        jobs = SimulatedJobs([joined, DEAD, DONE])
        assert jobs.attempts().run(1.0).epoch == 9
        assert jobs.epochs == [0, 8, 9]

    def test_stop_request_ends_the_attempts(self) -> None:
        assert SimulatedJobs([DEAD]).attempts(stopped=True).run(1.0).why == ""
        jobs = SimulatedJobs([DEAD, DEAD], stopped_after=2)
        assert jobs.attempts().run(1.0).epoch == 1
        assert jobs.epochs == [0, 1]
