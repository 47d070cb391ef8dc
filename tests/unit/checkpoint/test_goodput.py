"""The account of a run's time over starts that end by failures, and the interval of savings, compared with a search."""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict, replace

import pytest

from whale_nebula.checkpoint.manifest import Manifest, Position
from whale_nebula.report.records import Goodput, TimeAccount
from whale_nebula.runtime.checkpoint.level import Pace, choose_interval


class SimulatedClock:
    """A clock that advances only by `pass_seconds`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "time", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


def test_goodput_counts_each_second_once_across_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, saved, ended = SimulatedClock(monkeypatch), Manifest(Position()), None
    first_step = None
    for steps_after_saving in (3, 5, 0):
        spent = TimeAccount(ended)
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


def lost_share(interval: float, cost: float, between: float) -> float:
    """The share of time that is lost: to savings, and to what a failure undoes."""
    return cost / interval + interval / (2 * between)


@pytest.mark.parametrize(("cost", "between"), list(itertools.product([0.05, 0.2, 2.0], [600.0, 3600.0, 86400.0])))
def test_chosen_interval_loses_least_time(cost: float, between: float) -> None:
    chosen = choose_interval(cost, between, overhead=1.0)
    assert all(
        lost_share(chosen, cost, between) <= lost_share(chosen * factor, cost, between)
        for factor in (0.5, 0.9, 1.1, 2.0)
    )


def test_saving_overhead_is_limited() -> None:
    assert choose_interval(20.0, 600.0, overhead=0.035) == pytest.approx(20.0 / 0.035)


def test_interval_grows_with_the_cost_of_saving() -> None:
    pace = Pace()
    intervals = [pace.interval]
    for cost in (1.0, 1.0, 9.0, 9.0):
        pace.record_cost(cost)
        intervals.append(pace.interval)
    assert intervals[0] == 30.0 and intervals[1] == intervals[2] < intervals[3] < intervals[4]


def test_saving_is_due_only_after_a_new_step() -> None:
    pace = Pace(seconds=10.0)
    pace.record_saving(4, 100.0)
    assert not pace.is_due(4, 200.0) and not pace.is_due(5, 109.0) and pace.is_due(5, 110.0)
