"""Rounding to two-byte floats: infinities are preserved, and large finite numbers are clamped, not made infinite."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from whale_nebula.tf.lazy import tf

_GOLDEN = 0x9E3779B9


def bits(key: Any, places: Any) -> Any:
    """32 random bits (uint32) for each of these places (uint32); the key is a uint32[2].

    >>> bits(tf.constant([1, 2], tf.uint32), tf.constant([0, 1, 2], tf.uint32)).numpy().tolist()
    [3154396438, 1645042667, 2632225220]
    """
    first = mix(key[0] + tf.constant(_GOLDEN, tf.uint32))
    second = mix(tf.bitwise.bitwise_xor(first, key[1]))
    first = mix(first + second)
    return mix(mix(tf.bitwise.bitwise_xor(places, first)) + second)


def uniform(key: Any, places: Any) -> Any:
    """A number in [0, 1) for each place: the upper 24 bits, which float32 holds exactly.

    >>> float(uniform(tf.constant([1, 2], tf.uint32), tf.constant(0, tf.uint32)))
    0.7344...
    """
    upper = tf.bitwise.right_shift(bits(key, places), tf.constant(8, tf.uint32))
    return tf.cast(tf.bitcast(upper, tf.int32), tf.float32) * 2.0**-24


def mix(x: Any) -> Any:
    """A 32-bit number whose every bit hangs on every bit of the one given; no two give the same."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        x = _fold(x, shift) * tf.constant(factor, tf.uint32)
    return _fold(x, 15)


def _fold(x: Any, shift: int) -> Any:
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(shift, tf.uint32)))


_UPPER_HALF, _LARGEST = 0xFFFF0000, 0x7F7FFFFF


def to_fp16(x: Any) -> Any:
    """IEEE half precision, to the nearest; what is too large for it becomes the largest, 65504.

    Infinities and NaN stay what they are: whoever scales his loss looks for them. `clamped` counts the rest. Always
    to the nearest: with eleven bits the mean of what rounding does is far below the noise of a gradient.

    >>> to_fp16(tf.constant([1e9, -1e9, 1.0, float("inf"), float("nan")])).numpy().tolist()
    [65504.0, -65504.0, 1.0, inf, nan]
    """
    half = _half(x)
    return tf.cond(tf.reduce_any(tf.math.is_inf(half)), lambda: _clamp(x), lambda: half)


def count_overflows(x: Any) -> Any:
    """How many finite numbers half precision would make infinite (an int64 scalar).

    >>> int(count_overflows(tf.constant([1e9, -65521.0, 65519.0, float("inf")])))
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


def _clamp(x: Any) -> Any:
    """The slower way, gone only where something is too large: within the range, but for what was infinite before."""
    single = tf.cast(x, tf.float32)
    within = tf.clip_by_value(single, tf.float16.min, tf.float16.max)
    return tf.cast(tf.where(tf.math.is_finite(x), within, single), tf.float16)


def _by_chance(single: Any, key: Any) -> Any:
    """Sixteen random bits added below those that stay, carried or not; a finite number stays finite."""
    patterns = tf.bitcast(single, tf.uint32)
    places = tf.reshape(tf.bitcast(tf.range(tf.size(single)), tf.uint32), tf.shape(single))
    drawn = tf.bitwise.right_shift(bits(key, places), tf.constant(16, tf.uint32))
    sign = tf.bitwise.bitwise_and(patterns, tf.constant(0x80000000, tf.uint32))
    size = tf.bitwise.bitwise_xor(patterns, sign)
    moved = tf.minimum(size + drawn, tf.constant(_LARGEST, tf.uint32))
    kept = tf.bitwise.bitwise_and(tf.bitwise.bitwise_or(moved, sign), tf.constant(_UPPER_HALF, tf.uint32))
    return tf.where(tf.math.is_finite(single), tf.bitcast(kept, tf.float32), single)


def apart(pairs: npt.NDArray[Any], columns: int) -> npt.NDArray[np.int8]:
    """The integers of rows of so many columns: the left half of a row lies in the lower bits, the right in the upper.

    >>> apart(np.array([[0x9F, 0x01]], np.uint8), 3).tolist()
    [[7, -7, 1]]
    """
    left, right = pairs & 15, pairs >> 4
    single = np.concatenate([left, right[:, : columns - left.shape[1]]], axis=1).astype(np.int8)
    return single - np.int8(8)
