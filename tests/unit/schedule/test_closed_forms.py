"""The simulator agrees with the closed forms, and both with the research table."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import closed_form as closed
from whale_nebula.schedule.lines import Work, make_uniform_hops
from whale_nebula.schedule.simulate import Timeline, simulate

Shape = tuple[int, int, float, float, float, float]  # p, m, t_f, t_b, x, λ


def simulate_shape(shape: Shape, name: str = "eager-1f1b", *, weights: float | None = None, **options: Any) -> Timeline:
    stages, micro_batches, forward, backward, seconds, delay = shape
    works = [Work(forward, backward - (weights or 0.0), weights=weights)] * stages
    hops = make_uniform_hops(stages, seconds=seconds, delay=delay)
    return simulate(works, hops, micro_batches, name=name, **options)


def shapes(stages: tuple[int, int], load: tuple[float, float]) -> st.SearchStrategy[Shape]:
    """Uniform stages; `load` is the range of x/c."""

    def shape(p: int, m: int, c: float, split: float, part: float, delay: float) -> Shape:
        return p, m, c * split, c * (1 - split), c * part, delay * c

    return st.builds(
        shape,
        st.integers(*stages),
        st.integers(1, 40),
        st.floats(0.1, 10.0),
        st.floats(0.05, 0.95),
        st.floats(*load),
        st.floats(0.0, 4.0),
    )


def eager_seconds(shape: Shape) -> float:
    stages, micro_batches, forward, backward, seconds, delay = shape
    return closed.eager_seconds(stages, micro_batches, forward + backward, seconds, delay)


CASES = pytest.mark.parametrize(
    ("shape", "formula", "ordinary", "eager_"),
    [
        ((2, 8, 1.0, 2.0, 1.5, 0.0), ".529", ".385", ".200"),
        ((2, 16, 1.0, 2.0, 0.0, 6.0), ".802", ".673", ".238"),
        ((2, 16, 1.0, 2.0, 3.0, 0.0), ".673", ".515", ".158"),
        ((2, 16, 1.0, 2.0, 6.0, 0.0), ".802", ".680", ".556"),
        ((4, 16, 1.0, 2.0, 1.5, 0.0), ".761", ".515", ".273"),
    ],
)


def format_bubble(bubble: float) -> str:
    return f"{bubble:.3f}"[1:]


@CASES
def test_bubbles_match_the_research_table(shape: Shape, formula: str, ordinary: str, eager_: str) -> None:
    """The bubble is 1 − m·c/T, of formula (2) and of two simulated schedules."""
    stages, micro_batches, forward, backward, seconds, delay = shape
    total = closed.blocking_seconds(stages, micro_batches, forward + backward, seconds + delay)
    assert format_bubble(closed.bubble(total, micro_batches, forward + backward)) == formula
    assert format_bubble(simulate_shape(shape, "1f1b").bubble) == ordinary
    assert format_bubble(simulate_shape(shape).bubble) == eager_


def test_eager_speedup_over_1f1b() -> None:
    """p 2, link time as long as compute: 1.74 × as fast as 1F1B at m 16, 1.55 × at m 8."""
    for micro_batches, ratio in ((16, "1.74"), (8, "1.55")):
        shape = (2, micro_batches, 1.0, 2.0, 3.0, 0.0)
        assert f"{simulate_shape(shape, '1f1b').seconds / simulate_shape(shape).seconds:.2f}" == ratio


@given(shapes((1, 6), (0.0, 0.0)), st.sampled_from(["gpipe", "1f1b"]), st.booleans())
def test_gpipe_and_1f1b_match_the_formula_over_free_links(shape: Shape, name: str, fused: bool) -> None:
    stages, micro_batches, forward, backward, _, _ = shape
    free = (stages, micro_batches, forward, backward, 0.0, 0.0)
    timeline = simulate_shape(free, name, fused=None if fused else [False] * stages)
    total = closed.free_link_seconds(stages, micro_batches, forward + backward)
    assert timeline.seconds == pytest.approx(total, rel=1e-9)
    assert timeline.bubble == pytest.approx(closed.free_link_bubble(stages, micro_batches), abs=1e-9)


@given(shapes((2, 2), (0.0, 1.0)))
def test_1f1b_matches_the_formula_for_two_stages(shape: Shape) -> None:
    _, micro_batches, forward, backward, seconds, delay = shape
    total = closed.one_f_one_b_seconds(micro_batches, forward + backward, seconds + delay)
    assert simulate_shape(shape, "1f1b").seconds == pytest.approx(total, rel=1e-9)


@given(shapes((1, 2), (0.0, 4.0)))
def test_eager_matches_the_formula_for_two_stages(shape: Shape) -> None:
    assert simulate_shape(shape).seconds == pytest.approx(eager_seconds(shape), rel=1e-9)


@given(shapes((3, 6), (0.0, 0.75)))
def test_eager_matches_the_formula_over_idle_links(shape: Shape) -> None:
    assert simulate_shape(shape).seconds == pytest.approx(eager_seconds(shape), rel=1e-9)


@given(shapes((3, 6), (0.75, 4.0)))
def test_eager_loses_at_most_a_period_per_stage_over_busy_links(shape: Shape) -> None:
    stages, _, forward, backward, seconds, _ = shape
    lost = (stages - 2) * max(forward + backward, seconds)
    assert (
        eager_seconds(shape) * (1 - 1e-9) <= simulate_shape(shape).seconds <= (eager_seconds(shape) + lost) * (1 + 1e-9)
    )


@given(shapes((2, 5), (0.0, 2.0)))
def test_eager_formula_is_a_lower_bound_of_all_schedules(shape: Shape) -> None:
    for name in ("gpipe", "1f1b", "eager-1f1b"):
        assert simulate_shape(shape, name).seconds >= eager_seconds(shape) * (1 - 1e-9)


def test_eager_limit_must_round_up_at_each_hop() -> None:
    """Why `eager_limit` rounds up at each hop: w = p − s + ⌈2·t_c·(p − 1 − s)/c⌉ alone loses a fifth here."""
    shape = (3, 48, 1.0, 2.0, 0.5, 0.0)
    once = [3 - s + math.ceil(2 * 0.5 * (2 - s) / 3.0) for s in range(3)]
    slower = simulate([Work(1.0, 2.0)] * 3, make_uniform_hops(3, seconds=0.5), 48, in_flight=once)
    assert simulate_shape(shape).seconds == eager_seconds(shape)
    assert slower.seconds > 1.1 * eager_seconds(shape)


def find_minimum(total: dict[int, float]) -> int:
    return min(total, key=lambda m: (total[m], m))


BATCHES = pytest.mark.parametrize(
    ("stages", "compute", "overhead", "delay", "line"),
    [
        (2, 4.0, 0.003, 0.030, 4.0),
        (2, 4.0, 0.003, 0.030, 0.4),
        (4, 4.0, 0.003, 0.030, 1.0),
        (3, 10.0, 0.020, 0.001, 8.0),
        (2, 1.0, 0.010, 0.100, 3.0),  # bound by the line until m = 200
        (2, 0.5, 0.010, 0.005, 0.0),
    ],
)


@BATCHES
def test_best_micro_batch_matches_brute_force(
    stages: int, compute: float, overhead: float, delay: float, line: float
) -> None:
    """`line` is V/β: seconds that the whole batch holds one direction."""
    blocking, fast = {}, {}
    for m in range(1, 2000):
        c, x = compute / m + overhead, line / m
        blocking[m] = closed.blocking_seconds(stages, m, c, x + delay)
        fast[m] = closed.eager_seconds(stages, m, c, x, delay)
    assert abs(find_minimum(blocking) - closed.best_blocking(stages, compute, overhead, delay)) < 1
    assert abs(find_minimum(fast) - closed.best_eager(stages, compute, overhead, line)) < 1


@given(shapes((1, 6), (0.0, 0.0)), st.floats(0.1, 0.5))
def test_zero_bubble_matches_the_formula_over_free_links(shape: Shape, share: float) -> None:
    """Gradients of weights take what other stages would wait for; of equal parts a third of the bubble is left."""
    stages, micro_batches, forward, backward, _, _ = shape
    free = (stages, max(micro_batches, stages), forward, backward, 0.0, 0.0)
    timeline = simulate_shape(free, "zero-bubble", weights=share * backward)
    total = closed.zero_bubble_seconds(stages, free[1], forward, (1 - share) * backward, share * backward)
    assert timeline.seconds == pytest.approx(total, rel=1e-9)


@given(shapes((1, 6), (0.0, 2.0)), st.floats(0.0, 1.0), st.none() | st.integers(1, 8))
def test_zero_bubble_is_no_slower_than_eager_with_equal_limits(
    shape: Shape, share: float, in_flight: int | None
) -> None:
    """As long as gradients of weights take no more than half of what a stage computes."""
    _, _, forward, backward, _, _ = shape
    weights = share * min(backward, (forward + backward) / 2)
    found = simulate_shape(shape, "zero-bubble", weights=weights, in_flight=in_flight)
    assert found.seconds <= simulate_shape(shape, in_flight=in_flight).seconds * (1 + 1e-9)
