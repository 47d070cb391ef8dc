"""A basis that both sides hold: `r` numbers for each row cross, and a gradient just as small.

`expand(project(x))` is x q qᵀ, a linear map that is its own transpose: its gradient g q qᵀ crosses as
`project(g)` and is made whole by `expand`, exactly.

The basis is that of the largest directions of what crossed lately: of a running sum of Gram matrices. It is renewed
now and then by steps of subspace iteration, and turned towards the last one (orthogonal Procrustes), so that the
numbers that cross keep their meaning. It is rounded to float16, as it is sent: both sides use the same. What is
orthonormal before, is so up to 1e-3 after, which costs nothing that could be measured.

`gram_of`, `project` and `expand` are for the device, `first` and `renewed` run on the host: these are small matrices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from whale_nebula.codec.graph.spectrum import Matrix, leading

Basis = npt.NDArray[np.float16]

DECAY = 0.95
_RIDGE = 1e-6  # of the mean energy of a column: what has less than that is left as it is


def project(x: Any, q: Any) -> Any:
    """The coordinates [..., r] of the rows of `x` [..., n] on a basis [n, r].

    >>> project(tf.constant([[3.0, 4.0]]), tf.constant([[1.0], [0.0]])).numpy().tolist()
    [[3.0]]
    """
    return _times(x, q, transpose=False)


def expand(z: Any, q: Any) -> Any:
    """The rows [..., n] that have these coordinates [..., r].

    >>> expand(tf.constant([[3.0]]), tf.constant([[1.0], [0.0]])).numpy().tolist()
    [[3.0, 0.0]]
    """
    return _times(z, q, transpose=True)


def gram_of(x: Any, *, rows: int = 0) -> Any:
    """The Gram matrix xᵀx [n, n], float32, of the rows of `x` [m, n]; with `rows`, of about so many, evenly taken.

    >>> gram_of(tf.constant([[1.0, 2.0]])).numpy().tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """
    if rows:
        x = x[:: max(1, x.shape[0] // rows)]
    exact = tf.cast(x, tf.float32)
    return tf.matmul(exact, exact, transpose_a=True)


def running(gram: Any, new: Any, decay: float = DECAY) -> Any:
    """The sum of what was, by and by forgotten, and what is new; something that is not finite does not enter.

    >>> running(tf.constant([[1.0]]), tf.constant([[2.0]]), decay=0.5).numpy().tolist()
    [[2.5]]
    """
    total = decay * gram + new
    return finite_or(total, finite_or(gram, tf.zeros_like(gram)))


def finite_or(gram: Any, other: Any) -> Any:
    """The matrix, or the other one where anything in it is not finite.

    >>> finite_or(tf.constant([[float("nan")]]), tf.constant([[2.0]])).numpy().tolist()
    [[2.0]]
    """
    return tf.where(tf.reduce_all(tf.math.is_finite(gram)), gram, other)


def first(gram: Matrix, r: int) -> Basis:
    """The basis [n, r] of the largest directions of a Gram matrix.

    >>> first(np.diag(np.float32([1, 4, 2])), 2).tolist()
    [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    """
    if not _usable(gram):
        return np.eye(len(gram), r, dtype=np.float16)
    return leading(gram.astype(np.float64), r).vectors.astype(np.float16)


def renewed(gram: Matrix, last: Basis, steps: int = 2) -> Basis:
    """The basis after some steps of subspace iteration, turned so that it is as near to the last one as it can be.

    Directions without energy stay as they are; so does all of it, if the matrix is zero or not finite.
    """
    if not _usable(gram):
        return last
    exact, old = gram.astype(np.float64), last.astype(np.float64)
    exact /= np.trace(exact) / len(exact)
    q = old
    for _ in range(steps):
        q = np.linalg.qr(exact @ q + _RIDGE * q)[0]
    return _towards(q, old).astype(np.float16)


def _towards(q: Matrix, old: Matrix) -> Matrix:
    """The basis of the same space that is nearest to the old one."""
    u, _, vt = np.linalg.svd(q.T @ old)
    return q @ (u @ vt)


def _usable(gram: Matrix) -> bool:
    return bool(np.isfinite(gram).all() and np.trace(gram) > 0)


def _times(x: Any, q: Any, *, transpose: bool) -> Any:
    """`x` [..., a] times the basis or its transpose, in float32 at least."""
    exact = x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
    basis = tf.cast(q, exact.dtype)
    size = tf.shape(basis)[0 if transpose else 1]
    rows = tf.reshape(exact, [-1, exact.shape[-1]])
    made = tf.matmul(rows, basis, transpose_b=transpose)
    return tf.cast(tf.reshape(made, tf.concat([tf.shape(x)[:-1], [size]], 0)), x.dtype)
