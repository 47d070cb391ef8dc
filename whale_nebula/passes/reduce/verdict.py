"""What a fold means for the runtime, and for the user."""

from __future__ import annotations

from collections.abc import Callable

from whale_nebula.errors import BatchCoupledError
from whale_nebula.ir.graph import Graph
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
    rule = _RULES.get(fold.kind) or ("coupled" if fold.order or fold.position else f"concat:{fold.axis}")
    return "whole" if fold.inputs and rule in ("after", "coupled") else rule


def verdict(
    fold: Fold,
    graph: Graph,
    *,
    where: Callable[[int], str] = lambda op: "",
    what: str = "what is differentiated",
) -> BatchCoupledError | None:
    """Why a value cannot be had from micro-batches, or None where it can. `where` gives an op's line in the
    source.

    >>> error = verdict(Fold(COUPLED, reason="rows are sorted"), Graph(()))
    >>> print(error.why)
    rows are sorted
    >>> verdict(Fold(SUM), Graph(())) is None
    True
    """
    if fold.good:
        return None
    op = graph.ops[fold.blame] if 0 <= fold.blame < len(graph) else None
    return BatchCoupledError(
        f"micro-batches would change {what}: "
        + ("it is neither a sum nor a mean over the batch" if fold.kind == AFTER else "its rows depend on each other"),
        op="" if op is None else f"{op.name} ({op.type})",
        line="" if op is None else where(op.index),
        why=fold.reason,
    )
