"""Stages follow one another: within a phase no tensor goes back to an earlier stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from whale_nebula.errors import StageOrderError
from whale_nebula.ir.graph import LAYER, Graph
from whale_nebula.ir.origin import Origin
from whale_nebula.ir.program import Stage


def in_flow_order(graph: Graph, stages: Sequence[str]) -> list[str]:
    """The stages so that tensors go forward, and else as they are; where they go in a circle, all as they are.

    A functional model runs its nodes by depth, so the stage that was written first need not be entered first.

    >>> from whale_nebula.ir.text import from_text
    >>> graph = from_text('''
    ... %0 = Const float32[4]
    ... %1 = Neg(%0) float32[4] @head
    ... %2 = Exp(%0) float32[4] @trunk
    ... %3 = Add(%1, %2) float32[4] @head
    ... ''')
    >>> in_flow_order(graph, ["head", "trunk"])
    ['trunk', 'head']
    """
    feeding = _feeding(graph, stages)
    ordered: list[str] = []
    while len(ordered) < len(stages):
        ready = [key for key in stages if key not in ordered and feeding[key].issubset(ordered)]
        if not ready:
            return list(stages)
        ordered.append(ready[0])
    return ordered


def _feeding(graph: Graph, stages: Sequence[str]) -> dict[str, set[str]]:
    """The stages whose tensors each stage reads, at once or by way of ops that no scope stamped."""
    feeding: dict[str, set[str]] = {key: set() for key in stages}
    above: dict[int, frozenset[str]] = {}
    for op in graph.ops:
        before = frozenset[str]().union(*(above[value.op] for value in op.inputs))
        if op.stage is not None and op.stage in feeding:
            feeding[op.stage] |= before - {op.stage}
            before = frozenset({op.stage})
        above[op.index] = before
    return feeding


def check_order(
    graph: Graph,
    labels: Mapping[int, int],
    stages: tuple[Stage, ...],
    *,
    phase_of: Callable[[int], int] = lambda op: 0,
    where: Callable[[int], str] = lambda op: "",
) -> None:
    """Raise where an op of a stage reads what a later stage makes in the same phase."""
    for op in graph.ops:
        stage = labels.get(op.index)
        if stage is None:
            continue
        for value in op.inputs:
            source = labels.get(value.op, stage)
            if source > stage and phase_of(value.op) == phase_of(op.index):
                placed = _placed(graph, labels, op.index), _placed(graph, labels, value.op)
                raise _cycle(graph, stages[source], stages[stage], value.op, op.index, where, placed)


def backwards(later: Stage, earlier: Stage, where: str) -> StageOrderError:
    """The error for a gradient that would have to flow from an earlier stage into a later one."""
    second = f"nb.stage(cluster={earlier.cluster!r}, name={earlier.key + '_2'!r})"
    return StageOrderError(
        f"a gradient flows from stage {earlier.key!r} back into {later.key!r}, which comes after it",
        where=where,
        why=f"{earlier.key!r} reads what {later.key!r} made before it, in an earlier part of the step",
        mend=f"give what comes after it a name of its own: {second}, or tf.stop_gradient around what it reads",
    )


def _cycle(
    graph: Graph,
    later: Stage,
    earlier: Stage,
    source: int,
    reader: int,
    where: Callable[[int], str],
    placed: tuple[str, str],
) -> StageOrderError:
    made, read = graph.ops[source], graph.ops[reader]
    second = f"nb.stage(cluster={earlier.cluster!r}, name={earlier.key + '_2'!r})"
    return StageOrderError(
        f"stage {later.key!r} feeds stage {earlier.key!r}, which comes before it",
        where=where(reader) or read.name,
        why=f"{_said(where(reader)) or f'op {read.name!r} ({read.type})'} of {earlier.key!r} "
        f"reads {_said(where(source)) or repr(made.name)} of {later.key!r}{_line(where(source))}: "
        "stages must follow one another, and entering a stage again continues it"
        + (f"; nb.place gives {placed[0]} and {placed[1]}" if all(placed) else ""),
        mend=f"give the second a name: {second}" + " in the map of nb.place" * all(placed),
    )


def _said(origin: str) -> str:
    """The layer that an op lies in, in words."""
    return origin.said if isinstance(origin, Origin) else ""


def _line(origin: str) -> str:
    return f" ({origin})" if _said(origin) else ""


def _placed(graph: Graph, labels: Mapping[int, int], op: int) -> str:
    """Which layer of `nb.place` an op belongs to, or else the nearest one before it in the same stage."""
    queue, seen = [op], {op}
    while queue:
        found = graph.ops[queue.pop(0)]
        if LAYER in found.attributes:
            return str(found.attributes[LAYER])
        before = [value.op for value in found.inputs if labels.get(value.op) == labels.get(op)]
        queue += [each for each in before if each not in seen]
        seen.update(before)
    return ""
