"""The results of the batch-axis analysis: merge rules for the runtime, and errors for coupled rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from whale_nebula.errors import BatchCoupledError, CaptureError, StaticBatchError
from whale_nebula.ir.graph import Graph, Op
from whale_nebula.passes.rules.creation import SAME_SEED
from whale_nebula.passes.rules.registry import (
    AFTER,
    BESIDE,
    BY_ROW,
    COUNT,
    COUPLED,
    EMPTY,
    FIXED,
    INVERSE,
    MEAN,
    NO_RULE,
    PYTHON,
    SHAPE,
    SUM,
    WHOLE,
    Fold,
)
from whale_nebula.site import Origin
from whale_nebula.spec import Value

_ALONE, _, _ALLOW = BatchCoupledError.usual_mends


class BatchFixes(NamedTuple):
    """Changes of a script: one that leaves the batch `alone`, and one that `allow`s rows to depend on each other. If
    each replica may have one micro-batch, moments can be `shared`.
    """

    alone: str = _ALONE
    allow: str = _ALLOW
    shared: bool = False


def list_batch_fixes(asked: int, *, copied: bool) -> BatchFixes:
    """The fixes for a batch that `nb.pipeline` divides into this number of micro-batches, and that replicas divide if
    the step is `copied`.

    >>> list_batch_fixes(4, copied=False).alone, list_batch_fixes(1, copied=True).alone
    ('nb.pipeline(micro_batch=1)', 'nb.replica(1), or remove nb.replica')
    >>> list_batch_fixes(4, copied=True).alone
    'nb.replica(1) and nb.pipeline(micro_batch=1)'
    """
    if not copied:
        return BatchFixes()
    allow = 'nb.pipeline(coupled="allow") inside nb.replica, to run each micro-batch separately'
    if asked > 1:
        return BatchFixes(f"nb.replica(1) and {_ALONE}", allow)
    return BatchFixes("nb.replica(1), or remove nb.replica", allow, shared=True)


_WHY = "a micro-batch has only its share of the rows, and the last batch of an epoch may also be smaller"


class _StaticRows(NamedTuple):
    rows: int
    mend: str


def static_batch_error(
    fold: Fold, graph: Graph, where: Callable[[int], str] = lambda op: "", alone: str = BatchFixes().alone
) -> StaticBatchError | None:
    """The error for a value that couples the rows because a batch size is a constant; otherwise None. `alone` is the
    line that leaves the batch whole.
    """
    if fold.kind != COUPLED or not 0 <= fold.blame < len(graph):
        return None
    op = graph.ops[fold.blame]
    found = _find_static_rows(graph, op)
    if found is None:
        op, found = _find_static_rows_above(graph, op)
    if found is None:
        return None
    place = ", ".join(part for part in (op.label, where(op.index)) if part)
    mend = f"{found.mend}\nor {alone}"
    return StaticBatchError(f"the batch size {found.rows} is baked into the graph", where=place, why=_WHY, mend=mend)


def _find_static_rows(graph: Graph, op: Op) -> _StaticRows | None:
    finder = _FINDERS.get(op.type)
    return None if finder is None else finder(graph, op)


def _find_static_rows_above(graph: Graph, op: Op) -> tuple[Op, _StaticRows | None]:
    """The op before `op` that gave rows a fixed number that does not match other inputs, with that number; otherwise
    (`op`, None).

    Reshaped inputs alone are read whole, so the error appears only when they are combined with cut values.
    """
    longs = {value: (graph.spec(value).shape or (0,))[0] for value in op.inputs}
    for value, long in longs.items() if None in longs.values() else ():
        for above in sorted(graph.ascend([value.op]) if long else (), reverse=True):
            found = _find_static_rows(graph, graph.ops[above]) if graph.ops[above].type in _FIXING else None
            if found is not None and found.rows == long:
                return graph.ops[above], found
    return op, None


def free_row_count(sizes: Sequence[int], shape: Sequence[int | None]) -> list[int]:
    """The sizes of a reshape of a tensor of this shape, with -1 instead of a fixed number of rows.

    >>> free_row_count([32, -1], [None, 4]), free_row_count([32, 2, 2], [None, 4])
    ([-1, 4], [-1, 2, 2])
    """
    rest = list(sizes[1:])
    if -1 in rest:
        known = math.prod(size for size in rest if size > 0)
        rest[rest.index(-1)] = _count_row_entries(shape) // known if known and None not in shape[1:] else -1
    return [-1, *rest]


def _count_row_entries(shape: Sequence[int | None]) -> int:
    """The number of entries in a row."""
    return math.prod(size or 1 for size in shape[1:])


def _reshape(graph: Graph, op: Op) -> _StaticRows | None:
    sizes = graph.ops[op.inputs[1].op].constant or ()
    shape = graph.spec(op.inputs[0]).shape
    if not sizes or sizes[0] < 2 or not shape or shape[0] is not None:
        return None
    if -1 not in sizes and None not in shape[1:] and math.prod(sizes[1:]) != _count_row_entries(shape):
        return None  # rows are merged or split, also with -1
    return _StaticRows(sizes[0], f"tf.reshape(x, {free_row_count(sizes, shape)})")


def _operand(graph: Graph, op: Op) -> _StaticRows | None:
    """An operand of constants with the size of a batch, combined with rows."""
    shapes = [graph.spec(value).shape for value in op.inputs]
    beside = any(shape is None or None in shape for shape in shapes)
    for value, shape in zip(op.inputs, shapes, strict=True) if beside else ():
        if shape and shape[0] is not None and shape[0] > 1 and _constant(graph, value):
            rest = "".join(f", {size}" for size in shape[1:])
            return _StaticRows(
                shape[0], f"give it as many rows as the batch: tf.zeros([tf.shape(x)[0]{rest}]) for zeros"
            )
    return None


def _constant(graph: Graph, value: Value) -> bool:
    return all(not graph.ops[op].role and not graph.ops[op].stateful for op in graph.ascend([value.op]))


def _unpack(graph: Graph, op: Op) -> _StaticRows | None:
    number = op.attributes.get("num")
    along = op.attributes.get("axis", 0)
    if not isinstance(number, int) or number < 2 or along != 0:
        return None
    return _StaticRows(number, "work on all rows at once, or tf.map_fn(f, x)")


def _split(graph: Graph, op: Op) -> _StaticRows | None:
    sizes = graph.ops[op.inputs[1].op].constant or ()
    axis = graph.ops[op.inputs[2].op].constant or ()
    if axis[:1] != (0,) or not sizes or min(sizes) < 0:
        return None
    return _StaticRows(sum(sizes), "work on all rows at once, or split another axis: tf.split(x, n, axis=1)")


_FIXING = frozenset({"Reshape", "Unpack", "SplitV"})
"""Ops whose result has a fixed number of rows."""

_FINDERS: dict[str, Callable[[Graph, Op], _StaticRows | None]] = {
    "Reshape": _reshape,
    "Unpack": _unpack,
    "SplitV": _split,
    **dict.fromkeys(("ConcatV2", "Pack", "AddV2", "Add", "Sub", "Mul", "RealDiv", "Maximum", "Minimum"), _operand),
    **dict.fromkeys(("SelectV2", "Select", "BatchMatMulV2", "MatMul", "SquaredDifference"), _operand),
}


LOSS = "the differentiated value"
_RULES = {
    WHOLE: "same", EMPTY: "same", COUNT: "sum", SUM: "sum", MEAN: "mean", AFTER: "after", INVERSE: "after",
    SHAPE: "after", COUPLED: "coupled",
}  # fmt: skip


def merge_rule(fold: Fold) -> str:
    """The rule, as text, that combines the values of micro-batches into that of the batch.

    "same", "sum", "mean" and "concat:<axis>" apply to all entries; "vector:<rule>,<rule>" has a rule for each entry;
    "whole": do not merge, evaluate it once on the whole batch (it depends on inputs alone); "after": compute it once
    from merged values; "coupled": impossible.

    >>> merge_rule(Fold("rows", axis=1)), merge_rule(Fold("mean"))
    ('concat:1', 'mean')
    """
    if fold.kind == SHAPE and fold.parts is not None and not fold.inputs:
        return f"vector:{','.join(merge_rule(part) for part in fold.parts)}"
    rule = _RULES.get(fold.kind) or ("coupled" if fold.order_problem else f"concat:{fold.axis}")
    return "whole" if fold.inputs and rule in ("after", "coupled") else rule


def coupling_error(
    fold: Fold,
    graph: Graph,
    *,
    where: Callable[[int], str] = lambda op: "",
    what: str = LOSS,
    fixes: tuple[str, ...] = (),
    batch_fixes: BatchFixes = BatchFixes(),  # noqa: B008 - immutable
) -> CaptureError | None:
    """The error for a value, described by `what`, that cannot be computed from micro-batches; None if it can. `where`
    returns an op's line in the source, `fixes` are specific to this value, `batch_fixes` leave the batch whole.

    >>> error = coupling_error(Fold(COUPLED, reason="rows are sorted"), Graph(()))
    >>> print(error.why)
    rows are sorted
    >>> coupling_error(Fold(SUM), Graph(())) is None
    True
    """
    if fold.is_mergeable:
        return None
    static = static_batch_error(fold, graph, where, batch_fixes.alone)
    if static is not None:
        return static
    op = graph.ops[fold.blame] if 0 <= fold.blame < len(graph) else None
    origin = "" if op is None else where(op.index)
    layer = origin.layer_description if isinstance(origin, Origin) else ""
    named = "" if op is None else op.label
    return BatchCoupledError(
        _headline(fold, layer, what),
        op=named,
        line=str(origin),
        where=str(origin) if layer else None,
        why=f"{fold.reason}: op {named}" if layer else fold.reason,
        mends=(*_list_fixes(op, what, origin, fold, batch_fixes), *fixes),
    )


_UNDECIDED = ("not known", "unknown", "by number")
"""Parts of reasons for which a rule cannot decide, while others mean that rows depend on each other."""


def _headline(fold: Fold, layer: str, what: str) -> str:
    """The statement that rows depend on each other, or that the rules cannot decide it."""
    inside = f", in {layer}" if layer else ""
    if fold.reason.startswith(NO_RULE):
        return f"whether micro-batches would change {what} is not known: there is {fold.reason}{inside}"
    if any(words in fold.reason for words in _UNDECIDED):
        return f"whether micro-batches would change {what} is not known: no rule covers this use of an op{inside}"
    return f"micro-batches would change {what}: {_describe_fold(fold, layer)}"


def _describe_fold(fold: Fold, layer: str) -> str:
    if fold.kind == AFTER:
        return "it is neither a sum nor a mean over the batch" + f", in {layer}" * bool(layer)
    return f"{layer} makes its rows depend on each other" if layer else "rows depend on each other"


def _list_fixes(op: Op | None, what: str, origin: str, fold: Fold, batch_fixes: BatchFixes) -> tuple[str, ...]:
    """The applicable fixes: a weight declares the divisor of a mean loss, a different layer normalizes single rows."""
    weight = BatchCoupledError.usual_mends[1]
    scalar = op is not None and bool(op.outputs) and all(spec.scalar for spec in op.outputs) and not op.functions
    fails = fold.reason in (BESIDE, FIXED)
    allow = batch_fixes.allow + _EXACT * (fold.reason == BY_ROW or PYTHON in fold.reason)
    weighs = scalar and what == LOSS and not isinstance(origin, Origin)  # a layer's output is not a loss
    found = [batch_fixes.alone, *([weight] if weighs else []), _AS_MANY if fails else allow]
    if isinstance(origin, Origin) and origin.kind in _BY_ROW:
        found.append(f"{_BY_ROW[origin.kind]} instead of {origin.layer_description}")
        if batch_fixes.shared and op is not None and "/moments/" in op.name:
            found.append(f"{origin.kind}(synchronized=True), which computes moments over all replicas")
    if SAME_SEED in fold.reason:
        found.append(_MOVING)
    if op is not None and "compile_loss" in op.name and Fold(AFTER).description in fold.reason:
        found.append(_MASK)
    added = op is not None and op.type == "AddV2" and what == LOSS
    if added and fold.reason.endswith(f"mixed with {Fold(MEAN).description}"):
        found.append(_AVERAGED)
    return tuple(found)


_AVERAGED = "tf.reduce_mean(rows) + mean, if both are parts of a loss: average the rows before adding the mean"
_EXACT = ": this is exact if rows are independent"
_AS_MANY = "the number of rows of the batch, tf.fill([tf.shape(x)[0], 1], value), instead of a fixed number"
_MOVING = "a seed that advances with each draw: keras.random.SeedGenerator(...), or the methods of tf.random.Generator"
_MASK = (
    "if Keras divides the loss by a mask that the model computes: a mask computed from inputs only, as by "
    "Embedding(mask_zero=True) and Masking"
)
_BY_ROW = {"BatchNormalization": "keras.layers.LayerNormalization or GroupNormalization"}
