"""The simulator: small cases by hand, and invariants for all speeds."""

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_nebula.errors import OptionError
from whale_nebula.schedule.lines import Hop, Line, Work, make_hop, make_uniform_hops
from whale_nebula.schedule.schedules import SCHEDULES, list_instructions
from whale_nebula.schedule.simulate import Span, Timeline, draw_schedule, draw_timeline, run_lists, simulate

Hops = dict[tuple[int, int], Hop]
EVEN = Work(1.0, 2.0)


def list_spans(timeline: Timeline, place: int | str) -> list[tuple[str, int, float, float]]:
    return [(s.what, s.micro_batch, s.start, s.end) for s in timeline.spans_of(place)]


def test_timeline_of_two_stages_over_a_slow_link() -> None:
    timeline = simulate([EVEN, EVEN], make_uniform_hops(2, seconds=2.0, delay=0.5), 2, name="1f1b")
    assert list_spans(timeline, 0) == [
        ("F", 0, 0.0, 1.0),
        ("F", 1, 1.0, 2.0),
        ("B", 0, 9.0, 11.0),
        ("B", 1, 12.0, 14.0),
    ]
    assert list_spans(timeline, "0->1") == [("F", 0, 1.0, 3.0), ("F", 1, 3.0, 5.0)]
    assert list_spans(timeline, 1) == [
        ("F", 0, 3.5, 4.5),
        ("B", 0, 4.5, 6.5),
        ("F", 1, 6.5, 7.5),
        ("B", 1, 7.5, 9.5),
    ]
    assert list_spans(timeline, "1->0") == [("B", 0, 6.5, 8.5), ("B", 1, 9.5, 11.5)]
    assert timeline.seconds == 14.0
    assert (timeline.busy(0), timeline.wait(0), timeline.busy("0->1")) == (6.0, 8.0, 4.0)
    assert timeline.bubble == pytest.approx(8 / 14)
    assert timeline.lines == ("0->1", "1->0")


def test_hops_that_share_a_link_take_turns() -> None:
    shared: Hops = {
        (0, 1): make_hop("a->b", "b->a", seconds=2.0),
        (0, 2): make_hop("a->b", "b->a", seconds=2.0),
    }
    apart: Hops = {
        (0, 1): make_hop("a->b", "b->a", seconds=2.0),
        (0, 2): make_hop("a->c", "c->a", seconds=2.0),
    }
    works = [Work(1.0)] * 3
    assert simulate(works, shared, 1).seconds == 6.0
    assert simulate(works, apart, 1).seconds == 4.0


def test_gradients_may_share_a_link_with_activations() -> None:
    hops: Hops = {
        (0, 1): make_hop("a->b", "b->a", seconds=3.0),
        (1, 2): make_hop("b->a", "a->b", seconds=3.0),
    }
    timeline = simulate([EVEN] * 3, hops, 4)
    assert {span.what for span in timeline.spans_of("b->a")} == {"F", "B"}
    held = timeline.spans_of("b->a")
    assert all(a.end <= b.start for a, b in pairwise(held))
    assert timeline.busy("b->a") == 24.0


def test_directions_have_their_own_bytes_and_rates() -> None:
    hop = Hop(Line("a->b", 100.0, 1.0), Line("b->a", 50.0, 2.0), forward=400.0, backward=50.0)
    timeline = simulate([EVEN, EVEN], {(0, 1): hop}, 1)
    assert timeline.seconds == 1.0 + (4.0 + 1.0) + 3.0 + (1.0 + 2.0) + 2.0


def test_stage_waits_for_a_skip_connection() -> None:
    works = [EVEN] * 3
    skip: Hops = {**make_uniform_hops(3), (0, 2): make_hop("0->2", "2->0", seconds=0.5, delay=10.0)}
    assert simulate(works, make_uniform_hops(3), 1).seconds == 9.0
    assert simulate(works, skip, 1).seconds == 1.0 + 10.5 + 3.0 + 10.5 + 2.0


def test_no_gradient_crosses_to_a_frozen_stage() -> None:
    timeline = simulate([Work(1.0), EVEN, EVEN], make_uniform_hops(3, seconds=0.5), 3)
    assert "1->0" not in timeline.lines
    assert "2->1" in timeline.lines
    assert {span.what for span in timeline.spans_of(0)} == {"F"}


def test_no_gradient_crosses_a_hop_that_has_none() -> None:
    """Integers cross: both stages have a backward, and neither waits for the other's."""
    hop = Hop(Line("a->b", 1.0), Line("b->a", 1.0), forward=1.0, backward=None)
    timeline = simulate([EVEN, EVEN], {(0, 1): hop}, 2, name="gpipe")
    assert timeline.lines == ("a->b",)
    assert list_spans(timeline, 0)[2:] == [("B", 0, 2.0, 4.0), ("B", 1, 4.0, 6.0)]


def test_last_stage_without_a_backward_delays_no_stage() -> None:
    timeline = simulate([EVEN, Work(1.0)], make_uniform_hops(2, seconds=1.0), 3)
    assert timeline.lines == ("0->1",)
    assert timeline.seconds == 9.0


def test_ascending_limits_are_reported_as_a_deadlock_or_lowered() -> None:
    """Lists with ascending limits deadlock; `simulate` lowers the limits by `limit_descending`."""
    lists = [list_instructions(stage, 3, 2, limit) for stage, limit in enumerate((1, 2, 1))]
    with pytest.raises(OptionError, match="stage 0 at B0, stage 1 at F1, stage 2 at FB1"):
        run_lists(lists, [EVEN] * 3, make_uniform_hops(3))
    assert simulate([EVEN] * 3, make_uniform_hops(3), 4, in_flight=[1, 2, 1]).seconds == 4 * 9.0


def test_timeline_of_empty_lists_is_empty() -> None:
    timeline = run_lists([(), ()], [EVEN, EVEN], {})
    assert (timeline.seconds, timeline.bubble, timeline.lines) == (0.0, 0.0, ())


def seconds() -> st.SearchStrategy[float]:
    return st.floats(0.0, 5.0, allow_subnormal=False)


def works(stages: int) -> st.SearchStrategy[list[Work]]:
    backward = st.none() | seconds()
    return st.lists(st.builds(Work, seconds(), backward, seconds()), min_size=stages, max_size=stages)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[Work], Hops]:
    """Stages of random speed, some without a backward; a chain with skips; some hops inside, some shared."""
    stages = draw(st.integers(1, 5))
    pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages) if b == a + 1 or draw(st.booleans())]
    return draw(works(stages)), {pair: draw(hop()) for pair in pairs}


def hop() -> st.SearchStrategy[Hop]:
    line = st.none() | st.builds(Line, st.sampled_from("abc"), st.just(1.0), seconds())
    return st.builds(Hop, line, line, seconds(), st.none() | seconds())


@given(
    pipelines(),
    st.integers(1, 12),
    st.sampled_from(sorted(SCHEDULES)),
    st.none() | st.integers(1, 9) | st.lists(st.integers(1, 9), min_size=5, max_size=5),
    st.booleans(),
)
def test_simulated_work_runs_once_without_a_deadlock(
    pipeline: tuple[list[Work], Hops],
    micro_batches: int,
    name: str,
    in_flight: int | list[int] | None,
    fused: bool,
) -> None:
    stages, hops = pipeline
    chosen = in_flight[: len(stages)] if isinstance(in_flight, list) else in_flight
    timeline = simulate(
        stages, hops, micro_batches, name=name, in_flight=chosen, fused=None if fused else [False] * len(stages)
    )
    for stage, work in enumerate(stages):
        ran = timeline.spans_of(stage)
        expected = {(what, m) for what in ("FB" if work.has_backward else "F") for m in range(micro_batches)}
        assert sorted((span.what, span.micro_batch) for span in ran) == sorted(expected)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(ran))
        assert math.isclose(timeline.busy(stage), micro_batches * work.seconds, abs_tol=1e-6)
        assert timeline.seconds >= micro_batches * work.seconds - 1e-6


@given(pipelines(), st.integers(1, 12), st.sampled_from(sorted(SCHEDULES)))
def test_stage_starts_after_its_inputs_arrive(pipeline: tuple[list[Work], Hops], micro_batches: int, name: str) -> None:
    stages, hops = pipeline
    timeline = simulate(stages, hops, micro_batches, name=name)
    at = {(span.place, span.what, span.micro_batch): span for span in timeline.spans}
    for (source, destination), hop_ in hops.items():
        for m in range(micro_batches):
            there = hop_.forward_line.seconds(hop_.forward) + hop_.forward_line.delay if hop_.forward_line else 0.0
            assert at[destination, "F", m].start >= at[source, "F", m].end + there - 1e-9
            if hop_.backward is None or not (stages[source].has_backward and stages[destination].has_backward):
                continue
            back = hop_.backward_line.seconds(hop_.backward) + hop_.backward_line.delay if hop_.backward_line else 0.0
            assert at[source, "B", m].start >= at[destination, "B", m].end + back - 1e-9


# -------------------- Drawings: literal ones, and their width and other invariants
def test_narrow_drawing_shows_digits() -> None:
    drawn = draw_schedule("eager-1f1b", stages=2, micro_batches=12, seconds=1.5, width=60)
    assert drawn.splitlines() == [
        "stage 0 |012....0=31=42=53=64=75=86=97=a8=b9=.a=.b=|",
        "stage 1 |...00=11=22=33=44=55=66=77=88=99=aa=bb=...|",
    ]


def test_narrow_drawing_marks_gradients_of_weights() -> None:
    drawn = draw_schedule("zero-bubble", stages=2, micro_batches=8, width=40)
    assert drawn.splitlines()[1] == "stage 1 |.0=1=~2=~3=~4=~5=~6=~7=~~|"


def test_micro_batches_beyond_the_digits_are_drawn_as_fill() -> None:
    drawn = draw_schedule("1f1b", stages=1, micro_batches=40, width=200)
    assert drawn.count("z") == 2
    assert drawn.endswith("-==|")


def test_times_are_rounded_to_columns() -> None:
    spans = (Span(0, "F", 0, 0.0, 1.0), Span(0, "B", 0, 1.0, 2.7), Span(1, "F", 0, 2.7, 3.9))
    assert draw_timeline(Timeline(2, spans)).splitlines() == [
        "stage 0 |F0-B0===....|",
        "stage 1 |........F0--|",
    ]


def test_message_shorter_than_a_column_is_drawn() -> None:
    """A hundred columns a second: messages of a millisecond, the first of them at the very beginning."""
    line = Line("a->b", rate=1e6, delay=0.02)
    timeline = simulate([Work(0.0, 0.2), Work(0.1, 0.2)], {(0, 1): Hop(line, Line("b->a", 1e6), 1000, 1000)}, 3)
    rows = dict(row.split("|")[:2] for row in draw_timeline(timeline, lines=True).splitlines())
    assert re.fullmatch(r"012\.+", rows["a->b    "])
    assert rows["b->a    "].count("=") == 3


def test_stage_blocks_keep_their_names_beside_short_messages() -> None:
    hop = Hop(Line("a->b", 1e6), Line("b->a", 1e6), 1000, None)
    first, second, line = draw_timeline(simulate([Work(1.0), Work(1.0)], {(0, 1): hop}, 2), lines=True).splitlines()
    assert "F0-F1-" in first and "F0-F1-" in second and line.count("0") + line.count("1") == 2


def test_link_without_traffic_is_not_drawn() -> None:
    hop = Hop(Line("a->b", 1e6, 1.0), Line("b->a", 1e6), 0, None)
    assert simulate([Work(1.0), Work(1.0)], {(0, 1): hop}, 2).lines == ()


def test_messages_beyond_the_columns_are_cut_off() -> None:
    spans = tuple(Span("a->b", "F", number, 0.001 * number, 0.001 * (number + 1)) for number in range(30))
    drawn = draw_timeline(Timeline(1, (Span(0, "F", 0, 0.0, 1.0), *spans)), width=31, lines=True)
    assert all(len(row) <= 31 for row in drawn.splitlines())
    assert drawn.splitlines()[1].startswith("a->b    |")


@given(
    st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 3.0)), min_size=1, max_size=9),
    st.integers(30, 120),
)
def test_messages_all_have_a_mark(messages: list[tuple[float, float]], width: int) -> None:
    spans = tuple(Span("a->b", "F", n, at, at + long) for n, (at, long) in enumerate(sorted(messages)))
    _, line = draw_timeline(Timeline(1, (Span(0, "F", 0, 0.0, 100.0), *spans)), width=width, lines=True).splitlines()
    row = line[line.index("|") + 1 : -1]
    assert list(re.sub(r"[^0-9]", "", row)) == [str(number) for number in range(len(messages))]
    assert len(line) <= width


def test_drawing_of_an_empty_timeline() -> None:
    assert draw_timeline(Timeline(2, ())) == "stage 0 ||\nstage 1 ||"


def test_span_of_zero_seconds_takes_no_column() -> None:
    spans = (Span(0, "F", 0, 0.0, 0.0), Span(0, "B", 0, 0.0, 2.0))
    assert draw_timeline(Timeline(1, spans)) == "stage 0 |B0=|"


@given(
    st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "zero-bubble"]),
    st.integers(1, 5),
    st.integers(1, 40),
    st.floats(0.0, 4.0),
    st.integers(20, 140),
)
def test_drawn_rows_are_ascii_of_equal_length_within_the_width(
    name: str, stages: int, micro_batches: int, seconds: float, width: int
) -> None:
    rows = draw_schedule(name, stages=stages, micro_batches=micro_batches, seconds=seconds, width=width).splitlines()
    assert len(rows) == stages
    assert len({len(row) for row in rows}) == 1
    assert all(len(row) <= width and row.isascii() for row in rows)


def test_shifted_block_keeps_its_digit() -> None:
    spans = (Span(0, "F", 0, 0.0, 100.0), Span("a->b", "F", 0, 0.0, 2.0), Span("a->b", "F", 1, 0.0, 2.0))
    assert draw_timeline(Timeline(1, spans), width=110, lines=True).splitlines()[1].count("1") == 1
