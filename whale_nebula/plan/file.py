"""Plan files, and the first difference between two plans."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale_nebula.errors import PlanError
from whale_nebula.ir.canonical import HERE, THERE, Words, first_difference
from whale_nebula.plain import from_plain, to_plain
from whale_nebula.plan.timing import times
from whale_nebula.spec import Spec

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan


_ALONE = "local/0"
"""The worker of all stages if one process runs every cluster; then placement is not compared."""


def plan_difference(mine: Plan, theirs: Plan, words: Words = (HERE, THERE)) -> str | None:
    """The first difference between two plans, causes before consequences; None if they are equal.

    Properties of the place where a plan was made are not compared: rows of its example, rates of links, and workers if
    one of the plans is of a single process.
    """
    alone = any(stage.worker == _ALONE for plan in (mine, theirs) for stage in plan.stages.values())
    ours, others = (_list_facts(plan, workers=not alone) for plan in (mine, theirs))
    for own, other in zip(ours, others, strict=True):
        for name in dict.fromkeys([*own, *other]):
            if name not in own or name not in other:
                there, not_there = words if name in own else words[::-1]
                return f"{name} exists {there}, and not {not_there}"
            if own[name] != other[name]:
                return f"{name} is {own[name]} {words[0]}, {other[name]} {words[1]}"
    found = first_difference(mine.lines, theirs.lines, words)
    for one, two in zip(mine.boundaries, theirs.boundaries, strict=True):
        if found and one.maker != two.maker:  # a different name alone is ignored, as Keras numbers models
            return f"boundary {one.name} is made by {one.maker!r} {words[0]}, {two.maker!r} {words[1]}; {found}"
    return found or None


def _list_facts(plan: Plan, *, workers: bool) -> list[dict[str, str]]:
    """Named facts of a plan, causes before consequences."""
    stages: dict[str, str] = {}
    crossing: dict[str, str] = {}
    for stage in plan.stages.values():
        order = f", in the order {' '.join(map(str, stage.order))}" if stage.order else ""
        copies = f", in {stage.replicas} replicas{order}" if stage.replicas > 1 else ""
        stages[f"stage {stage.name!r}"] = f"on cluster {stage.cluster!r}{copies}"
    for each in plan.boundaries:
        name = f"boundary {each.name}, from {each.source} to {' and '.join(each.destinations)},"
        crossing |= {name: str(Spec(each.dtype, each.shape)), f"the codec of {name}": each.codec}
        crossing[f"the backward codec of {name}"] = each.backward_codec
    said = [line.split(" ", 2) for line in plan.lines if line.startswith(("input ", "variable "))]
    return [
        {**stages, "the order of the stages": ", ".join(plan.stages)},
        dict(word.split("=", 1) for line in plan.lines[:1] for word in line.split()[1:]),
        {f"the version of {name}": version for name, version in plan.versions.items()},
        {f"input {name}": rest for kind, name, rest in said if kind == "input"},
        crossing,
        {f"variable {name}": rest for kind, name, rest in said if kind == "variable"},
        {f"the worker of stage {name!r}": stage.worker for name, stage in plan.stages.items() if workers},
        {f"the number of threads {name}": str(count) for name, count in plan.threads.items()},
    ]


FORMAT = "whale_nebula plan 1"
SHOWN = "whale_nebula shown plan 1"
"""The format of printed plans: without the program's text, so they cannot be loaded and compared."""


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan."""
    Path(path).write_text(to_text(plan), encoding="utf-8")


def to_text(plan: Plan) -> str:
    """The text of a plan's file."""
    return json.dumps(_document(plan, FORMAT), indent=1) + "\n"


def to_json(plan: Plan) -> str:
    """A plan as JSON for other programs, without the program's text, and with derived numbers."""
    document = _document(plan, SHOWN)
    del document["lines"]
    for name, stage in plan.stages.items():
        document["stages"][name]["memory_bytes"] = stage.memory_bytes
    for name, link in plan.links.items():
        document["links"][name]["seconds"] = link.seconds
    drawn = times(plan)
    seconds = drawn.seconds + plan.exchange_seconds if drawn.assumed.timed else None
    document["predicted"] = {"assuming": str(drawn.assumed), "seconds": seconds}
    if plan.predicted is not None:
        document["predicted"] = {"assuming": "what the planner went by", **to_plain(plan.predicted)}
    return json.dumps(document, indent=1)


def _document(plan: Plan, form: str) -> dict[str, Any]:
    """A plan as a JSON object, without its functions."""
    without = {"definition", "passes", "decision", *["considered"] * (not plan.considered)}
    names = (name for name in plan.__dataclass_fields__ if name not in without)
    digests = {"digest": plan.digest, "program_digest": plan.program_digest}
    return {"format": form, **digests, **{name: to_plain(getattr(plan, name)) for name in names}}


def load(kind: type[Plan], path: str | os.PathLike[str]) -> Plan:
    """Read a plan, and verify its digest."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PlanError("this file holds no plan", where=str(path), why=_explain_error(error), mend=_MEND) from None
    return parse(kind, text, str(path))


def parse(kind: type[Plan], text: str | bytes, where: str) -> Plan:
    """The plan in the text of a file."""
    try:
        plan, digest = _read(kind, text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlanError("this file holds no plan", where=where, why=_explain_error(error), mend=_MEND) from None
    if plan.digest != digest:
        raise PlanError("this plan was changed after it was saved", where=where, mend=_MEND)
    return plan


def _explain_error(error: Exception) -> str:
    """The reason why a file is invalid, in words.

    >>> _explain_error(KeyError("format")), _explain_error(json.JSONDecodeError("Expecting value", "plan", 0))
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


def _read(kind: type[Plan], text: str | bytes) -> tuple[Plan, str]:
    document = json.loads(text)
    found = document.pop("format")
    if found == SHOWN:
        raise ValueError("it is what show --json prints, which has no program in it")
    if found != FORMAT:
        raise ValueError(f"the format is not {FORMAT!r}")
    return from_plain(kind, document), document["digest"]
