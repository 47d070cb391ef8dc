"""With which weight each gradient starts, so that the sum over micro-batches is the whole batch's gradient.

With one micro-batch the weight is one. With several, a target that is a sum over the batch keeps it, a mean gets the
micro-batch's share of the rows, what is divided by them that share twice, and what is none of these is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from whale_nebula.capture.mirror import in_order, mirror
from whale_nebula.capture.places import place_of
from whale_nebula.capture.recount import recount
from whale_nebula.capture.roles import roles
from whale_nebula.capture.tracing import Tracing
from whale_nebula.ir.graph import Graph
from whale_nebula.passes.reduce import Fold, Folding, fold, verdict
from whale_nebula.passes.reduce.state import AFTER, SHAPE
from whale_nebula.passes.reduce.whole_batch import mends
from whale_nebula.spec import Value
from whale_nebula.tf import private as tf_private

Tensor = Any


def weigh(trace: Tracing, targets: Sequence[Tensor], seeds: Sequence[Any]) -> list[Tensor]:
    """The tensors that the targets' gradients start from."""
    ones = [_ones(target) if seed is None else seed for target, seed in zip(targets, seeds, strict=True)]
    if not trace.cut:
        return ones
    if trace.weights:
        return [seed * tf.cast(trace.feed("share"), seed.dtype) for seed in ones]
    recount(trace)
    kinds = _kinds(trace, targets)
    return [_weighed(trace, seed, _SHARES.get(kind, 0)) for seed, kind in zip(ones, kinds, strict=True)]


_SHARES = {"mean": 1, "whole": 1, "inverse": 2}
"""How often a target's weight is its micro-batch's share of the rows. One divided by these rows is too large itself."""


def _weighed(trace: Tracing, seed: Tensor, times: int) -> Tensor:
    for _ in range(times):
        seed = seed * tf.cast(trace.feed("share"), seed.dtype)
    return seed


def _ones(target: Tensor) -> Tensor:
    return tf.ones_like(target)


def _kinds(trace: Tracing, targets: Sequence[Tensor]) -> list[str]:
    """How each target folds the batch, after growing what must be counted over the whole of it."""
    folding, graph, operations = _fold(trace, targets)
    if folding.grows:
        _grow(trace, folding, operations)
        folding, graph, operations = _fold(trace, targets)
    where = places(operations)
    numbers = {op.name: index for index, op in enumerate(operations)}
    kinds: list[str] = []
    lines = mends(trace.pipeline.micro_batch, copied=trace.replicas.several)
    for target in targets:
        state = folding.of(Value(numbers[target.op.name], target.value_index))
        refusal = verdict(_one(state, numbers[target.op.name]), graph, where=where, lines=lines)
        if refusal is not None and trace.pipeline.coupled != "allow":
            raise refusal
        kinds.append("mean" if refusal is not None else state.kind)
    return kinds


def _one(state: Fold, op: int) -> Fold:
    """The entries of a target have one weight."""
    return Fold(AFTER, blame=op, reason=_MIXED) if state.kind == SHAPE else state


_MIXED = "its entries are no one kind: some grow with the rows, others do not"


def _fold(trace: Tracing, targets: Sequence[Tensor]) -> tuple[Folding, Graph, list[Any]]:
    operations = in_order(trace.graph.get_operations())
    numbers = {op.name: index for index, op in enumerate(operations)}
    graph = mirror(trace.graph, roles(trace))
    batched = {numbers[t.op.name]: 0 for t, split in zip(trace.leaves, trace.batched, strict=True) if split}
    backward = {numbers[name] for request in trace.requests for name in request.backward}
    wanted = [Value(numbers[t.op.name], t.value_index) for t in targets]
    return fold(graph, batched, targets=wanted, skip=backward.__contains__), graph, operations


def _grow(trace: Tracing, folding: Folding, operations: Sequence[Any]) -> None:
    """Let the readers of a micro-batch's count or sum read it scaled up to the whole batch."""
    for consumer, position, value in folding.grows:
        tensor = operations[value.op].outputs[value.out]
        with tf.control_dependencies(None):
            grown = tensor * tf.cast(trace.feed("grow"), tensor.dtype)
        trace.grown.add(grown.op.name)  # no tape saw it made, and yet gradients flow through it
        tf_private.set_input(operations[consumer], position, grown)


def places(operations: Sequence[Any]) -> Callable[[int], str]:
    """Op number to the user's line that made it."""
    return lambda number: place_of(operations[number])
