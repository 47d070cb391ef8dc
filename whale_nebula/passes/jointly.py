"""Ops that save bytes only where all of them run late: each alone would not.

A loss that is masked makes a scale and a mask of the mask: each of the two is no larger than what it is made of, so
that each alone is best made early. Both together are larger than the one mask, which may even cross anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from whale_nebula.ir.graph import CAPTURE, HOLDER, Graph, Op
from whale_nebula.passes.min_cut import FREELY, far_side
from whale_nebula.spec import Value

_Edge = tuple[tuple[object, object], int]
_EARLY, _LATE = "early", "late"


def jointly(graph: Graph, labels: Mapping[int, int], free: Sequence[Op], stages: int) -> dict[int, int]:
    """New labels of `free` ops that run later than they are labelled, where fewer bytes cross then.

    A tensor that crosses to a stage is counted once, however many ops there read it. Ops stay where as many would
    cross. What touches state, and what descends from a gradient, stays in any case.

    >>> from whale_nebula.ir.text import from_text
    >>> graph = from_text('''
    ... %0 = NotEqual bool[?,6]
    ... %1 = Cast(%0) float32[?,6]
    ... %2 = Sum(%1) float32[]
    ... %3 = Cast(%1) bool[?,6]
    ... %4 = SelectV2(%3, %2) float32[?,6]
    ... ''')
    >>> jointly(graph, {0: 0, 1: 0, 2: 0, 3: 0, 4: 1}, graph.ops[1:4], 2)
    {1: 1, 2: 1, 3: 1}
    """
    descended = graph.descend(op.index for op in graph.ops if op.role == HOLDER)
    movable = [op for op in free if op.index not in descended and _may_wait(graph, op)]
    found: dict[int, int] = {}
    for stage in reversed(range(1, stages)):
        known = {**labels, **found}
        region = _region(graph, known, movable, stage)
        late = far_side(dict(_edges(graph, known, region, stage)), _EARLY, _LATE) if region else set()
        found.update(dict.fromkeys(sorted(region & late), stage))
    return found


def _may_wait(graph: Graph, op: Op) -> bool:
    return not op.stateful and not any(graph.ops[value.op].role == CAPTURE for value in op.inputs)


def _region(graph: Graph, labels: Mapping[int, int], movable: Sequence[Op], stage: int) -> set[int]:
    """What could run in a stage and runs before it: all that reads it is there, or later, or could be."""
    found: set[int] = set()
    for op in reversed(movable):
        readers = [c.index for value in op.values for c in graph.consumers(value) if c.index in labels]
        if labels[op.index] < stage and readers and all(r in found or labels[r] >= stage for r in readers):
            found.add(op.index)
    return found


def _edges(graph: Graph, labels: Mapping[int, int], region: Collection[int], stage: int) -> Iterator[_Edge]:
    """A tensor costs its bytes where it is made early and any op reads it late; what reads a late op is late."""
    made = [value for index in region for value in graph.ops[index].values]
    given = {value: None for index in sorted(region) for value in graph.ops[index].inputs if value.op not in region}
    for value in (*made, *given):
        readers = [c.index for c in graph.consumers(value) if c.index in labels]
        there = any(r not in region and labels[r] == stage for r in readers)
        crosses = value.op in region or (labels.get(value.op, stage) < stage and not there)
        if crosses:
            yield from _tensor(value, graph.spec(value).nbytes(), [r for r in readers if r in region], there, region)


def _tensor(
    value: Value, size: int, readers: Sequence[int], there: bool, region: Collection[int]
) -> Iterator[_Edge]:
    yield ((value.op if value.op in region else _EARLY), value), size
    for reader in readers:
        yield (value, reader), FREELY
        if value.op in region:
            yield (reader, value.op), FREELY
    if there:
        yield (value, _LATE), FREELY
