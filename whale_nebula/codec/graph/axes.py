"""The principal axes of what crossed lately, and how they cross themselves.

They are the eigenvectors of a running sum of Gram matrices of rows, each as long as any other: a precision that
follows loses the same share of each. They cross in eight bits a number, and both sides make what came orthonormal
again by the same few products (Newton and Schulz): what rounding turned them by is of no account, for these are the
axes then. Two machines may differ in the last digits, which is what a product of matrices may do anyway.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from whale_nebula.codec.graph.spectrum import Matrix, leading
from whale_nebula.errors import RemoteProtocolError

_LEVELS = 127
_ROUNDS = 6
_NEAR = 1e-4


def gram_of(x: Any, *, most: int = 0) -> Any:
    """The Gram matrix [n, n], float32, of the directions of rows; with `most`, of about so many, evenly taken.

    >>> gram_of(tf.constant([[3.0, 0.0], [0.0, 0.0]])).numpy().tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    if most:
        x = x[:: max(1, x.shape[0] // most)]
    single = tf.cast(x, tf.float32)
    peaked = tf.math.divide_no_nan(single, tf.reduce_max(tf.abs(single), axis=-1, keepdims=True))
    rows = tf.math.divide_no_nan(peaked, tf.norm(peaked, axis=-1, keepdims=True))
    return tf.matmul(rows, rows, transpose_a=True)


def told(gram: Matrix) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """The axes, longest first, in eight bits a number, and the largest number of each.

    >>> numbers, largest = told(np.diag(np.float32([1, 4])))
    >>> numbers.tolist(), largest.tolist()
    ([[0, 127], [127, 0]], [1.0, 1.0])
    """
    whole = bool(np.isfinite(gram).all() and np.trace(gram) > 0)
    vectors = leading(gram.astype(np.float64), len(gram)).vectors if whole else np.eye(len(gram))
    largest = np.abs(vectors).max(axis=0).astype(np.float16)
    return np.rint(vectors / largest * _LEVELS).clip(-_LEVELS, _LEVELS).astype(np.int8), largest


def heard(numbers: npt.NDArray[np.int8], largest: npt.NDArray[np.float16]) -> npt.NDArray[np.float32]:
    """The axes that these are, at right angles and of length one: what either side goes by.

    >>> axes = heard(*told(np.float32([[2, 1], [1, 2]])))
    >>> bool(np.allclose(axes.T @ axes, np.eye(2), atol=1e-6)), bool(np.allclose(np.abs(axes), 0.5**0.5, atol=1e-2))
    (True, True)
    """
    with np.errstate(all="ignore"):
        made = numbers.astype(np.float64) / _LEVELS * largest.astype(np.float64)
        for _ in range(_ROUNDS):
            made = 1.5 * made - 0.5 * made @ (made.T @ made)
        off = np.abs(made.T @ made - np.eye(len(made))).max(initial=0)
    if not off < _NEAR:
        raise RemoteProtocolError("axes came that are not at right angles")
    return made.astype(np.float32)
