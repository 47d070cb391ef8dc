"""Reports in several processes: each on its own stage, and each with a prediction of the whole step from shared
timings.
"""

from __future__ import annotations

import pytest

from tests.processes.running import Ended, run
from whale_nebula.report.report import Report, read
from whale_nebula.report.saved import group_programs

WORKERS = ("c0/0", "c1/0")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, list[Report]]:
    path = tmp_path_factory.mktemp("seeing") / "run.jsonl"
    ended = run("train", 2, "seeing", path)
    ended.result.check()
    reports, broken = read(path)
    assert broken == 0
    return ended, reports


def test_each_process_reports_on_its_own_stage(seen: tuple[Ended, list[Report]]) -> None:
    ended, reports = seen
    assert ended.all("worker") == list(WORKERS)
    assert ended.all("stages") == [["c0"], ["c1"]]
    assert {program.worker: len(program.reports) for program in group_programs(reports)} == dict.fromkeys(WORKERS, 4)
    assert len({report.scalars["loss"] for report in reports}) == 4  # a loss for each step, the same in both


def test_each_process_predicts_all_stages(seen: tuple[Ended, list[Report]]) -> None:
    told = {(report.worker, report.step): report for report in seen[1]}
    assert [told[worker, step].prediction is None for worker in WORKERS for step in (1, 2, 3, 4)] == [
        True, True, False, False, True, True, False, False,
    ]  # fmt: skip
    first, second = (told[worker, 4] for worker in WORKERS)
    assert first.prediction.stages.keys() == second.prediction.stages.keys() == {"c0", "c1"}
    assert first.basis.phases == second.basis.phases  # made of what both told
    assert first.prediction.links == second.prediction.links


def test_codecs_take_their_time_of_the_stages_and_of_what_is_foretold(seen: tuple[Ended, list[Report]]) -> None:
    for report in seen[1]:
        [stage] = report.stages.values()
        own = sum(each.encode_seconds + each.decode_seconds for each in report.boundaries.values())
        assert stage.codec_seconds >= 0.9 * own > 0
    assert all(stage.codec_seconds > 0 for stage in seen[1][-1].prediction.stages.values())


def test_the_line_is_that_of_the_config(seen: tuple[Ended, list[Report]]) -> None:
    report = seen[1][-1]
    for link in report.prediction.links.values():
        assert link.seconds == pytest.approx(8 * link.bytes / 1e6)
    assert all("predicted" in text for text in seen[0].all("text"))
