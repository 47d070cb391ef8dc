"""Report files: one report as JSON, or a line for each step; docs/metrics.md documents every key. Plan files are made
by the same rule: dataclasses as JSON and back, by the types of their fields.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from whale_nebula.errors import StateError
from whale_nebula.report.prediction import Prediction

if TYPE_CHECKING:
    from whale_nebula.report.report import Report


def to_plain(value: Any) -> Any:
    """A value as JSON has it: pairs as keys are written "1>2", and numbers that are not finite are null."""
    if isinstance(value, Mapping):
        pairs = ((">".join(map(str, key)) if isinstance(key, tuple) else key, each) for key, each in value.items())
        return {key: to_plain(each) for key, each in pairs}
    if isinstance(value, tuple | list):
        return [to_plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: to_plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_plain(kind: Any, value: Any) -> Any:
    """A value of a type from what `to_plain` made of it; fields that are missing have their defaults.

    A null where none can be is a field's default, and a number that is not finite.

    >>> from whale_nebula.schedule.lines import Hop, Line
    >>> hop = Hop(Line("a->b"), None, 4.0, None)
    >>> to_plain(hop)["there"], from_plain(Hop, to_plain(hop)) == hop
    ({'name': 'a->b', 'rate': None, 'delay': 0.0}, True)
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else from_plain(next(each for each in inner if each is not NoneType), value)
    if origin is tuple:
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(from_plain(each, own) for each, own in zip(kinds, value, strict=True))
    if origin is Mapping:
        pairs = get_origin(inner[0]) is tuple
        return {
            tuple(map(int, key.split(">"))) if pairs else key: from_plain(inner[1], each) for key, each in value.items()
        }
    if hasattr(kind, "__dataclass_fields__"):
        types = _field_types(kind)
        known = {name: each for name, each in value.items() if name in types}
        given = {n: each for n, each in known.items() if each is not None or NoneType in get_args(types[n])}
        return kind(**{name: from_plain(types[name], each) for name, each in given.items()})
    return math.nan if kind is float and value is None else value


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


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
    if report.meetings is None:
        del found["meetings"]
    for kind in ("links", "boundaries"):
        for name, each in getattr(report, kind).items():
            found[kind][name]["ratio"] = each.ratio
    return found


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Write one report, in lines for people."""
    write(path, json.loads(text(report)))


def write(path: str | os.PathLike[str], document: Mapping[str, Any], indent: int | None = 1) -> None:
    """Write a JSON file; one that is there is replaced at once or not at all."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.new")  # other processes may write the same file
    beside.write_text(json.dumps(document, indent=indent, allow_nan=False) + "\n", "utf-8")
    beside.replace(target)


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
