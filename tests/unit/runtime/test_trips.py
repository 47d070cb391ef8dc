"""Timings of the first micro-batch in stages of several processes, and the resulting in-flight limits."""

from types import SimpleNamespace
from typing import Any

import pytest

from whale_nebula.config import Links
from whale_nebula.ir.routing import Seat
from whale_nebula.report.records import Span
from whale_nebula.runtime.step.clock import Clocks, LineClock, StageClock
from whale_nebula.runtime.step.measured import Measured, paces_of_trips
from whale_nebula.schedule.lines import Work, uniform
from whale_nebula.schedule.schedules import Pace, limits
from whale_nebula.schedule.simulate import simulate

STAGES = 2
CUT: Any = SimpleNamespace(phases=[SimpleNamespace(index=0)], program=SimpleNamespace(stages=[None] * STAGES))


def clocks(stage: int, spans: list[Span], told: list[Span]) -> Clocks:
    clock = StageClock("s", 0.0, spans=spans)
    return Clocks({Seat(stage): clock}, StageClock("once", 0.0), LineClock(0, 0, 0.0, told))


def seen_of(compute: float, hold: float, delay: float, count: int = 8, steps: int = 3) -> dict[str, float]:
    """What both processes say after steps as the simulator times them, with three micro-batches in flight."""
    works = [Work(compute / 3, 2 * compute / 3)] * STAGES
    timeline = simulate(works, uniform(STAGES, seconds=hold, delay=delay), count, in_flight=3)
    told = {"0.0.forward": compute / 3, "0.0.backward": 2 * compute / 3, "0.1.forward": compute / 3}
    told["0.1.backward"] = 2 * compute / 3
    for stage in range(STAGES):
        places = (stage, _LINES[stage])
        spans, lines = ([_span(each) for each in timeline.spans if each.place == place] for place in places)
        measured = Measured(CUT, [], Links())
        for _ in range(steps):
            measured.add(clocks(stage, spans, lines))
        told |= measured.medians()
    return told


_LINES = ("0->1", "1->0")


def _span(span: Any) -> Span:
    what = {"F": "forward", "B": "backward"}[span.what]
    return Span(str(span.place), f"{what} {span.micro_batch}", span.start, span.end, span.micro_batch)


def limit(seen: dict[str, float]) -> int:
    (pace,) = paces_of_trips(CUT, seen)
    return limits("eager-1f1b", STAGES, 8, pace=pace)[0]


def test_a_trip_is_the_way_there_and_back() -> None:
    (pace,) = paces_of_trips(CUT, seen_of(0.15, hold=0.07, delay=0.02))
    assert pace == Pace(pytest.approx(0.15), (pytest.approx(0.18),), pytest.approx(0.07))


def test_a_long_way_takes_more_in_flight_than_without_a_measurement() -> None:
    """What three in flight lose on that line, four do not."""
    assert limits("eager-1f1b", STAGES, 8)[0] == 3
    assert limit(seen_of(0.15, hold=0.07, delay=0.02)) == 4


def test_a_queue_before_the_next_stage_counts_as_no_way() -> None:
    """With more in flight, the later micro-batches wait there; the limit stays what it is."""
    few, many = (limit(seen_of(0.15, hold=0.07, delay=0.02, count=count)) for count in (4, 8))
    assert few == many == 4


def test_a_short_way_takes_as_many_as_without_one() -> None:
    assert limit(seen_of(0.15, hold=0.001, delay=0.0)) == 3


def test_a_line_that_is_slower_than_the_stages_is_kept_busy_and_no_more() -> None:
    assert limit(seen_of(0.05, hold=0.2, delay=0.02)) == 4


def test_before_all_have_said_something_there_is_no_pace() -> None:
    assert paces_of_trips(CUT, seen_of(0.15, hold=0.07, delay=0.02, steps=1) | {}) == [Pace(0.15, (0.15,), 0.0)]
    assert paces_of_trips(CUT, {}) == []
