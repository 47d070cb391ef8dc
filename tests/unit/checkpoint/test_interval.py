"""The interval of savings: the rule compared with a search, and its bound."""

from __future__ import annotations

import itertools

import pytest

from whale_nebula.runtime.checkpoint.level import Pace, choose_interval


def lost(interval: float, cost: float, between: float) -> float:
    """The share of time that is lost: to savings, and to what a failure undoes."""
    return cost / interval + interval / (2 * between)


@pytest.mark.parametrize(("cost", "between"), list(itertools.product([0.05, 0.2, 2.0], [600.0, 3600.0, 86400.0])))
def test_no_other_interval_loses_less(cost: float, between: float) -> None:
    chosen = choose_interval(cost, between, overhead=1.0)
    assert all(lost(chosen, cost, between) <= lost(chosen * factor, cost, between) for factor in (0.5, 0.9, 1.1, 2.0))


def test_saving_takes_no_more_than_its_share() -> None:
    assert choose_interval(20.0, 600.0, overhead=0.035) == pytest.approx(20.0 / 0.035)


def test_the_interval_follows_what_savings_cost() -> None:
    pace = Pace()
    intervals = [pace.interval]
    for cost in (1.0, 1.0, 9.0, 9.0):
        pace.note_cost(cost)
        intervals.append(pace.interval)
    assert intervals[0] == 30.0 and intervals[1] == intervals[2] < intervals[3] < intervals[4]


def test_nothing_is_due_where_no_step_was_done_since() -> None:
    pace = Pace(seconds=10.0)
    pace.note_saving(4, 100.0)
    assert not pace.is_due(4, 200.0) and not pace.is_due(5, 109.0) and pace.is_due(5, 110.0)
