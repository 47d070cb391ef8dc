"""What touches one state, and no scope stamped, stays in one stage: a seed is counted on where it is drawn from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.passes.effects import is_effect, is_random, resources, written


def together(
    graph: Graph, labels: Mapping[int, int], free: Collection[int], earliest: Mapping[int, int]
) -> dict[int, int]:
    """New labels of `free` ops, so that no state of the forward is written in one stage and read in another.

    A write that nobody reads could go anywhere, and would go last. It goes with the reads to the first of their
    stages. Labels stay where a stamp says whose a variable is, and where a write is made later (see `earliest`).

    >>> from whale_nebula.ir.text import from_text
    >>> graph = from_text('''
    ... %0 = capture seed resource[]
    ... %1 = ReadVariableOp(%0) int64[2] stateful
    ... %2 = StatelessRandomNormalV2(%1) float32[8]
    ... %3 = AssignAddVariableOp(%0, %1) stateful
    ... ''')
    >>> together(graph, {1: 0, 2: 0, 3: 1}, {1, 2, 3}, {})
    {1: 0, 3: 0}
    """
    apart = [ops for ops in _touching_written(graph, labels, free) if _can_meet(ops, labels, free, earliest)]
    forward = graph.ascend(op.index for op in graph.ops if op.stage is not None or is_random(op)) if apart else ()
    return {
        op.index: _first(ops, labels) for ops in apart if any(op.index in forward for op in ops) for op in ops
    }


def _touching_written(graph: Graph, labels: Mapping[int, int], free: Collection[int]) -> Iterator[list[Op]]:
    """Of each variable that a free op writes, all ops that touch it."""
    writes = (op for op in graph.ops if op.index in free and is_effect(op, graph))
    found: dict[int, list[Op]] = {handle: [] for op in writes for handle in written(op, graph)}
    for op in graph.ops if found else ():
        for handle in set(resources(op, graph)) & found.keys() if op.index in labels else ():
            found[handle].append(op)
    yield from found.values()


def _can_meet(
    ops: Sequence[Op], labels: Mapping[int, int], free: Collection[int], earliest: Mapping[int, int]
) -> bool:
    """Whether ops lie apart that could as well all lie in the first of their stages."""
    first = _first(ops, labels)
    movable = all(op.index in free and earliest.get(op.index, first) <= first for op in ops)
    return movable and any(labels[op.index] != first for op in ops)


def _first(ops: Sequence[Op], labels: Mapping[int, int]) -> int:
    return min(labels[op.index] for op in ops)
