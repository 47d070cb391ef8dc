"""Inputs that are given a shape by way of a model's output count their own rows instead.

Keras does so with the mask of `ignore_class`. The rows are the same, but what is divided by a sum over such a tensor
needs it of the whole batch before the model has run: it must come from inputs alone.
"""

from __future__ import annotations

import tensorflow as tf

from whale_nebula import tf_private
from whale_nebula.capture.mirror import in_order, mirror
from whale_nebula.capture.roles import roles
from whale_nebula.capture.tracing import Tracing
from whale_nebula.ir.graph import Graph
from whale_nebula.passes.reduce import fold


def recount(trace: Tracing) -> None:
    """Rewire the reshapes of a trace whose batch is cut, as far as it goes."""
    graph = mirror(trace.graph, roles(trace))
    operations = in_order(trace.graph.get_operations())
    numbers = {op.name: index for index, op in enumerate(operations)}
    leaves = [numbers[leaf.op.name] for leaf in trace.leaves]
    if not _suspects(graph, leaves):
        return
    batched = {leaf: 0 for leaf, split in zip(leaves, trace.batched, strict=True) if split}
    backward = {numbers[name] for request in trace.requests for name in request.backward}
    for consumer, axis, sizes in fold(graph, batched, skip=backward.__contains__, recounting=True).recounts:
        data, asked = operations[consumer].inputs
        with trace.graph.as_default(), tf.control_dependencies(None):
            rows = tf.shape(data, asked.dtype)[axis]
            shape = tf.stack([rows if size is None else tf.constant(size, asked.dtype) for size in sizes])
        tf_private.set_input(operations[consumer], 1, shape)


def _suspects(graph: Graph, leaves: list[int]) -> bool:
    """Whether something of the inputs alone is given a shape that is not."""
    pure = set(leaves)
    for op in graph.ops:
        if op.type == "Reshape" and op.inputs[0].op in pure and op.inputs[1].op not in pure:
            return True
        if (op.inputs or op.type == "Const") and not op.stateful and all(value.op in pure for value in op.inputs):
            pure.add(op.index)
    return False
