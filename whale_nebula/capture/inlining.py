"""Inline `tf.function`s called by a step, so that scopes inside them apply to the step.

TensorFlow would trace it into a graph of its own, which runs as one op, and no boundary could lie inside it. Some
stay calls: what XLA compiles, what names an implementation of its own, and what a loop's body or a branch calls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from whale_nebula.capture.tracing import Tracing, current
from whale_nebula.tf import private as tf_private

_call = tf_private.PolymorphicFunction.__call__


@functools.wraps(_call)  # AutoGraph goes by its module: it calls TensorFlow's own objects as they are
def call_inlined(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the call of a tf.function: run its body in the trace, where that means the same."""
    trace = current()
    if trace is None or trace.busy or tf.compat.v1.get_default_graph() is not trace.graph:
        return _call(function, *args, **kwargs)
    if tf_private.compiled_by_xla(function):
        with _forbid_scopes_in_xla(trace):
            return _call(function, *args, **kwargs)
    if not tf_private.can_inline(function):
        return _call(function, *args, **kwargs)
    return tf_private.run_inline(function, args, kwargs)


@contextlib.contextmanager
def _forbid_scopes_in_xla(trace: Tracing) -> Iterator[None]:
    """Around the call of a function that XLA compiles: a scope inside it says so."""
    before, trace.compiled = trace.compiled, True
    try:
        yield
    finally:
        trace.compiled = before
