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


def test_drawing_replaces_the_previous_drawing(opened) -> None:
    screen, seen = opened()
    screen.draw("one\ntwo\n")
    screen.draw("three\n")
    assert seen.shown == ["three"]


def test_other_output_appears_above_the_drawing(opened) -> None:
    screen, seen = opened()
    screen.draw("table\n")
    print("mine")
    assert seen.shown == ["mine"]
    screen.draw("table\nof two lines\n")
    print("an error", file=sys.stderr)
    screen.draw("table\n")
    assert seen.shown == ["mine", "an error", "table"]


def test_screen_does_not_draw_over_an_unfinished_line(opened) -> None:
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


def test_pending_drawing_is_drawn_when_the_line_ends(opened) -> None:
    """The last table of a run comes while another worker's line is unfinished, and no other follows."""
    screen, seen = opened()
    sys.stdout.write("half a")
    assert not screen.draw("table\n")
    screen.leave()
    sys.stdout.write(" line\n")
    assert seen.shown == ["half a line", "table"]
    print("what comes next")
    assert seen.shown == ["half a line", "table", "what comes next"]


def test_empty_write_keeps_the_drawing(opened) -> None:
    screen, seen = opened()
    screen.draw("table\n")
    sys.stdout.write("")
    assert seen.shown == ["table"]


def test_closed_screen_restores_standard_streams(opened) -> None:
    screen, seen = opened()
    assert sys.stdout is not seen
    assert sys.stdout.isatty() and sys.stdout.encoding == seen.encoding
    sys.stdout.writelines(["a\n", "b\n"])
    screen.close()
    assert (sys.stdout, sys.stderr) == (seen, seen)
    assert seen.shown == ["a", "b"]


def test_closed_screen_keeps_a_stream_replaced_by_other_code(opened, monkeypatch: pytest.MonkeyPatch) -> None:
    screen, seen = opened()
    other = Terminal()
    monkeypatch.setattr(sys, "stdout", other)
    screen.close()
    assert (sys.stdout, sys.stderr) == (other, seen)


def test_terminal_finds_the_stream_that_is_a_tty(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch)
    assert terminal() is seen
    monkeypatch.setattr(sys, "stdout", None)
    assert terminal() is seen
    monkeypatch.setattr(sys, "stderr", None)
    assert terminal() is None


def test_live_display_leaves_the_last_step_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch)
    live = Live(Screen(seen))
    for step in range(3, 20):
        live.step(replace(full(), step=step))
    live.close()
    print("done")
    assert seen.shown[0].startswith("fit, step 19 ─")
    assert seen.shown[-1] == "done"
    assert sys.stdout is seen


def test_live_display_shows_stage_activity_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_live_display_draws_only_in_the_lead_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch)
    live = Live(Screen(seen), here=lambda: False)
    live.tick()
    live.step(full())
    live.close()
    assert seen.shown == []


def test_table_higher_than_the_terminal_is_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch)
    monkeypatch.setenv("LINES", "6")
    live = Live(Screen(seen))
    live.step(full())
    assert len(seen.shown) == 5
    live.close()
