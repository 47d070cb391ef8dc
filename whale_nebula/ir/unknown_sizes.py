"""A plan with the sizes that only a step knows: of sentences as long as those of this batch.

TensorFlow leaves an axis open that differs from batch to batch. What crosses is counted by the sizes that a plan
knows, so a step over free lines, where nothing is sent and measured, first fills them in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whale_nebula.ir.cut import Cut
from whale_nebula.ir.graph import Op
from whale_nebula.ir.integers import Shape
from whale_nebula.ir.program import Program
from whale_nebula.ir.sizes import Sizes
from whale_nebula.spec import Spec, Value


def is_sized(cut: Cut) -> bool:
    """Whether the plan knows the size of all that crosses between stages, given the rows."""
    return not any(_open(cut.program, value) for value in _crossing(cut))


def sized(cut: Cut, shapes: Sequence[Shape], rows: int) -> Cut:
    """The plan with the sizes of what crosses filled in, for inputs of these shapes with so many rows each."""
    program = cut.program
    leaves = {
        Value(leaf.op): (rows, *shape[1:]) if leaf.batched else tuple(shape)
        for leaf, shape in zip(program.leaves, shapes, strict=True)
    }
    open_ones = {value: of for value, of in _crossing(cut).items() if _open(program, value)}
    above = program.graph.ascend([of.op for of in open_ones.values()])
    sizes = Sizes(program.graph, rows, leaves).follow(sorted(above))
    ops = list(program.graph.ops)
    for value, of in open_ones.items():
        ops[value.op] = _filled(ops[value.op], value.out, sizes.shape(of))
    return replace(cut, program=replace(program, graph=replace(program.graph, ops=tuple(ops))))


def _crossing(cut: Cut) -> dict[Value, Value]:
    """What crosses between stages, there and back; a gradient is of the size of its boundary."""
    back = {flow.gradient: flow.boundary for request in cut.program.requests for flow in request.flows}
    return {**{boundary.value: boundary.value for boundary in cut.boundaries}, **back}


def _open(program: Program, value: Value) -> bool:
    shape = program.graph.spec(value).shape
    return shape is None or None in shape[1:]


def _filled(op: Op, out: int, shape: Shape) -> Op:
    """The op with a size for each axis of an output but the first, where that is the batch's."""
    outputs = list(op.outputs)
    known = outputs[out].shape
    first = (None,) if known and known[0] is None else shape[:1]
    outputs[out] = Spec(outputs[out].dtype, (*first, *shape[1:]))
    return replace(op, outputs=tuple(outputs))
