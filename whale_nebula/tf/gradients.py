"""Private parts of TensorFlow for gradients: `tf.gradients`, and the order in which a tape adds gradients.

Each function has a contract test in tests/contract.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from whale_nebula.tf import require_supported
from whale_nebula.tf.patch import Patch, apply_patches

require_supported()  # the following imports depend on these versions

from tensorflow.python.eager import execute  # noqa: E402
from tensorflow.python.ops import gradients_util  # noqa: E402

_gradients_helper = gradients_util._GradientsHelper


def patch_gradients(compute_gradients: Callable[..., list[Any] | None]) -> Patch:
    """Call `compute_gradients(targets, sources, seeds, stops, unconnected)` instead of `tf.gradients`.

    This includes every v1 optimizer's `compute_gradients` of a tensor. If the result is None, TensorFlow computes them.
    """

    def helper(ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(_gradients_helper).bind(ys, xs, grad_ys, *args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments
        found = None
        if options["src_graph"] is None:
            found = compute_gradients(ys, xs, grad_ys, options["stop_gradients"], options["unconnected_gradients"])
        return _gradients_helper(ys, xs, grad_ys, *args, **kwargs) if found is None else found

    return Patch(gradients_util, "_GradientsHelper", helper)


class TapeOrder(NamedTuple):
    """The ops of a graph in the order in which a tape visits them, and the name scopes in which it recorded them."""

    ranks: Mapping[Any, int]
    scopes: Mapping[str, str]


_orders: dict[Any, TapeOrder] = {}
_mark_reached_ops = gradients_util._MarkReachedOps
_enqueue_ready = gradients_util._UpdatePendingAndEnqueueReady
_maybe_compile = gradients_util._MaybeCompile


def differentiate(
    targets: Sequence[Any],
    sources: Sequence[Any],
    seeds: Sequence[Any],
    stops: Sequence[Any],
    order: TapeOrder | None = None,
) -> list[Any]:
    """The gradients of `targets` (weighted by `seeds`) in the current graph; None, dense or IndexedSlices each.

    With `order`, gradients are added in the order of a tape, and have the names that it gives: TensorFlow's optimizer
    sorts the terms of a sum by name.
    """
    if not sources:
        return []
    if order is None:
        return list(
            _gradients_helper(list(targets), list(sources), list(seeds), stop_gradients=list(stops), name="nebula")
        )
    graph, scope = tf.compat.v1.get_default_graph(), get_name_scope()
    ends = sorted(zip(targets, seeds, strict=True), key=lambda end: order.ranks.get(end[0].op, len(order.ranks)))
    _orders[graph] = order
    try:
        with apply_patches(_ORDER_PATCHES):
            found = _gradients_helper(
                [target for target, _ in ends],
                list(sources),
                [seed for _, seed in ends],
                stop_gradients=list(stops),
                name=f"{scope}/" if scope else "",
            )
    finally:
        del _orders[graph]
    return list(found)


def _mark_recorded(from_ops: Any, reached_ops: Any, func_graphs: Any) -> None:
    """Do not wait for readers that the tape has not recorded, such as `tf.stop_gradient`."""
    _mark_reached_ops(from_ops, reached_ops, func_graphs)
    order = _orders.get(from_ops[0].graph)
    if order is not None:
        reached_ops.difference_update([op for op in reached_ops if op not in order.ranks and op not in from_ops])


def _enqueue_in_order(grads: Any, op: Any, queue: Any, *args: Any) -> None:
    _enqueue_ready(grads, op, queue, *args)
    order = _orders.get(op.graph)
    if order is not None and len(queue) > 1:
        ready = sorted(queue, key=lambda each: order.ranks.get(each, len(order.ranks)))
        queue.clear()
        queue.extend(ready)


def _name_like_tape(scope: str, op: Any, func: Any, grad_fn: Any) -> Any:
    order = _orders.get(op.graph)
    if order is None:
        return _maybe_compile(scope, op, func, grad_fn)
    recorded = order.scopes.get(op.name, op.name.rpartition("/")[0])
    with tf.name_scope(f"gradient_tape/{recorded}/" if recorded else "gradient_tape/"):
        return _maybe_compile(scope, op, func, grad_fn)


_ORDER_PATCHES = (
    Patch(gradients_util, "_MarkReachedOps", _mark_recorded),
    Patch(gradients_util, "_UpdatePendingAndEnqueueReady", _enqueue_in_order),
    Patch(gradients_util, "_MaybeCompile", _name_like_tape),
)


def get_name_scope() -> str:
    """The name scope that is open in the current graph."""
    return str(tf.compat.v1.get_default_graph().get_name_scope())


_record_gradient = execute.record_gradient


def patch_records(note_outputs: Callable[[Sequence[Any]], None]) -> Patch:
    """Call `note_outputs(outputs)` when a tape may record an op, in the name scope that the tape notes."""

    def record_op(op_type: str, inputs: Any, attributes: Any, outputs: Any) -> None:
        _record_gradient(op_type, inputs, attributes, outputs)
        note_outputs(outputs)

    return Patch(execute, "record_gradient", record_op)
