"""What contracts about graphs begin with."""

from typing import Any

import tensorflow as tf

VECTOR = tf.TensorSpec([None], tf.float32)


def graph_of(fn: Any, *specs: Any) -> Any:
    """The graph that a function is traced into."""
    return tf.function(fn, autograph=False).get_concrete_function(*specs).graph
