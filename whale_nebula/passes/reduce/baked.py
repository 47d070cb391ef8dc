"""A batch size that is written into the step as a number: with micro-batches there are fewer rows than it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from whale_nebula.errors import StaticBatchError
from whale_nebula.ir.graph import Graph, Op
from whale_nebula.passes.reduce.state import COUPLED, Fold
from whale_nebula.passes.reduce.whole_batch import Mends
from whale_nebula.spec import Value

_WHY = "a micro-batch has only its share of the rows, and the last batch of an epoch may have fewer too"


class _Found(NamedTuple):
    rows: int
    mend: str


def baked(
    fold: Fold, graph: Graph, where: Callable[[int], str] = lambda op: "", alone: str = Mends().alone
) -> StaticBatchError | None:
    """The error for a value that couples the rows because a batch size is a constant; else None. `alone` is the line
    that leaves the batch whole.
    """
    if fold.kind != COUPLED or not 0 <= fold.blame < len(graph):
        return None
    op = graph.ops[fold.blame]
    found = _found(graph, op)
    if found is None:
        op, found = _above(graph, op)
    if found is None:
        return None
    place = ", ".join(part for part in (f"{op.name} ({op.type})", where(op.index)) if part)
    mend = f"{found.mend}\nor {alone}"
    return StaticBatchError(f"the batch size {found.rows} is baked in", where=place, why=_WHY, mend=mend)


def _found(graph: Graph, op: Op) -> _Found | None:
    finder = _FINDERS.get(op.type)
    return None if finder is None else finder(graph, op)


def _above(graph: Graph, op: Op) -> tuple[Op, _Found | None]:
    """Where rows got the fixed number with which they do not fit others at `op`.

    Inputs that are reshaped alone are read whole, so it comes to light only where they meet what is cut.
    """
    longs = {value: (graph.spec(value).shape or (0,))[0] for value in op.inputs}
    for value, long in longs.items() if None in longs.values() else ():
        for above in sorted(graph.ascend([value.op]) if long else (), reverse=True):
            found = _found(graph, graph.ops[above]) if graph.ops[above].type in _FIXING else None
            if found is not None and found.rows == long:
                return graph.ops[above], found
    return op, None


def free(sizes: Sequence[int], shape: Sequence[int | None]) -> list[int]:
    """The target of a reshape with -1 where the number of rows stands.

    >>> free([32, -1], [None, 4]), free([32, 2, 2], [None, 4])
    ([-1, 4], [-1, 2, 2])
    """
    rest = list(sizes[1:])
    if -1 in rest:
        known = math.prod(size for size in rest if size > 0)
        rest[rest.index(-1)] = _row(shape) // known if known and None not in shape[1:] else -1
    return [-1, *rest]


def _row(shape: Sequence[int | None]) -> int:
    """How many numbers a row has."""
    return math.prod(size or 1 for size in shape[1:])


def _reshape(graph: Graph, op: Op) -> _Found | None:
    sizes = graph.ops[op.inputs[1].op].constant or ()
    shape = graph.spec(op.inputs[0]).shape
    if not sizes or sizes[0] < 2 or not shape or shape[0] is not None:
        return None
    if -1 not in sizes and None not in shape[1:] and math.prod(sizes[1:]) != _row(shape):
        return None  # rows are merged or taken apart: they would be with -1 as well
    return _Found(sizes[0], f"tf.reshape(x, {free(sizes, shape)})")


def _operand(graph: Graph, op: Op) -> _Found | None:
    """An operand that is made of constants and is as long as a batch, beside rows."""
    shapes = [graph.spec(value).shape for value in op.inputs]
    beside = any(shape is None or None in shape for shape in shapes)
    for value, shape in zip(op.inputs, shapes, strict=True) if beside else ():
        if shape and shape[0] is not None and shape[0] > 1 and _constant(graph, value):
            rest = "".join(f", {size}" for size in shape[1:])
            return _Found(shape[0], f"make it as long as the batch: tf.zeros([tf.shape(x)[0]{rest}]) for zeros")
    return None


def _constant(graph: Graph, value: Value) -> bool:
    return all(not graph.ops[op].role and not graph.ops[op].stateful for op in graph.ascend([value.op]))


def _unpack(graph: Graph, op: Op) -> _Found | None:
    number = op.attributes.get("num")
    along = op.attributes.get("axis", 0)
    if not isinstance(number, int) or number < 2 or along != 0:
        return None
    return _Found(number, "work on all rows at once, or tf.map_fn(f, x)")


def _split(graph: Graph, op: Op) -> _Found | None:
    sizes = graph.ops[op.inputs[1].op].constant or ()
    axis = graph.ops[op.inputs[2].op].constant or ()
    if axis[:1] != (0,) or not sizes or min(sizes) < 0:
        return None
    return _Found(sum(sizes), "work on all rows at once, or split another axis: tf.split(x, n, axis=1)")


_FIXING = frozenset({"Reshape", "Unpack", "SplitV"})
"""Ops that make of rows something with a fixed number."""

_FINDERS: dict[str, Callable[[Graph, Op], _Found | None]] = {
    "Reshape": _reshape,
    "Unpack": _unpack,
    "SplitV": _split,
    **dict.fromkeys(("ConcatV2", "Pack", "AddV2", "Add", "Sub", "Mul", "RealDiv", "Maximum", "Minimum"), _operand),
    **dict.fromkeys(("SelectV2", "Select", "BatchMatMulV2", "MatMul", "SquaredDifference"), _operand),
}
