"""Random bits without a state: each is a hash of a key and of a place, so that both are all it takes to draw it again.

TensorFlow's own generators cost several times what quantising costs, and promise no bits across devices. Here all
is arithmetic on 32-bit integers: the same key gives the same bits on every machine, in any order, compiled or not.

The finaliser is one of Wellons' best found with two multiplications (bias 0.107 of 2^-32 a bit). One round would
make the streams of two keys the same numbers in another order; between two rounds the key comes in again.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

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
