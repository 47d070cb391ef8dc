"""Reports as JSON: a file with one, or a line per step. docs/metrics.md documents every key."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale_nebula.report.prediction import Basis, PhaseBasis, Prediction
from whale_nebula.report.records import BoundaryReport, LinkReport, StageReport
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
