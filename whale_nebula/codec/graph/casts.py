"""Numbers in two bytes. What the computation made infinite stays so; nothing else becomes it for being too large."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from whale_nebula.codec.graph import counter

_UPPER_HALF, _LARGEST = 0xFFFF0000, 0x7F7FFFFF


def to_fp16(x: Any) -> Any:
    """IEEE half precision, to the nearest; what is too large for it becomes the largest, 65504.

    Infinities and NaN stay what they are: whoever scales his loss looks for them. `clamped` counts the rest. Always
    to the nearest: with eleven bits the mean of what rounding does is far below the noise of a gradient.

    >>> to_fp16(tf.constant([1e9, -1e9, 1.0, float("inf"), float("nan")])).numpy().tolist()
    [65504.0, -65504.0, 1.0, inf, nan]
    """
    half = _half(x)
    return tf.cond(tf.reduce_any(tf.math.is_inf(half)), lambda: _held(x), lambda: half)


def clamped(x: Any) -> Any:
    """How many finite numbers half precision would make infinite (an int64 scalar).

    >>> int(clamped(tf.constant([1e9, -65521.0, 65519.0, float("inf")])))
    2
    """
    return tf.math.count_nonzero(tf.math.is_finite(x) & ~tf.math.is_finite(_half(x)))


def to_bf16(x: Any, key: Any = None) -> Any:
    """The upper half of a float32, to the nearest; with a key (uint32[2]) up or down by chance, so that the mean is x.

    >>> to_bf16(tf.constant([1.00390625, 1e30])).numpy().tolist()
    [1.0, 1.0002...e+30]
    """
    single = tf.cast(x, tf.float32)
    return tf.cast(single if key is None else _by_chance(single, key), tf.bfloat16)


def restore(x: Any, dtype: str) -> Any:
    """What crossed in two bytes in its own type; what that cannot hold becomes its largest number.

    >>> restore(to_bf16(tf.constant([65504.0], tf.float16)), "float16").numpy().tolist()
    [65504.0]
    """
    return to_fp16(x) if dtype == "float16" else tf.cast(x, dtype)


def _half(x: Any) -> Any:
    return tf.cast(tf.cast(x, tf.float32), tf.float16)  # a float64 by the same two steps, compiled or not


def _held(x: Any) -> Any:
    """The slower way, gone only where something is too large: within the range, but for what was infinite before."""
    single = tf.cast(x, tf.float32)
    within = tf.clip_by_value(single, tf.float16.min, tf.float16.max)
    return tf.cast(tf.where(tf.math.is_finite(x), within, single), tf.float16)


def _by_chance(single: Any, key: Any) -> Any:
    """Sixteen random bits added below those that stay, carried or not; a finite number stays finite."""
    patterns = tf.bitcast(single, tf.uint32)
    places = tf.reshape(tf.bitcast(tf.range(tf.size(single)), tf.uint32), tf.shape(single))
    drawn = tf.bitwise.right_shift(counter.bits(key, places), tf.constant(16, tf.uint32))
    sign = tf.bitwise.bitwise_and(patterns, tf.constant(0x80000000, tf.uint32))
    size = tf.bitwise.bitwise_xor(patterns, sign)
    moved = tf.minimum(size + drawn, tf.constant(_LARGEST, tf.uint32))
    kept = tf.bitwise.bitwise_and(tf.bitwise.bitwise_or(moved, sign), tf.constant(_UPPER_HALF, tf.uint32))
    return tf.where(tf.math.is_finite(single), tf.bitcast(kept, tf.float32), single)
