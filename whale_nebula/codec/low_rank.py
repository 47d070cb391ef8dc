"""SVD(ratio) of the Nebula-I paper: a matrix as the product of two thin ones, the best approximation of that rank.

*What the ratio means.* The papers count the numbers that are sent: k left vectors, k right vectors and k singular
values are k(m + n + 1) numbers of m n, and their table (0.30 of the bytes for FP16(SVD(0.6)), 0.09 for 0.2) agrees with
`k(m + n + 1) / (m n) <= ratio`. Keeping the share `ratio` of the *singular values*, as the name suggests, would enlarge
square matrices: 307 of 512 at 0.6 are 1.2 times as many numbers as before. `largest_rank` is the rule of the table, so
the result always has fewer numbers, except for a matrix too small for k = 1. (A block-wise precision pads short rows;
`codec.sizes` determines whether the bytes are fewer, too.)

*How.* Not by an SVD: the eigenvectors V of the Gram matrix of the shorter side and one product x V give the same
factors at less than a quarter of the cost. The singular values are in `left`, so they are not sent separately.

*How exact.* In float32 the Gram matrix has no information below 1e-7 of the energy. If less than `LEAST_FLOAT32_SHARE`
of it would be dropped (an error below 0.3 %: fast decaying spectra, rank-deficient matrices), or if squares overflow or
underflow, it is computed again in float64. That takes twice as long in total, and is exact down to an error of 1e-6,
the limit of `tf.linalg.svd` in float32, too.

The decomposition runs eagerly, on the host: see `spectrum`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from whale_nebula.tf import tf

Matrix = npt.NDArray[Any]


class Spectrum(NamedTuple):
    """Eigenvalues (`values`), largest first, and the leading vectors as columns."""

    values: Matrix
    vectors: Matrix

    @property
    def dropped_share(self) -> float:
        """The share of the matrix's trace outside the vectors' span; below 1e-6 it is noise in float32."""
        held, whole = self.vectors.shape[1], float(self.values.sum())
        return float(self.values[held:].sum()) / whole if whole > 0 else 0.0


def leading_vectors(gram: Matrix, k: int) -> Spectrum:
    """The `k` leading eigenvectors of a Gram matrix, the largest entry of each positive.

    >>> leading_vectors(np.diag(np.float32([1, 4])), 1).vectors.tolist()
    [[0.0], [1.0]]
    """
    values, vectors = np.linalg.eigh(gram)
    return Spectrum(values[::-1], fix_signs(vectors[:, ::-1][:, :k]))


def fix_signs(vectors: Matrix) -> Matrix:
    """Make singular vectors unique: negate each whose largest entry is negative.

    >>> fix_signs(np.array([[0.6], [-0.8]])).tolist()
    [[-0.6], [0.8]]
    """
    if not vectors.size:
        return vectors
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    return vectors * np.where(largest < 0, -1, 1).astype(vectors.dtype)


LEAST_FLOAT32_SHARE = 1e-5


def factor(x: Any, k: int) -> tuple[Any, Any]:
    """`(left [m, k], right [n, k])`: the matrix of rank k nearest to `x` [m, n] is their product, see `restore`.

    The factor of the shorter side is orthonormal, the other one contains the singular values, largest first. Non-finite
    input gives non-finite output.

    >>> left, right = factor(tf.constant([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]), 1)
    >>> restore(left, right).numpy().round(4).tolist()
    [[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]
    """
    exact = x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
    tall = x.shape[0] >= x.shape[1]
    vectors = tf.constant(_compute_vectors(np.asarray(exact), tall, k), exact.dtype)
    other = tf.matmul(exact, vectors, transpose_a=not tall)
    left, right = (other, vectors) if tall else (vectors, other)
    return tf.cast(left, x.dtype), tf.cast(right, x.dtype)


def restore(left: Any, right: Any) -> Any:
    """The product [m, n] of two factors."""
    if left.dtype.size < 4:
        return tf.cast(restore(tf.cast(left, tf.float32), tf.cast(right, tf.float32)), left.dtype)
    return tf.matmul(left, right, transpose_b=True)


def _compute_vectors(x: Matrix, tall: bool, k: int) -> Matrix:
    """Orthonormal vectors of the shorter side: in float32 if that is exact enough."""
    side = x.shape[1 if tall else 0]
    if not k or not x.size:
        return np.eye(side, k, dtype=x.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        gram = _multiply_gram(x, tall)
    if x.dtype != np.float64 and np.isfinite(gram).all():
        found = leading_vectors(gram, k)
        if found.dropped_share > LEAST_FLOAT32_SHARE:
            return found.vectors
    peak = float(max(x.max(), -x.min()))
    if not 0 < peak < np.inf:
        return np.eye(side, k, dtype=x.dtype)  # zeros, or not finite: LAPACK must not get NaN
    return leading_vectors(_multiply_gram(x.astype(np.float64) / peak, tall), k).vectors


def _multiply_gram(x: Matrix, tall: bool) -> Matrix:
    return x.T @ x if tall else x @ x.T


Basis = npt.NDArray[np.float16]

DECAY = 0.95
_RIDGE = 1e-6  # of the mean energy of a column: directions with less are kept unchanged


def project(x: Any, q: Any) -> Any:
    """The coordinates [..., r] of the rows of `x` [..., n] on a basis [n, r].

    >>> project(tf.constant([[3.0, 4.0]]), tf.constant([[1.0], [0.0]])).numpy().tolist()
    [[3.0]]
    """
    return _multiply_by_basis(x, q, transpose=False)


def expand(z: Any, q: Any) -> Any:
    """The rows [..., n] that have these coordinates [..., r].

    >>> expand(tf.constant([[3.0]]), tf.constant([[1.0], [0.0]])).numpy().tolist()
    [[3.0, 0.0]]
    """
    return _multiply_by_basis(z, q, transpose=True)


def compute_gram(x: Any, *, rows: int = 0) -> Any:
    """The Gram matrix xᵀx [n, n], float32, of the rows of `x` [m, n]; with `rows`, of about that many rows, evenly
    sampled.

    >>> compute_gram(tf.constant([[1.0, 2.0]])).numpy().tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """
    if rows:
        x = x[:: max(1, x.shape[0] // rows)]
    exact = tf.cast(x, tf.float32)
    return tf.matmul(exact, exact, transpose_a=True)


def decay_and_add(gram: Any, new: Any, decay: float = DECAY) -> Any:
    """The exponentially decayed sum of Gram matrices with a new one added; a non-finite one is omitted.

    >>> decay_and_add(tf.constant([[1.0]]), tf.constant([[2.0]]), decay=0.5).numpy().tolist()
    [[2.5]]
    """
    total = decay * gram + new
    return replace_nonfinite(total, replace_nonfinite(gram, tf.zeros_like(gram)))


def replace_nonfinite(gram: Any, other: Any) -> Any:
    """The matrix, or the other one if it has a non-finite entry.

    >>> replace_nonfinite(tf.constant([[float("nan")]]), tf.constant([[2.0]])).numpy().tolist()
    [[2.0]]
    """
    return tf.where(tf.reduce_all(tf.math.is_finite(gram)), gram, other)


def initial_basis(gram: Matrix, r: int) -> Basis:
    """The basis [n, r] of the largest directions of a Gram matrix.

    >>> initial_basis(np.diag(np.float32([1, 4, 2])), 2).tolist()
    [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    """
    if not _has_energy(gram):
        return np.eye(len(gram), r, dtype=np.float16)
    return leading_vectors(gram.astype(np.float64), r).vectors.astype(np.float16)


def renew_basis(gram: Matrix, last: Basis, steps: int = 2) -> Basis:
    """The basis after some steps of subspace iteration, rotated to be nearest to the last one.

    Directions without energy are unchanged; so is the entire basis, if the matrix is zero or not finite.
    """
    if not _has_energy(gram):
        return last
    exact, old = gram.astype(np.float64), last.astype(np.float64)
    exact /= np.trace(exact) / len(exact)
    q = old
    for _ in range(steps):
        q = np.linalg.qr(exact @ q + _RIDGE * q)[0]
    return _align_basis(q, old).astype(np.float16)


def _align_basis(q: Matrix, old: Matrix) -> Matrix:
    """The basis of the same space that is nearest to the old one."""
    u, _, vt = np.linalg.svd(q.T @ old)
    return q @ (u @ vt)


def _has_energy(gram: Matrix) -> bool:
    return bool(np.isfinite(gram).all() and np.trace(gram) > 0)


def _multiply_by_basis(x: Any, q: Any, *, transpose: bool) -> Any:
    """`x` [..., a] times the basis or its transpose, in float32 at least."""
    exact = x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
    basis = tf.cast(q, exact.dtype)
    size = tf.shape(basis)[0 if transpose else 1]
    rows = tf.reshape(exact, [-1, exact.shape[-1]])
    made = tf.matmul(rows, basis, transpose_b=transpose)
    return tf.cast(tf.reshape(made, tf.concat([tf.shape(x)[:-1], [size]], 0)), x.dtype)


def largest_rank(m: int, n: int, ratio: float) -> int:
    """The largest rank k of an m x n matrix with k(m + n + 1) / (m n) <= ratio; 0 if there is none.

    >>> largest_rank(8192, 768, 0.6), largest_rank(512, 512, 0.6), largest_rank(4, 1, 1.0), largest_rank(0, 768, 0.6)
    (421, 153, 0, 0)
    """
    if m < 1 or n < 1:
        return 0
    k = int(ratio * m * n / (m + n + 1)) + 1
    while k * (m + n + 1) / (m * n) > ratio:
        k -= 1
    return max(k, 0)


def kept_count(n: int, fraction: float) -> int:
    """The number of entries of a row that are kept, out of `n`.

    >>> kept_count(768, 0.1), kept_count(8, 0.01), kept_count(0, 0.5)
    (77, 1, 0)
    """
    return min(n, max(1, round(fraction * n)))
