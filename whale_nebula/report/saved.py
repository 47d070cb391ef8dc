"""Reports as JSON, and summaries of files of them. docs/metrics.md documents every key."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from whale_nebula.report.lines import gap, per_second
from whale_nebula.report.prediction import Basis, PhaseBasis, Prediction
from whale_nebula.report.records import BoundaryReport, LinkReport, StageReport, duration, size
from whale_nebula.report.text import of_link, of_stage, report_text
from whale_nebula.schedule.lines import Hop, Line

if TYPE_CHECKING:
    from whale_nebula.report.report import Report


FORMAT = "whale_nebula report 1"


def text(report: Report) -> str:
    """All of a report on one line."""
    return _line({**document(report), "spans": [_sparse(span) for span in report.spans]})


def line(report: Report) -> str:
    """A report on one line without its spans, which would be most of it."""
    return _line(document(report))


def document(report: Report) -> dict[str, Any]:
    """A report without its spans as JSON has it; what was predicted stands beside it under keys of its own."""
    return {
        "format": FORMAT,
        "time": round(report.time, 6),
        "worker": report.worker,
        "program": report.program,
        "step": report.step,
        "step_seconds": report.step_seconds,
        "micro_batches": report.micro_batches,
        "scalars": dict(report.scalars),
        "stages": {name: _stage(stage) for name, stage in report.stages.items()},
        "links": {name: _link(link) for name, link in report.links.items()},
        "boundaries": {name: _link(boundary) for name, boundary in report.boundaries.items()},
        "predicted": None if report.prediction is None else _prediction_fields(report.prediction),
        **({} if report.meetings is None else {"meetings": _flat(report.meetings)}),
        "notes": list(report.notes),
        "run": {
            "steps": report.run.steps,
            "seconds": report.run.seconds,
            "links": {name: _flat(link) for name, link in report.run.links.items()},
        },
        "basis": None if report.basis is None else _basis(report.basis),
    }


def _flat(values: Any) -> dict[str, Any]:
    """The fields of a dataclass; `asdict` would copy what they hold, which takes ten times as long."""
    return {name: getattr(values, name) for name in values.__dataclass_fields__}


def _stage(stage: StageReport) -> dict[str, Any]:
    known = stage.replicas
    return {**_flat(stage), "replicas": None if known is None else [_stage(each) for each in known]}


def _link(link: LinkReport | BoundaryReport) -> dict[str, Any]:
    return {**_flat(link), "ratio": link.ratio}


def _prediction_fields(prediction: Prediction) -> dict[str, Any]:
    stages = {name: _flat(stage) for name, stage in prediction.stages.items()}
    return {
        "seconds": prediction.seconds,
        "stages": stages,
        "links": {name: _flat(link) for name, link in prediction.links.items()},
    }


def _basis(basis: Basis) -> dict[str, Any]:
    rounds = [[{**_flat(one), "line": _line_fields(one.line)} for one in together] for together in basis.exchange]
    return {**_flat(basis), "phases": [_phase(phase) for phase in basis.phases], "exchange": rounds}


def _phase(phase: PhaseBasis) -> dict[str, Any]:
    """Hops by "source>destination", because JSON's keys are text."""
    hops = {f"{a}>{b}": _crosses(hop) for (a, b), hop in phase.hops.items()}
    numbers = {f"{a}>{b}": [_flat(way) for way in both] for (a, b), both in phase.numbers.items()}
    return {"works": [_flat(work) for work in phase.works], "fused": phase.fused, "hops": hops, "numbers": numbers}


def _crosses(hop: Hop) -> dict[str, Any]:
    return {**_flat(hop), "there": _line_fields(hop.there), "back": _line_fields(hop.back)}


def _line_fields(line: Line | None) -> dict[str, Any] | None:
    """A line whose rate is null is as fast as memory: JSON knows no infinity."""
    if line is None:
        return None
    return {"name": line.name, "rate": line.rate if math.isfinite(line.rate) else None, "delay": line.delay}


def _line(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:  # a loss that is no number any more
        return json.dumps(finite(values), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    """The same with null for every number that is not finite: JSON knows no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def _sparse(values: Any) -> dict[str, Any]:
    return {name: value for name, value in _flat(values).items() if value is not None}


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Write one report, in lines for people."""
    write(path, json.loads(text(report)))


def write(path: str | os.PathLike[str], document: Mapping[str, Any], indent: int | None = 1) -> None:
    """Write a JSON file; one that is there is replaced at once or not at all."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.new")
    beside.write_text(json.dumps(document, indent=indent, allow_nan=False) + "\n", "utf-8")
    beside.replace(target)


@dataclass(frozen=True)
class Beside:
    """A measured number, the middle one of all steps, and what was predicted, where that is known."""

    measured: float
    predicted: float | None = None


@dataclass(frozen=True)
class Program:
    """All steps of one program in one process. The first one, which warms up, counts in totals only.

    `gaps` are the seconds from one step's end to the next one's, where no other program ran between the two.
    """

    worker: str
    program: str
    reports: tuple[Report, ...]
    gaps: tuple[float, ...] = ()

    @property
    def steady(self) -> tuple[Report, ...]:
        """The steps that say how fast it goes."""
        return self.reports[1:] or self.reports

    @property
    def last(self) -> Report:
        """The last step, which knows the pace best."""
        return self.reports[-1]

    def seconds(self) -> Beside:
        """A step."""
        return self._beside(lambda report: report.step_seconds, lambda report: report.predicted_seconds)

    def computes(self, stage: str) -> Beside | None:
        """What a stage computes in a step; None where stages were not timed apart."""
        return self._of_stage(stage, "compute_seconds")

    def waits(self, stage: str) -> Beside | None:
        """What a stage waits in a step."""
        return self._of_stage(stage, "wait_seconds")

    def _of_stage(self, stage: str, name: str) -> Beside | None:
        def predicted(report: Report) -> float | None:
            found = report.prediction.stages.get(stage) if report.prediction is not None else None
            return None if found is None else getattr(found, name)

        if stage not in self.last.stages or getattr(self.last.stages[stage], name) is None:
            return None
        return self._beside(lambda report: getattr(report.stages.get(stage), name, None), predicted)

    def carries(self, link: str) -> Beside:
        """Bytes of a link in a step."""

        def predicted(report: Report) -> float | None:
            found = report.prediction.links.get(link) if report.prediction is not None else None
            return None if found is None else float(found.bytes)

        return self._beside(lambda report: report.links.get(link, LinkReport()).bytes, predicted)

    def carried(self, link: str) -> int:
        """Bytes of a link in all steps."""
        return sum(report.links.get(link, LinkReport()).bytes for report in self.reports)

    def _beside(
        self, measured: Callable[[Report], float | None], predicted: Callable[[Report], float | None]
    ) -> Beside:
        found = [value for report in self.steady if (value := measured(report)) is not None]
        told = [value for report in self.steady if (value := predicted(report)) is not None]
        return Beside(median(found), median(told) if told else None)

    def typical(self) -> Report:
        """The last step, with the seconds that are usual: of it the bottleneck is told."""
        stages = {
            name: replace(
                stage,
                compute_seconds=_finite_or_none(self.computes(name)),
                wait_seconds=_finite_or_none(self.waits(name)),
            )
            for name, stage in self.last.stages.items()
        }
        return replace(self.last, step_seconds=self.seconds().measured, stages=stages)

    @property
    def per_second(self) -> float | None:
        """Steps a second, with the input and the callbacks between steps; None where no two came in a row."""
        return len(self.gaps) / sum(self.gaps) if self.gaps else None


def programs(reports: Sequence[Report]) -> list[Program]:
    """The last run in the file, by process and program."""
    found: dict[tuple[str, str], list[Report]] = {}
    gaps: dict[tuple[str, str], list[float]] = {}
    before: dict[str, Report] = {}
    for report in last_run(reports):
        key = report.worker, report.program
        found.setdefault(key, []).append(report)
        passed = gap(before.get(report.worker), report)
        gaps.setdefault(key, []).extend([] if passed is None else [passed])
        before[report.worker] = report
    return [Program(*key, tuple(own), tuple(gaps[key])) for key, own in found.items()]


def last_run(reports: Sequence[Report]) -> list[Report]:
    """The reports of each process since it began anew: a file may be appended to by one run after the other."""
    begins = {report.worker: number for number, report in enumerate(reports) if report.run.steps == 1}
    return [report for number, report in enumerate(reports) if number >= begins.get(report.worker, 0)]


def runs(reports: Sequence[Report]) -> int:
    """How many runs have written to the file."""
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
        for program in programs(reports):
            lines += [*_program(program), ""]
        lines.append("the last step:")
    lines.append(report_text(reports[-1], bottleneck=len(reports) == 1))
    if runs(reports) > 1:
        lines.append(f"earlier runs in this file, left out here: {runs(reports) - 1}")
    if broken:
        lines.append(f"lines that hold no report, left out: {broken} (a process that died may cut its last one short)")
    return "\n".join(lines)


def _program(program: Program) -> Iterator[str]:
    many = f"{len(program.reports)} step{'s' * (len(program.reports) != 1)}"
    rate = "" if program.per_second is None else f", {per_second(program.per_second)}"
    yield f"{program.program} in {program.worker}: {many}, {_format_measure(program.seconds(), duration)} each{rate}"
    for name in program.last.scalars:
        values = [report.scalars[name] for report in program.reports if name in report.scalars]
        yield f"  {name}: {values[0]:.4g} at first, {values[-1]:.4g} at last"
    for name in program.last.stages:
        computes, waits = program.computes(name), program.waits(name)
        if computes is not None and waits is not None:
            whose = of_stage(program.last, name)
            computed, waited = (_format_measure(each, duration, whose) for each in (computes, waits))
            yield f"  stage {name}: computes {computed}, waits {waited}"
    for name in program.last.links:
        whose = of_link(program.last, name)
        a_step = _format_measure(program.carries(name), size, whose)
        yield f"  link {name}: {a_step} a step, {size(program.carried(name))} in all"
    yield f"  bottleneck: {program.typical().bottleneck}"
    if program.typical().straggler:
        yield f"  straggler: {program.typical().straggler}"


def _format_measure(number: Beside, unit: Callable[[float], str], whose: str = "") -> str:
    said = unit(number.measured)
    return said if number.predicted is None else f"{said} (predicted {unit(number.predicted)}{whose})"


def summary_document(reports: Sequence[Report], broken: int = 0) -> dict[str, Any]:
    """The same for programs to read."""
    return {
        "programs": [_program_document(program) for program in programs(reports)],
        "last": document(reports[-1]),
        "runs": runs(reports),
        "broken_lines": broken,
    }


def _program_document(program: Program) -> dict[str, Any]:
    stages = program.last.stages
    return {
        "program": program.program,
        "worker": program.worker,
        "steps": len(program.reports),
        "steps_per_second": program.per_second,
        "step_seconds": _plain(program.seconds()),
        "scalars": dict(program.last.scalars),
        "stages": {
            name: {"compute_seconds": _plain(program.computes(name)), "wait_seconds": _plain(program.waits(name))}
            for name in stages
        },
        "links": {
            name: {"bytes": _plain(program.carries(name)), "total_bytes": program.carried(name)}
            for name in program.last.links
        },
        "bottleneck": program.typical().bottleneck,
        "straggler": program.typical().straggler,
    }


def _finite_or_none(number: Beside | None) -> float | None:
    return None if number is None else number.measured


def _plain(number: Beside | None) -> dict[str, float | None] | None:
    return None if number is None else {"measured": number.measured, "predicted": number.predicted}
