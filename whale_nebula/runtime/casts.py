"""What a mere cast does to a boundary's tensor on the two sides of a link; it runs inside a trace as well."""

from __future__ import annotations

from typing import Any

from whale_nebula.codec.rounding import restore, to_bf16, to_fp16
from whale_nebula.codec.way import parse_way

_CASTS = {"fp16": to_fp16, "bf16": to_bf16}


def encode(way: str, tensor: Any) -> Any:
    """Make a tensor small for the line; what is no floating-point number goes as it is.

    >>> import tensorflow as tf
    >>> encode("fp16", tf.constant([1e9, 1.0])).numpy().tolist()
    [65504.0, 1.0]
    """
    cast = parse_way(way).cast
    return tensor if cast is None or not tensor.dtype.is_floating else _CASTS[cast](tensor)


def decode(tensor: Any, dtype: Any) -> Any:
    """Give a tensor back its own element type."""
    return tensor if tensor.dtype == dtype else restore(tensor, dtype.name)
