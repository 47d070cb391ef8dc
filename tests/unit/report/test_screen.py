"""The drawn area stays below other output, and waits for unfinished lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from tests.unit.report.terminal import Terminal, stand_in
from whale_nebula.report.screen import Screen, terminal


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[Screen, Terminal]]]:
    screens: list[Screen] = []

    def make() -> tuple[Screen, Terminal]:
        seen = stand_in(monkeypatch)
        screens.append(Screen(seen))
        screens[0].open()
        return screens[0], seen

    yield make
    for screen in screens:
        screen.close()


def test_a_drawing_takes_the_place_of_the_one_before(opened) -> None:
    screen, seen = opened()
    screen.draw("one\ntwo\n")
    screen.draw("three\n")
    assert seen.shown == ["three"]


def test_what_others_print_stands_above(opened) -> None:
    screen, seen = opened()
    screen.draw("table\n")
    print("mine")
    assert seen.shown == ["mine"]
    screen.draw("table\nof two lines\n")
    print("an error", file=sys.stderr)
    screen.draw("table\n")
    assert seen.shown == ["mine", "an error", "table"]


def test_an_unfinished_line_is_left_alone(opened) -> None:
    """Keras's bar: a line that it goes on writing to, until the epoch is over."""
    screen, seen = opened()
    screen.draw("table\n")
    for done in range(1, 4):
        sys.stdout.write(f"\r{done}/3 bar")
        assert not screen.draw("table\n")
        assert seen.shown == [f"{done}/3 bar"]
    sys.stdout.write("\n")
    assert screen.draw("table\n")
    assert seen.shown == ["3/3 bar", "table"]


def test_what_could_not_be_drawn_is_drawn_once_the_line_is_ended(opened) -> None:
    """The last table of a run comes while another worker's line is unfinished, and no other follows."""
    screen, seen = opened()
    sys.stdout.write("half a")
    assert not screen.draw("table\n")
    screen.leave()
    sys.stdout.write(" line\n")
    assert seen.shown == ["half a line", "table"]
    print("what comes next")
    assert seen.shown == ["half a line", "table", "what comes next"]


def test_writing_nothing_changes_nothing(opened) -> None:
    screen, seen = opened()
    screen.draw("table\n")
    sys.stdout.write("")
    assert seen.shown == ["table"]


def test_afterwards_the_streams_are_who_they_were(opened) -> None:
    screen, seen = opened()
    assert sys.stdout is not seen
    assert sys.stdout.isatty() and sys.stdout.encoding == seen.encoding
    sys.stdout.writelines(["a\n", "b\n"])
    screen.close()
    assert (sys.stdout, sys.stderr) == (seen, seen)
    assert seen.shown == ["a", "b"]


def test_a_stream_that_somebody_else_has_put_there_since_stays(opened, monkeypatch: pytest.MonkeyPatch) -> None:
    screen, seen = opened()
    other = Terminal()
    monkeypatch.setattr(sys, "stdout", other)
    screen.close()
    assert (sys.stdout, sys.stderr) == (other, seen)


def test_the_terminal_is_the_stream_that_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch)
    assert terminal() is seen
    monkeypatch.setattr(sys, "stdout", None)
    assert terminal() is seen
    monkeypatch.setattr(sys, "stderr", None)
    assert terminal() is None
