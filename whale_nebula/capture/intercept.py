"""Compute requested gradients while a step is traced; elsewhere TensorFlow computes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from whale_nebula.capture.differentiate import differentiate
from whale_nebula.capture.projection import check_nested
from whale_nebula.capture.tracing import Tracing, current
from whale_nebula.errors import GradientError
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private

_original = tf.GradientTape.gradient
_original_enter = tf.GradientTape.__enter__
_original_vectorized = tf_private.parallel_for._pfor_impl


def answer_tape(
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """Replacement of `tf.GradientTape.gradient` in the thread that traces; calls the original elsewhere."""
    trace = current()
    if trace is not None and trace.plain:
        with trace.set_flags(busy=True):
            found = _original(tape, target, sources, output_gradients, unconnected_gradients)
        # ops that use it belong to no stage
        parts = tf.nest.flatten(found, expand_composites=True)
        trace.bottlenecks.homes.update((part.ref(), None) for part in parts if part is not None)
        return found
    flat = [_unwrap_variable(source) for source in tf.nest.flatten(sources)]
    if trace is None or not _is_outermost(trace, tape):
        if trace is not None and not trace.flags.busy:
            check_nested(trace.bottlenecks, tf.nest.flatten(target), flat)
        return _original(tape, target, sources, output_gradients, unconnected_gradients)
    targets = [t for t in tf.nest.flatten(target) if t is not None]
    seeds = None if output_gradients is None else tf.nest.flatten(output_gradients)
    found = _answer(trace, tape, targets, flat, seeds, (), unconnected_gradients)
    tf_private.tape_finish(tape)
    return tf.nest.pack_sequence_as(sources, found)


def answer_gradients(targets: Any, sources: Any, seeds: Any, stops: Any, unconnected: Any) -> list[Any] | None:
    """The gradients of a request; None if TensorFlow should compute them: in a function's body, or
    while a tape records.
    """
    trace = current()
    if trace is None or trace.flags.busy or trace.plain:
        return None
    if tf_private.tape_records():
        check_nested(trace.bottlenecks, _make_list(targets), _make_list(sources))
        return None
    ends = [tf.convert_to_tensor(target) for target in _make_list(targets)]
    _check_first_order(trace, ends)
    if tf.compat.v1.get_default_graph() is not trace.graph:
        return None
    starts = None if seeds is None else _make_list(seeds)
    return _answer(
        trace, None, ends, _make_list(sources), starts, [] if stops is None else _make_list(stops), unconnected
    )


def _answer(
    trace: Tracing,
    tape: tf.GradientTape | None,
    targets: Sequence[Any],
    sources: Sequence[Any],
    seeds: Sequence[Any] | None,
    stops: Sequence[Any],
    unconnected: Any,
) -> list[Any]:
    with trace.set_flags(busy=True):
        ends = [tf.convert_to_tensor(target) for target in targets]
        starts = [None] * len(ends) if seeds is None else seeds
        found = differentiate(trace, tape, ends, sources, starts, stops)
        if getattr(unconnected, "value", unconnected) == "zero":
            pairs = zip(found, sources, strict=True)
            found = [tf.zeros_like(source) if gradient is None else gradient for gradient, source in pairs]
    return found


def _is_outermost(trace: Tracing, tape: tf.GradientTape) -> bool:
    """Whether a request is outermost, not in our own differentiation, a body, another tape, or an invalid call."""
    if trace.flags.busy or tf.compat.v1.get_default_graph() is not trace.graph or not tf_private.tape_open(tape):
        return False
    tf_private.tape_stop(tape)
    return not tf_private.tape_records()


def _unwrap_variable(source: Any) -> Any:
    """The tf.Variable inside a Keras variable; anything else unchanged."""
    return getattr(source, "value", source) if not isinstance(source, (tf.Tensor, tf.Variable)) else source


def vectorize_plainly(*args: Any, **kwargs: Any) -> Any:
    """Replacement of TensorFlow's vectorizer: gradients requested inside a body (of a Jacobian or a map) are computed
    by TensorFlow.
    """
    trace = current()
    if trace is None:
        return _original_vectorized(*args, **kwargs)
    with trace.set_flags(busy=True, vectorizing=True):
        return _original_vectorized(*args, **kwargs)


def enter_tape(tape: tf.GradientTape) -> tf.GradientTape:
    """Replacement of `tf.GradientTape.__enter__` that records the tapes of a trace."""
    trace = current()
    if trace is not None:
        trace.tapes.append(tape)
    return _original_enter(tape)


def note_mask(tensor: Any, mask: Any) -> None:
    """Record the Keras mask of a tensor, which marks the rows that count."""
    trace = current()
    if trace is not None:
        trace.masks.append((tensor, mask))


def _make_list(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _check_first_order(trace: Tracing, ends: Sequence[Any]) -> None:
    """Refuse the gradient of a tensor that depends on a gradient, unless by `tf.stop_gradient`."""
    held = {tensor.op for request in trace.requests for _, tensors in request.holders for tensor in tensors}
    stack, seen = [tensor.op for tensor in ends], set[Any]()
    while stack and held:
        op = stack.pop()
        if op in held:
            raise GradientError(
                "tf.gradients is asked for the gradient of something that a gradient went into",
                where=str(script_site()),
                why="a plan knows the first gradient only once all stages have run backward",
                mend="with tf.GradientTape() as outer: around the forward and the first tf.gradients, then "
                "outer.gradient(...); or tf.stop_gradient(...) around the first gradient, if it is meant as a constant",
            )
        if op not in seen and op.type != "StopGradient":
            seen.add(op)
            # a placeholder of a body may be a capture of the outer graph
            captures = getattr(op.graph, "captures", ()) if op.type == "Placeholder" else ()
            outside = [given for given, inner in captures if inner.op is op and hasattr(given, "op")]
            stack.extend(tensor.op for tensor in [*op.inputs, *outside])


def explain_late_requests(tapes: Iterable[Any]) -> None:
    """At the end of the trace, make later requests to tapes that are still alive raise an explanatory error."""
    for tape in tapes:
        for question in ("gradient", "jacobian", "batch_jacobian") if tf_private.tape_open(tape) else ():
            setattr(tape, question, partial(_ask_tape, tape, question))


def _ask_tape(tape: Any, question: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return getattr(tf.GradientTape, question)(tape, *args, **kwargs)
    except (TypeError, ValueError) as error:
        if "out of scope" not in str(error):
            raise
        raise GradientError(
            "a tape of a step is asked after the step",
            where=str(script_site()),
            why="it has seen the tensors of the trace, which have no values outside of it",
            mend="ask inside the step, and return the answer: return loss, tape.gradient(loss, variables)",
        ) from error
