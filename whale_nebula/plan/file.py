"""Plan files, and the first difference between two plans."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale_nebula.errors import PlanError
from whale_nebula.ir.canonical import HERE, THERE, Words, first_difference
from whale_nebula.plan.records import PlanBoundary, PlanLayer, PlanLink, PlanOnce, PlanStage, PlanTied
from whale_nebula.plan.timing import times
from whale_nebula.spec import Spec

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan


_ALONE = "local/0"
"""The worker of all stages where every cluster lives in one process: it says nothing of where they would run."""


def plan_difference(mine: Plan, theirs: Plan, words: Words = (HERE, THERE)) -> str | None:
    """The first difference, what is said before what follows from it; None where the plans are the same.

    Where a plan was made is not compared: rows of its example, rates of links, and workers if one of the plans is
    of a single process.
    """
    return next(_differences(mine, theirs, words), None)


def _differences(mine: Plan, theirs: Plan, words: Words) -> Iterator[str]:
    yield from _stages(mine, theirs, words)
    yield from _tables("", _pipeline(mine), _pipeline(theirs), words)
    yield from _tables("the version of ", mine.versions, theirs.versions, words)
    yield from _tables("input ", _lines(mine, "input"), _lines(theirs, "input"), words)
    yield from _boundaries(mine, theirs, words)
    yield from _tables("variable ", _lines(mine, "variable"), _lines(theirs, "variable"), words)
    if mine.lines != theirs.lines:
        yield first_difference(_ops(mine), _ops(theirs), words)
    yield from _tables("the number of threads ", mine.threads, theirs.threads, words)
    yield from _workers(mine, theirs, words)


def _ops(plan: Plan) -> list[str]:
    """The lines of the program, but for which op holds which input: that follows from the ops."""
    return [line for line in plan.lines if not line.startswith("arguments ")]


def _unlike(what: str, own: object, other: object, words: Words) -> Iterator[str]:
    if own != other:
        yield f"{what} is {own} {words[0]}, {other} {words[1]}"


def _tables(what: str, own: Mapping[str, object], other: Mapping[str, object], words: Words) -> Iterator[str]:
    for name in dict.fromkeys([*own, *other]):
        if name not in own or name not in other:
            yield _only(f"{what}{name}", name in own, words)
        else:
            yield from _unlike(f"{what}{name}", own[name], other[name], words)


def _only(what: str, mine: bool, words: Words) -> str:
    there, not_there = words if mine else words[::-1]
    return f"{what} exists {there}, and not {not_there}"


def _stages(mine: Plan, theirs: Plan, words: Words) -> Iterator[str]:
    here, there = words
    for name in dict.fromkeys([*mine.stages, *theirs.stages]):
        own, other = mine.stages.get(name), theirs.stages.get(name)
        if own is None or other is None:
            yield _describe_renamed_stage(mine, theirs, words) or _only(f"stage {name!r}", own is not None, words)
        elif own.cluster != other.cluster:
            yield f"stage {name!r} is on cluster {own.cluster!r} {here}, on {other.cluster!r} {there}"
        else:
            yield from _unlike(f"the number of replicas of stage {name!r}", own.replicas, other.replicas, words)
            yield from _unlike(f"the order of the replicas of stage {name!r}", _turns(own), _turns(other), words)
    if list(mine.stages) != list(theirs.stages):
        yield f"the stages follow one another as {_list_stages(mine)} {here}, as {_list_stages(theirs)} {there}"


def _turns(stage: PlanStage) -> str:
    """Who takes which micro-batch."""
    return " ".join(map(str, stage.order)) or "the plain one"


def _describe_renamed_stage(mine: Plan, theirs: Plan, words: Words) -> str:
    """A stage that has another name in the same place: by `nb.place` a stage is called after its cluster."""
    pairs = list(zip(mine.stages.values(), theirs.stages.values(), strict=False))
    unlike = [(own, other) for own, other in pairs if own.name != other.name]
    if len(mine.stages) != len(theirs.stages) or len(unlike) != 1:
        return ""
    own, other = unlike[0]
    said = [f"{each.name!r} on cluster {each.cluster!r}" for each in (own, other)]
    return f"stage number {pairs.index(unlike[0])} is {said[0]} {words[0]}, {said[1]} {words[1]}"


def _list_stages(plan: Plan) -> str:
    return ", ".join(plan.stages)


def _pipeline(plan: Plan) -> Mapping[str, str]:
    """What the first line says, by its words."""
    return dict(word.split("=", 1) for word in plan.lines[0].split()[1:]) if plan.lines else {}


def _lines(plan: Plan, kind: str) -> Mapping[str, str]:
    """What the lines of this kind say, by the names that they say it of."""
    found = (line.split(" ", 2) for line in plan.lines if line.startswith(f"{kind} "))
    return {name: said for _, name, said in found}


def _boundaries(mine: Plan, theirs: Plan, words: Words) -> Iterator[str]:
    here, there = words
    for own, other in zip_longest(mine.boundaries, theirs.boundaries):
        if own is None or other is None:
            found = own if own is not None else other
            yield _only(f"boundary {found.name}, {_route(found)},", own is not None, words)
            return
        if _route(own) != _route(other):
            yield f"boundary {own.name} goes {_route(own)} {here}, {_route(other)} {there}"
        name = f"boundary {own.name}, {_route(own)},"
        yield from _unlike(name, Spec(own.dtype, own.shape), Spec(other.dtype, other.shape), words)
        yield from _unlike(f"the codec of {name}", own.codec, other.codec, words)
        yield from _unlike(f"the backward codec of {name}", own.backward_codec, other.backward_codec, words)


def _route(boundary: PlanBoundary) -> str:
    return f"from {boundary.source} to {' and '.join(boundary.destinations)}"


def _workers(mine: Plan, theirs: Plan, words: Words) -> Iterator[str]:
    for name, own in mine.stages.items():
        pair = own.worker, theirs.stages[name].worker
        if _ALONE not in pair:
            yield from _unlike(f"the worker of stage {name!r}", *pair, words)


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
