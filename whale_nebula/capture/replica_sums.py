"""Synchronised batch-norm moments over all replicas of a stage, as an op in the traced step.

`BatchNormalization(synchronized=True)` asks for the mean and the variance of the whole batch, of which each replica has
some rows. They follow from three sums, and each replica adds its own parts. So the trace gets an op that stands for
"the sum over all replicas of the stage"::

    sums of x and x², count ──▶ ReplicaSum ──▶ mean, variance ──▶ normalised x ──▶ loss
         gradient of x    ◀── ReplicaSum ◀── gradient of the sums, made of one's own rows

Its gradient is such a sum again: what one replica adds changes the losses of all. In a graph it is an Identity, which
is what it comes to where one process has the whole batch; between processes the runtime puts a collective in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from whale_nebula.capture.loss_weights import roles
from whale_nebula.capture.mirror import SUMMED, mirror
from whale_nebula.capture.tracing import Tracing, current
from whale_nebula.ir.program import Program
from whale_nebula.passes.replicas import Where, refusal
from whale_nebula.tf import moments as tf_moments
from whale_nebula.tf import private as tf_private

_GRADIENT = "NebulaReplicaSum"


def over_replicas(trace: Tracing, part: Any) -> Any:
    """The sum over all replicas of what each of them has."""
    graph = trace.graph
    with tf_private.stamp_ops(graph, {SUMMED: 1}), graph.gradient_override_map({"Identity": _GRADIENT}):
        total = tf.identity(part, "replica_sum")
    trace.summed.append(total.op)
    return total


@tf.RegisterGradient(_GRADIENT)
def _gradient(_: Any, gradient: Any) -> Any:
    trace = _own_trace()
    return gradient if trace is None else over_replicas(trace, gradient)


def _own_trace() -> Tracing | None:
    """The trace, where ops that are made now are a part of its graph itself, and not of a body."""
    trace = current()
    if trace is None or trace.plain or trace.vectorizing or tf.executing_eagerly():
        return None
    return trace if tf.compat.v1.get_default_graph() is trace.graph else None


def synchronize_moments(x: Any, axes: Sequence[int], keepdims: bool) -> tuple[Any, Any] | None:
    """Mean and variance, by Keras's own formula; None where they are those of what is there."""
    trace = _own_trace()
    own = [tf.reduce_sum(each, axes, keepdims=True) for each in (x, tf.square(x), tf.ones_like(x))] if trace else []
    if trace is None or not all(each.shape.is_fully_defined() for each in own):
        return None
    added, squares, count = tf.unstack(over_replicas(trace, tf.stack(own)))
    mean = tf.math.divide_no_nan(added, count)
    variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
    return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))


def settle_sums(trace: Tracing, program: Program, where: Where) -> Program:
    """The program of a trace: its sums over replicas stay, are those of micro-batches alone, or are refused."""
    refused = refusal(program, where)
    if not trace.summed or (refused is None and program.pipeline.micro_batch > 1):
        return program
    if refused is not None and program.pipeline.coupled != "allow":
        raise refused
    for op in trace.summed:
        tf_moments.unmark(op, SUMMED)
    return replace(program, graph=mirror(trace.graph, roles(trace)))
