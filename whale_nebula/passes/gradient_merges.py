"""Merge rules for gradients of intermediate values, from micro-batches to the whole batch.

The gradient of rows has rows. That of a value which is the same in every micro-batch, or a mean over the batch, is a
sum; that of a sum over the batch is in every micro-batch what it is for all of them, as a loss is linear in it::

    rows        loss_m depends on its own rows alone        put behind each other
    whole, mean loss = loss_0 + loss_1 + ...                added
    sum         d loss / d (s_0 + s_1 + ...) = d loss_m / d s_m   the same
"""

from __future__ import annotations

from dataclasses import replace

from whale_nebula.ir.graph import CAPTURE
from whale_nebula.ir.program import ADDED, GradientPart, Program, Request
from whale_nebula.passes.batch import BatchFolds
from whale_nebula.passes.rules import COUPLED, ROWS, WHOLE, Fold, Folding

SAME = "same"
_RULES = {WHOLE: ADDED, "mean": ADDED, "sum": SAME}


def with_merges(program: Program, folds: BatchFolds) -> Program:
    """Say of every gradient that is asked for how it is put together; what cannot be is refused."""
    if folds.folding is None:
        return program
    requests = []
    for request in program.requests:
        merges = tuple(_merge(program, folds, folds.folding, request, n) for n in range(len(request.origins)))
        parts = tuple(_merge_slices(part, request, folds, folds.folding) for part in request.parts)
        requests.append(replace(request, merges=merges, parts=parts))
    return replace(program, requests=tuple(requests))


def _merge_slices(part: GradientPart, request: Request, folds: BatchFolds, folding: Folding) -> GradientPart:
    """A sparse part with the rule for its slices, which its indices decide.

    The uncut gradient has one slice for each index. An optimizer that squares slices, as Adam does, would tell a sum of
    slices from the slices of all micro-batches: so these are merged to the slices of the uncut step.
    """
    if not part.sparse:
        return part
    state = folding.of(part.values[1])
    if state.kind == WHOLE:
        return replace(part, merge=ADDED)
    if state.kind != ROWS or state.position:
        name = request.sources[part.source]
        if state.good:
            state = Fold(COUPLED, blame=part.values[1].op, reason=f"rows of {name!r} are looked up at {state.spoken}")
        folds.refuse(state, f"the gradient of {name!r}")
    return part


def _merge(program: Program, folds: BatchFolds, folding: Folding, request: Request, source: int) -> str:
    origin, parts = request.origins[source], [part for part in request.parts if part.source == source]
    if origin < 0 or program.graph.ops[origin].role == CAPTURE or not parts:
        return ADDED
    value, *others = program.graph.ops[origin].values
    state = folding.of(value)
    alike = all(folding.of(other).bare == state.bare for other in others)
    sparse = not alike or any(part.sparse for part in parts)
    if state.kind in _RULES and not (sparse and state.kind != WHOLE):
        return _RULES[state.kind]
    if state.kind == ROWS and not (state.axis or state.misplaced or sparse):
        return ROWS
    if state.good:
        reason = state.misplaced or f"the gradient of {state.spoken} is asked for"
        along = f", which lie along axis {state.axis}" if state.kind == ROWS and state.axis else ""
        state = Fold(COUPLED, blame=value.op, reason=reason + along)
    folds.refuse(state, "a gradient that is asked for")
    shape = program.graph.spec(value).shape
    return ROWS if shape and shape[0] is None else ADDED
