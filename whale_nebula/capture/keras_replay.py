"""Re-enter, node by node, the scopes in which a functional model was built, when its call is traced.

A scope that is open already (entered in a `call`, or around the model's call) has the last word.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from whale_nebula import scopes
from whale_nebula.capture.keras_copies import Frames, built_at, frames_of, stages_of
from whale_nebula.capture.places import BUILT
from whale_nebula.capture.tracing import current
from whale_nebula.tf import private as tf_private

_LOCAL = threading.local()
_run = tf_private.KerasFunction._run_through_graph
_operation_for = tf_private.KerasFunction._get_operation_for_node
_call = tf_private.KerasSequential.call


def find_operation(function: Any, node: Any) -> Any:
    """Keras asks this for each node just before it calls the node's operation."""
    _LOCAL.frames = _frames_of_node(function, node)
    _LOCAL.line = built_at(_tag_call(function, node))
    return _operation_for(function, node)


def _frames_of_node(function: Any, node: Any) -> Frames:
    """A Sequential's layers carry their own scopes; elsewhere the nodes do."""
    return frames_of(_tag_call(function, node))


def _tag_call(function: Any, node: Any) -> Any:
    return node.operation if getattr(_LOCAL, "sequential", None) is function else node


def run_graph(function: Any, inputs: Any, operation_fn: Any = lambda op: op, call_fn: Any = None) -> Any:
    """Stands in for `Function._run_through_graph`: each node runs in the scopes that it was built in."""
    if current() is None or call_fn is not None:
        return _run(function, inputs, operation_fn, call_fn)

    if getattr(_LOCAL, "sequential", None) is not function:
        _tell(function)

    def scoped(operation: Any) -> Callable[..., Any]:
        return _entering(operation_fn(operation), _LOCAL.frames, _LOCAL.line)

    return _run(function, inputs, scoped, None)


def _tell(model: Any) -> None:
    """The step that is traced hears of all the stages of a model before it enters the first."""
    trace = current()
    if trace is not None:
        trace.meets(stages_of(model))


def _entering(operation: Callable[..., Any], frames: Frames, line: str) -> Callable[..., Any]:
    if not frames:
        return operation

    def entered(*args: Any, **kwargs: Any) -> Any:
        with _built_at(line):
            if scopes.stage_of(scopes.open_frames()) is not None:
                return operation(*args, **kwargs)
            with scopes.reenter(frames):
                return operation(*args, **kwargs)

    return entered


def _built_at(line: str) -> contextlib.AbstractContextManager[None]:
    """Let what is traced now bear the line where its node was made."""
    trace, graph = current(), tf.compat.v1.get_default_graph()
    if trace is None or trace.graph is not graph:
        return contextlib.nullcontext()
    return tf_private.stamp_ops(graph, {BUILT: line})


def call_sequential(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `Sequential.call`, whose layers bear the scopes instead of its nodes."""
    _tell(model)
    before = getattr(_LOCAL, "sequential", None)
    _LOCAL.sequential = model._functional
    try:
        return _call(model, *args, **kwargs)
    finally:
        _LOCAL.sequential = before
