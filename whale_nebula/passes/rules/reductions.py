"""Rules for reductions; over the batch axis the result is a sum or a mean."""

from __future__ import annotations

from functools import reduce

from whale_nebula.ir.graph import REPLICA_SUM, Graph
from whale_nebula.ir.integers import FOLDS
from whale_nebula.passes.rules.algebra import add_folds, fold_extremum, move_by_wholes, multiply_folds
from whale_nebula.passes.rules.axes import axes, describe_entries, fold_axes, list_axes, number_axes
from whale_nebula.passes.rules.registry import (
    COUNT,
    MEAN,
    ROWS,
    SUM,
    UNKNOWN,
    WHOLE,
    Axes,
    Fold,
    Node,
    Result,
    Undecided,
    count,
    rule,
    whole,
)
from whale_nebula.spec import Spec, Value

_OTHERS = ("Prod", "Max", "Min", "All", "Any", "EuclideanNorm")


def _describe_reduction(node: Node) -> Axes:
    """The axes of a reduction: the reduced ones are removed."""
    folded = _find_reduced_axes(node)
    if folded is None:
        raise Undecided("the reduced axes are not known")
    labels = list_axes(node, 0, max(folded, default=0))
    new = [f"new {label}" if axis in folded else label for axis, label in enumerate(labels)]
    left = [label for axis, label in enumerate(labels) if axis not in folded]
    return Axes((labels,), (new if node.flag("keep_dims") else left,), folded=node.op.type.lower())


@rule("Sum", "Mean", *_OTHERS, axes=_describe_reduction, literal=True)
def reduction(node: Node) -> Result:
    """A reduction: sums and means over the batch are linear; all others over it couple the rows."""
    data, axes = node.folds
    vector = (data.parts is not None and node.parts(0) is not None) or (data.literal is not None and node.rank(0) == 1)
    if vector and data.kind != ROWS:
        return _reduce_shape(node)
    if axes.kind != WHOLE:
        return _reduce_other_axes(node)
    return fold_axes(node, _describe_reduction, lambda node, _: _reduce_other_axes(node), _reduce_rows)


def _find_reduced_axes(node: Node) -> frozenset[int] | None:
    rank, numbers = node.rank(0), node.ints(1)
    if numbers is None:
        everything = node.op.outputs[0].scalar and not node.flag("keep_dims") and rank is not None
        return frozenset(range(rank)) if everything and rank is not None else None
    if rank is None:
        return frozenset(numbers) if all(number >= 0 for number in numbers) else None
    return frozenset(number % rank for number in numbers)


def reduced_spec(node: Node) -> Spec | None:
    """The spec of a reduction whose axes are known here, but were not when traced; otherwise None."""
    if node.op.type not in ("Sum", "Mean", *_OTHERS) or node.op.outputs[0].shape is not None:
        return None
    shape, folded = node.spec(0).shape, _find_reduced_axes(node)
    if shape is None or folded is None or node.flag("keep_dims"):
        return None
    return Spec(node.op.outputs[0].dtype, tuple(size for axis, size in enumerate(shape) if axis not in folded))


def _reduce_rows(node: Node, data: Fold, _: Axes) -> Fold:
    if node.op.type == "Sum":
        return count(UNKNOWN) if _is_constant(node.graph, node.op.inputs[0]) else Fold(SUM)
    if node.op.type != "Mean":
        return node.couple(f"{node.op.type} over the batch is neither a sum nor a mean")
    if _rounds(node):
        return node.couple(_ROUNDED)
    if data.ragged:
        return node.couple("a mean over a different number of entries in each row")
    return Fold(MEAN)


_ROUNDED = "a mean of integers is rounded: sum them and divide the sum"


def _rounds(node: Node) -> bool:
    return node.op.type == "Mean" and node.spec(0).dtype.startswith(("int", "uint"))


def _is_constant(graph: Graph, value: Value) -> bool:
    """Whether every entry is the same constant: tf.ones, times numbers from constants. Its sum counts entries.

    TensorFlow 1's losses compute their divisor this way.
    """
    op = graph.ops[value.op]
    if op.type == "Fill":
        return _constant(graph, op.inputs[1])
    if op.type != "Mul":
        return False
    left, right = op.inputs
    pairs = ((left, right), (right, left))
    return any(graph.spec(one).scalar and _constant(graph, one) and _is_constant(graph, rows) for one, rows in pairs)


def _constant(graph: Graph, value: Value) -> bool:
    """Whether a number depends on constants alone."""
    above = graph.ascend([value.op])
    return all(graph.ops[op].inputs or graph.ops[op].type == "Const" for op in above)


def _reduce_other_axes(node: Node) -> Fold:
    linear = node.op.type in ("Sum", "Mean") and not _rounds(node)
    return move_by_wholes(node, node.folds) if linear else node.nonlinear(node.folds)


def _reduce_shape(node: Node) -> Fold:
    """The fold of a reduction of a vector of sizes, such as the product of a shape."""
    parts = node.parts(0)
    if not parts or node.flag("keep_dims"):
        return _reduce_other_axes(node)
    if all(part.literal is not None for part in parts) and node.op.type in ("Prod", "Sum", "Max", "Min"):
        return whole(FOLDS[node.op.type]([part.literal[0] for part in parts if part.literal is not None]).item())
    if node.op.type == "Prod":
        return multiply_folds(node, parts)
    if node.op.type in ("Max", "Min"):
        return reduce(lambda left, right: fold_extremum(node, (left, right)), parts)
    return add_folds(node, parts) if node.op.type == "Sum" else node.nonlinear(parts)


@axes("L2Loss")
def l2_loss(node: Node) -> Axes:
    """Half the sum of squares."""
    return Axes((list_axes(node),), ((),))


@axes("ArgMax ArgMin")
def arg_extremum(node: Node) -> Axes:
    """The axes of an arg-max: the searched one is removed."""
    before, along = _labels_but_one(node)
    left = [label for label in before if label != along]
    return Axes((before,), (left,), mixed={along: f"{node.op.type} over the batch"})


@axes("Cumprod CumulativeLogsumexp")
@axes("Cumsum", rest=move_by_wholes)
def cumulative(node: Node) -> Axes:
    """A running reduction along any axis but the batch."""
    labels, along = _labels_but_one(node)
    return Axes((labels,), (labels,), mixed={along: f"{node.op.type} along the batch"})


def _labels_but_one(node: Node) -> tuple[list[str], str]:
    """The labels of an input, and the label of the one axis that the next input selects."""
    axis = node.need_int(1, f"{node.op.type} over the batch")
    if node.rank(0) is None and axis < 0:
        raise Undecided(f"{node.op.type} over the batch")
    labels = list_axes(node, 0, axis)
    return labels, labels[axis % len(labels)]


def _describe_segments(node: Node) -> Axes:
    rank, dealt = (node.need_rank(place, "segments do not correspond to rows") for place in (0, 1))
    return Axes((number_axes(rank), number_axes(rank)[:dealt]), (["heap", *number_axes(rank)[dealt:]],))


@rule("UnsortedSegmentSum", "SegmentSumV2", axes=_describe_segments)
def segments(node: Node) -> Result:
    """Segment sums with a fixed number of segments: over the batch they are sums; over other axes each row has its own
    segments.
    """
    return fold_axes(node, _describe_segments, move_by_wholes)


@rule("DenseBincount", "Bincount")
def bincount(node: Node) -> Result:
    """Counts of each number, or whether it occurs: for each row, or for the batch, where only counts are sums."""
    data, number, weights = node.folds
    if ROWS not in (data.kind, weights.kind):
        return node.nonlinear(node.folds)
    if number.kind != WHOLE or not {data.kind, weights.kind} <= {ROWS, WHOLE}:
        return node.couple(f"{node.op.type} over the batch")
    if node.rank(0) == 2:
        return data.without_numbers if data.axis == 0 else node.couple("the batch is counted along its axis")
    if node.flag("binary_output"):
        return node.couple(f"{node.op.type} over the batch")
    return Fold(SUM) if data.kind == ROWS else node.couple("weights correspond to rows, but the counted values do not")


@axes("InTopK InTopKV2")
def in_top_k(node: Node) -> Axes:
    """Scores [rows, classes] and targets [rows]."""
    return Axes(("nc", "n"), ("n",), mixed={"c": "scores and targets do not correspond to rows"})


@rule(REPLICA_SUM, axes=describe_entries, literal=True)
def replica_sum(node: Node) -> Result:
    """A sum over replicas: a sum or count over the batch becomes that of the whole batch in every micro-batch."""
    part = node.folds[0]
    if part.kind in (SUM, COUNT):
        return whole()
    return node.couple(f"replicas would sum {part.description} instead of parts of a sum over the batch")
