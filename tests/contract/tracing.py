"""Helpers of contract tests: traced graphs, and recorded calls of attributes of TensorFlow and Keras."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

VECTOR = tf.TensorSpec([None], tf.float32)


def trace_graph(fn: Any, *specs: Any) -> Any:
    """The graph that a function is traced into."""
    return tf.function(fn, autograph=False).get_concrete_function(*specs).graph


@contextlib.contextmanager
def record_calls(owner: Any, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """Replace a function of a class or module by one that notes the arguments of its calls, and calls it."""
    original, calls = getattr(owner, name), list[tuple[Any, ...]]()

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append((*args, tf.compat.v1.get_default_graph()))
        return original(*args, **kwargs)

    setattr(owner, name, record)
    try:
        yield calls
    finally:
        setattr(owner, name, original)
