"""Restarts of workers: the rule as data, and the loop with simulated jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from whale_nebula.config.schema import Restarts
from whale_nebula.errors import NebulaError
from whale_nebula.launch import Outcome, Result
from whale_nebula.launch.heartbeat import WorkerStatus
from whale_nebula.launch.restarts import LONG_SECONDS, RECURRING, Attempts, Failure, Rule, find_failure

KILLED = "ended by SIGKILL"


def failure(trained: float | None = 1.0, *ways: str, recurring: str = "", saved: int | None = None) -> Failure:
    return Failure("npu/0", KILLED, recurring, frozenset(ways), trained, saved)


class TestTheRule:
    def test_it_waits_twice_as_long_each_time_up_to_a_minute(self) -> None:
        rule = Rule(Restarts(most=9))
        assert [rule.judge(failure()).wait for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]

    @pytest.mark.parametrize(
        ("first", "patience", "waits"),
        [(5.0, 120.0, [5, 10, 20, 40, 60]), (0.0, 120.0, [0, 0]), (1.0, 6.0, [1, 2, 3, 3])],
    )
    def test_the_first_wait_is_configured_and_the_others_do_not_wait_in_vain(
        self, first: float, patience: float, waits: list[float]
    ) -> None:
        rule = Rule(Restarts(most=9, wait=first), patience)
        assert [rule.judge(failure()).wait for _ in waits] == waits

    def test_used_up_they_are_after_so_many(self) -> None:
        rule = Rule(Restarts(most=2))
        verdicts = [rule.judge(failure()) for _ in range(3)]
        assert [(each.again, each.number, each.used_up) for each in verdicts] == [
            (True, 1, False),
            (True, 2, False),
            (False, 0, True),
        ]
        assert verdicts[2].why == "no restarts left: 2 of 2 were used"

    def test_whoever_has_trained_for_long_begins_anew(self) -> None:
        rule = Rule(Restarts(most=2))
        rule.judge(failure())
        rule.judge(failure())
        again = rule.judge(failure(LONG_SECONDS))
        assert (again.again, again.wait, again.number) == (True, 1.0, 1)
        assert rule.judge(failure(LONG_SECONDS - 1)).number == 2

    def test_whoever_got_further_begins_anew_and_who_comes_to_the_same_step_does_not(self) -> None:
        rule = Rule(Restarts(most=2))
        starts = [failure(saved=step) for step in (None, 5, 5, 9, 7, 9)]
        verdicts = [rule.judge(each) for each in starts]
        assert [(each.number, each.wait) for each in verdicts[:5]] == [(1, 1), (1, 1), (2, 2), (1, 1), (2, 2)]
        assert verdicts[5].used_up

    def test_nobody_who_has_not_asked_for_restarts_hears_of_them(self) -> None:
        verdict = Rule(Restarts()).judge(failure())
        assert (verdict.again, verdict.why, verdict.used_up) == (False, "", False)

    def test_an_error_that_would_come_again_ends_it(self) -> None:
        verdict = Rule(Restarts(most=2)).judge(failure(recurring="NB-500"))
        assert (verdict.again, verdict.why) == (False, "not restarted: NB-500 would recur")
        assert not verdict.used_up

    @pytest.mark.parametrize(
        ("failures", "again"),
        [
            ([failure(None, "a"), failure(None, "a")], False),
            ([failure(None, "a", "b"), failure(None, "b", "c")], False),
            ([failure(None, "a"), failure(None, "b"), failure(None, "a")], True),
            ([failure(None, "a"), failure(1.0, "a"), failure(None, "a")], True),
            ([failure(1.0, "a"), failure(1.0, "a"), failure(1.0, "a")], True),
            ([failure(None), failure(None), failure(None)], True),
            ([failure(None, "a"), failure(None), failure(None, "a")], False),
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
    def test_before_the_first_step_nobody_fails_twice_in_the_same_way(
        self, failures: list[Failure], again: bool
    ) -> None:
        rule = Rule(Restarts(most=9))
        *before, last = [rule.judge(each).again for each in failures]
        assert all(before) and last == again


def outcome(worker: str, code: int, err: str = "", **status: object) -> Outcome:
    return Outcome(worker, code, "", err, WorkerStatus(**status))  # type: ignore[arg-type]


def result(first: str | None, *outcomes: Outcome, frozen: tuple[str, ...] = (), trained: float | None = 1.0) -> Result:
    return Result({each.worker: each for each in outcomes}, first, False, frozenset(frozen), trained)


class TestFailures:
    @pytest.mark.parametrize("first", [None, "gpu/0"], ids=["all ended well", "all were asked to leave"])
    def test_where_nobody_failed_there_is_none(self, first: str | None) -> None:
        code = 0 if first is None else 75
        assert find_failure(result(first, outcome("gpu/0", code), outcome("npu/0", code))) is None

    def test_by_a_signal_and_frozen(self) -> None:
        dead, gone = outcome("npu/0", -9), outcome("gpu/0", 1, "NB-401 npu/0 is gone", error="NB-401")
        found = find_failure(result("npu/0", dead, gone))
        assert found == Failure("npu/0", KILLED, ways=frozenset({"npu/0: ended by SIGKILL"}), trained=1.0)
        stood = find_failure(result("npu/0", dead, gone, frozen=("npu/0",), trained=None))
        assert stood is not None and stood.how == "it was frozen, and was killed" and stood.trained is None

    def test_whom_the_launcher_has_ended_did_not_fail_itself(self) -> None:
        found = find_failure(result("npu/0", outcome("npu/0", 7), outcome("gpu/0", -9)))
        assert found is not None and found.ways == {"npu/0: exit code #"}

    def test_numbers_make_no_difference(self) -> None:
        one, two = (find_failure(result("a/0", outcome("a/0", 1, f"ValueError: 0x{n}f of {n}"))) for n in (17, 23))
        assert one is not None and two is not None and one.ways == two.ways

    @pytest.mark.parametrize("sent", [{"error": "NB-500"}, {"error": "NB-302", "cause": "NB-211"}], ids=str)
    def test_what_any_worker_says_of_its_error_counts(self, sent: dict[str, str]) -> None:
        """By itself, or of a worker of another launcher."""
        found = find_failure(result("gpu/0", outcome("gpu/0", 1, error="NB-302"), outcome("npu/0", 1, "no", **sent)))
        assert found is not None and found.recurring == sent.get("cause", sent["error"])

    def test_a_worker_that_says_who_has_failed_before_it_is_not_the_first(self) -> None:
        repeating = outcome("gpu/0", 1, "NB-302 worker 'npu/0' failed: ValueError: no", error="NB-302")
        found = find_failure(result("gpu/0", repeating, outcome("npu/0", 1, "ValueError: no")))
        assert str(found) == "worker npu/0 failed first: exit code 1: ValueError: no"

    def test_errors_of_scripts_and_settings_come_again_and_those_of_lines_do_not(self) -> None:
        assert {"NB-001", "NB-104", "NB-205", "NB-211", "NB-220", "NB-304", "NB-428", "NB-500", "NB-501"} <= RECURRING
        assert not {"NB-300", "NB-301", "NB-302", "NB-307", "NB-401", "NB-402", "NB-412", "NB-414"} & RECURRING
        assert NebulaError.code not in RECURRING


@dataclass
class Jobs:
    """Jobs that end one after the other with these results, and what was done meanwhile."""

    results: list[Result]
    stopped_after: int = 99
    rests: list[float] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def start(self, epoch: int) -> Iterator[Jobs]:
        self.epochs.append(epoch)
        yield self

    def wait(self, deadline: float, *, patience: float | None = None) -> Result:
        return self.results.pop(0)

    def rest(self, seconds: float) -> bool:
        self.rests.append(seconds)
        return len(self.rests) < self.stopped_after

    def attempts(self, most: int = 5, *, stopped: bool = False) -> Attempts:
        rule = Rule(Restarts(most=most))
        return Attempts(rule, self.start, rest=self.rest, is_stopped=lambda: stopped, report=self.lines.append)  # type: ignore[arg-type]


DEAD = result("npu/0", outcome("npu/0", -9), outcome("gpu/0", 1, error="NB-401"))
DONE = result(None, outcome("npu/0", 0), outcome("gpu/0", 0))


class TestTheLoop:
    def test_it_starts_again_until_all_ends_well(self) -> None:
        jobs = Jobs([DEAD, DEAD, DONE])
        ended = jobs.attempts().run(1.0)
        assert (ended.result, ended.epoch, ended.why) == (DONE, 2, "")
        assert (jobs.epochs, jobs.rests) == ([0, 1, 2], [1.0, 2.0])
        assert jobs.lines[1] == (
            "worker npu/0 failed first: ended by SIGKILL; restart 2 of 5 begins after 2 s, as epoch 2"
        )

    def test_used_up_it_remembers_how_it_began(self) -> None:
        ended = Jobs([result("gpu/0", outcome("gpu/0", 3)), DEAD]).attempts(1).run(1.0)
        assert (ended.result, ended.used_up, str(ended.first)) == (DEAD, True, "worker gpu/0 failed first: exit code 3")

    def test_it_goes_on_from_the_epoch_that_the_workers_have_joined(self) -> None:
        joined = result("npu/0", outcome("npu/0", -9), outcome("gpu/0", 1, epoch=7))
        jobs = Jobs([joined, DEAD, DONE])
        assert jobs.attempts().run(1.0).epoch == 9
        assert jobs.epochs == [0, 8, 9]

    def test_whoever_asks_for_the_end_gets_it(self) -> None:
        assert Jobs([DEAD]).attempts(stopped=True).run(1.0).why == ""
        jobs = Jobs([DEAD, DEAD], stopped_after=2)
        assert jobs.attempts().run(1.0).epoch == 1
        assert jobs.epochs == [0, 1]
