"""The principal axes of what crossed lately, and how they cross themselves.

They are the eigenvectors of a running sum of Gram matrices of rows, each as long as any other: a precision that
follows loses the same share of each. They cross in eight bits a number, and both sides make what came orthonormal
again by the same products (Newton and Schulz): what rounding turned them by is of no account, for these are the
axes then. Two machines may differ in the last digits, which is what a product of matrices may do anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from whale_nebula.codec.graph import basis
from whale_nebula.codec.graph.spectrum import Matrix, leading
from whale_nebula.errors import RemoteProtocolError

Numbers = npt.NDArray[np.int8]
Largest = npt.NDArray[np.float16]
Axes = npt.NDArray[np.float32]

_LEVELS = 127
_NEAR, _ROUNDS, _POWERS = 1e-7, 24, 4


class Made(NamedTuple):
    """Axes, and what is told of them: in eight bits a number, and the largest number of each."""

    axes: Axes
    numbers: Numbers
    largest: Largest


def gram_of(x: Any, *, most: int = 0) -> Any:
    """The Gram matrix [n, n], float32, of the directions of rows; with `most`, of about so many, evenly taken. It is
    zero where something in it would not be finite.

    >>> gram_of(tf.constant([[3.0, 0.0], [0.0, 0.0]])).numpy().tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    if most:
        x = x[:: -(-x.shape[0] // most) or 1]
    single = tf.cast(x, tf.float32)
    peaked = tf.math.divide_no_nan(single, tf.reduce_max(tf.abs(single), axis=-1, keepdims=True))
    rows = tf.math.divide_no_nan(peaked, tf.norm(peaked, axis=-1, keepdims=True))
    gram = basis.gram_of(rows)
    return basis.finite_or(gram, tf.zeros_like(gram))


def made(gram: Matrix) -> Made:
    """The axes, longest first. Where there is nothing to go by, or where eight bits would not hold them, they are those
    of the numbers as they are.

    >>> axes, numbers, largest = made(np.diag(np.float32([1, 4])))
    >>> numbers.tolist(), largest.tolist()
    ([[0, 127], [127, 0]], [1.0, 1.0])
    """
    plain = np.eye(len(gram))
    told = _rounded(leading(gram.astype(np.float64), len(gram)).vectors if np.trace(gram) > 0 else plain)
    axes = _upright(*told)
    if axes is None:
        told = _rounded(plain)
        axes = heard(*told)
    return Made(axes, *told)


def heard(numbers: Numbers, largest: Largest) -> Axes:
    """The axes that these are, at right angles and of length one: what either side goes by.

    >>> axes = heard(*made(np.float32([[2, 1], [1, 2]]))[1:])
    >>> bool(np.allclose(axes.T @ axes, np.eye(2), atol=1e-6)), bool(np.allclose(np.abs(axes), 0.5**0.5, atol=1e-2))
    (True, True)
    """
    axes = _upright(numbers, largest)
    if axes is None:
        raise RemoteProtocolError("axes came that are not at right angles")
    return axes


def _rounded(vectors: Matrix) -> tuple[Numbers, Largest]:
    largest = np.abs(vectors).max(axis=0).astype(np.float16)
    return np.rint(vectors / largest * _LEVELS).clip(-_LEVELS, _LEVELS).astype(np.int8), largest


def _upright(numbers: Numbers, largest: Largest) -> Axes | None:
    """The orthonormal matrix that is nearest; None where none is near."""
    made = numbers.astype(np.float64) / _LEVELS * largest.astype(np.float64)
    lengths = np.square(made).sum(axis=0) if np.isfinite(made).all() else np.zeros(1)
    if not made.size or lengths.min() < 0.25 or lengths.max() > 4:
        return None
    made /= _stretch(made)
    for _ in range(_ROUNDS):
        product = made.T @ made
        if np.abs(product - np.eye(len(made))).max() < _NEAR:
            return made.astype(np.float32)
        made = 1.5 * made - 0.5 * made @ product
    return None


def _stretch(matrix: Matrix) -> float:
    """How much it makes the vector longer that it makes longest, nearly, but 1 at least: so that rounds converge."""
    vector = np.ones(len(matrix)) + np.arange(len(matrix)) % 7
    for _ in range(_POWERS):
        vector = matrix.T @ (matrix @ (vector / np.linalg.norm(vector)))
    return max(1.0, 1.05 * float(np.sqrt(np.linalg.norm(vector))))
