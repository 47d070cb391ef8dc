"""Plan files, and the first difference between two plans."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale_nebula.errors import PlanError
from whale_nebula.ir.canonical import HERE, THERE, Words, first_difference
from whale_nebula.plan.timing import times
from whale_nebula.report.serial import from_plain, to_plain
from whale_nebula.spec import Spec

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan


_ALONE = "local/0"
"""The worker of all stages where every cluster lives in one process: it says nothing of where they would run."""


def plan_difference(mine: Plan, theirs: Plan, words: Words = (HERE, THERE)) -> str | None:
    """The first difference, a cause before what follows from it; None where the plans are the same.

    Where a plan was made is not compared: rows of its example, rates of links, and workers if one of the plans is
    of a single process.
    """
    return next(_differences(mine, theirs, words), None)


def _differences(mine: Plan, theirs: Plan, words: Words) -> Iterator[str]:
    for own, other in zip(_list_facts(mine), _list_facts(theirs), strict=True):
        for name in dict.fromkeys([*own, *other]):
            if name not in own or name not in other:
                there, not_there = words if name in own else words[::-1]
                yield f"{name} exists {there}, and not {not_there}"
            elif own[name] != other[name]:
                yield f"{name} is {own[name]} {words[0]}, {other[name]} {words[1]}"
    if mine.lines != theirs.lines:
        yield first_difference(_list_ops(mine), _list_ops(theirs), words)
    for name, stage in mine.stages.items():
        workers = stage.worker, theirs.stages[name].worker
        if workers[0] != workers[1] and _ALONE not in workers:
            yield f"the worker of stage {name!r} is {workers[0]} {words[0]}, {workers[1]} {words[1]}"
    for name in dict.fromkeys([*mine.threads, *theirs.threads]):
        counts = mine.threads.get(name, 0), theirs.threads.get(name, 0)
        if counts[0] != counts[1]:
            yield f"the number of threads {name} is {counts[0]} {words[0]}, {counts[1]} {words[1]}"


def _list_facts(plan: Plan) -> list[dict[str, object]]:
    """What can be said of a plan by a name, causes before what follows from them."""
    pipeline = plan.lines[0].split()[1:] if plan.lines else []
    stages = {f"stage {name!r}": f"on cluster {stage.cluster!r}" for name, stage in plan.stages.items()}
    counts = {f"the number of replicas of stage {name!r}": stage.replicas for name, stage in plan.stages.items()}
    turns = {
        f"the order of the replicas of stage {name!r}": " ".join(map(str, stage.order)) or "the plain one"
        for name, stage in plan.stages.items()
    }
    crossing: dict[str, object] = {}
    for each in plan.boundaries:
        name = f"boundary {each.name}, from {each.source} to {' and '.join(each.destinations)},"
        crossing |= {name: Spec(each.dtype, each.shape), f"the codec of {name}": each.codec}
        crossing[f"the backward codec of {name}"] = each.backward_codec
    written: dict[str, object] = {name: value for name, _, value in (word.partition("=") for word in pipeline)}
    return [
        {**stages, **counts, **turns, "the order of the stages": ", ".join(plan.stages)},
        written,
        {f"the version of {name}": version for name, version in plan.versions.items()},
        _find_lines(plan, "input"),
        crossing,
        _find_lines(plan, "variable"),
    ]


def _find_lines(plan: Plan, kind: str) -> dict[str, object]:
    """What the lines of this kind say, by what they say it of."""
    found = (line.split(" ", 2) for line in plan.lines if line.startswith(f"{kind} "))
    return {f"{kind} {name}": said for _, name, said in found}


def _list_ops(plan: Plan) -> list[str]:
    """The lines of the program, but for which op holds which input: that follows from the ops."""
    return [line for line in plan.lines if not line.startswith("arguments ")]


FORMAT = "whale_nebula plan 1"
SHOWN = "whale_nebula shown plan 1"
"""The format of what is printed: it lacks the program's text, so it cannot be loaded and compared."""


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan."""
    Path(path).write_text(json.dumps(_document(plan, FORMAT), indent=1) + "\n", encoding="utf-8")


def to_json(plan: Plan) -> str:
    """A plan for other programs to read: without the program's text, and with what is told from the rest."""
    document = _document(plan, SHOWN)
    del document["lines"]
    for name, stage in plan.stages.items():
        document["stages"][name]["memory_bytes"] = stage.memory_bytes
    for name, link in plan.links.items():
        document["links"][name]["seconds"] = link.seconds
    drawn = times(plan)
    seconds = drawn.seconds + plan.exchange_seconds if drawn.assumed.timed else None
    document["predicted"] = {"assuming": str(drawn.assumed), "seconds": seconds}
    return json.dumps(document, indent=1)


def _document(plan: Plan, form: str) -> dict[str, Any]:
    """All that JSON can have of a plan: its functions are left out."""
    names = (name for name in plan.__dataclass_fields__ if name not in ("definition", "passes"))
    digests = {"digest": plan.digest, "program_digest": plan.program_digest}
    return {"format": form, **digests, **{name: to_plain(getattr(plan, name)) for name in names}}


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
    return from_plain(kind, document), document["digest"]
