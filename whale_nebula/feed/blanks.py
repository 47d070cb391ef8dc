"""What stands for a row that is not here: values that show where something computes with them after all."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def blank(spec: tf.TensorSpec) -> tf.Tensor:
    """A tensor of a form, without a value: NaN, the integer that is farthest from others, "" or False. Where the form
    leaves a size open, there is nothing.

    >>> blank(tf.TensorSpec([2], tf.float32)).numpy().tolist(), int(blank(tf.TensorSpec([], tf.int32)))
    ([nan, nan], -2147483648)
    >>> blank(tf.TensorSpec([None, 3], tf.string)).shape.as_list()
    [0, 3]
    """
    shape = [size or 0 for size in spec.shape] if spec.shape.rank else []
    return tf.fill(shape, tf.constant(_value(spec.dtype), spec.dtype))


def can_be_blank(spec: Any) -> bool:
    """Whether there is such a tensor of a form.

    >>> can_be_blank(tf.TensorSpec([], tf.bool)), can_be_blank(tf.RaggedTensorSpec([None, None], tf.int32))
    (True, False)
    """
    if not isinstance(spec, tf.TensorSpec):
        return False
    dtype = spec.dtype
    return bool(dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype in (tf.bool, tf.string))


def _value(dtype: tf.DType) -> Any:
    if dtype.is_floating or dtype.is_complex:
        return float("nan")
    if dtype.is_integer:
        return dtype.max if dtype.is_unsigned else dtype.min
    return "" if dtype == tf.string else False
