"""What a file of metrics says of a run: middle values, totals, the last step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.report.making import THERE, basis, full, measured
from whale_nebula.report.records import LinkReport, RunTotals, Scalars
from whale_nebula.report.report import Report
from whale_nebula.report.summary import last_run, programs, runs, summary_document, summary_text


def run(steps: int, worker: str = "local/0", program: str = "fit") -> list[Report]:
    """The first step takes long, as first steps do; the others as predicted."""
    usual = measured(basis(rate=1e5), worker=worker)
    return [
        replace(
            usual,
            program=program,
            step=step,
            step_seconds=9.0 if step == 1 else usual.step_seconds,
            basis=None if step == 1 else usual.basis,
            run=RunTotals(step),
            time=float(step),
            scalars=Scalars(("loss",), (1.0 / step,)),
        )
        for step in range(1, steps + 1)
    ]


def test_the_first_step_counts_in_totals_only() -> None:
    (program,) = programs(run(5))
    usual = run(2)[1]
    assert program.seconds().measured == usual.step_seconds
    assert program.seconds().predicted == usual.predicted_seconds
    assert program.carries(THERE).measured == usual.links[THERE].bytes
    assert program.carried(THERE) == 5 * usual.links[THERE].bytes
    assert program.per_second == 1.0


def test_the_text_has_averages_and_the_last_step() -> None:
    text = summary_text(run(5))
    first, *rest = text.splitlines()
    assert first.startswith("fit in local/0: 5 steps, ") and first.endswith("each, 1 steps/s with what lies between")
    assert rest[0] == "  loss: 1 at first, 0.2 at last"
    assert text.count("bottleneck: ") == 1
    assert "the last step:\nstep 5 of fit: " in text


def test_the_rate_leaves_out_what_lies_between_steps_of_other_programs() -> None:
    """Three steps, a validation whose first step is traced, and three steps again."""
    train = [replace(each, time=time) for each, time in zip(run(6), (9, 10, 11, 50, 51, 52), strict=True)]
    test = replace(run(1, program="test")[0], time=40.0, run=RunTotals(4))
    fit, validation = programs([*train[:3], test, *train[3:]])
    assert fit.per_second == 1.0
    assert validation.per_second is None
    text = summary_text([*train[:3], test, *train[3:]])
    assert "test in local/0: 1 step, 9.000 s each\n" in text


def test_one_report_is_shown_as_it_is() -> None:
    assert summary_text([full()]) == str(full())


def test_programs_and_processes_are_told_apart() -> None:
    reports = [*run(3, "gpu/0"), *run(2, "gpu/0", "test"), *run(3, "npu/0")]
    reports[3] = replace(reports[3], run=RunTotals(4))  # the second program of the same run
    found = [(program.worker, program.program, len(program.reports)) for program in programs(reports)]
    assert found == [("gpu/0", "fit", 3), ("gpu/0", "test", 2), ("npu/0", "fit", 3)]


def test_of_several_runs_in_a_file_the_last_counts() -> None:
    reports = [*run(4), *run(2), *run(3)]
    assert [report.step for report in last_run(reports)] == [1, 2, 3]
    assert runs(reports) == 3
    assert "earlier runs in this file, left out here: 2" in summary_text(reports)


def test_lines_that_were_left_out_are_counted() -> None:
    assert "lines that hold no report, left out: 2 (" in summary_text(run(2), broken=2)
    assert "left out" not in summary_text(run(2))


def test_the_bottleneck_is_that_of_a_usual_step() -> None:
    reports = run(6)
    reports[-1] = replace(reports[-1], step_seconds=5.0)
    assert "something else takes time" in reports[-1].bottleneck
    assert programs(reports)[0].typical.bottleneck == reports[-2].bottleneck


def test_the_document_says_the_same() -> None:
    reports = run(5)
    found = summary_document(reports, broken=1)
    (program,) = found["programs"]
    usual = reports[-1]
    assert (program["steps"], program["scalars"], found["runs"], found["broken_lines"]) == (5, {"loss": 0.2}, 1, 1)
    assert program["step_seconds"] == {"measured": usual.step_seconds, "predicted": usual.predicted_seconds}
    assert program["links"][THERE] == {"bytes": {"measured": 4000, "predicted": 4000.0}, "total_bytes": 20_000}
    assert found["last"]["step"] == 5


@pytest.mark.parametrize("links", [{}, {THERE: LinkReport(10, 10, 10, 1)}])
def test_a_step_whose_stages_are_not_timed_apart(links: dict[str, LinkReport]) -> None:
    plain = Report("fit", 1, 0.5, 1, {"gpu": replace(full().stages["gpu"], compute_seconds=None)}, links)
    text = summary_text([plain, replace(plain, step=2)])
    assert "stage gpu: computes" not in text
