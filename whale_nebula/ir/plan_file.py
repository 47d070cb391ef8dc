"""A plan in a file: JSON with all of it but the graphs, to pin one and to compare it with another."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from whale_nebula.errors import PlanError
from whale_nebula.ir.face import Plan
from whale_nebula.ir.overview import PlanBoundary, PlanLink, PlanOnce, PlanStage, PlanTied

FORMAT = "whale_nebula plan 1"


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan."""
    kept = {name: _plain(getattr(plan, name)) for name in _names(Plan) if name != "definition"}
    document = {"format": FORMAT, "digest": plan.digest, "program_digest": plan.program_digest, **kept}
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def load(path: str | os.PathLike[str]) -> Plan:
    """Read a plan, and see that it is what was written."""
    try:
        plan, digest = _read(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlanError(
            "this file holds no plan", where=str(path), why=f"{type(error).__name__}: {error}", mend=_MEND
        ) from None
    if plan.digest != digest:
        raise PlanError("this plan was changed after it was saved", where=str(path), mend=_MEND)
    return plan


_MEND = "nb.plan(model, *example).save(path) writes one"


def _read(text: str) -> tuple[Plan, str]:
    document = json.loads(text)
    if document.pop("format") != FORMAT:
        raise ValueError(f"the format is not {FORMAT!r}")
    digest, _ = document.pop("digest"), document.pop("program_digest")
    document |= {
        "stages": {name: _made(PlanStage, each) for name, each in document["stages"].items()},
        "links": {name: _made(PlanLink, each) for name, each in document["links"].items()},
        "boundaries": tuple(_made(PlanBoundary, each) for each in document["boundaries"]),
        "once": tuple(_made(PlanOnce, each) for each in document["once"]),
        "tied": tuple(_made(PlanTied, each) for each in document["tied"]),
    }
    return _made(Plan, document), digest


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    return kind(**{name: tuple(each) if isinstance(each, list) else each for name, each in values.items()})


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
