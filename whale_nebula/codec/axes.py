"""A structure that rotates each row to the principal axes of its tensor, so that a coded precision needs fewer bits.

The rows of a model's tensors have most of their variance in few directions, but none may be dropped. On the principal
axes few numbers of a row are large and most are small, so that an entropy-coded precision (`coded`) needs fewer bits.
The error is the same in all directions, as it is without axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from whale_nebula.codec import low_rank
from whale_nebula.codec.blocks import rows_and_columns
from whale_nebula.codec.low_rank import Matrix, leading_vectors
from whale_nebula.codec.objects import COPY_SECONDS, EIGEN_SECONDS, FLOPS, Cost, Reduced, Structure, gram_seconds
from whale_nebula.codec.packing import Dims, Part
from whale_nebula.codec.structures import RENEWAL_STEPS, SAMPLED_ROWS
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.tf import tf

_ORTHONORMALIZING_STEPS = 12  # iterations that make axes orthonormal again
_MAX_COLUMNS_PER_ROW = 3  # with more columns the axes themselves cost more bytes than they save


class Held(NamedTuple):
    """State of a basis: axes [n, n] as columns and, on the encoding side, the running Gram matrix, the step in which
    the axes were computed, and whether there was any data then.
    """

    q: Any = None
    gram: Any = None
    step: int = 0
    found: bool = False


@dataclass(frozen=True)
class Axes(Structure):
    """Rotation of each row onto principal axes that both sides hold, computed from recently sent tensors, by descending
    variance. The gradient has axes of its own.

    >>> from whale_nebula.codec import Coded
    >>> str(Axes() >> Coded(2.3)), Axes().numbers((64, 128)), Axes().numbers((8, 128))
    ('axes >> coded(2.3)', ((64, 128),), None)
    """

    name = "axes"
    keeps = "axes"
    shrinks = False
    widens = True
    careful = True

    def numbers(self, dims: Dims) -> tuple[Dims, ...] | None:
        """The same sizes; None if there are too few rows."""
        rows, columns = rows_and_columns(dims)
        return (dims,) if columns > 1 and columns <= _MAX_COLUMNS_PER_ROW * rows else None

    def cost(self, m: int, n: int) -> Cost:
        """A product with the axes on each side."""
        product = 2.0 * m * n * n / FLOPS + COPY_SECONDS * m * n
        return Cost(product, product)

    def renewal_seconds(self, m: int, n: int) -> float:
        """Seconds per step of sampling rows, and of renewing the axes at intervals."""
        made = _ORTHONORMALIZING_STEPS * 2 * n**3 / (FLOPS / 2) + EIGEN_SECONDS * n**3
        return gram_seconds(min(m, SAMPLED_ROWS), n) + made / RENEWAL_STEPS

    def init(self, dims: Dims) -> Held:
        """The initial state, without axes."""
        return Held()

    def fits(self, state: Held, dims: Dims) -> bool:
        """Whether the axes have the tensor's number of columns."""
        return state.q is None or len(state.q) == dims[-1]

    def news(self, dims: Dims) -> tuple[Part, ...]:
        """The axes, in eight bits a number, and the largest number of each."""
        return Part("int8", (dims[-1], dims[-1])), Part("float16", (dims[-1],))

    def refresh(self, state: Held, x: Any, step: int) -> tuple[Held, tuple[Any, ...] | None]:
        """Update the statistics. Axes are sent with the first step, every fiftieth step, and as soon as there is data
        for the first time.
        """
        rows = tf.reshape(x, rows_and_columns(x.shape))
        added = compute_row_gram(rows, most=SAMPLED_ROWS if state.found else 0)
        gram = added if state.gram is None else low_rank.decay_and_add(state.gram, added)
        found = state.found or bool(gram.numpy().trace() > 0)
        if state.q is not None and found == state.found and step - state.step < RENEWAL_STEPS:
            return state._replace(gram=gram), None
        columns, *news = make_axes(gram.numpy())
        return Held(columns, gram, step, found), tuple(news)

    def learn(self, state: Held, news: Sequence[Any], dims: Dims) -> Held:
        """Adopt the received axes."""
        return Held(restore_axes(*news))

    def reduce(self, state: Held, x: Any) -> Reduced:
        """Compute the coordinates of the rows."""
        return Reduced((low_rank.project(_widen_to_float32(x), state.q),))

    def expand(self, state: Held, numbers: Sequence[Any], extras: Sequence[Any], dims: Dims) -> tuple[Any, Any]:
        """Rotate coordinates back to rows."""
        return low_rank.expand(numbers[0], state.q), None


def _widen_to_float32(x: Any) -> Any:
    """Cast to float32 at least: the norm of a half-precision row may exceed its type's range."""
    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x


Numbers = npt.NDArray[np.int8]
AxisMaxima = npt.NDArray[np.float16]
AxisColumns = npt.NDArray[np.float32]

_LEVELS = 127
_TOLERANCE, _MAX_ITERATIONS, _POWER_STEPS = 1e-7, 24, 4


class QuantisedAxes(NamedTuple):
    """Quantised axes: eight bits a number, and the largest number of each axis."""

    axes: AxisColumns
    numbers: Numbers
    largest: AxisMaxima


def compute_row_gram(x: Any, *, most: int = 0) -> Any:
    """The Gram matrix [n, n], float32, of normalised rows; with `most`, of about that many rows, evenly sampled. It is
    zero if it would not be finite.

    >>> compute_row_gram(tf.constant([[3.0, 0.0], [0.0, 0.0]])).numpy().tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    if most:
        x = x[:: -(-x.shape[0] // most) or 1]
    single = tf.cast(x, tf.float32)
    peaked = tf.math.divide_no_nan(single, tf.reduce_max(tf.abs(single), axis=-1, keepdims=True))
    rows = tf.math.divide_no_nan(peaked, tf.norm(peaked, axis=-1, keepdims=True))
    gram = low_rank.compute_gram(rows)
    return low_rank.replace_nonfinite(gram, tf.zeros_like(gram))


def make_axes(gram: Matrix) -> QuantisedAxes:
    """Principal axes of a Gram matrix, by descending eigenvalue; the identity if there is no data or eight bits cannot
    represent them.

    >>> axes, numbers, largest = make_axes(np.diag(np.float32([1, 4])))
    >>> numbers.tolist(), largest.tolist()
    ([[0, 127], [127, 0]], [1.0, 1.0])
    """
    plain = np.eye(len(gram))
    rounded = _round_axes(leading_vectors(gram.astype(np.float64), len(gram)).vectors if np.trace(gram) > 0 else plain)
    axes = _orthonormalize(*rounded)
    if axes is None:
        rounded = _round_axes(plain)
        axes = restore_axes(*rounded)
    return QuantisedAxes(axes, *rounded)


def restore_axes(numbers: Numbers, largest: AxisMaxima) -> AxisColumns:
    """The orthonormal axes of decoded numbers, which both sides use.

    >>> axes = restore_axes(*make_axes(np.float32([[2, 1], [1, 2]]))[1:])
    >>> bool(np.allclose(axes.T @ axes, np.eye(2), atol=1e-6)), bool(np.allclose(np.abs(axes), 0.5**0.5, atol=1e-2))
    (True, True)
    """
    axes = _orthonormalize(numbers, largest)
    if axes is None:
        raise RemoteProtocolError("received axes that are not orthogonal")
    return axes


def _round_axes(vectors: Matrix) -> tuple[Numbers, AxisMaxima]:
    largest = np.abs(vectors).max(axis=0).astype(np.float16)
    return np.rint(vectors / largest * _LEVELS).clip(-_LEVELS, _LEVELS).astype(np.int8), largest


def _orthonormalize(numbers: Numbers, largest: AxisMaxima) -> AxisColumns | None:
    """The nearest orthonormal matrix; None if none is near."""
    made = numbers.astype(np.float64) / _LEVELS * largest.astype(np.float64)
    lengths = np.square(made).sum(axis=0) if np.isfinite(made).all() else np.zeros(1)
    if not made.size or lengths.min() < 0.25 or lengths.max() > 4:
        return None
    made /= _estimate_norm(made)
    for _ in range(_MAX_ITERATIONS):
        product = made.T @ made
        if np.abs(product - np.eye(len(made))).max() < _TOLERANCE:
            return made.astype(np.float32)
        made = 1.5 * made - 0.5 * made @ product
    return None


def _estimate_norm(matrix: Matrix) -> float:
    """Estimate of a matrix's spectral norm, at least 1, so that the iterations converge."""
    vector = np.ones(len(matrix)) + np.arange(len(matrix)) % 7
    for _ in range(_POWER_STEPS):
        vector = matrix.T @ (matrix @ (vector / np.linalg.norm(vector)))
    return max(1.0, 1.05 * float(np.sqrt(np.linalg.norm(vector))))
