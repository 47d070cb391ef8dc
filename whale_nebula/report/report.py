"""The report of a step: seconds by stage, bytes by link, and the totals of the run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from whale_nebula.errors import StateError
from whale_nebula.errors.text import Named
from whale_nebula.report import saved
from whale_nebula.report.bottleneck import describe_bottleneck, describe_straggler
from whale_nebula.report.prediction import (
    Basis,
    Carried,
    LinkPrediction,
    Numbers,
    PhaseBasis,
    Prediction,
    StagePrediction,
    predict,
)
from whale_nebula.report.records import (
    ALONE,
    BoundaryReport,
    Elsewhere,
    LinkReport,
    MeetingsReport,
    RunTotals,
    Scalars,
    Span,
    StageReport,
)
from whale_nebula.report.saved import FORMAT
from whale_nebula.report.spans import Timeline, chrome_trace
from whale_nebula.report.text import report_text
from whale_nebula.schedule.lines import Hop, Line, Work


@dataclass(frozen=True)
class Report:
    """The last step: its stages in order, its links as "a->b", what was predicted, and the run's totals.

    `scalars` are the single numbers that the step returned, its loss and metrics; `worker` is the process that
    reports, and `time` when the step ended, in seconds since 1970. In a run of several processes `stages` and `links`
    are this one's own; what is known of the others is `elsewhere`. `meetings` is there where clusters train apart.
    """

    program: str
    step: int
    step_seconds: float
    micro_batches: int
    stages: Mapping[str, StageReport]
    links: Mapping[str, LinkReport]
    spans: tuple[Span, ...] = ()
    basis: Basis | None = None
    notes: tuple[str, ...] = ()
    run: RunTotals = field(default_factory=RunTotals)
    scalars: Mapping[str, float] = field(default_factory=Scalars)
    worker: str = ALONE
    time: float = 0.0
    elsewhere: Elsewhere = field(default_factory=Elsewhere)
    boundaries: Mapping[str, BoundaryReport] = field(default_factory=dict)
    meetings: MeetingsReport | None = None

    def __post_init__(self) -> None:
        for name in ("stages", "links", "boundaries"):
            object.__setattr__(self, name, Named(getattr(self, name)))

    @cached_property
    def prediction(self) -> Prediction | None:
        """What the simulator says of this step, from the pace of those before; None before two have run, and where
        stages are not timed apart.
        """
        return None if self.basis is None else predict(self.basis)

    @property
    def predicted_seconds(self) -> float | None:
        """The seconds of `prediction`: to be held against `step_seconds`."""
        return None if self.prediction is None else self.prediction.seconds

    @cached_property
    def bottleneck(self) -> str:
        """What the step waits for, and what would help, in a sentence. It says nothing that was not computed.

        >>> Report("predict", 1, 0.1, 1, {"gpu": StageReport()}, {}).bottleneck
        'there is one stage, and nothing crosses a link'
        """
        said = describe_bottleneck(self)
        return said if self.worker == ALONE else f"as {self.worker} sees it, {said}"

    @cached_property
    def straggler(self) -> str:
        """Which replica of a stage the others wait for, how long, and what would help, in a sentence; empty where none
        is much slower than the others.

        >>> Report("predict", 1, 0.1, 1, {"gpu": StageReport()}, {}).straggler
        ''
        """
        return describe_straggler(self)

    def timeline(self) -> tuple[Span, ...]:
        """What ran when, in seconds from the start of the step: a tuple of spans, which prints as a drawing."""
        return Timeline(self.spans)

    def to_chrome_trace(self) -> dict[str, Any]:
        """The timeline as trace events, for Perfetto (ui.perfetto.dev) or chrome://tracing.

        >>> Report("fit", 1, 0.5, 1, {"gpu": StageReport()}, {}).to_chrome_trace()["displayTimeUnit"]
        'ms'
        """
        return chrome_trace(self)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write `to_chrome_trace()` to a file that Perfetto opens."""
        saved.write(path, self.to_chrome_trace(), indent=None)

    def to_json(self) -> str:
        """The report on one line of JSON, as the metrics file has it, with the spans besides.

        >>> Report("fit", 1, 0.5, 1, {}, {}).to_json()[:30]
        '{"format":"whale_nebula report'
        """
        return saved.text(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as JSON: `whale-nebula show --report FILE` prints it, and `Report.load` reads it."""
        saved.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Report:
        """Read what `save` wrote; of a metrics file, the last step."""
        return load(path)[-1]

    def __str__(self) -> str:
        return report_text(self)


def load(path: str | os.PathLike[str]) -> list[Report]:
    """The reports in a file, one or many; a line that was cut short when a process died is left out."""
    return read(path)[0]


def read(path: str | os.PathLike[str]) -> tuple[list[Report], int]:
    """The reports in a file, and how many of its lines hold none."""
    try:
        documents, broken = _documents(Path(path).read_text("utf-8"))
        reports = [_report(each) for each in documents]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _no_report(path, f"{type(error).__name__}: {error}") from None
    if not reports:
        raise _no_report(path, "it is empty" if not broken else f"none of its {broken} lines is a report")
    return reports, broken


def _no_report(path: str | os.PathLike[str], why: str) -> StateError:
    mend = 'nb.last_report().save("step.json") writes one, nb.init(metrics="run.jsonl") a line for each step'
    return StateError("this file holds no report", where=str(path), why=why, mend=mend)


def _documents(text: str) -> tuple[list[dict[str, Any]], int]:
    try:
        whole = json.loads(text)
        found = [whole] if isinstance(whole, dict) else []
    except ValueError:
        found = list(_lines(text))
    ours = [each for each in found if each.get("format") == FORMAT]
    return ours, len(found) - len(ours)


def _lines(text: str) -> Iterator[dict[str, Any]]:
    for one in filter(None, text.splitlines()):
        try:
            value = json.loads(one)
        except ValueError:
            value = None
        yield value if isinstance(value, dict) else {}


def _report(values: Mapping[str, Any]) -> Report:
    plain = {name: values[name] for name in ("program", "step", "step_seconds", "micro_batches", "worker", "time")}
    report = Report(
        **plain,
        stages={name: _stage(each) for name, each in values["stages"].items()},
        links={name: _make_record(LinkReport, each) for name, each in values["links"].items()},
        boundaries={name: _boundary(each) for name, each in values.get("boundaries", {}).items()},
        spans=tuple(_make_record(Span, each) for each in values.get("spans", ())),
        basis=None if values["basis"] is None else _basis_of(values["basis"]),
        notes=tuple(values["notes"]),
        run=_totals(values["run"]),
        meetings=_meetings(values.get("meetings")),
        scalars={name: float("nan") if value is None else value for name, value in values["scalars"].items()},
    )
    vars(report)["prediction"] = _prediction(values["predicted"])  # what was simulated then is not simulated again
    return report


def _meetings(values: Mapping[str, Any] | None) -> MeetingsReport | None:
    return None if values is None else MeetingsReport(**{**values, "others": tuple(values["others"])})


def _stage(values: Mapping[str, Any]) -> StageReport:
    known = values.get("replicas", ())
    replicas = None if known is None else tuple(_stage(each) for each in known)
    made: StageReport = _make_record(StageReport, {**values, "replicas": replicas})
    return made


def _prediction(values: Mapping[str, Any] | None) -> Prediction | None:
    if values is None:
        return None
    return Prediction(
        seconds=values["seconds"],
        stages={name: StagePrediction(**each) for name, each in values["stages"].items()},
        links={name: LinkPrediction(**each) for name, each in values["links"].items()},
    )


def _totals(values: Mapping[str, Any]) -> RunTotals:
    links = {name: _make_record(LinkReport, each) for name, each in values["links"].items()}
    return RunTotals(values["steps"], values["seconds"], links)


def _make_record(kind: Any, values: Mapping[str, Any]) -> Any:
    return kind(**{each.name: values[each.name] for each in fields(kind) if each.name in values})


def _boundary(values: Mapping[str, Any]) -> BoundaryReport:
    made: BoundaryReport = _make_record(BoundaryReport, {**values, "notes": tuple(values["notes"])})
    return made


def _basis_of(values: Mapping[str, Any]) -> Basis:
    phases = tuple(_phase_of(each) for each in values["phases"])
    rounds = tuple(tuple(_read_carried(one) for one in together) for together in values["exchange"])
    basis: Basis = _make_record(Basis, {**values, **_tuples(values), "phases": phases, "exchange": rounds})
    return basis


def _tuples(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(values.get(name, ())) for name in ("stages", "at_most")}


def _phase_of(values: Mapping[str, Any]) -> PhaseBasis:
    return PhaseBasis(
        works=tuple(map(_work, values["works"])),
        fused=tuple(values["fused"]),
        hops={_pair(key): _hop(each) for key, each in values["hops"].items()},
        numbers={_pair(key): (Numbers(**there), Numbers(**back)) for key, (there, back) in values["numbers"].items()},
    )


def _work(values: Mapping[str, Any]) -> Work:
    made: Work = _make_record(
        Work, {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
    )
    return made


def _pair(key: str) -> tuple[int, int]:
    source, destination = key.split(">")
    return int(source), int(destination)


def _hop(values: Mapping[str, Any]) -> Hop:
    return Hop(_way(values["there"]), _way(values["back"]), values["forward"], values["backward"])


def _read_carried(values: Mapping[str, Any]) -> Carried:
    return Carried(_line(values["line"]), values["bytes"], tuple(values.get("what", ())))


def _way(values: Mapping[str, Any] | None) -> Line | None:
    return None if values is None else _line(values)


def _line(values: Mapping[str, Any]) -> Line:
    return Line(values["name"], math.inf if values["rate"] is None else values["rate"], values["delay"])
