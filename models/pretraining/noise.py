"""Random numbers that are a function of a seed, a row's number and a place, and of nothing else.

So a row is hidden and filled in the same way whatever batch, micro-batch or cluster it comes in, and a run that is cut
gives the bits of one that is not.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from whale_nebula.codec import blocks

HIDE, FILL = 1, 2
"""What numbers are drawn for: places to hide, and tokens to put there."""
_LEAST = 2.0**-25


def draw_uniform(seed: int, purpose: int, numbers: Any, count: int) -> Any:
    """`count` numbers in (0, 1) for each row, by the rows' own numbers (int32): (rows, count).

    >>> first = draw_uniform(7, HIDE, tf.constant([3, 4]), 2)
    >>> bool(tf.reduce_all(first[1] == draw_uniform(7, HIDE, tf.constant([4]), 2)[0]))
    True
    """
    base = tf.constant((seed * 0x9E3779B1 + purpose * 0x85EBCA77) % 2**32, tf.uint32)
    key = (base, tf.bitcast(numbers, tf.uint32)[:, None])
    return blocks.uniform(key, tf.bitcast(tf.range(count), tf.uint32)[None, :]) + _LEAST


def draw_gumbel(seed: int, purpose: int, numbers: Any, shape: tuple[int, int]) -> Any:
    """Gumbel noise for each row: (rows, *shape). The largest of scores plus noise is a sample of their softmax."""
    drawn = draw_uniform(seed, purpose, numbers, shape[0] * shape[1])
    return tf.reshape(-tf.math.log(-tf.math.log(drawn)), (-1, *shape))
