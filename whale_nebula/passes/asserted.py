"""Assertions of what the whole batch decides: they are made once, of the merged value, and not of each micro-batch's.

What is asserted of every row holds of the batch if it holds of each micro-batch. That a sum stays below a limit does
not follow: it is asserted when all of them are through, before the update begins.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.passes.reduce import COUPLED, ROWS, WHOLE, Fold, Folding
from whale_nebula.spec import Value

_ALL = frozenset({"All", "LogicalAnd", "Identity", "StopGradient", "Reshape", "Squeeze", "ExpandDims", "Pack"})
_BELOW = frozenset({"Less", "LessEqual"})
_ABOVE = frozenset({"Greater", "GreaterEqual"})
_GUARD = "AssertGuard"
"""A part of the name of the branch that TensorFlow asserts in; what decides it is what is asserted."""


class Asserted(NamedTuple):
    """`once` are checks that wait for merged values; `refused` what is wrong with those that cannot."""

    once: frozenset[int]
    refused: tuple[Fold, ...]


def asserted(graph: Graph, checks: Collection[int], folding: Folding) -> Asserted:
    """Part the checks that each micro-batch cannot make of its own rows."""
    of_all = [op for op in sorted(checks) if not _each(graph, graph.ops[op], folding)]
    refused = [_refused(graph, op, folding) for op in of_all]
    good = frozenset(op for op, why in zip(of_all, refused, strict=True) if why is None)
    return Asserted(good, tuple(why for why in refused if why is not None))


def _each(graph: Graph, op: Op, folding: Folding) -> bool:
    """Whether an assertion holds of the batch where, and only where, it holds of each micro-batch."""
    if op.type.startswith("CheckNumerics"):
        return True
    if op.type == "Assert" or _GUARD in op.name:
        return _holds(graph, op.inputs[0], folding)
    return all(folding.of(value).kind in (ROWS, WHOLE) for value in op.inputs)


def _holds(graph: Graph, value: Value, folding: Folding) -> bool:
    op = graph.ops[value.op]
    if folding.of(value).kind in (ROWS, WHOLE):
        return True
    if op.type in _ALL:
        return _holds(graph, op.inputs[0], folding) and (
            op.type not in ("LogicalAnd", "Pack") or all(_holds(graph, each, folding) for each in op.inputs[1:])
        )
    if op.type in _BELOW | _ABOVE:
        low, high = op.inputs if op.type in _BELOW else reversed(op.inputs)
        least = 1 if op.type.endswith("Equal") else 0
        if folding.of(high).kind == "count" and max(folding.of(low).literal or (least + 1,)) <= least:
            return True  # no micro-batch is empty
        return _bound(graph, low, "Max", folding) and _bound(graph, high, "Min", folding)
    return op.type == "Equal" and _counts_alike(*(folding.of(each) for each in op.inputs))


def _bound(graph: Graph, value: Value, kind: str, folding: Folding) -> bool:
    """Whether a value is the largest (smallest) of rows, or the same everywhere."""
    state, op = folding.of(value), graph.ops[value.op]
    return state.kind == WHOLE or (op.type == kind and folding.of(op.inputs[0]).kind == ROWS)


def _counts_alike(left: Fold, right: Fold) -> bool:
    """Whether two shapes are as many times the rows: then each micro-batch's are equal where the batch's are."""
    if left.parts is not None and right.parts is not None and len(left.parts) == len(right.parts):
        return all(_counts_alike(*pair) for pair in zip(left.parts, right.parts, strict=True))
    counts = left.kind == right.kind == "count" and left.per == right.per > 0
    return counts or (left.kind == right.kind == WHOLE)


def _refused(graph: Graph, check: int, folding: Folding) -> Fold | None:
    """Why an assertion cannot be made of merged values, or None where it can."""
    states = [folding.of(value) for value in graph.ops[check].inputs]
    bad = next((state for state in states if state.kind == COUPLED), None)
    rows = any(state.kind == ROWS for state in states)
    return bad or (Fold(COUPLED, blame=check, reason=_ROWS) if rows else None)


_ROWS = "it is about all rows, and says something of each: what it says would have to be sent, too"
