"""The directions that hold most of a symmetric matrix, by LAPACK on the host.

numpy's LAPACK is used in place of TensorFlow's own `eigh` because it takes four fifths of its time on a matrix of
768 x 768 (XLA's takes a hundred times as long), and because it can be asked again in float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[Any]


class Spectrum(NamedTuple):
    """`values` largest first, and the leading vectors, a column each."""

    values: Matrix
    vectors: Matrix

    @property
    def left_out(self) -> float:
        """The share of the matrix's trace that the vectors do not hold; below 1e-6 it is noise in float32."""
        held, whole = self.vectors.shape[1], float(self.values.sum())
        return float(self.values[held:].sum()) / whole if whole > 0 else 0.0


def leading(gram: Matrix, k: int) -> Spectrum:
    """The `k` leading eigenvectors of a Gram matrix, the largest entry of each positive.

    >>> leading(np.diag(np.float32([1, 4])), 1).vectors.tolist()
    [[0.0], [1.0]]
    """
    values, vectors = np.linalg.eigh(gram)
    return Spectrum(values[::-1], with_signs(vectors[:, ::-1][:, :k]))


def with_signs(vectors: Matrix) -> Matrix:
    """The same directions, each with its largest entry positive: a vector and its negative are one to LAPACK.

    >>> with_signs(np.array([[0.6], [-0.8]])).tolist()
    [[-0.6], [0.8]]
    """
    if not vectors.size:
        return vectors
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    return vectors * np.where(largest < 0, -1, 1).astype(vectors.dtype)
