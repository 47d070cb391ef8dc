"""What a boundary's codec does to its tensor on the two sides of a link: the precisions that are built."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from whale_nebula.errors import NotYetError


def encode(codec: str, tensor: Any) -> Any:
    """Make a tensor small for the line; what is no floating-point number goes as it is.

    >>> encode("fp16", tf.constant([1e9, 1.0])).numpy().tolist()
    [65504.0, 1.0]
    """
    if codec == "none" or not tensor.dtype.is_floating:
        return tensor
    if codec == "fp16":
        return tf.cast(tf.clip_by_value(tensor, tf.float16.min, tf.float16.max), tf.float16)
    if codec == "bf16":
        return tf.cast(tensor, tf.bfloat16)
    raise NotYetError(f"the codec {codec!r}")


def decode(tensor: Any, dtype: Any) -> Any:
    """Give a tensor back its own element type."""
    return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)
