"""Drawings: literal ones, and that they fit and keep their promises."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whale_nebula.schedule import Span, Timeline, Work, draw, picture, simulate, uniform


def test_a_drawing_with_names() -> None:
    assert picture("1f1b", stages=3, micro_batches=4).splitlines() == [
        "stage 0 |F0-F1-F2-............B0====F3-B1====...B2====...B3====|",
        "stage 1 |...F0-F1-......B0====F2-B1====F3-B2====...B3====......|",
        "stage 2 |......F0-B0====F1-B1====F2-B2====F3-B3====............|",
    ]


def test_a_narrow_drawing_has_digits() -> None:
    drawn = picture("eager-1f1b", stages=2, micro_batches=12, seconds=1.5, width=60)
    assert drawn.splitlines() == [
        "stage 0 |012....0=31=42=53=64=75=86=97=a8=b9=.a=.b=|",
        "stage 1 |...00=11=22=33=44=55=66=77=88=99=aa=bb=...|",
    ]


def test_a_drawing_with_lines() -> None:
    timeline = simulate([Work(1.0, 2.0)] * 2, uniform(2, seconds=1.0), 2)
    assert draw(timeline, lines=True).splitlines()[2:] == [
        "0->1    |...F0-F1-........................|",
        "1->0    |...............B0=......B1=......|",
    ]


def test_sixteen_micro_batches_on_four_stages_fit_a_page() -> None:
    drawn = picture("eager-1f1b", stages=4, micro_batches=16, seconds=1.5)
    assert all(len(row) <= 100 for row in drawn.splitlines())
    for row in drawn.splitlines():
        assert all(row.count(f"{digit}=") == 1 for digit in "0123456789abcdef")


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


def test_an_empty_timeline() -> None:
    assert draw(Timeline(2, ())) == "stage 0 ||\nstage 1 ||"


def test_a_span_of_no_seconds_takes_no_column() -> None:
    spans = (Span(0, "F", 0, 0.0, 0.0), Span(0, "B", 0, 0.0, 2.0))
    assert draw(Timeline(1, spans)) == "stage 0 |B0=|"


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b", "eager-1f1b"]),
    st.integers(1, 5),
    st.integers(1, 40),
    st.floats(0.0, 4.0),
    st.integers(20, 140),
)
def test_rows_are_equal_ascii_and_within_the_width(
    name: str, stages: int, micro_batches: int, seconds: float, width: int
) -> None:
    rows = picture(
        name, stages=stages, micro_batches=micro_batches, seconds=seconds, width=width
    ).splitlines()
    assert len(rows) == stages
    assert len({len(row) for row in rows}) == 1
    assert all(len(row) <= width and row.isascii() for row in rows)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_every_name_is_drawn_once(name: str) -> None:
    for row in picture(name, stages=3, micro_batches=9, width=400).splitlines():
        for micro_batch in range(9):
            assert row.count(f"F{micro_batch}") == row.count(f"B{micro_batch}") == 1
