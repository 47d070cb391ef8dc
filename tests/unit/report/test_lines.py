"""Lines in the log: the first step of each program, one every ten seconds, and the last."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tests.unit.report.making import full
from whale_nebula.report.text import Lines, Rate, log


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def at(clock: Clock, lines: Lines, second: float, step: int, program: str = "fit") -> None:
    clock.now = second
    lines.step(replace(full(), step=step, program=program, time=second))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture):
    """What was said so far, each line to its first comma."""
    return lambda: [record.getMessage().split(":")[0] for record in caplog.records]


def test_first_then_every_ten_seconds_and_at_the_end(said) -> None:
    clock = Clock()
    lines = Lines(now=clock)
    for second in range(24):
        at(clock, lines, second, second + 1)
    assert said() == ["step 1 of fit", "step 11 of fit", "step 21 of fit"]
    lines.close()
    assert said()[3:] == ["step 24 of fit"]


def test_a_last_step_that_was_said_is_not_said_again(said) -> None:
    lines = Lines(now=Clock())
    lines.step(full())
    lines.close()
    assert said() == ["step 3 of fit"]


def test_each_program_has_a_first_and_a_last_step(said) -> None:
    clock = Clock()
    lines = Lines(now=clock)
    for second, program in enumerate(["fit", "fit", "test", "test"]):
        at(clock, lines, second, second + 1, program)
    lines.close()
    assert said() == ["step 1 of fit", "step 3 of test", "step 2 of fit", "step 4 of test"]


def test_only_the_lead_says_anything(said) -> None:
    lines = Lines(here=lambda: False, now=Clock())
    lines.step(full())
    lines.close()
    assert said() == []


def test_where_nobody_listens_they_go_to_standard_error_and_after_that_all_is_as_before(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    before = log.level, list(log.handlers)
    lines = Lines(now=Clock())
    lines.step(full())
    lines.close()
    assert capsys.readouterr().err.startswith("whale_nebula: step 3 of fit: ")
    assert (log.level, log.handlers) == before


def test_the_rate_is_that_of_the_last_steps() -> None:
    rate = Rate()
    assert rate.add(replace(full(), time=5.0, step_seconds=0.5)) is None, "the first step is traced, which takes long"
    assert rate.add(replace(full(), time=5.25)) == 4.0
    for second in range(100):
        found = rate.add(replace(full(), time=10.0 + second))
    assert found == 1.0


def test_a_validation_between_two_steps_does_not_slow_the_training() -> None:
    rate = Rate()
    for program, time in (("fit", 1.0), ("fit", 1.5), ("test", 60.0), ("test", 61.0), ("fit", 90.0)):
        found = rate.add(replace(full(), program=program, time=time))
    assert found == 2.0
