"""What a fold means for the runtime, and for the user."""

from __future__ import annotations

from collections.abc import Callable

from whale_nebula.errors import BatchCoupledError, CaptureError
from whale_nebula.ir.graph import Graph, Op
from whale_nebula.ir.origin import Origin
from whale_nebula.passes.reduce.baked import baked
from whale_nebula.passes.reduce.making import SAME_SEED
from whale_nebula.passes.reduce.registry import BESIDE, FIXED, NO_RULE
from whale_nebula.passes.reduce.state import (
    AFTER,
    COUNT,
    COUPLED,
    EMPTY,
    INVERSE,
    MEAN,
    SHAPE,
    SUM,
    WHOLE,
    Fold,
)
from whale_nebula.passes.reduce.whole_batch import Mends

LOSS = "what is differentiated"
_RULES = {
    WHOLE: "same", EMPTY: "same", COUNT: "sum", SUM: "sum", MEAN: "mean", AFTER: "after", INVERSE: "after",
    SHAPE: "after", COUPLED: "coupled",
}  # fmt: skip


def merge_rule(fold: Fold) -> str:
    """How the values of the micro-batches become the whole's.

    "same", "sum", "mean" and "concat:<axis>" say just that; "vector:<rule>,<rule>" says it entry by entry;
    "whole": do not merge, evaluate it once on the whole batch (it comes from inputs alone); "after": compute
    it once from merged values; "coupled": it cannot be had.

    >>> merge_rule(Fold("rows", axis=1)), merge_rule(Fold("mean"))
    ('concat:1', 'mean')
    """
    if fold.kind == SHAPE and fold.parts is not None and not fold.inputs:
        return f"vector:{','.join(merge_rule(part) for part in fold.parts)}"
    rule = _RULES.get(fold.kind) or ("coupled" if fold.misplaced else f"concat:{fold.axis}")
    return "whole" if fold.inputs and rule in ("after", "coupled") else rule


def verdict(
    fold: Fold,
    graph: Graph,
    *,
    where: Callable[[int], str] = lambda op: "",
    what: str = LOSS,
    ways: tuple[str, ...] = (),
    lines: Mends = Mends(),  # noqa: B008 - it does not change
) -> CaptureError | None:
    """Why a value cannot be had from micro-batches, or None where it can. `where` gives an op's line in the
    source, `ways` are ways out that only this value has, `lines` those that leave the batch as it is.

    >>> error = verdict(Fold(COUPLED, reason="rows are sorted"), Graph(()))
    >>> print(error.why)
    rows are sorted
    >>> verdict(Fold(SUM), Graph(())) is None
    True
    """
    if fold.good:
        return None
    static = baked(fold, graph, where, lines.alone)
    if static is not None:
        return static
    op = graph.ops[fold.blame] if 0 <= fold.blame < len(graph) else None
    origin = "" if op is None else where(op.index)
    layer = origin.said if isinstance(origin, Origin) else ""
    named = "" if op is None else f"{op.name} ({op.type})"
    return BatchCoupledError(
        _headline(fold, layer, what),
        op=named,
        line=str(origin),
        where=str(origin) if layer else None,
        why=f"{fold.reason}: op {named}" if layer else fold.reason,
        mends=(*_mends(graph, op, what, origin, fold, lines), *ways),
    )


_UNDECIDED = ("not known", "unknown", "by number")
"""What stands in reasons that say that a rule cannot tell, and not that rows depend on each other."""


def _headline(fold: Fold, layer: str, what: str) -> str:
    """That rows depend on each other, or that the rules do not say whether they do."""
    inside = f", in {layer}" if layer else ""
    if fold.reason.startswith(NO_RULE):
        return f"whether micro-batches would change {what} is not known: there is {fold.reason}{inside}"
    if any(words in fold.reason for words in _UNDECIDED):
        return f"whether micro-batches would change {what} is not known: no rule covers this use of an op{inside}"
    return f"micro-batches would change {what}: {_said(fold, layer)}"


def _said(fold: Fold, layer: str) -> str:
    if fold.kind == AFTER:
        return "it is neither a sum nor a mean over the batch" + f", in {layer}" * bool(layer)
    return f"{layer} makes its rows depend on each other" if layer else "its rows depend on each other"


def _mends(graph: Graph, op: Op | None, what: str, origin: str, fold: Fold, lines: Mends) -> tuple[str, ...]:
    """The ways out that fit: a weight says what a loss is a mean over, another layer normalises each row alone."""
    weight = BatchCoupledError.usual_mends[1]
    scalar = op is not None and bool(op.outputs) and all(spec.scalar for spec in op.outputs)
    fails = fold.reason in (BESIDE, FIXED)
    found = [lines.alone, *([weight] if scalar and what == LOSS else []), _AS_MANY if fails else lines.allow]
    if isinstance(origin, Origin) and origin.kind in _BY_ROW:
        found.append(f"{_BY_ROW[origin.kind]} in the place of {origin.said}")
        if lines.shared and op is not None and "/moments/" in op.name:
            found.append(f"{origin.kind}(synchronized=True), whose moments are those of all replicas")
    if SAME_SEED in fold.reason:
        found.append(_MOVING)
    if op is not None and "compile_loss" in op.name and Fold(AFTER).spoken in fold.reason:
        found.append(_MASK)
    return tuple(found)


_AS_MANY = "as many rows as the batch has, tf.fill([tf.shape(x)[0], 1], value), in the place of a fixed number"
_MOVING = "a seed that moves on with each draw: keras.random.SeedGenerator(...), or a tf.random.Generator's own draws"
_MASK = (
    "a mask that is made of the inputs alone, as Embedding(mask_zero=True) and Masking make it: this one hangs on what "
    "the model computes, so what Keras divides the loss by is not known before"
)
_BY_ROW = {"BatchNormalization": "keras.layers.LayerNormalization or GroupNormalization"}
