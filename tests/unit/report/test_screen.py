"""The drawn area stays below other output and waits for unfinished lines; the live table that is drawn in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.unit.report.making import full
from tests.unit.report.terminal import Terminal, stand_in
from whale_nebula.report.published import begin, watch
from whale_nebula.report.screen import Screen, terminal
from whale_nebula.report.watchers import Live, Watching


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


def test_the_last_step_stays_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch)
    live = Live(Screen(seen))
    for step in range(3, 20):
        live.step(replace(full(), step=step))
    live.close()
    print("done")
    assert seen.shown[0].startswith("fit, step 19 ─")
    assert seen.shown[-1] == "done"
    assert sys.stdout is seen


def test_between_steps_it_says_what_the_stages_do(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch)

    class Step:
        name, steps, doing = "fit", 3, {"gpu": "backward 2", "npu": "waits"}

    watching = Watching([])
    watch([watching])
    live = Live(Screen(seen))
    live.step(full())
    assert not any("backward 2" in line for line in seen.shown)
    begin(Step())
    live.tick()
    assert [line.split()[-2:] for line in seen.shown[3:5]] == [["backward", "2"], seen.shown[4].split()[-2:]]
    assert seen.shown[4].endswith("waits")
    watching.close()
    live.close()


def test_before_a_step_and_where_another_process_leads_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch)
    live = Live(Screen(seen), here=lambda: False)
    live.tick()
    live.step(full())
    live.close()
    assert seen.shown == []


def test_a_table_higher_than_the_terminal_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch)
    monkeypatch.setenv("LINES", "6")
    live = Live(Screen(seen))
    live.step(full())
    assert len(seen.shown) == 5
    live.close()
