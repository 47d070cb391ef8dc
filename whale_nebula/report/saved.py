"""Report files: one report as JSON, or a line for each step, and summaries of them: averages and totals of each
program, and the last step. docs/metrics.md documents every key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from whale_nebula.errors import StateError
from whale_nebula.plain import from_plain, to_plain, write_json
from whale_nebula.report.prediction import Prediction
from whale_nebula.report.records import LinkReport, PredictionGap, duration, size
from whale_nebula.report.text import (
    measure_interval,
    name_predicted_replica,
    name_predicted_workers,
    rate_text,
    report_text,
)

if TYPE_CHECKING:
    from whale_nebula.report.report import Report


FORMAT = "whale_nebula report 1"
_UNSAVED = ("spans", "elsewhere")


def json_text(report: Report) -> str:
    """A report with its spans, on one line of JSON."""
    spans = [{name: each for name, each in to_plain(span).items() if each is not None} for span in report.spans]
    return _encode_line({**report_document(report), "spans": spans})


def json_line(report: Report) -> str:
    """A report without its spans, which are the largest part, on one line of JSON."""
    return _encode_line(report_document(report))


def report_document(report: Report) -> dict[str, Any]:
    """A report as a JSON object, without its spans and the reports of other processes, but with its prediction."""
    names = (name for name in report.__dataclass_fields__ if name not in _UNSAVED)
    document = {"format": FORMAT, **{name: to_plain(getattr(report, name)) for name in names}}
    document["predicted"] = to_plain(report.prediction)
    for name in ("meetings", "planned", "goodput", "cost"):
        if document[name] is None:
            del document[name]
    if report.cost is not None:
        document["cost"]["per_sample"] = report.cost.per_sample
    for kind in ("links", "boundaries"):
        for name, each in getattr(report, kind).items():
            document[kind][name]["ratio"] = each.ratio
    return document


def _encode_line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Write one report as indented JSON."""
    write_json(path, json.loads(json_text(report)))


def read(kind: type[Report], path: str | os.PathLike[str]) -> tuple[list[Report], int]:
    """The reports in a file, and the number of invalid lines."""
    try:
        found = _parse_documents(Path(path).read_text("utf-8"))
        reports = [_parse_report(kind, each) for each in found if each.get("format") == FORMAT]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _no_report_error(path, f"{type(error).__name__}: {error}") from None
    broken = len(found) - len(reports)
    if not reports:
        raise _no_report_error(path, "the file is empty" if not broken else f"none of its {broken} lines is a report")
    return reports, broken


def _no_report_error(path: str | os.PathLike[str], why: str) -> StateError:
    mend = (
        'write one with nb.last_report().save("step.json"), or a line for each step with nb.init(metrics="run.jsonl")'
    )
    return StateError("this file contains no report", where=str(path), why=why, mend=mend)


def _parse_documents(text: str) -> list[dict[str, Any]]:
    """The file's one document, or one for each of its lines; an empty one for an invalid line."""
    try:
        whole = json.loads(text)
    except ValueError:
        return [_parse_document(each) for each in filter(None, text.splitlines())]
    return [whole] if isinstance(whole, dict) else []


def _parse_document(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _parse_report(kind: type[Report], values: Mapping[str, Any]) -> Report:
    report: Report = from_plain(kind, values)
    predicted = from_plain(Prediction | None, values["predicted"])
    vars(report)["prediction"] = predicted  # the saved prediction replaces a new simulation
    return report


_TIMED = ("compute_seconds", "wait_seconds")


@dataclass(frozen=True)
class ProgramReports:
    """All steps of one program in one process. The first one, a warm-up, counts in totals only.

    `intervals` are the seconds from one step's end to the next one's, if no other program ran between the two.
    """

    worker: str
    program: str
    reports: tuple[Report, ...]
    intervals: tuple[float, ...] = ()

    @property
    def steady_reports(self) -> tuple[Report, ...]:
        """The steps from which rates are computed."""
        return self.reports[1:] or self.reports

    @property
    def last(self) -> Report:
        """The last step, which has the most accurate pace."""
        return self.reports[-1]

    def compare_seconds(self) -> PredictionGap:
        """The median seconds of a step, and of its predictions."""
        return self._compare(lambda report: report.step_seconds, lambda predicted: predicted.seconds)

    def compare_stage(self, stage: str, name: str) -> PredictionGap | None:
        """The medians of a field of a stage's reports and predictions; None if stages were not timed separately."""
        if getattr(self.last.stages.get(stage), name, None) is None:
            return None
        return self._compare(
            lambda report: getattr(report.stages.get(stage), name, None),
            lambda predicted: getattr(predicted.stages.get(stage), name, None),
        )

    def compare_stage_times(self, stage: str) -> list[PredictionGap | None]:
        """The medians of a stage's computing and of its waiting seconds."""
        return [self.compare_stage(stage, key) for key in _TIMED]

    def compare_link_bytes(self, link: str) -> PredictionGap:
        """The median bytes of a link per step."""
        return self._compare(
            lambda report: report.links.get(link, LinkReport()).bytes,
            lambda predicted: float(predicted.links[link].bytes) if link in predicted.links else None,
        )

    def sum_link_bytes(self, link: str) -> int:
        """Bytes of a link in all steps."""
        return sum(report.links.get(link, LinkReport()).bytes for report in self.reports)

    def _compare(
        self, measured: Callable[[Report], float | None], predicted: Callable[[Prediction], float | None]
    ) -> PredictionGap:
        found = [value for report in self.steady_reports if (value := measured(report)) is not None]
        predictions = [report.prediction for report in self.steady_reports if report.prediction is not None]
        expected = [value for each in predictions if (value := predicted(each)) is not None]
        return PredictionGap(median(found), median(expected) if expected else None)

    @property
    def typical(self) -> Report:
        """The last step with the median times of all, to find the bottleneck."""
        stages = {}
        for name, stage in self.last.stages.items():
            computes, waits = (None if one is None else one.measured for one in self.compare_stage_times(name))
            stages[name] = replace(stage, compute_seconds=computes, wait_seconds=waits)
        return replace(self.last, step_seconds=self.compare_seconds().measured, stages=stages)

    @property
    def steps_per_second(self) -> float | None:
        """Steps a second, including input and callbacks between steps; None if no two are consecutive."""
        return len(self.intervals) / sum(self.intervals) if self.intervals else None


def group_programs(reports: Sequence[Report]) -> list[ProgramReports]:
    """The steps of the last run in a file, grouped by process and program."""
    groups: dict[tuple[str, str], list[Report]] = {}
    intervals: dict[tuple[str, str], list[float]] = {}
    before: dict[str, Report] = {}
    for report in select_last_run(reports):
        key = report.worker, report.program
        groups.setdefault(key, []).append(report)
        passed = measure_interval(before.get(report.worker), report)
        intervals.setdefault(key, []).extend([] if passed is None else [passed])
        before[report.worker] = report
    return [ProgramReports(*key, tuple(steps), tuple(intervals[key])) for key, steps in groups.items()]


def select_last_run(reports: Sequence[Report]) -> list[Report]:
    """The reports of each process since its last start: several runs may append to one file."""
    begins = {report.worker: number for number, report in enumerate(reports) if report.run.steps == 1}
    return [report for number, report in enumerate(reports) if number >= begins.get(report.worker, 0)]


def count_runs(reports: Sequence[Report]) -> int:
    """The number of runs in a file: first steps of the process that wrote its first line."""
    first = reports[0].worker
    return max(sum(report.run.steps == 1 for report in reports if report.worker == first), 1)


def summary_text(reports: Sequence[Report], broken: int = 0) -> str:
    """Averages and totals of each program, and the last step.

    >>> from whale_nebula.report.report import Report
    >>> print(summary_text([Report("fit", 1, 0.5, 2, {}, {})]).splitlines()[0])
    step 1 of fit: 0.500 s, 2 micro-batches
    """
    lines = []
    if len(reports) > 1:
        for program in group_programs(reports):
            lines += [*_program_lines(program), ""]
        lines.append("last step:")
    lines.append(report_text(reports[-1], bottleneck=len(reports) == 1))
    if count_runs(reports) > 1:
        lines.append(f"earlier runs in this file, not shown: {count_runs(reports) - 1}")
    if broken:
        lines.append(f"invalid lines, ignored: {broken} (the last line of a process that died may be incomplete)")
    return "\n".join(lines)


def _program_lines(program: ProgramReports) -> Iterator[str]:
    last, typical = program.last, program.typical
    many = f"{len(program.reports)} step{'s' * (len(program.reports) != 1)}"
    rate = "" if program.steps_per_second is None else f", {rate_text(program.steps_per_second)}"
    yield f"{program.program} in {program.worker}: {many}, {program.compare_seconds().text(duration)} each{rate}"
    for name in last.scalars:
        values = [report.scalars[name] for report in program.reports if name in report.scalars]
        yield f"  {name}: {values[0]:.4g} first, {values[-1]:.4g} last"
    for name in last.stages:
        found = program.compare_stage_times(name)
        computes, waits = (each and each.text(duration, name_predicted_replica(last, name)) for each in found)
        if computes and waits:
            yield f"  stage {name}: computes {computes}, waits {waits}"
    for name in last.links:
        a_step = program.compare_link_bytes(name).text(size, name_predicted_workers(last, name))
        yield f"  link {name}: {a_step} per step, {size(program.sum_link_bytes(name))} total"
    yield f"  bottleneck: {typical.bottleneck}"
    if typical.straggler:
        yield f"  straggler: {typical.straggler}"


def summary_document(reports: Sequence[Report], broken: int = 0) -> dict[str, Any]:
    """What `summary_text` shows, as a JSON object."""
    document = {
        "programs": [_program_document(program) for program in group_programs(reports)],
        "last": report_document(reports[-1]),
        "runs": count_runs(reports),
        "broken_lines": broken,
    }
    plain: dict[str, Any] = to_plain(document)
    return plain


def _program_document(program: ProgramReports) -> dict[str, Any]:
    last, typical = program.last, program.typical
    return {
        "program": program.program,
        "worker": program.worker,
        "steps": len(program.reports),
        "steps_per_second": program.steps_per_second,
        "step_seconds": program.compare_seconds(),
        "scalars": last.scalars,
        "stages": {name: {key: program.compare_stage(name, key) for key in _TIMED} for name in last.stages},
        "links": {
            name: {"bytes": program.compare_link_bytes(name), "total_bytes": program.sum_link_bytes(name)}
            for name in last.links
        },
        "bottleneck": typical.bottleneck,
        "straggler": typical.straggler,
    }
