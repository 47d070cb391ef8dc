"""Report files: one report as JSON, or a line for each step; docs/metrics.md documents every key."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale_nebula.errors import StateError
from whale_nebula.plain import from_plain, to_plain, write_json
from whale_nebula.report.prediction import Prediction

if TYPE_CHECKING:
    from whale_nebula.report.report import Report


FORMAT = "whale_nebula report 1"
_UNSAVED = ("spans", "elsewhere")


def text(report: Report) -> str:
    """All of a report on one line."""
    spans = [{name: each for name, each in to_plain(span).items() if each is not None} for span in report.spans]
    return _line({**document(report), "spans": spans})


def line(report: Report) -> str:
    """A report on one line without its spans, which would be most of it."""
    return _line(document(report))


def document(report: Report) -> dict[str, Any]:
    """A report without its spans as JSON has it; what was predicted stands beside it under keys of its own."""
    names = (name for name in report.__dataclass_fields__ if name not in _UNSAVED)
    found = {"format": FORMAT, **{name: to_plain(getattr(report, name)) for name in names}}
    found["predicted"] = to_plain(report.prediction)
    for name in ("meetings", "planned", "goodput"):
        if found[name] is None:
            del found[name]
    for kind in ("links", "boundaries"):
        for name, each in getattr(report, kind).items():
            found[kind][name]["ratio"] = each.ratio
    return found


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Write one report, in lines for people."""
    write_json(path, json.loads(text(report)))


def read(kind: type[Report], path: str | os.PathLike[str]) -> tuple[list[Report], int]:
    """The reports in a file, and how many of its lines hold none."""
    try:
        found = _documents(Path(path).read_text("utf-8"))
        reports = [_report(kind, each) for each in found if each.get("format") == FORMAT]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _no_report(path, f"{type(error).__name__}: {error}") from None
    broken = len(found) - len(reports)
    if not reports:
        raise _no_report(path, "it is empty" if not broken else f"none of its {broken} lines is a report")
    return reports, broken


def _no_report(path: str | os.PathLike[str], why: str) -> StateError:
    mend = 'nb.last_report().save("step.json") writes one, nb.init(metrics="run.jsonl") a line for each step'
    return StateError("this file holds no report", where=str(path), why=why, mend=mend)


def _documents(text: str) -> list[dict[str, Any]]:
    """The file's one document, or one for each of its lines; of a line that is none, an empty one."""
    try:
        whole = json.loads(text)
    except ValueError:
        return [_document(each) for each in filter(None, text.splitlines())]
    return [whole] if isinstance(whole, dict) else []


def _document(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _report(kind: type[Report], values: Mapping[str, Any]) -> Report:
    report: Report = from_plain(kind, values)
    predicted = from_plain(Prediction | None, values["predicted"])
    vars(report)["prediction"] = predicted  # what was simulated then is not simulated again
    return report
