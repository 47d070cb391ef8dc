"""Drawings: literal ones, and their width and other invariants."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from whale_nebula.schedule.lines import Hop, Line, Work
from whale_nebula.schedule.simulate import Span, Timeline, draw, picture, simulate


def test_a_narrow_drawing_has_digits() -> None:
    drawn = picture("eager-1f1b", stages=2, micro_batches=12, seconds=1.5, width=60)
    assert drawn.splitlines() == [
        "stage 0 |012....0=31=42=53=64=75=86=97=a8=b9=.a=.b=|",
        "stage 1 |...00=11=22=33=44=55=66=77=88=99=aa=bb=...|",
    ]


def test_a_narrow_drawing_tells_gradients_of_weights_apart() -> None:
    drawn = picture("zero-bubble", stages=2, micro_batches=8, width=40)
    assert drawn.splitlines()[1] == "stage 1 |.0=1=~2=~3=~4=~5=~6=~7=~~|"


def test_more_micro_batches_than_digits_are_drawn_as_fill() -> None:
    drawn = picture("1f1b", stages=1, micro_batches=40, width=200)
    assert drawn.count("z") == 2
    assert drawn.endswith("-==|")


def test_times_that_do_not_divide_are_rounded_to_columns() -> None:
    spans = (Span(0, "F", 0, 0.0, 1.0), Span(0, "B", 0, 1.0, 2.7), Span(1, "F", 0, 2.7, 3.9))
    assert draw(Timeline(2, spans)).splitlines() == [
        "stage 0 |F0-B0===....|",
        "stage 1 |........F0--|",
    ]


def test_a_message_that_is_shorter_than_a_column_leaves_a_mark() -> None:
    """A hundred columns a second: messages of a millisecond, the first of them at the very beginning."""
    line = Line("a->b", rate=1e6, delay=0.02)
    timeline = simulate([Work(0.0, 0.2), Work(0.1, 0.2)], {(0, 1): Hop(line, Line("b->a", 1e6), 1000, 1000)}, 3)
    rows = dict(row.split("|")[:2] for row in draw(timeline, lines=True).splitlines())
    assert re.fullmatch(r"012\.+", rows["a->b    "])
    assert rows["b->a    "].count("=") == 3


def test_stages_keep_their_names_beside_short_messages() -> None:
    hop = Hop(Line("a->b", 1e6), Line("b->a", 1e6), 1000, None)
    first, second, line = draw(simulate([Work(1.0), Work(1.0)], {(0, 1): hop}, 2), lines=True).splitlines()
    assert "F0-F1-" in first and "F0-F1-" in second and line.count("0") + line.count("1") == 2


def test_what_does_not_cross_is_not_drawn() -> None:
    hop = Hop(Line("a->b", 1e6, 1.0), Line("b->a", 1e6), 0, None)
    assert simulate([Work(1.0), Work(1.0)], {(0, 1): hop}, 2).lines == ()


def test_more_messages_than_columns_are_drawn_as_far_as_they_go() -> None:
    spans = tuple(Span("a->b", "F", number, 0.001 * number, 0.001 * (number + 1)) for number in range(30))
    drawn = draw(Timeline(1, (Span(0, "F", 0, 0.0, 1.0), *spans)), width=31, lines=True)
    assert all(len(row) <= 31 for row in drawn.splitlines())
    assert drawn.splitlines()[1].startswith("a->b    |")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 3.0)), min_size=1, max_size=9),
    st.integers(30, 120),
)
def test_every_message_has_its_mark(messages: list[tuple[float, float]], width: int) -> None:
    spans = tuple(Span("a->b", "F", n, at, at + long) for n, (at, long) in enumerate(sorted(messages)))
    _, line = draw(Timeline(1, (Span(0, "F", 0, 0.0, 100.0), *spans)), width=width, lines=True).splitlines()
    row = line[line.index("|") + 1 : -1]
    assert list(re.sub(r"[^0-9]", "", row)) == [str(number) for number in range(len(messages))]
    assert len(line) <= width


def test_an_empty_timeline() -> None:
    assert draw(Timeline(2, ())) == "stage 0 ||\nstage 1 ||"


def test_a_span_of_no_seconds_takes_no_column() -> None:
    spans = (Span(0, "F", 0, 0.0, 0.0), Span(0, "B", 0, 0.0, 2.0))
    assert draw(Timeline(1, spans)) == "stage 0 |B0=|"


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "zero-bubble"]),
    st.integers(1, 5),
    st.integers(1, 40),
    st.floats(0.0, 4.0),
    st.integers(20, 140),
)
def test_rows_are_equal_ascii_and_within_the_width(
    name: str, stages: int, micro_batches: int, seconds: float, width: int
) -> None:
    rows = picture(name, stages=stages, micro_batches=micro_batches, seconds=seconds, width=width).splitlines()
    assert len(rows) == stages
    assert len({len(row) for row in rows}) == 1
    assert all(len(row) <= width and row.isascii() for row in rows)


def test_a_block_that_is_pushed_aside_keeps_its_digit() -> None:
    spans = (Span(0, "F", 0, 0.0, 100.0), Span("a->b", "F", 0, 0.0, 2.0), Span("a->b", "F", 1, 0.0, 2.0))
    assert draw(Timeline(1, spans), width=110, lines=True).splitlines()[1].count("1") == 1
