"""The table: what stands in it, when it is drawn, and that it leaves the last step on the terminal."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from tests.unit.report.making import full
from tests.unit.report.terminal import stand_in
from whale_nebula.report.live import Live
from whale_nebula.report.published import begin, forget, watch
from whale_nebula.report.records import BoundaryReport, LinkReport, StageReport
from whale_nebula.report.report import Report
from whale_nebula.report.screen import Screen
from whale_nebula.report.watchers import Watching


@pytest.fixture(autouse=True)
def fresh():
    forget()
    yield
    forget()


def test_it_shows_stages_links_and_the_bottleneck(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch)
    live = Live(Screen(seen))
    live.step(full())
    title, head, stages, gpu, npu, links, there, back, boundaries, b0, *sentence = seen.shown
    assert title.startswith("fit, step 3 ─")
    assert head.startswith("loss 0.25, accuracy 0.5 · ") and "0.200 s a step, predicted" in head
    assert stages.split() == ["stage", "computes", "waits", "in", "flight", "of", "the", "step", "now"]
    assert gpu.split()[:3] == ["gpu", "0.120", "s"] and npu.split()[0] == "npu"
    assert links.split()[0] == "link"
    assert there.split()[:5] == ["gpu->npu", "3.9", "KiB", "100", "%"] and back.split()[0] == "npu->gpu"
    assert boundaries.split() == ["boundary", "a", "step", "of", "raw", "error", "as", "codec", "takes"]
    assert b0.split() == ["b0", "gpu->npu", "1.2", "KiB", "29.7", "%", "0.0093", "int8", "3.0", "ms"]
    assert not any(line.startswith("b0 npu") for line in seen.shown), "it crosses as it is"
    assert " ".join(sentence) == full().bottleneck
    live.close()


def test_what_another_process_measures_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch)
    live = Live(Screen(seen))
    came = BoundaryReport("rank(8) >> int8", 4096, 130, 258, 1)
    live.step(replace(full(), boundaries={"b0 npu->gpu": came}))
    assert next(line.split() for line in seen.shown if line.startswith("b0")) == (
        ["b0", "npu->gpu", "258", "B", "6.3", "%", "rank(8)", ">>", "int8"]
    )
    live.step(replace(full(), boundaries={}))
    live.close()
    assert not any(line.startswith("b") for line in seen.shown)


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


def test_names_are_no_markup_and_clusters_are_named_where_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch)
    stages = {"a": StageReport(cluster="gpu"), "b": StageReport(0.1, 0.2, "b", 1)}
    live = Live(Screen(seen))
    live.step(Report("[red]fit[/red]", 1, 0.5, 1, stages, {"gpu->b": LinkReport(10, 10, 10, 1)}))
    assert seen.shown[0].startswith("[red]fit[/red], step 1")
    assert seen.shown[3].split()[:2] == ["a", "(gpu)"] and "not timed apart" in seen.shown[3]
    assert seen.shown[6].endswith("free")
    live.close()


def test_what_is_nothing_but_headers_is_called_that(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stand_in(monkeypatch)
    live = Live(Screen(seen))
    links = {"npu->gpu": LinkReport(8, 1140, 8, 5), "gpu->npu": LinkReport(4000, 4100, 4000, 2)}
    live.step(replace(full(), links=links))
    words = {line.split()[0]: line.split() for line in seen.shown}
    assert words["npu->gpu"][3] == "headers" and words["gpu->npu"][3:5] == ["102", "%"]
    live.close()
