"""The papers' SVD(ratio): a matrix as the product of two thin ones, the best there is of their size.

*What the ratio means.* The papers count it in numbers that cross: k left vectors, k right vectors and k singular
values are k(m + n + 1) numbers of m n, and their table (0.30 of the bytes for FP16(SVD(0.6)), 0.09 for 0.2) fits
`k(m + n + 1) / (m n) <= ratio`. To keep the share `ratio` of the *singular values*, as the name suggests, makes
square matrices grow: 307 of 512 at 0.6 are 1.2 times as many numbers as before. `ranks.rank_of` is the rule that
fits, so what crosses always is fewer numbers; what does not shrink is a matrix too small for k = 1. (A block-wise
precision pads short rows. Whether the bytes are fewer too, `codec.fitting` looks.)

*How.* Not by an SVD: the eigenvectors V of the Gram matrix of the shorter side and one product x V give the same
factors at less than a quarter of the cost. The singular values are in `left`, so they do not cross on their own.

*How exact.* In float32 the Gram matrix knows nothing below 1e-7 of the energy. Where less than `FINE` of it would be
left out (an error below 0.3 %: fast decaying spectra, rank-deficient matrices), or where squares overflow or vanish,
it is made again in float64. That takes twice as long in all, and is right down to an error of 1e-6, where
`tf.linalg.svd` in float32 ends too.

The decomposition runs eagerly, on the host: see `spectrum`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.codec.graph.spectrum import Matrix, leading

FINE = 1e-5


def factor(x: Any, k: int) -> tuple[Any, Any]:
    """`(left [m, k], right [n, k])`: the matrix of rank k nearest to `x` [m, n] is their product, see `restore`.

    The factor of the shorter side is orthonormal, the other one has the singular values in it, largest first. What
    is not finite comes out not finite.

    >>> left, right = factor(tf.constant([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]), 1)
    >>> restore(left, right).numpy().round(4).tolist()
    [[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]
    """
    exact = x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
    tall = x.shape[0] >= x.shape[1]
    vectors = tf.constant(_vectors(np.asarray(exact), tall, k), exact.dtype)
    other = tf.matmul(exact, vectors, transpose_a=not tall)
    left, right = (other, vectors) if tall else (vectors, other)
    return tf.cast(left, x.dtype), tf.cast(right, x.dtype)


def restore(left: Any, right: Any) -> Any:
    """The matrix [m, n] that two factors stand for."""
    if left.dtype.size < 4:
        return tf.cast(restore(tf.cast(left, tf.float32), tf.cast(right, tf.float32)), left.dtype)
    return tf.matmul(left, right, transpose_b=True)


def _vectors(x: Matrix, tall: bool, k: int) -> Matrix:
    """Orthonormal vectors of the shorter side: in float32 where that is enough."""
    side = x.shape[1 if tall else 0]
    if not k or not x.size:
        return np.eye(side, k, dtype=x.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        gram = _gram(x, tall)
    if x.dtype != np.float64 and np.isfinite(gram).all():
        found = leading(gram, k)
        if found.left_out > FINE:
            return found.vectors
    peak = float(max(x.max(), -x.min()))
    if not 0 < peak < np.inf:
        return np.eye(side, k, dtype=x.dtype)  # zeros, or not finite: LAPACK is not asked about NaN
    return leading(_gram(x.astype(np.float64) / peak, tall), k).vectors


def _gram(x: Matrix, tall: bool) -> Matrix:
    return x.T @ x if tall else x @ x.T
