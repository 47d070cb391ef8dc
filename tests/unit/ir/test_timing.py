"""The drawn schedule of a plan: what it takes for granted, and that it says so."""

from dataclasses import replace

import pytest

import whale_nebula as nb
from whale_nebula.ir.parts import PlanBoundary, PlanLink, PlanStage
from whale_nebula.ir.timing import Assumed, assumed, duration, in_flight, times
from whale_nebula.wire.frame import wire_bytes

SIZE = 100_000


def stage(name: str, flops: int = 3, runs: str = "FB") -> PlanStage:
    return PlanStage(name, name, "local/0", 1, 1, (), 0, (), (), (runs,), forward_flops=flops, activation_bytes=10)


def plan(rate: float | None, delay: float = 0.0, *, count: int = 4, schedule: str = "eager-1f1b") -> nb.Plan:
    """Two stages with a line between them."""
    boundary = PlanBoundary("b0", "a", ("b",), "float32", (None, 4), 0, "none", SIZE, True, "none", SIZE)
    line = PlanLink("", SIZE * count, wire_bytes(SIZE) * count, count, rate, delay)
    return nb.Plan(
        name="step", stages={"a": stage("a"), "b": stage("b", 6)}, boundaries=(boundary,),
        links={"a->b": line, "b->a": line}, once=(), tied=(), micro_batch=count, rows=(8,) * count,
        schedule=schedule, in_flight=None, versions={}, threads={}, notes=(), lines=(),
    )  # fmt: skip


def test_free_lines_take_nothing_and_stages_are_equal() -> None:
    found = times(plan(None))
    assert str(found.assumed) == "assuming equal stages: a forward takes 1, a backward 2, and lines nothing"
    assert found.seconds == (4 + 1) * 3


def test_a_slow_line_sets_the_pace() -> None:
    rate, delay = 8e6, 0.01
    taken = 8 * wire_bytes(SIZE) / rate + delay
    found = times(plan(rate, delay))
    assert found.assumed == Assumed(taken, "a->b")
    assert "each stage computes a micro-batch in 110 ms, what one takes on a->b" in str(found.assumed)
    assert found.seconds == pytest.approx(3 * taken + taken + 2 * taken + taken)  # the closed form of eager-1F1B


def test_a_line_with_nothing_but_delay_does_too() -> None:
    assert assumed(plan(None, 0.02)) == Assumed(0.02, "a->b")


def test_proportions_come_from_flops_if_asked() -> None:
    (phase,) = times(plan(None), Assumed(by_flops=True)).phases
    assert phase.timeline.busy(0) == pytest.approx(phase.timeline.busy(1) / 2)


def test_what_is_held_follows_the_schedule() -> None:
    assert in_flight(plan(None, schedule="gpipe")) == {"a": 4, "b": 1}
    assert in_flight(plan(None, schedule="1f1b")) == {"a": 2, "b": 1}
    assert in_flight(plan(8e6, 0.01)) == {"a": 4, "b": 1}
    forward = {name: replace(each, runs=("F",)) for name, each in plan(None).stages.items()}
    assert in_flight(replace(plan(None), stages=forward)) == {"a": 0, "b": 0}


def test_a_limit_of_the_users_own_is_kept() -> None:
    assert in_flight(replace(plan(8e6, 0.01), in_flight=2)) == {"a": 2, "b": 1}


def test_a_boundary_for_two_stages_of_a_cluster_crosses_once() -> None:
    given = plan(8e6)
    both = replace(given.boundaries[0], destinations=("b", "c"))
    stages = {**given.stages, "c": replace(stage("c"), cluster="b")}
    found = times(replace(given, stages=stages, boundaries=(both,)))
    (phase,) = found.phases
    assert len([span for span in phase.timeline.of("a->b") if span.seconds]) == 4


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.0, "12 s"), (0.25, "250 ms"), (3.2e-5, "32 µs"), (0.0, "0 µs"), (1234.0, "1.23e+03 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
