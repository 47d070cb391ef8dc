"""The forms of a step (a text, lines of the log, a table), and the text of a run: golden."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.golden.files import check_golden
from tests.unit.report.sample_reports import THERE, make_basis, make_full_report, make_measured_report
from tests.unit.report.terminal import replace_standard_streams
from whale_nebula.report.prediction import Basis
from whale_nebula.report.records import (
    ALONE,
    BoundaryReport,
    LinkReport,
    RemoteMeasurements,
    RunTotals,
    Scalars,
    StageReport,
    busiest,
)
from whale_nebula.report.report import Report
from whale_nebula.report.saved import group_programs, summary_document, summary_text
from whale_nebula.report.screen import Screen
from whale_nebula.report.text import Rate, StepLog, log, step_line
from whale_nebula.report.watchers import Live
from whale_nebula.schedule.lines import Work

SENT = BoundaryReport("int8", 4096, 1088, 1216, 1, 0.002, 0.001, 0.0093)


def make_small_report(
    stages: dict[str, StageReport], links: dict[str, LinkReport] | None = None, **more: object
) -> Report:
    return replace(Report("fit", 3, 0.5, 2, stages, links or {}), **more)


def make_crossing_report(**boundaries: BoundaryReport) -> Report:
    return replace(make_full_report(), boundaries=boundaries)


def make_replicated_report(worker: str = "npu/1") -> Report:
    """A step whose second stage has three replicas, as one of several processes sees it."""
    given = make_basis()
    (phase,) = given.phases
    report = make_measured_report(
        replace(given, phases=(replace(phase, works=(phase.works[0], make_replicated_work(3))),))
    )
    here = {"npu": report.stages["npu"]}
    return replace(report, worker=worker, stages=here, elsewhere=RemoteMeasurements({"gpu": report.stages["gpu"]}))


def make_replicated_work(count: int, **more: object) -> Work:
    return Work(0.0, 0.03, replicas=count, **more)


def make_straggling_report(
    *seconds: float, worker: str = "npu/0", order: tuple[int, ...] = (), rows: int = 8, many: int = 2, **more: object
) -> Report:
    """A step of 80 ms in so many micro-batches, for which the replicas of stage npu computed so long."""
    found: Basis = make_basis(micro_batches=many, rows=rows)
    phase = replace(found.phases[0], works=(Work(0.01, 0.02), make_replicated_work(len(seconds), order=order)))
    npu = busiest([StageReport(each, cluster="npu") for each in seconds])
    told = Report("fit", 9, 0.08, many, {"gpu": StageReport(0.06), "npu": npu}, {}, worker=worker)
    return replace(told, basis=replace(found, phases=(phase,), **more))


def make_remote_straggler_report() -> Report:
    """A straggler of which only another process has told."""
    told = make_straggling_report(0.04, 0.02)
    return replace(told, stages={"gpu": told.stages["gpu"]}, elsewhere=RemoteMeasurements({"npu": told.stages["npu"]}))


def make_link_report(payload: int, size: int, frames: int) -> LinkReport:
    return LinkReport(payload, size, payload, frames)


TWO = {"gpu": StageReport(0.2, 0.3), "npu": StageReport()}
REPORTS = {
    "something in every field": make_full_report(),
    "no boundary is measured": make_crossing_report(),
    "a boundary that crosses as it is": make_crossing_report(
        b0=BoundaryReport("none", 4096, 4096, 4224, 1), b1=BoundaryReport()
    ),
    "rows were left out": make_crossing_report(b0=BoundaryReport("none", 4096, 2048, 2176, 1, error=0.0)),
    "another process encodes": make_crossing_report(b0=replace(SENT, error=None, encode_seconds=0.0)),
    "another process measures": make_crossing_report(b0=BoundaryReport("rank(8) >> int8", 4096, 130, 258, 1)),
    "columns as wide as what stands in them": make_crossing_report(
        b0=SENT, b10=replace(SENT, codec="svd(0.6) >> fp16")
    ),
    "headers outweigh tensors on one link": replace(
        make_full_report(),
        links={"npu->gpu": make_link_report(8, 1140, 5), "gpu->npu": make_link_report(4000, 4100, 2)},
    ),
    "headers of many frames": make_small_report({}, {"a->b": make_link_report(48_000, 54_000, 45)}),
    "headers of two frames": make_small_report({}, {"a->b": make_link_report(8, 280, 2)}),
    "headers of one frame": make_small_report({}, {"a->b": make_link_report(1000, 1050, 1)}),
    "stages that are not timed apart": make_small_report(TWO, {"gpu->npu": LinkReport(1024, 1034, 2048, 1)}),
    "one of several processes": make_small_report(
        {"gpu": StageReport(0.2, 0.3)}, {"gpu->npu": LinkReport()}, worker="gpu/0"
    ),
    "names are no markup, clusters have others than stages": make_small_report(
        {"a": StageReport(cluster="gpu"), "b": StageReport(0.1, 0.2, "b", 1)}, {"gpu->b": make_link_report(10, 10, 1)},
        program="[red]fit[/red]",
    ),
    "all clusters, by what they told": make_small_report(
        {"npu": StageReport(0.3, 0.2, "npu", 1)}, {"npu->gpu": LinkReport(bytes=272)},
        elsewhere=RemoteMeasurements(
            {"gpu": StageReport(0.1, 0.4, "gpu", 2)}, {"gpu->npu": make_link_report(100, 136, 1)}
        ),
    ),
    "a prediction for the busiest replica and for all who send": make_replicated_report(),
    "in one process a prediction is for all": make_replicated_report("local/0"),
    "replicas that stand idle": make_small_report(
        {"npu": busiest([StageReport(0.5, 0.1), StageReport(0.2, 0.4), StageReport(0.4, 0.2)]),
         "gpu": StageReport(0.1, 0.5)}
    ),
    "replicas that are not timed": make_small_report(
        {"npu": StageReport(cluster="npu", replicas=None, copies=3), "gpu": StageReport(cluster="gpu")}
    ),
    "the slowest of two": make_straggling_report(0.04, 0.02),
    "the slowest of three": make_straggling_report(0.04, 0.02, 0.03, rows=1),
    "not worth a word": make_straggling_report(0.04, 0.037),
    "a straggler, and rows depend on each other": make_straggling_report(0.04, 0.02, divides=False),
    "a straggler, and too few rows": make_straggling_report(0.04, 0.02, rows=1),
    "a straggler in one process, which shares its cores": make_straggling_report(0.04, 0.02, worker=ALONE),
    "a straggler, and nothing was foretold": replace(make_straggling_report(0.04, 0.02), basis=None),
    "a straggler by a config that is wrong": make_straggling_report(0.02, 0.04, 0.02, order=(0, 1, 1, 2), many=8),
    "a straggler in another process": make_remote_straggler_report(),
}  # fmt: skip


def draw_table(report: Report, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    with monkeypatch.context() as patched:
        seen = replace_standard_streams(patched)
        live = Live(Screen(seen))
        live.step(report)
        shown = list(seen.shown)
        live.close()
    return shown


def test_step_texts_match_the_golden_file(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    for name, report in REPORTS.items():
        written += [f"== {name}", str(report), "-- log", step_line(report, None), "-- table"]
        written += draw_table(report, monkeypatch)
    check_golden(request, "reports.txt", "\n".join(written))


@pytest.mark.parametrize("name", [name for name in REPORTS if not name.endswith("another process")])
def test_saved_report_prints_the_same_text(name: str, tmp_path: Path) -> None:
    """But what others told: each process writes its own."""
    REPORTS[name].save(tmp_path / "step.json")
    loaded = Report.load(tmp_path / "step.json")
    assert str(loaded) == str(REPORTS[name])
    assert (loaded.stages, loaded.basis, loaded.straggler) == tuple(
        getattr(REPORTS[name], field) for field in ("stages", "basis", "straggler")
    )


def test_replica_idle_seconds_do_not_depend_on_the_reporter() -> None:
    told = make_straggling_report(0.04, 0.02).stages["npu"]
    assert replace(told, compute_seconds=0.02).idle_seconds == told.idle_seconds == pytest.approx(0.02)


# ---------------------------------------------------------------------- runs
def make_run(
    steps: int, worker: str = "local/0", program: str = "fit", begun: int = 1, start: float = 0.0
) -> list[Report]:
    """The first step takes long, as first steps do; the others as predicted, one a second."""
    usual = make_measured_report(make_basis(rate=1e5), worker=worker)
    return [
        replace(
            usual,
            program=program,
            step=step,
            step_seconds=9.0 if step == 1 else usual.step_seconds,
            basis=None if step == 1 else usual.basis,
            run=RunTotals(begun + step - 1),
            time=start + step,
            scalars=Scalars(("loss",), (1.0 / step,)),
        )
        for step in range(1, steps + 1)
    ]


def make_validated_run() -> list[Report]:
    """Three steps, a validation whose first step is traced, and three steps again."""
    train = [replace(each, time=time) for each, time in zip(make_run(6), (9, 10, 11, 50, 51, 52), strict=True)]
    return [*train[:3], replace(make_run(1, program="test")[0], time=40.0, run=RunTotals(4)), *train[3:]]


def make_slowed_run() -> list[Report]:
    """A run whose last step is not a usual one."""
    *reports, last = make_run(6)
    return [*reports, replace(last, step_seconds=5.0)]


def make_untimed_run(**links: LinkReport) -> list[Report]:
    plain = make_small_report({"gpu": replace(make_full_report().stages["gpu"], compute_seconds=None)}, links)
    return [plain, replace(plain, step=4)]


RUNS = {
    "five steps, of which the first counts in totals only": make_run(5),
    "what lies between steps of other programs is not a time of theirs": make_validated_run(),
    "one report": [make_full_report()],
    "programs and processes": [*make_run(3, "gpu/0"), *make_run(2, "gpu/0", "test", begun=4), *make_run(3, "npu/0")],
    "of several runs in a file the last counts": [*make_run(4), *make_run(2), *make_run(3)],
    "a usual step, and a last one that is none": make_slowed_run(),
    "replicas": [replace(make_replicated_report(), step=step) for step in (1, 2, 3)],
    "stages that are not timed apart": make_untimed_run(),
    "and a link beside them": make_untimed_run(**{THERE: make_link_report(10, 10, 1)}),
}


def test_run_texts_match_the_golden_file(request: pytest.FixtureRequest) -> None:
    written = [f"== {name}\n{summary_text(reports)}" for name, reports in RUNS.items()]
    written.append(f"== lines that hold no report\n{summary_text(make_run(2), broken=2)}")
    check_golden(request, "runs.txt", "\n".join(written))


def test_summary_document_matches_the_reports() -> None:
    reports = make_run(5)
    found, usual = summary_document(reports, broken=1), reports[-1]
    (program,) = found["programs"]
    assert (program["steps"], program["scalars"], found["runs"], found["broken_lines"]) == (5, {"loss": 0.2}, 1, 1)
    assert program["step_seconds"] == {"measured": usual.step_seconds, "predicted": usual.predicted_seconds}
    assert program["links"][THERE] == {"bytes": {"measured": 4000, "predicted": 4000.0}, "total_bytes": 20_000}
    assert found["last"]["step"] == 5
    assert (
        group_programs(make_slowed_run())[0].typical.bottleneck
        == make_slowed_run()[-2].bottleneck
        != make_slowed_run()[-1].bottleneck
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def log_step_at(clock: Clock, lines: StepLog, second: float, step: int, program: str = "fit") -> None:
    clock.now = second
    lines.step(replace(make_full_report(), step=step, program=program, time=second))


@pytest.fixture
def read_logged_steps(caplog: pytest.LogCaptureFixture):
    """The lines that were logged so far, each up to its first colon."""
    return lambda: [record.getMessage().split(":")[0] for record in caplog.records]


def test_lines_log_first_step_every_ten_seconds_and_last_step(read_logged_steps) -> None:
    clock = Clock()
    lines = StepLog(now=clock)
    for second in range(24):
        log_step_at(clock, lines, second, second + 1)
    assert read_logged_steps() == ["step 1 of fit", "step 11 of fit", "step 21 of fit"]
    lines.close()
    assert read_logged_steps()[3:] == ["step 24 of fit"]


def test_lines_log_an_already_logged_last_step_once(read_logged_steps) -> None:
    lines = StepLog(now=Clock())
    lines.step(make_full_report())
    lines.close()
    assert read_logged_steps() == ["step 3 of fit"]


def test_lines_log_first_and_last_step_of_each_program(read_logged_steps) -> None:
    clock = Clock()
    lines = StepLog(now=clock)
    for second, program in enumerate(["fit", "fit", "test", "test"]):
        log_step_at(clock, lines, second, second + 1, program)
    lines.close()
    assert read_logged_steps() == ["step 1 of fit", "step 3 of test", "step 2 of fit", "step 4 of test"]


def test_lines_log_only_in_the_lead_process(read_logged_steps) -> None:
    lines = StepLog(is_selected=lambda: False, now=Clock())
    lines.step(make_full_report())
    lines.close()
    assert read_logged_steps() == []


def test_lines_without_handlers_write_to_stderr_and_restore_the_logger(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    before = log.level, list(log.handlers)
    lines = StepLog(now=Clock())
    lines.step(make_full_report())
    lines.close()
    assert capsys.readouterr().err.startswith("whale_nebula: step 3 of fit: ")
    assert (log.level, log.handlers) == before


def test_rate_covers_recent_steps() -> None:
    rate = Rate()
    assert rate.add(replace(make_full_report(), time=5.0, step_seconds=0.5)) is None, (
        "the first step is traced, which takes long"
    )
    assert rate.add(replace(make_full_report(), time=5.25)) == 4.0
    for second in range(100):
        found = rate.add(replace(make_full_report(), time=10.0 + second))
    assert found == 1.0


def test_rate_excludes_validation_between_steps() -> None:
    rate = Rate()
    for program, time in (("fit", 1.0), ("fit", 1.5), ("test", 60.0), ("test", 61.0), ("fit", 90.0)):
        found = rate.add(replace(make_full_report(), program=program, time=time))
    assert found == 2.0
