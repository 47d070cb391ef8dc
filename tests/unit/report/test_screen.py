"""The drawn area stays below other output and waits for unfinished lines; the live table that is drawn in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.unit.report.sample_reports import make_full_report
from tests.unit.report.terminal import Terminal, replace_standard_streams
from whale_nebula.report.published import begin, watch
from whale_nebula.report.screen import Screen, find_terminal
from whale_nebula.report.watchers import Live, WatcherThread


@pytest.fixture
def open_screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[Screen, Terminal]]]:
    screens: list[Screen] = []

    def make() -> tuple[Screen, Terminal]:
        terminal_stream = replace_standard_streams(monkeypatch)
        screens.append(Screen(terminal_stream))
        screens[0].open()
        return screens[0], terminal_stream

    yield make
    for screen in screens:
        screen.close()


def test_drawing_replaces_the_previous_drawing(open_screen) -> None:
    screen, terminal_stream = open_screen()
    screen.draw("one\ntwo\n")
    screen.draw("three\n")
    assert terminal_stream.shown == ["three"]


def test_other_output_appears_above_the_drawing(open_screen) -> None:
    screen, terminal_stream = open_screen()
    screen.draw("table\n")
    print("mine")
    assert terminal_stream.shown == ["mine"]
    screen.draw("table\nof two lines\n")
    print("an error", file=sys.stderr)
    screen.draw("table\n")
    assert terminal_stream.shown == ["mine", "an error", "table"]


def test_screen_does_not_draw_over_an_unfinished_line(open_screen) -> None:
    """Keras's bar: a line that it goes on writing to, until the epoch is over."""
    screen, terminal_stream = open_screen()
    screen.draw("table\n")
    for done in range(1, 4):
        sys.stdout.write(f"\r{done}/3 bar")
        assert not screen.draw("table\n")
        assert terminal_stream.shown == [f"{done}/3 bar"]
    sys.stdout.write("\n")
    assert screen.draw("table\n")
    assert terminal_stream.shown == ["3/3 bar", "table"]


def test_pending_drawing_is_drawn_when_the_line_ends(open_screen) -> None:
    """The last table of a run comes while another worker's line is unfinished, and no other follows."""
    screen, terminal_stream = open_screen()
    sys.stdout.write("half a")
    assert not screen.draw("table\n")
    screen.keep_drawing()
    sys.stdout.write(" line\n")
    assert terminal_stream.shown == ["half a line", "table"]
    print("what comes next")
    assert terminal_stream.shown == ["half a line", "table", "what comes next"]


def test_empty_write_keeps_the_drawing(open_screen) -> None:
    screen, terminal_stream = open_screen()
    screen.draw("table\n")
    sys.stdout.write("")
    assert terminal_stream.shown == ["table"]


def test_closed_screen_restores_standard_streams(open_screen) -> None:
    screen, terminal_stream = open_screen()
    assert sys.stdout is not terminal_stream
    assert sys.stdout.isatty() and sys.stdout.encoding == terminal_stream.encoding
    sys.stdout.writelines(["a\n", "b\n"])
    screen.close()
    assert (sys.stdout, sys.stderr) == (terminal_stream, terminal_stream)
    assert terminal_stream.shown == ["a", "b"]


def test_closed_screen_keeps_a_stream_replaced_by_other_code(open_screen, monkeypatch: pytest.MonkeyPatch) -> None:
    screen, terminal_stream = open_screen()
    other = Terminal()
    monkeypatch.setattr(sys, "stdout", other)
    screen.close()
    assert (sys.stdout, sys.stderr) == (other, terminal_stream)


def test_terminal_finds_the_stream_that_is_a_tty(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal_stream = replace_standard_streams(monkeypatch)
    assert find_terminal() is terminal_stream
    monkeypatch.setattr(sys, "stdout", None)
    assert find_terminal() is terminal_stream
    monkeypatch.setattr(sys, "stderr", None)
    assert find_terminal() is None


def test_live_display_leaves_the_last_step_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal_stream = replace_standard_streams(monkeypatch)
    live = Live(Screen(terminal_stream))
    for step in range(3, 20):
        live.step(replace(make_full_report(), step=step))
    live.close()
    print("done")
    assert terminal_stream.shown[0].startswith("fit, step 19 ─")
    assert terminal_stream.shown[-1] == "done"
    assert sys.stdout is terminal_stream


def test_live_display_shows_stage_activity_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal_stream = replace_standard_streams(monkeypatch)

    class Step:
        name, steps, doing = "fit", 3, {"gpu": "backward 2", "npu": "waits"}

    watching = WatcherThread([])
    watch([watching])
    live = Live(Screen(terminal_stream))
    live.step(make_full_report())
    assert not any("backward 2" in line for line in terminal_stream.shown)
    begin(Step())
    live.tick()
    assert [line.split()[-2:] for line in terminal_stream.shown[3:5]] == [
        ["backward", "2"],
        terminal_stream.shown[4].split()[-2:],
    ]
    assert terminal_stream.shown[4].endswith("waits")
    watching.close()
    live.close()


def test_live_display_draws_only_in_the_lead_process(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal_stream = replace_standard_streams(monkeypatch)
    live = Live(Screen(terminal_stream), is_selected=lambda: False)
    live.tick()
    live.step(make_full_report())
    live.close()
    assert terminal_stream.shown == []


def test_table_higher_than_the_terminal_is_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal_stream = replace_standard_streams(monkeypatch)
    monkeypatch.setenv("LINES", "6")
    live = Live(Screen(terminal_stream))
    live.step(make_full_report())
    assert len(terminal_stream.shown) == 5
    live.close()
