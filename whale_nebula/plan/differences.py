"""In words, the first thing in which two plans differ: what a pinned plan is held against."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from whale_nebula.ir.canonical import HERE, THERE, Words, first_difference
from whale_nebula.ir.graph import CAPTURE, Graph, Op
from whale_nebula.ir.text import TextError, scan_graph
from whale_nebula.plan.records import PlanBoundary, PlanStage
from whale_nebula.spec import Spec, Value

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan


_STAMPED = "_stamped"
_OPS = ("%", "func ", "  ", "return ")


def op_difference(mine: Sequence[str], theirs: Sequence[str], words: Words) -> str:
    """The first difference of the ops; of what follows them (gradient requests, results) if the ops are the same."""
    try:
        graphs = _graph(mine), _graph(theirs)
        said = _describe_op_difference(*graphs, words, stamps=False) or _describe_op_difference(
            *graphs, words, stamps=True
        )
    except TextError:  # a file of another version may say things that we do not know
        said = ""
    return said or first_difference(_without_arguments(mine), _without_arguments(theirs), words)


def _without_arguments(lines: Sequence[str]) -> list[str]:
    """Which op holds which input follows from the ops."""
    return [line for line in lines if not line.startswith("arguments ")]


def _graph(lines: Sequence[str]) -> Graph:
    return scan_graph("\n".join(line for line in lines if line.startswith(_OPS)))


def _describe_op_difference(mine: Graph, theirs: Graph, words: Words, *, stamps: bool) -> str:
    """Where the ops part; that a scope gave an op to its stage is the last thing to be said."""
    own, other = _Meanings(mine, stamps), _Meanings(theirs, stamps)
    fresh, gone = own.parting(other.all), other.parting(own.all)
    if not fresh and not gone:
        return ""
    if not fresh or not gone:
        graph, op, (there, not_there) = (mine, fresh[0], words) if fresh else (theirs, gone[0], words[::-1])
        return f"{_name_op(op)} exists {there}, and not {not_there}{_near(graph, op)}"
    first = fresh[0]
    match = max(gone, key=lambda each: own.likeness(first, other, each))
    return next(_op_differences(mine, first, theirs, match, words)) + _near(mine, first)


class _Meanings:
    """For each op of a graph a value that is the same for ops that compute the same."""

    def __init__(self, graph: Graph, stamps: bool) -> None:
        self.graph = graph
        self.of: dict[int, int] = {}
        bodies = {name: _body(function) for name, function in graph.functions.items()}
        for op in graph.ops:
            stamp = stamps and _STAMPED in op.attributes
            self.of[op.index] = hash((_op_signature(op, bodies), stamp, *(self._of(value) for value in op.inputs)))
        self.all = set(self.of.values())

    def _of(self, value: Value) -> Hashable:
        return self.of[value.op], value.out

    def parting(self, known: set[int]) -> list[Op]:
        """The ops with no equal among those known, while what they read has one; a constant is part of its reader."""
        found = [op for op in self.graph.ops if self.of[op.index] not in known and op.type != "Const"]
        return [op for op in found if all(self.of[source] in known for source in self.read(op))]

    def read(self, op: Op) -> list[int]:
        """What an op reads, but for constants."""
        return [value.op for value in op.inputs if self.graph.ops[value.op].type != "Const"]

    def likeness(self, op: Op, others: _Meanings, other: Op) -> tuple[int, bool]:
        """How much two ops are the same op, changed."""
        mine, theirs = ({each.of[source] for source in each.read(o)} for each, o in ((self, op), (others, other)))
        return len(mine & theirs), op.type == other.type


def _body(function: Graph) -> Hashable:
    return tuple((_op_signature(op, {}), op.inputs) for op in function.ops), function.returns


def _op_signature(op: Op, bodies: Mapping[str, Hashable]) -> Hashable:
    name = op.name if op.role else ""
    called = tuple(bodies.get(each, each) for each in op.functions)
    attributes = tuple(item for item in sorted(op.attributes.items()) if item[0] != _STAMPED)
    return op.type, op.role, name, op.stage, op.outputs, op.constant, attributes, called


def _op_differences(mine: Graph, own: Op, theirs: Graph, other: Op, words: Words) -> Iterator[str]:
    """What two ops differ in, the plainest first."""
    here, there = words
    name = _name_op(own)
    if own.type != other.type or own.role or other.role:
        yield f"{name} stands {here} where {_name_op(other)} stands {there}"
    if own.stage != other.stage:
        yield f"{name} is in stage {own.stage!r} {here}, in {other.stage!r} {there}"
    for key in sorted({*own.attributes, *other.attributes} - {_STAMPED}):
        a, b = own.attributes.get(key), other.attributes.get(key)
        if a != b:
            yield f"{name} has {key.removeprefix('_')}={a!r} {here}, {b!r} {there}"
    if own.outputs != other.outputs:
        yield f"{name} gives {_join_parts(own.outputs)} {here}, {_join_parts(other.outputs)} {there}"
    for a, b in zip(_constants(mine, own), _constants(theirs, other), strict=False):
        if a != b:
            yield f"{name} reads the constant {a} {here}, {b} {there}"
    if (_STAMPED in own.attributes) != (_STAMPED in other.attributes):
        inside, outside = words if _STAMPED in own.attributes else words[::-1]
        yield f"{name} is given to its stage by a scope {inside}, and by none {outside}"
    if own.functions:
        yield f"the body of {name} is another one {here} than {there}"
    yield f"{name} reads {_join_parts(own.inputs)} {here}, {_join_parts(other.inputs)} {there}"


def _constants(graph: Graph, op: Op) -> Iterator[str]:
    for value in op.inputs:
        source = graph.ops[value.op]
        if source.type == "Const":
            said = source.constant if source.constant is not None else source.attributes.get("content", "?")
            yield f"{said[0] if isinstance(said, tuple) and len(said) == 1 else said}"


def _name_op(op: Op) -> str:
    return f"op {op.index} ({op.role} {op.name!r})" if op.role else f"op {op.index} {op.type}"


def _join_parts(parts: Sequence[object]) -> str:
    return ", ".join(map(str, parts)) or "nothing"


def _near(graph: Graph, op: Op) -> str:
    """The nearest variable that an op depends on: it says where in the model one is."""
    queue: list[Value] = list(op.inputs)
    seen = set(queue)
    while queue:
        source = graph.ops[queue.pop(0).op]
        if source.role == CAPTURE:
            return f"; the nearest variable before it is {source.name!r}"
        fresh = [value for value in source.inputs if value not in seen]
        queue += fresh
        seen.update(fresh)
    return ""


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
        yield op_difference(mine.lines, theirs.lines, words)
    yield from _tables("the number of threads ", mine.threads, theirs.threads, words)
    yield from _workers(mine, theirs, words)


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
