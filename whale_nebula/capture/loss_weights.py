"""Weights of the seeds of gradients, so that the sum over micro-batches is the gradient of the whole batch.

With one micro-batch the weight is one. With several, it is one for a target that is a sum over the batch, the
micro-batch's share of the rows for a mean, and the square of that share for a quotient by the number of rows. Other
targets are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from whale_nebula.capture.entered_scopes import map_handle_paths, stamp_readers
from whale_nebula.capture.mirror import SUMMED, find_origin, mirror, order_operations
from whale_nebula.capture.splits import stamp_siblings
from whale_nebula.capture.tracing import Tracing, current_graph_trace
from whale_nebula.errors import BatchCoupledError
from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, INPUT, Graph
from whale_nebula.ir.program import Program
from whale_nebula.passes.replicas import Where, find_batch_sum_error
from whale_nebula.passes.rules import SHAPE_ONLY_OPS, Fold, Folding, coupling_error, fold
from whale_nebula.passes.rules.registry import AFTER, SHAPE
from whale_nebula.passes.rules.verdict import list_batch_fixes
from whale_nebula.site import script_site
from whale_nebula.spec import Value
from whale_nebula.tf import patch as tf_patch
from whale_nebula.tf import private as tf_private


def mirror_trace(trace: Tracing) -> Graph:
    """The ops of a trace as pure data, with the stages from an assignment or a split in addition to those of scopes."""
    graph = mirror(trace.graph, find_roles(trace))
    if trace.assignment is None:
        return stamp_siblings(trace, graph)
    numbers = {op.name: index for index, op in enumerate(order_operations(trace.graph.get_operations()))}
    first = trace.requests[0].before if trace.requests else None
    forward = None if first is None else {numbers[name] for name in first if name in numbers}
    paths = map_handle_paths(trace.graph, numbers, trace.handles)
    return stamp_readers(graph, trace.assignment, paths, forward)


def find_roles(trace: Tracing) -> dict[str, tuple[str, str]]:
    """Op name to (role, name) for the placeholder ops of a trace."""
    found = {leaf.op.name: (INPUT, leaf.op.name) for leaf in trace.leaves}
    for _, internal in trace.graph.captures:
        found[internal.op.name] = (CAPTURE, internal.op.name)
    for request in trace.requests:
        for _, tensors in request.holders:
            found.update({t.op.name: (HOLDER, t.op.name) for t in tensors})
        found.update({feed.op.name: (FEED, "arrival") for _, feed in request.arrivals})
    found.update({tensor.op.name: (FEED, name) for name, tensor in trace.feeds.items()})
    return found


def _read_trace(trace: Tracing) -> tuple[Graph, list[Any], dict[str, int]]:
    """The trace as pure data, its ops in the same order, and their numbers by name."""
    operations = order_operations(trace.graph.get_operations())
    return mirror_trace(trace), operations, {op.name: index for index, op in enumerate(operations)}


def _fold_trace(trace: Tracing, graph: Graph, numbers: Mapping[str, int], **options: Any) -> Folding:
    """The folds of the trace's values over its batched inputs."""
    batched = {numbers[leaf.op.name]: 0 for leaf, split in zip(trace.leaves, trace.batched, strict=True) if split}
    backward = {numbers[name] for request in trace.requests for name in request.backward}
    return fold(graph, batched, skip=backward.__contains__, **options)


def replace_batch_sizes(trace: Tracing) -> Graph:
    """Replace constant batch sizes in a trace with a divided batch, if it is known what they count. Returns the ops of
    the trace as pure data.
    """
    graph, operations, numbers = _read_trace(trace)
    if not _has_suspect(graph, [numbers[leaf.op.name] for leaf in trace.leaves]):
        return graph
    recounts = _fold_trace(trace, graph, numbers, recounting=True).recounts
    for (consumer, place, _), rows, axis, sizes in recounts:
        before = operations[consumer].inputs[place]
        fill = _FILLED.get(before.op.type)
        with trace.graph.as_default(), tf.control_dependencies(None):
            dtype = before.dtype if fill is None else tf.int32
            count = tf.shape(operations[rows.op].outputs[rows.out], dtype)[axis]
            shape = tf.stack([count if size is None else tf.constant(size, dtype) for size in sizes])
            made = shape if fill is None else fill(shape, before.dtype)
        tf_private.set_input(operations[consumer], place, made)
    return mirror_trace(trace) if recounts else graph


_FILLED = {"ZerosLike": tf.zeros, "OnesLike": tf.ones}


def _has_suspect(graph: Graph, leaves: list[int]) -> bool:
    """Whether a value that depends only on inputs is combined with a shape, or a value of one, that does not."""
    fed, pure, like = set(leaves), set(leaves), set[int]()
    for op in graph.ops:
        above = {value.op for value in op.inputs}
        if op.type == "Reshape" and op.inputs[0].op in pure and op.inputs[1].op not in pure:
            return True
        if op.type in SHAPE_ONLY_OPS and not above <= pure:
            like.add(op.index)
        elif (above or op.type == "Const") and not op.stateful and above - pure <= like:
            if above & fed and not above <= pure:
                return True
            (pure if above <= pure else like).add(op.index)
            if above & fed:
                fed.add(op.index)
    return False


Tensor = Any


def weight_seeds(trace: Tracing, targets: Sequence[Tensor], seeds: Sequence[Any]) -> list[Tensor]:
    """The seeds of the gradients of `targets` (None: ones), weighted for micro-batches."""
    weighed = [tf.ones_like(target) if seed is None else seed for target, seed in zip(targets, seeds, strict=True)]
    if not trace.entered_scopes.is_cut:
        return weighed
    times = [1] * len(weighed)
    if not trace.loss_weights:
        replace_batch_sizes(trace)
        times = [_SHARE_EXPONENTS.get(kind, 0) for kind in _classify_targets(trace, targets)]
    for number, each in enumerate(times):
        for _ in range(each):
            weighed[number] = weighed[number] * tf.cast(trace.feed("share"), weighed[number].dtype)
    return weighed


def check_overwritten(trace: Tracing, sources: Sequence[Any]) -> None:
    """Refuse gradients that an optimizer assigns to their variables, such as scales of float8, if the batch is divided.

    Their layers make them in a backward, each from the rows that it sees; a sum of them is not the value of the batch.
    """
    name = next((str(each.path) for each in sources if getattr(each, "overwrite_with_gradient", False)), None)
    if name is not None and trace.entered_scopes.is_cut:
        raise BatchCoupledError(
            f"micro-batches would change the value of {name!r}: the optimizer overwrites it with its gradient",
            where=str(script_site()),
            why="the gradients of micro-batches are added up, and this one is no gradient but the variable's next "
            "value, which its layer computes from the rows of a batch (overwrite_with_gradient=True, used for float8)",
            mends=(
                list_batch_fixes(
                    trace.entered_scopes.pipeline.micro_batch, copied=trace.entered_scopes.replicas.has_several
                ).alone,
            ),
        )


_SHARE_EXPONENTS = {"mean": 1, "whole": 1, "inverse": 2}
"""The exponent of the micro-batch's share of the rows in a target's weight, by kind."""
_MIXED = "its entries are of different kinds: some grow with the number of rows, others do not"


def _classify_targets(trace: Tracing, targets: Sequence[Tensor]) -> list[str]:
    """The kind of the fold of each target; counts and sums of a micro-batch are scaled to the whole batch first where a
    target needs that (`Folding.grows`). Raises for a target that micro-batches would change.
    """
    folding, graph, operations, values = _fold_targets(trace, targets)
    if folding.grows:
        # ops that read a micro-batch's count or sum get it scaled to the whole batch
        for consumer, position, value in folding.grows:
            tensor = operations[value.op].outputs[value.out]
            with tf.control_dependencies(None):
                grown = tensor * tf.cast(trace.feed("grow"), tensor.dtype)
            trace.grown.add(grown.op.name)  # not recorded by a tape, but gradients flow through it
            tf_private.set_input(operations[consumer], position, grown)
        folding, graph, operations, values = _fold_targets(trace, targets)
    kinds: list[str] = []
    batch_fixes = list_batch_fixes(
        trace.entered_scopes.pipeline.micro_batch, copied=trace.entered_scopes.replicas.has_several
    )
    for value in values:
        state = folding.fold_of(value)
        one = Fold(AFTER, blame=value.op, reason=_MIXED) if state.kind == SHAPE else state
        refusal = coupling_error(
            one, graph, where=lambda number: find_origin(operations[number]), batch_fixes=batch_fixes
        )
        if refusal is not None and trace.entered_scopes.pipeline.coupled != "allow":
            raise refusal
        kinds.append("mean" if refusal is not None else state.kind)
    return kinds


def _fold_targets(trace: Tracing, targets: Sequence[Tensor]) -> tuple[Folding, Graph, list[Any], list[Value]]:
    graph, operations, numbers = _read_trace(trace)
    values = [Value(numbers[target.op.name], target.value_index) for target in targets]
    return _fold_trace(trace, graph, numbers, targets=values), graph, operations, values


_GRADIENT = "NebulaReplicaSum"


def sum_over_replicas(trace: Tracing, part: Any) -> Any:
    """The sum of a value over all replicas; its gradient is summed as well."""
    graph = trace.graph
    with tf_private.stamp_ops(graph, {SUMMED: 1}), graph.gradient_override_map({"Identity": _GRADIENT}):
        total = tf.identity(part, "replica_sum")
    trace.summed.append(total.op)
    return total


@tf.RegisterGradient(_GRADIENT)
def _sum_gradient(_: Any, gradient: Any) -> Any:
    trace = _find_cut_trace()
    return gradient if trace is None else sum_over_replicas(trace, gradient)


def _find_cut_trace() -> Tracing | None:
    """The current trace if it is to be cut and new ops belong to its own graph, not to a body; otherwise None."""
    trace = current_graph_trace()
    return trace if trace is not None and not trace.plain and not trace.flags.vectorizing else None


def synchronize_moments(x: Any, axes: Sequence[int], keepdims: bool) -> tuple[Any, Any] | None:
    """Mean and variance over all replicas, by Keras's formula; None if only local ones are needed."""
    trace = _find_cut_trace()
    own = [tf.reduce_sum(each, axes, keepdims=True) for each in (x, tf.square(x), tf.ones_like(x))] if trace else []
    if trace is None or not all(each.shape.is_fully_defined() for each in own):
        return None
    added, squares, count = tf.unstack(sum_over_replicas(trace, tf.stack(own)))
    mean = tf.math.divide_no_nan(added, count)
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
    return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))


def resolve_sums(trace: Tracing, program: Program, where: Where) -> Program:
    """Decide on each sum over replicas in a traced program: it is kept, reduced to micro-batches, or refused."""
    refused = find_batch_sum_error(program, where)
    if not trace.summed or (refused is None and program.pipeline.micro_batch > 1):
        return program
    if refused is not None and program.pipeline.coupled != "allow":
        raise refused
    for op in trace.summed:
        tf_patch.remove_attribute(op, SUMMED)
    return replace(program, graph=mirror_trace(trace))
