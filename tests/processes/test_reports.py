"""Reports in several processes: each on its own stage, and each with a prediction of the whole step from shared
timings.
"""

from __future__ import annotations

import pytest

from tests.processes.worker_runs import FinishedRun, run_workers
from whale_nebula.report.report import Report, read
from whale_nebula.report.saved import group_programs

WORKERS = ("c0/0", "c1/0")


@pytest.fixture(scope="module")
def run_and_reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[FinishedRun, list[Report]]:
    path = tmp_path_factory.mktemp("reports") / "run.jsonl"
    ended = run_workers("train", 2, "write_reports", path)
    ended.result.check()
    reports, broken = read(path)
    assert broken == 0
    return ended, reports


def test_process_reports_on_its_own_stage(run_and_reports: tuple[FinishedRun, list[Report]]) -> None:
    ended, reports = run_and_reports
    assert ended.get_all("worker") == list(WORKERS)
    assert ended.get_all("stages") == [["c0"], ["c1"]]
    assert {program.worker: len(program.reports) for program in group_programs(reports)} == dict.fromkeys(WORKERS, 4)
    assert len({report.scalars["loss"] for report in reports}) == 4  # a loss for each step, the same in both


def test_process_predicts_all_stages(run_and_reports: tuple[FinishedRun, list[Report]]) -> None:
    reports_by_step = {(report.worker, report.step): report for report in run_and_reports[1]}
    assert [reports_by_step[worker, step].prediction is None for worker in WORKERS for step in (1, 2, 3, 4)] == [
        True, True, False, False, True, True, False, False,
    ]  # fmt: skip
    first, second = (reports_by_step[worker, 4] for worker in WORKERS)
    assert first.prediction.stages.keys() == second.prediction.stages.keys() == {"c0", "c1"}
    assert first.basis.phases == second.basis.phases  # from the timings of both
    assert first.prediction.links == second.prediction.links


def test_codec_seconds_are_in_stages_and_predictions(run_and_reports: tuple[FinishedRun, list[Report]]) -> None:
    for report in run_and_reports[1]:
        [stage] = report.stages.values()
        own = sum(each.encode_seconds + each.decode_seconds for each in report.boundaries.values())
        assert stage.codec_seconds >= 0.9 * own > 0
    assert all(stage.codec_seconds > 0 for stage in run_and_reports[1][-1].prediction.stages.values())


def test_predicted_link_seconds_use_the_configured_rate(run_and_reports: tuple[FinishedRun, list[Report]]) -> None:
    report = run_and_reports[1][-1]
    for link in report.prediction.links.values():
        assert link.seconds == pytest.approx(8 * link.bytes / 1e6)
    assert all("predicted" in text for text in run_and_reports[0].get_all("text"))
