"""Tensors that a function gets as their only owner, so that TensorFlow writes results into their memory. The caller of
a tf.function holds its arguments until it returns, so an update that reads a gradient needs memory for an additional
temporary tensor of the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Handover:
    """A variable through which a tensor is passed to a function; it is empty before and after.

    >>> handover = Handover(tf.float32)
    >>> handover.put(tf.constant([1.0, 2.0]))
    >>> tf.function(lambda: 2 * handover.take([2]))().numpy().tolist()
    [2.0, 4.0]
    >>> handover.variable.shape, len(handover.variable.numpy())
    (TensorShape(None), 0)
    """

    def __init__(self, dtype: Any) -> None:
        self.variable = tf.Variable(tf.zeros([0], dtype), trainable=False, shape=tf.TensorShape(None))

    def put(self, tensor: Any) -> None:
        """Hold a tensor until the function takes it; the caller drops its own references."""
        tf.raw_ops.AssignVariableOp(resource=self.variable.handle, value=tensor)

    def take(self, shape: Sequence[int | None]) -> Any:
        """The tensor, in a function that is being traced; from there on only the function holds it."""
        tensor = self.variable.read_value()
        with tf.control_dependencies([tensor]):
            empty = tf.raw_ops.AssignVariableOp(resource=self.variable.handle, value=tf.zeros([0], tensor.dtype))
        with tf.control_dependencies([empty]):
            return tf.ensure_shape(tensor, shape)
