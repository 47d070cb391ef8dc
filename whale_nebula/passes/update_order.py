"""The order in which an update writes large variables: one after the other.

TensorFlow updates all variables concurrently, and holds a temporary tensor of the size of each. In order it holds
those of one variable.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from whale_nebula.ir.graph import REPLICA_SUM, Graph
from whale_nebula.passes.facts import ASSIGNS
from whale_nebula.spec import Spec

LEAST = 1 << 20
"""The least bytes of a variable that is ordered."""


def order_updates(graph: Graph, ops: Sequence[int]) -> dict[int, int]:
    """For each op of an update that is ordered: the write that it waits for, which is that of the previous large
    variable.

    Two variables are ordered if no value that only one of them depends on is read for the other.
    """
    chosen = set(ops)
    before = {
        index: {*(value.op for value in graph.ops[index].inputs), *graph.ops[index].control} & chosen for index in ops
    }
    if any(each > index for index, needed in before.items() for each in needed):
        return {}  # a TensorFlow 1 loop
    writes = [index for index in sorted(ops) if graph.ops[index].type in ASSIGNS]
    bits = {index: 1 << number for number, index in enumerate(writes)}
    reached = _follow(before, bits)  # the writes that depend on an op, itself included
    last = sorted(index for index in writes if reached[index] == bits[index])
    finals = sum(bits[index] for index in last)
    large: dict[int, list[int]] = {bits[index]: [] for index in last}
    for index in sorted(ops):
        if (only := reached[index] & finals) in large and _may_wait(graph, index):
            large[only].append(index)
    found = {}
    ordered = [index for index in last if large[bits[index]]]
    for previous, index in itertools.pairwise(ordered):
        mine = large[bits[index]]
        found.update({each: previous for each in mine if before[each].isdisjoint(mine)})
    return found


def _follow(before: Mapping[int, set[int]], bits: Mapping[int, int]) -> dict[int, int]:
    """The bits of all ops that depend on each op."""
    found = {index: bits.get(index, 0) for index in before}
    for index in sorted(before, reverse=True):
        for each in before[index]:
            found[each] |= found[index]
    return found


def _may_wait(graph: Graph, index: int) -> bool:
    """Whether an op makes a large value, and no other process waits for it."""
    op = graph.ops[index]
    alone = not op.stateful or op.type == "ReadVariableOp"
    return alone and bool(op.inputs) and op.type != REPLICA_SUM and any(map(is_large, op.outputs))


def is_large(spec: Spec) -> bool:
    """Whether a tensor is of the size of a large variable, as far as known."""
    return spec.shape is not None and None not in spec.shape and spec.nbytes() >= LEAST
