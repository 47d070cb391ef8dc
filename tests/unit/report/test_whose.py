"""A prediction for all replicas says so beside the number of one of them, and a report says how many there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.unit.report.making import basis, measured
from whale_nebula.report.records import Elsewhere, StageReport, busiest
from whale_nebula.report.report import Report
from whale_nebula.report.summary import summary_text
from whale_nebula.report.text import of_link, of_stage


def copied(worker: str = "npu/1") -> Report:
    """A step whose second stage has three replicas, as one of several processes sees it."""
    given = basis()
    (phase,) = given.phases
    works = (phase.works[0], replace(phase.works[1], replicas=3))
    report = measured(replace(given, phases=(replace(phase, works=works),)))
    here = {"npu": report.stages["npu"]}
    return replace(report, worker=worker, stages=here, elsewhere=Elsewhere({"gpu": report.stages["gpu"]}))


def test_a_stage_is_predicted_for_its_busiest_replica() -> None:
    assert of_stage(copied(), "npu") == " for the busiest replica"
    assert of_stage(copied(), "gpu") == of_stage(copied("local/0"), "npu") == of_stage(copied(), "other") == ""


def test_a_link_is_predicted_for_all_who_send() -> None:
    assert of_link(copied(), "npu->gpu") == " for all workers of npu"
    assert of_link(copied(), "gpu->npu") == of_link(copied("local/0"), "npu->gpu") == ""


def test_both_stand_in_the_text() -> None:
    text = str(copied())
    assert text.count("for the busiest replica)") == 2 and text.count(" for all workers of npu\n") == 1
    summed = summary_text([replace(copied(), step=step) for step in (1, 2, 3)])
    assert "for the busiest replica)" in summed and " for all workers of npu) a step" in summed


def test_the_text_says_how_many_there_are_and_how_long_they_are_idle() -> None:
    timed = busiest([StageReport(0.5, 0.1), StageReport(0.2, 0.4), StageReport(0.4, 0.2)])
    text = str(Report("fit", 3, 0.6, 3, {"npu": timed, "gpu": StageReport(0.1, 0.5)}, {}))
    assert "stage npu: computes 0.500 s, waits 0.100 s; 3 replicas, which stand idle 0.400 s in all" in text
    assert "waits 0.500 s\n" in text


def test_what_was_not_timed_is_not_known(tmp_path: Path) -> None:
    untimed = StageReport(cluster="npu", replicas=None, copies=3)
    assert untimed.idle_seconds is None and StageReport().idle_seconds == 0
    report = Report("fit", 3, 0.6, 3, {"npu": untimed, "gpu": StageReport(cluster="gpu")}, {})
    assert "stage npu: part of one local function, not timed apart; 3 replicas\n" in str(report)
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json").stages == report.stages
