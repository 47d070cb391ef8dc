"""The account of a run's time, over starts that end by failures: a simulated day."""

from __future__ import annotations

import time
from dataclasses import asdict, replace

import pytest

from whale_nebula.checkpoint.manifest import Manifest, Position
from whale_nebula.report.records import Goodput, Spent


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "time", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


def test_every_second_of_a_run_with_failures_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, saved, ended = Clock(monkeypatch), Manifest(Position()), None
    first_step = None
    for steps_after_saving in (3, 5, 0):
        spent = Spent(ended)
        spent.resume(Goodput(**saved.spent), saved.at)
        clock.pass_seconds(7.0)  # TensorFlow starts
        for number in range(4 + steps_after_saving):
            spent.begin()
            first_step = first_step or clock.now
            if number == 4:
                with spent.count_saving():
                    clock.pass_seconds(0.5)
                saved = replace(saved, at=clock.now, spent=asdict(spent.sum_up()))
            with spent.count_step():
                clock.pass_seconds(2.0)
            clock.pass_seconds(1.0)  # data
        ended = clock.now
        clock.pass_seconds(1.0)  # the launcher waits
    found = spent.sum_up()
    assert (found.saving, found.recovery) == (0.0 + 1.0, 2 * (7.0 + 1.0))
    assert found.lost == (3 + 5) * 3.0  # what was done after the saving, twice
    assert found.steps == (4 + 4 + 4) * 2.0
    assert found.total == clock.now - (first_step or 0.0)
    assert found.other == pytest.approx(13.0) and found.share == pytest.approx(1 - 41.0 / found.total)
