"""Rules for reductions: over the batch axis they give a sum or a mean."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

from whale_nebula.ir.graph import REPLICA_SUM, Graph
from whale_nebula.passes.rules.algebra import add_folds, extreme, move_by_wholes, multiply_folds
from whale_nebula.passes.rules.registry import (
    COUNT,
    MEAN,
    ROWS,
    SUM,
    UNKNOWN,
    WHOLE,
    Fold,
    Number,
    Result,
    Site,
    count,
    rule,
    whole,
)
from whale_nebula.spec import Spec, Value

_OTHERS = ("Prod", "Max", "Min", "All", "Any", "EuclideanNorm")


@rule("Sum", "Mean", *_OTHERS, literal=True)
def reduction(site: Site) -> Result:
    """Sums and means over the batch stay linear; every other function over it couples the rows."""
    data, axes = site.folds
    vector = (data.parts is not None and site.parts(0) is not None) or (data.literal is not None and site.rank(0) == 1)
    if vector and data.kind != ROWS:
        return _of_vector(site)
    if data.kind != ROWS or axes.kind != WHOLE:
        return _without_rows(site)
    folded = _axes(site)
    if folded is None:
        return site.coupled("the axes that are folded are not known")
    if data.axis in folded:
        return _over_rows(site, data)
    shift = 0 if site.flag("keep_dims") else sum(axis < data.axis for axis in folded)
    return data._replace(axis=data.axis - shift).bare


def _axes(site: Site) -> frozenset[int] | None:
    rank, numbers = site.rank(0), site.ints(1)
    if numbers is None:
        everything = site.op.outputs[0].scalar and not site.flag("keep_dims") and rank is not None
        return frozenset(range(rank)) if everything and rank is not None else None
    if rank is None:
        return frozenset(numbers) if all(number >= 0 for number in numbers) else None
    return frozenset(number % rank for number in numbers)


def reduced_spec(site: Site) -> Spec | None:
    """The form of a reduction whose axes are known here, and were not where it was traced; else None."""
    if site.op.type not in ("Sum", "Mean", *_OTHERS) or site.op.outputs[0].shape is not None:
        return None
    shape, folded = site.spec(0).shape, _axes(site)
    if shape is None or folded is None or site.flag("keep_dims"):
        return None
    return Spec(site.op.outputs[0].dtype, tuple(size for axis, size in enumerate(shape) if axis not in folded))


def _over_rows(site: Site, data: Fold) -> Fold:
    if site.op.type == "Sum":
        return count(UNKNOWN) if _all_the_same(site.graph, site.op.inputs[0]) else Fold(SUM)
    if site.op.type != "Mean":
        return site.coupled(f"{site.op.type} over the batch is neither a sum nor a mean")
    if _rounds(site):
        return site.coupled(_ROUNDED)
    if data.ragged:
        return site.coupled("a mean over entries of which each row has another number")
    return Fold(MEAN)


_ROUNDED = "a mean of whole numbers is rounded: add them, and divide the sum"


def _rounds(site: Site) -> bool:
    return site.op.type == "Mean" and site.spec(0).dtype.startswith(("int", "uint"))


def _all_the_same(graph: Graph, value: Value) -> bool:
    """Whether every entry is the same constant: tf.ones, times numbers that come from constants. It is counted.

    So TensorFlow 1's losses find out what they divide by.
    """
    op = graph.ops[value.op]
    if op.type == "Fill":
        return _constant(graph, op.inputs[1])
    if op.type != "Mul":
        return False
    left, right = op.inputs
    pairs = ((left, right), (right, left))
    return any(graph.spec(one).scalar and _constant(graph, one) and _all_the_same(graph, rows) for one, rows in pairs)


def _constant(graph: Graph, value: Value) -> bool:
    """Whether a number comes from constants alone."""
    above = graph.ascend([value.op])
    return all(graph.ops[op].inputs or graph.ops[op].type == "Const" for op in above)


def _without_rows(site: Site) -> Fold:
    linear = site.op.type in ("Sum", "Mean") and not _rounds(site)
    return move_by_wholes(site, site.folds) if linear else site.nonlinear(site.folds)


def _of_vector(site: Site) -> Fold:
    """Products of shapes are numbers of entries."""
    parts = site.parts(0)
    if not parts or site.flag("keep_dims"):
        return _without_rows(site)
    if all(part.literal is not None for part in parts) and site.op.type in ("Prod", "Sum", "Max", "Min"):
        return whole(_fold_number(site.op.type, [part.literal[0] for part in parts if part.literal is not None]))
    if site.op.type == "Prod":
        return multiply_folds(site, parts)
    if site.op.type in ("Max", "Min"):
        return reduce(lambda left, right: extreme(site, (left, right)), parts)
    return add_folds(site, parts) if site.op.type == "Sum" else site.nonlinear(parts)


def _fold_number(kind: str, numbers: Sequence[Number]) -> Number:
    if kind == "Prod":
        return prod(numbers)
    if kind == "Sum":
        return sum(numbers)
    return max(numbers) if kind == "Max" else min(numbers)


@rule("L2Loss")
def half_square(site: Site) -> Result:
    """Half the sum of squares."""
    return Fold(SUM) if site.folds[0].kind == ROWS else site.nonlinear(site.folds)


@rule("ArgMax", "ArgMin")
def best(site: Site) -> Result:
    """The axis that is searched is folded away."""
    data, rank, axis = site.folds[0], site.rank(0), site.known(1)
    if data.kind != ROWS:
        return site.nonlinear(site.folds)
    if axis is None or (rank is None and axis < 0) or axis % (rank or axis + 1) == data.axis:
        return site.coupled(f"{site.op.type} over the batch")
    return data._replace(axis=data.axis - (axis % (rank or axis + 1) < data.axis)).bare


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def running(site: Site) -> Result:
    """Along any axis but the batch."""
    data, rank, axis = site.folds[0], site.rank(0), site.known(1)
    if data.kind != ROWS:
        return move_by_wholes(site, site.folds) if site.op.type == "Cumsum" else site.nonlinear(site.folds)
    if axis is None or (rank is None and axis < 0) or axis % (rank or axis + 1) == data.axis:
        return site.coupled(f"{site.op.type} along the batch")
    return data.bare


@rule("UnsortedSegmentSum", "SegmentSumV2")
def segments(site: Site) -> Result:
    """Rows dealt into a number of heaps that is the same everywhere: the heaps are sums. Where other axes than the
    batch are dealt, each row has heaps of its own.
    """
    data, names, number = site.folds
    if data.kind == names.kind == ROWS and number.kind == WHOLE and data.axis == names.axis:
        return Fold(SUM) if data.order == names.order else site.coupled("rows and their heaps lie in other orders")
    ranked = site.rank(1)
    if data.kind == ROWS and names.kind == number.kind == WHOLE and ranked is not None and data.axis >= ranked:
        return data._replace(axis=data.axis - ranked + 1).bare
    if any(fold.kind == ROWS for fold in site.folds):
        return site.coupled("the heaps are not one a row")
    return move_by_wholes(site, site.folds)


@rule("DenseBincount", "Bincount")
def heights(site: Site) -> Result:
    """How often each number occurs: a sum, if the number of numbers is the same everywhere."""
    data, number, weights = site.folds
    if ROWS not in (data.kind, weights.kind):
        return site.nonlinear(site.folds)
    if number.kind != WHOLE or not {data.kind, weights.kind} <= {ROWS, WHOLE} or site.flag("binary_output"):
        return site.coupled(f"{site.op.type} over the batch")
    if site.rank(0) == 2:
        return data.bare if data.axis == 0 else site.coupled("the batch is counted along its axis")
    return Fold(SUM) if data.kind == ROWS else site.coupled("weights of rows, but heaps that are no rows")


@rule("InTopK", "InTopKV2")
def among_best(site: Site) -> Result:
    """Scores [rows, classes] and targets [rows]."""
    scores, targets, k = site.folds
    if k.kind == WHOLE and scores.kind == targets.kind == ROWS and scores.order == targets.order:
        return targets.bare if scores.axis == targets.axis == 0 else site.coupled("classes along the batch axis")
    if any(fold.kind == ROWS for fold in site.folds):
        return site.coupled("scores and targets are not one a row")
    return site.nonlinear(site.folds)


@rule(REPLICA_SUM, literal=True)
def over_replicas(site: Site) -> Result:
    """A sum or a count over the batch becomes the same in every micro-batch. Nothing else would be the whole's then."""
    part = site.folds[0]
    if part.kind in (SUM, COUNT):
        return whole()
    return site.coupled(f"replicas would add up {part.spoken}, and not parts of a sum over the batch")
