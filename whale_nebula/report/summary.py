"""Summarise a metrics file: many steps in a few lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from whale_nebula.report.lines import gap, per_second
from whale_nebula.report.records import LinkReport
from whale_nebula.report.saved import document
from whale_nebula.report.text import of_link, of_stage, report_text
from whale_nebula.report.units import duration, size

if TYPE_CHECKING:
    from whale_nebula.report.report import Report


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
