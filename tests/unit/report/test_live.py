"""The live table: its contents, when it is drawn, and the last step that remains on the terminal."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from tests.unit.report.making import full
from tests.unit.report.terminal import stand_in
from whale_nebula.report.published import begin, watch
from whale_nebula.report.screen import Screen
from whale_nebula.report.watchers import Live, Watching


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
