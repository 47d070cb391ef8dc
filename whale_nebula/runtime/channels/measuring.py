"""How much a codec loses: now and then what crosses is made whole again at the side that sent it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from whale_nebula.codec import rounding as casts

EVERY = 50
_BEYOND = 65520.0  # what half precision rounds to infinity, and all above


def due(step: int) -> bool:
    """Whether the error is measured in a step, counted from 1.

    >>> [step for step in range(1, 102) if due(step)]
    [1, 2, 4, 8, 16, 32, 50, 64, 100]
    """
    return step > 0 and (step % EVERY == 0 or step & (step - 1) == 0)


def distance(x: Any, again: Any) -> float:
    """The norm of the difference by the norm of the tensor; 0 for a tensor of zeros that stayed so."""
    wide = tf.cast(x, tf.float32)
    off, size = tf.norm(wide - tf.cast(again, tf.float32)), tf.norm(wide)
    return float(off) if float(size) == 0 else float(off / size)


def clamped(x: Any) -> int:
    """How many numbers of a tensor half precision has to make smaller.

    Nearly always none: so its largest and its least are looked at, and counted is where they do not fit.

    >>> clamped(tf.constant([1e9, -1e9, 1.0, float("inf")])), clamped(tf.constant([65504.0])), clamped(tf.zeros([0]))
    (2, 0, 0)
    """
    if x.dtype.size < 4 or not x.shape.num_elements():
        return 0 if x.dtype != tf.bfloat16 else int(casts.clamped(x))
    fits = float(tf.reduce_max(x)) < _BEYOND and float(tf.reduce_min(x)) > -_BEYOND
    return 0 if fits else int(casts.clamped(x))
