"""Who the others wait for, and how long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.report.making import basis
from whale_nebula.report.records import Elsewhere, StageReport, busiest
from whale_nebula.report.report import Report
from whale_nebula.report.text import report_text
from whale_nebula.schedule.lines import Work


def report(
    *seconds: float, worker: str = "npu/0", order: tuple[int, ...] = (), rows: int = 8, many: int = 2, **more: object
) -> Report:
    """A step of 80 ms in so many micro-batches, for which the replicas of stage npu computed so long."""
    found = basis(micro_batches=many, rows=rows)
    phase = replace(found.phases[0], works=(Work(0.01, 0.02), Work(0.0, 0.03, replicas=len(seconds), order=order)))
    npu = busiest([StageReport(each, cluster="npu") for each in seconds])
    told = Report("fit", 9, 0.08, many, {"gpu": StageReport(0.06), "npu": npu}, {}, worker=worker)
    return replace(told, basis=replace(found, phases=(phase,), **more))


def test_the_slowest_is_named_with_what_it_costs() -> None:
    assert report(0.04, 0.02).straggler == ("npu.0 is the slowest of npu: npu.1 waits 20.0 ms of 80.0 ms")


def test_of_several_the_average_is_told() -> None:
    said = report(0.04, 0.02, 0.03, rows=1).straggler
    assert said == "npu.0 is the slowest of npu: the others wait 15.0 ms of 80.0 ms each, on the average"


def test_what_is_not_worth_a_word_is_not_said() -> None:
    assert report(0.04, 0.037).straggler == ""
    assert "straggler" not in report_text(report(0.04, 0.037))


def test_it_is_a_line_of_the_report_and_stays_one_in_a_file(tmp_path: Path) -> None:
    told = report(0.04, 0.02)
    assert f"  straggler: {told.straggler}" in report_text(told).splitlines()
    told.save(tmp_path / "step.json")
    again = Report.load(tmp_path / "step.json")
    assert again.stages["npu"] == told.stages["npu"] and again.basis == told.basis
    assert again.straggler == told.straggler


def test_what_replicas_wait_is_told_by_who_is_slowest_whichever_of_them_reports() -> None:
    told = report(0.04, 0.02).stages["npu"]
    assert replace(told, compute_seconds=0.02).idle_seconds == told.idle_seconds == pytest.approx(0.02)


def test_replicas_of_other_processes_are_known_by_what_they_told() -> None:
    told = report(0.04, 0.02)
    npu = told.stages["npu"]
    far = replace(told, stages={"gpu": told.stages["gpu"]}, elsewhere=Elsewhere({"npu": npu}))
    assert far.straggler == told.straggler
