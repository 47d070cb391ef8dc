"""What takes nothing from a model's output but its shape counts the rows of an input instead.

Keras does so with the mask of `ignore_class`, and with that of a `Concatenate` of something masked with something that
is not. The rows are the same, but what is divided by a sum over such a tensor needs it of the whole batch before the
model has run: it must come from inputs alone.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from whale_nebula.capture.mirror import in_order, mirror
from whale_nebula.capture.roles import roles
from whale_nebula.capture.tracing import Tracing
from whale_nebula.ir.graph import Graph
from whale_nebula.passes.reduce import SHAPED, fold
from whale_nebula.tf import private as tf_private


def recount(trace: Tracing) -> None:
    """Rewire a trace whose batch is cut, as far as it goes."""
    graph = mirror(trace.graph, roles(trace))
    operations = in_order(trace.graph.get_operations())
    numbers = {op.name: index for index, op in enumerate(operations)}
    leaves = [numbers[leaf.op.name] for leaf in trace.leaves]
    if not _suspects(graph, leaves):
        return
    batched = {leaf: 0 for leaf, split in zip(leaves, trace.batched, strict=True) if split}
    backward = {numbers[name] for request in trace.requests for name in request.backward}
    for (consumer, place, _), rows, axis, sizes in fold(
        graph, batched, skip=backward.__contains__, recounting=True
    ).recounts:
        reader = operations[consumer]
        with trace.graph.as_default(), tf.control_dependencies(None):
            made = _shaped(reader.inputs[place], operations[rows.op].outputs[rows.out], axis, sizes)
        tf_private.set_input(reader, place, made)


def _shaped(before: Any, data: Any, axis: int, sizes: tuple[int | None, ...]) -> Any:
    """A shape with the rows of `data`, or zeros or ones of that shape: what was read `before`."""
    dtype = tf.int32 if before.op.type in _FILLED else before.dtype
    rows = tf.shape(data, dtype)[axis]
    shape = tf.stack([rows if size is None else tf.constant(size, dtype) for size in sizes])
    return _FILLED[before.op.type](shape, before.dtype) if before.op.type in _FILLED else shape


_FILLED = {"ZerosLike": tf.zeros, "OnesLike": tf.ones}


def _suspects(graph: Graph, leaves: list[int]) -> bool:
    """Whether something of the inputs alone is given a shape that is not, or meets something of such a shape."""
    fed, pure, like = set(leaves), set(leaves), set[int]()
    for op in graph.ops:
        above = {value.op for value in op.inputs}
        if op.type == "Reshape" and op.inputs[0].op in pure and op.inputs[1].op not in pure:
            return True
        if op.type in SHAPED and not above <= pure:
            like.add(op.index)
        elif (above or op.type == "Const") and not op.stateful and above - pure <= like:
            if above & fed and not above <= pure:
                return True
            (pure if above <= pure else like).add(op.index)
            if above & fed:
                fed.add(op.index)
    return False
