"""Plan files: JSON with everything but the graphs, for pinning and comparison."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale_nebula.errors import PlanError
from whale_nebula.plan.records import PlanBoundary, PlanLayer, PlanLink, PlanOnce, PlanStage, PlanTied
from whale_nebula.plan.timing import times

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan

FORMAT = "whale_nebula plan 1"
SHOWN = "whale_nebula shown plan 1"
"""The format of what is printed: it lacks the program's text, so it cannot be loaded and compared."""


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan."""
    document = {"format": FORMAT, **_digests(plan), **_saved_fields(plan)}
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def to_json(plan: Plan) -> str:
    """A plan for other programs to read: without the program's text, and with what is told from the rest."""
    kept = _saved_fields(plan)
    del kept["lines"]
    for name, stage in plan.stages.items():
        kept["stages"][name]["memory_bytes"] = stage.memory_bytes
    for name, link in plan.links.items():
        kept["links"][name]["seconds"] = link.seconds
    drawn = times(plan)
    seconds = drawn.seconds + plan.exchange_seconds if drawn.assumed.timed else None
    predicted = {"assuming": str(drawn.assumed), "seconds": seconds}
    return json.dumps({"format": SHOWN, **_digests(plan), **kept, "predicted": predicted}, indent=1)


def load(kind: type[Plan], path: str | os.PathLike[str]) -> Plan:
    """Read a plan, and see that it is what was written."""
    try:
        plan, digest = _read(kind, Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlanError("this file holds no plan", where=str(path), why=_why(error), mend=_MEND) from None
    if plan.digest != digest:
        raise PlanError("this plan was changed after it was saved", where=str(path), mend=_MEND)
    return plan


def _why(error: Exception) -> str:
    """What is wrong with a file, in words.

    >>> _why(KeyError("format")), _why(json.JSONDecodeError("Expecting value", "plan", 0))
    ("it has no 'format'", 'it is no JSON: Expecting value: line 1 column 1 (char 0)')
    """
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON: {error}"
    return str(error) if isinstance(error, ValueError) else "what it holds does not lie as in a plan"


_MEND = "nb.plan(model, *example).save(path) writes one, and so does: whale-nebula show train.py --save plan.json"


def _read(kind: type[Plan], text: str) -> tuple[Plan, str]:
    document = json.loads(text)
    found = document.pop("format")
    if found == SHOWN:
        raise ValueError("it is what show --json prints, which has no program in it")
    if found != FORMAT:
        raise ValueError(f"the format is not {FORMAT!r}")
    digest, _ = document.pop("digest"), document.pop("program_digest")
    document |= {
        "stages": {name: _stage(each) for name, each in document["stages"].items()},
        "links": {name: _make_record(PlanLink, each) for name, each in document["links"].items()},
        "boundaries": tuple(_make_record(PlanBoundary, each) for each in document["boundaries"]),
        "once": tuple(_make_record(PlanOnce, each) for each in document["once"]),
        "tied": tuple(_make_record(PlanTied, each) for each in document["tied"]),
    }
    return _make_record(kind, document), digest


def _stage(values: Mapping[str, Any]) -> PlanStage:
    """A stage; files of earlier versions have no layers."""
    layers = tuple(_make_record(PlanLayer, each) for each in values.get("layers", ()))
    made: PlanStage = _make_record(PlanStage, {**values, "layers": layers})
    return made


def _make_record(kind: Any, values: Mapping[str, Any]) -> Any:
    return kind(**{name: tuple(each) if isinstance(each, list) else each for name, each in values.items()})


def _digests(plan: Plan) -> dict[str, Any]:
    return {"digest": plan.digest, "program_digest": plan.program_digest}


def _saved_fields(plan: Plan) -> dict[str, Any]:
    return {name: _plain(getattr(plan, name)) for name in _names(type(plan)) if name not in ("definition", "passes")}


def _names(kind: Any) -> list[str]:
    return [each.name for each in fields(kind)]


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in _names(type(value))}
    return value
