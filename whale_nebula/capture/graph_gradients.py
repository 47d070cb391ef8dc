"""`tf.gradients` and the v1 optimizers that call it: while a step is traced, they too ask us.

They differentiate the graph itself, not what a tape has followed. A gradient that we gave is a placeholder, so what
was made of it cannot be differentiated again: that is refused, and a tape around both can do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from whale_nebula.capture.differentiate import differentiate
from whale_nebula.capture.hook import Hook
from whale_nebula.capture.projected import check_nested
from whale_nebula.capture.tracing import Tracing, current
from whale_nebula.errors import GradientError
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private


def _asked(targets: Any, sources: Any, seeds: Any, stops: Any, unconnected: Any) -> list[Any] | None:
    """The gradients, or None where TensorFlow is to find them: in a body, or while a tape records."""
    trace = current()
    if trace is None or trace.busy:
        return None
    if tf_private.tape_records():
        check_nested(trace.bottlenecks, _listed(targets), _listed(sources))
        return None
    ends = [tf.convert_to_tensor(target) for target in _listed(targets)]
    _check_first_order(trace, ends)
    if tf.compat.v1.get_default_graph() is not trace.graph:
        return None
    trace.busy = True
    try:
        return _answer(trace, ends, _listed(sources), seeds, stops, unconnected)
    finally:
        trace.busy = False


def _answer(
    trace: Tracing, ends: Sequence[Any], sources: Sequence[Any], seeds: Any, stops: Any, unconnected: Any
) -> list[Any]:
    starts = [None] * len(ends) if seeds is None else _listed(seeds)
    found = differentiate(trace, None, ends, sources, starts, stops=[] if stops is None else _listed(stops))
    if getattr(unconnected, "value", unconnected) == "zero":
        pairs = zip(found, sources, strict=True)
        return [tf.zeros_like(source) if gradient is None else gradient for gradient, source in pairs]
    return found


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _check_first_order(trace: Tracing, ends: Sequence[Any]) -> None:
    """Refuse to differentiate what a gradient went into, unless it was stopped on the way."""
    held = {tensor.op for request in trace.requests for _, tensors in request.holders for tensor in tensors}
    stack, seen = [tensor.op for tensor in ends], set[Any]()
    while stack and held:
        op = stack.pop()
        if op in held:
            raise _second_order()
        if op not in seen and op.type != "StopGradient":
            seen.add(op)
            stack.extend(tensor.op for tensor in [*op.inputs, *_outside(op)])


def _outside(op: Any) -> list[Any]:
    """What an op of a body stands for, if that comes from the graph around it."""
    captures = getattr(op.graph, "captures", ()) if op.type == "Placeholder" else ()
    return [given for given, inner in captures if inner.op is op and hasattr(given, "op")]


def _second_order() -> GradientError:
    return GradientError(
        "tf.gradients is asked for the gradient of something that a gradient went into",
        where=str(script_site()),
        why="a plan knows the first gradient only once all stages have run backward",
        mend="with tf.GradientTape() as outer: around the forward and the first tf.gradients, then "
        "outer.gradient(...); or tf.stop_gradient(...) around the first gradient, if it is meant as a constant",
    )


_HOOK = Hook(lambda: tf_private.hook_gradients(_asked), lambda: tf_private.hook_gradients(None))


def graph_asked() -> AbstractContextManager[None]:
    """Hook `tf.gradients` while a step is traced; taken off when the last trace ends."""
    return _HOOK.held()
