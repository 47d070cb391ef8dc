"""Answer requests for gradients while a step is being traced; elsewhere they are TensorFlow's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    """Stands in for `tf.GradientTape.gradient` in the thread that traces, and passes through elsewhere."""
    trace = current()
    if trace is not None and trace.plain:
        return _unseen(trace, lambda: _original(tape, target, sources, output_gradients, unconnected_gradients))
    if trace is None or not _ours(trace, tape):
        if trace is not None and not trace.busy:
            check_nested(trace.bottlenecks, tf.nest.flatten(target), list(map(_plain, tf.nest.flatten(sources))))
        return _original(tape, target, sources, output_gradients, unconnected_gradients)
    trace.busy = True
    try:
        return _request(trace, tape, target, sources, output_gradients, unconnected_gradients)
    finally:
        trace.busy = False


def _ours(trace: Tracing, tape: tf.GradientTape) -> bool:
    """Not ours: our own differentiation, a loop's body or a vectorized one, a tape that another watches, a bad call."""
    if trace.busy or tf.compat.v1.get_default_graph() is not trace.graph or not tf_private.tape_open(tape):
        return False
    tf_private.tape_stop(tape)
    return not tf_private.tape_records()


def _unseen(trace: Tracing, ask: Callable[[], Any]) -> Any:
    """The answer of a tape in a step that runs uncut: what is made of it belongs to no stage."""
    before, trace.busy = trace.busy, True
    try:
        found = ask()
    finally:
        trace.busy = before
    parts = tf.nest.flatten(found, expand_composites=True)
    trace.bottlenecks.homes.update((part.ref(), None) for part in parts if part is not None)
    return found


def _request(
    trace: Tracing, tape: tf.GradientTape, target: Any, sources: Any, output_gradients: Any, unconnected: Any
) -> Any:
    targets = [tf.convert_to_tensor(t) for t in tf.nest.flatten(target) if t is not None]
    flat = [_plain(source) for source in tf.nest.flatten(sources)]
    seeds = [None] * len(targets) if output_gradients is None else tf.nest.flatten(output_gradients)
    found = differentiate(trace, tape, targets, flat, seeds)
    if getattr(unconnected, "value", unconnected) == "zero":
        pairs = zip(found, flat, strict=True)
        found = [_zeros(source) if gradient is None else gradient for gradient, source in pairs]
    tf_private.tape_finish(tape)
    return tf.nest.pack_sequence_as(sources, found)


def _zeros(source: Any) -> Any:
    known = source.shape.is_fully_defined()
    return tf.zeros(source.shape, source.dtype) if known else tf.zeros_like(source)


def _plain(source: Any) -> Any:
    """A Keras variable stands for the tf.Variable inside it."""
    return getattr(source, "value", source) if not isinstance(source, (tf.Tensor, tf.Variable)) else source


def vectorize_plainly(*args: Any, **kwargs: Any) -> Any:
    """Stands in for TensorFlow's vectorizer: what a tape is asked in a body (a Jacobian's, a map's) is part of it."""
    trace = current()
    if trace is None:
        return _original_vectorized(*args, **kwargs)
    before, trace.busy, trace.vectorizing = (trace.busy, trace.vectorizing), True, True
    try:
        return _original_vectorized(*args, **kwargs)
    finally:
        trace.busy, trace.vectorizing = before


def enter_tape(tape: tf.GradientTape) -> tf.GradientTape:
    """Stands in for `tf.GradientTape.__enter__`: the tapes of a trace are known."""
    trace = current()
    if trace is not None:
        trace.tapes.append(tape)
    return _original_enter(tape)


def note_mask(tensor: Any, mask: Any) -> None:
    """Keras says which rows of a tensor count."""
    trace = current()
    if trace is not None:
        trace.masks.append((tensor, mask))


def answer_gradients(targets: Any, sources: Any, seeds: Any, stops: Any, unconnected: Any) -> list[Any] | None:
    """The gradients, or None where TensorFlow is to find them: in a body, or while a tape records."""
    trace = current()
    if trace is None or trace.busy or trace.plain:
        return None
    if tf_private.tape_records():
        check_nested(trace.bottlenecks, _as_list(targets), _as_list(sources))
        return None
    ends = [tf.convert_to_tensor(target) for target in _as_list(targets)]
    _check_first_order(trace, ends)
    if tf.compat.v1.get_default_graph() is not trace.graph:
        return None
    trace.busy = True
    try:
        return _answer(trace, ends, _as_list(sources), seeds, stops, unconnected)
    finally:
        trace.busy = False


def _answer(
    trace: Tracing, ends: Sequence[Any], sources: Sequence[Any], seeds: Any, stops: Any, unconnected: Any
) -> list[Any]:
    starts = [None] * len(ends) if seeds is None else _as_list(seeds)
    found = differentiate(trace, None, ends, sources, starts, stops=[] if stops is None else _as_list(stops))
    if getattr(unconnected, "value", unconnected) == "zero":
        pairs = zip(found, sources, strict=True)
        return [tf.zeros_like(source) if gradient is None else gradient for gradient, source in pairs]
    return found


def _as_list(given: Any) -> list[Any]:
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


_QUESTIONS = ("gradient", "jacobian", "batch_jacobian")


def tell_later(tapes: Iterable[Any]) -> None:
    """The trace has ended: let those of its tapes that can still be asked say why there is no answer."""
    for tape in tapes:
        for question in _QUESTIONS if tf_private.tape_open(tape) else ():
            setattr(tape, question, partial(_ask_tape, tape, question))


def _ask_tape(tape: Any, question: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return getattr(tf.GradientTape, question)(tape, *args, **kwargs)
    except (TypeError, ValueError) as error:
        if "out of scope" not in str(error):
            raise
        raise _late() from error


def _late() -> GradientError:
    return GradientError(
        "a tape of a step is asked after the step",
        where=str(script_site()),
        why="it has seen the tensors of the trace, which have no values outside of it",
        mend="ask inside the step, and return the answer: return loss, tape.gradient(loss, variables)",
    )
