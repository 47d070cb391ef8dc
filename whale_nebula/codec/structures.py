"""The built-in structures: codecs that send fewer numbers. A tensor is viewed as a matrix with its last axis as
columns.

Top-k selects entries by magnitude, row by row: over the whole tensor it takes seven times as long, and a row of large
entries would displace the others. The gradient uses the same positions, so they are sent once. The selection runs on
the host, by numpy: it finds the k-th largest number of a row without sorting, in a fifth of the time of TensorFlow's
`top_k`, and entries at least as large are in order of position. XLA gives no benefit: call these functions eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from whale_nebula.codec import low_rank
from whale_nebula.codec.blocks import rows_and_columns
from whale_nebula.codec.low_rank import kept_count, largest_rank
from whale_nebula.codec.objects import COPY_SECONDS, EIGEN_SECONDS, FLOPS, Cost, Reduced, Structure, gram_seconds
from whale_nebula.codec.packing import Dims, Part
from whale_nebula.errors import OptionError, RemoteProtocolError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.tf import tf

Positions = npt.NDArray[np.int32]


def find_largest(x: Any, k: int) -> Positions:
    """The positions [m, k] of the `k` numbers of largest magnitude in each row of `x` [m, n], ascending.

    Among equal ones the first are selected; NaN is larger than infinity.

    >>> find_largest(tf.constant([[3.0, -5.0, 1.0, 5.0, 5.0]]), 2).tolist()
    [[1, 3]]
    """
    exact = x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
    m, n = exact.shape
    if not m or not k:
        return np.zeros((m, k), np.int32)
    magnitude = _rank_magnitudes(np.asarray(exact))
    least = np.partition(magnitude, n - k, axis=1)[:, n - k, None]
    chosen = magnitude >= least
    _drop_ties(chosen, magnitude, least, k)
    return (np.flatnonzero(chosen) % n).astype(np.int32).reshape(m, k)


def gather(x: Any, positions: Any) -> Any:
    """The numbers [m, k] of `x` [m, n] at these positions of each row.

    >>> gather(tf.constant([[3.0, -5.0, 1.0]]), [[0, 1]]).numpy().tolist()
    [[3.0, -5.0]]
    """
    return tf.gather(x, positions, batch_dims=1)


def scatter(values: Any, positions: Any, n: int) -> Any:
    """A tensor [m, n] that is zero except for these values [m, k] at their positions.

    >>> scatter(tf.constant([[3.0, -5.0]]), tf.constant([[0, 1]]), 3).numpy().tolist()
    [[3.0, -5.0, 0.0]]
    """
    m = tf.shape(values)[0]
    rows = tf.range(m)[:, tf.newaxis]
    flat = tf.reshape(tf.cast(rows, tf.int64) * n + tf.cast(positions, tf.int64), [-1, 1])
    shape = tf.stack([tf.cast(m, tf.int64) * n])
    return tf.reshape(tf.scatter_nd(flat, tf.reshape(values, [-1]), shape), [m, n])


def _rank_magnitudes(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Integers that order numbers by magnitude: their bits without the sign; NaN comes last."""
    return np.abs(x).view(f"i{x.itemsize}")


def _drop_ties(chosen: npt.NDArray[Any], magnitude: npt.NDArray[Any], least: npt.NDArray[Any], k: int) -> None:
    """If ties leave more than k entries in a row, drop the last ones."""
    rows = np.flatnonzero(np.count_nonzero(chosen, axis=1) > k)
    tied = magnitude[rows] == least[rows]
    above = np.count_nonzero(magnitude[rows] > least[rows], axis=1)
    chosen[rows] &= ~tied | (np.cumsum(tied, axis=1, dtype=np.int32) <= k - above[:, None])


CHUNK = 4096
_INDEX_BITS = 12

Bytes = npt.NDArray[np.uint8]


def packed_bytes(m: int, n: int, k: int) -> int:
    """Bytes of the packed positions of k out of n columns, for m rows.

    >>> packed_bytes(8, 1024, 512), packed_bytes(8, 1024, 10), packed_bytes(8, 8192, 10)
    (1024, 120, 136)
    """
    return min(_mask_bytes(m, n), _index_bytes(m, n, k))


def pack_positions(positions: npt.NDArray[Any], n: int) -> Bytes:
    """The bytes of positions [m, k], ascending within each row, out of n columns.

    >>> pack_positions(np.array([[0, 2, 3]]), 8).tolist()
    [13]
    """
    m, k = positions.shape
    if _index_bytes(m, n, k) < _mask_bytes(m, n):
        return _to_indices(positions, n)
    mask = np.zeros((m, n), np.bool_)
    np.put_along_axis(mask, positions.astype(np.int64), True, axis=1)
    return np.packbits(mask.reshape(-1), bitorder="little")


def unpack_positions(data: Bytes, m: int, n: int, k: int) -> Positions:
    """Unpack positions [m, k]; raises for invalid positions.

    >>> unpack_positions(np.array([13], np.uint8), 1, 8, 3).tolist()
    [[0, 2, 3]]
    """
    if data.size != packed_bytes(m, n, k):
        raise _positions_error(f"received {data.size} bytes, expected {packed_bytes(m, n, k)}", m, n, k)
    if _index_bytes(m, n, k) < _mask_bytes(m, n):
        return _from_indices(data, m, n, k)
    return _from_mask(data, m, n, k)


def _mask_bytes(m: int, n: int) -> int:
    return -(-m * n // 8)


def _index_bytes(m: int, n: int, k: int) -> int:
    return -(-m * k * _INDEX_BITS // 8) + 2 * m * (_count_chunks(n) - 1)


def _count_chunks(n: int) -> int:
    return max(1, -(-n // CHUNK))


def _from_mask(data: Bytes, m: int, n: int, k: int) -> Positions:
    bits = np.unpackbits(data, bitorder="little")
    if bits[m * n :].any():
        raise _positions_error("bits are set after the last column", m, n, k)
    mask = bits[: m * n].view(np.bool_).reshape(m, n)
    if (np.count_nonzero(mask, axis=1) != k).any():
        raise _positions_error("a row has a different number of positions", m, n, k)
    return (np.flatnonzero(mask) % max(n, 1)).astype(np.int32).reshape(m, k)


def _to_indices(positions: npt.NDArray[Any], n: int) -> Bytes:
    m = positions.shape[0]
    chunk = positions // CHUNK
    counts = [np.count_nonzero(chunk == each, axis=1) for each in range(_count_chunks(n) - 1)]
    table = np.array(counts, "<u2").reshape(-1, m).T
    pairs = np.zeros((-(-positions.size // 2), 2), np.uint16)
    pairs.reshape(-1)[: positions.size] = (positions % CHUNK).reshape(-1)
    low, high = pairs[:, 0], pairs[:, 1]
    triples = np.stack([low & 255, (low >> 8) | ((high & 15) << 4), high >> 4], axis=1).astype(np.uint8)
    used = -(-positions.size * _INDEX_BITS // 8)
    return np.concatenate([np.ascontiguousarray(table).view(np.uint8).reshape(-1), triples.reshape(-1)[:used]])


def _from_indices(data: Bytes, m: int, n: int, k: int) -> Positions:
    head = 2 * m * (_count_chunks(n) - 1)
    start = _chunk_starts(data[:head], m, n, k)
    triples = np.zeros((-(-m * k // 2), 3), np.uint16)
    triples.reshape(-1)[: data.size - head] = data[head:]
    low = triples[:, 0] | ((triples[:, 1] & 15) << 8)
    high = (triples[:, 1] >> 4) | (triples[:, 2] << 4)
    flat = np.stack([low, high], axis=1).reshape(-1)
    if flat[m * k :].any():
        raise _positions_error("bits are set after the last index", m, n, k)
    positions = flat[: m * k].astype(np.int32).reshape(m, k) + start
    if (positions >= n).any():
        raise _positions_error("a position is after the last column", m, n, k)
    if (positions[:, 1:] <= positions[:, :-1]).any():
        raise _positions_error("the positions of a row are not in ascending order", m, n, k)
    return positions


def _chunk_starts(table: Bytes, m: int, n: int, k: int) -> Any:
    """The first column of the chunk to which each of the [m, k] indices is relative."""
    if not table.size:
        return np.int32(0)
    counts = np.ascontiguousarray(table).view("<u2").reshape(m, -1).astype(np.int64)
    ends = counts.cumsum(axis=1)
    if (ends > k).any():
        raise _positions_error("the chunks of a row hold more positions", m, n, k)
    order = np.arange(k)[None]
    return np.int32(CHUNK) * sum((order >= end[:, None]).astype(np.int32) for end in ends.T)


def _positions_error(what: str, m: int, n: int, k: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"invalid positions of {k} out of {n} columns in {m} rows: {what}")


BASES = ("shared", "learned", "svd")
RENEWAL_STEPS = 50  # steps, after which a shared basis is renewed
SAMPLED_ROWS = 256  # rows of a step that enter the running Gram matrix
# Steps of subspace iteration in float64; a singular value decomposition, by eigenvectors.
_ITERATIONS, _SVD_FACTOR = 2, 20
_TOP_K_COST = Cost(8.8e-9, 7.3e-9)  # to find the largest numbers of each row, and to put them back


class Shared(NamedTuple):
    """A basis [n, r] in float16, and on the encoding side the running Gram matrix of sent tensors."""

    q: Any = None
    gram: Any = None


@dataclass(frozen=True)
class SVD(Structure):
    """Truncated SVD: the best low-rank approximation whose factors have at most `ratio` of the tensor's numbers.

    >>> from whale_nebula.codec import INT8
    >>> str(SVD(0.6) >> INT8())
    'svd(0.6) >> int8'
    """

    name = "svd"
    ratio: float

    def __post_init__(self) -> None:
        check_share("SVD", "ratio", self.ratio)

    def numbers(self, dims: Dims) -> tuple[Dims, ...] | None:
        """The sizes of the two thin factors."""
        m, n = rows_and_columns(dims)
        k = largest_rank(m, n, self.ratio)
        return ((m, k), (n, k)) if k else None

    def cost(self, m: int, n: int) -> Cost:
        """The Gram matrix of the shorter side (it is symmetric: half a product), its eigenvectors, and a product."""
        short = min(m, n)
        product = 2.0 * m * n * largest_rank(m, n, self.ratio) / FLOPS
        return Cost(m * n * short / FLOPS + EIGEN_SECONDS * short**3 + product, product + COPY_SECONDS * m * n)

    def reduce(self, state: Any, x: Any) -> Reduced:
        """Compute the two factors."""
        m, n = rows_and_columns(x.shape)
        return Reduced(tuple(low_rank.factor(tf.reshape(x, (m, n)), largest_rank(m, n, self.ratio))))

    def expand(self, state: Any, numbers: Sequence[Any], extras: Sequence[Any], dims: Dims) -> tuple[Any, Any]:
        """Multiply the factors."""
        return tf.reshape(low_rank.restore(*numbers), dims), None


@dataclass(frozen=True)
class Rank(Structure):
    """Projection of each row on `r` directions: a basis that both sides hold ("shared"), or one that is trained as a
    part of the model from a random start ("learned") or from the singular vectors of the layer whose output is sent
    ("svd").

    With a learned basis `norm` adds a LayerNorm before it.

    >>> str(Rank(96)), str(Rank(96, basis="svd"))
    ('rank(96)', 'rank(96, svd)')
    """

    name = "rank"
    returns = True
    r: int
    basis: str = "shared"
    norm: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.r, int) or isinstance(self.r, bool) or self.r < 1:
            raise OptionError(
                f"Rank({self.r!r}) is not a positive integer", why="a rank is a number of columns", mend="Rank(96)"
            )
        if self.basis not in BASES:
            raise OptionError(f"no basis is called {self.basis!r}", mend=did_you_mean(self.basis, BASES))
        if self.norm and self.basis != "learned":
            why = "the norm is trained with the basis; a kernel's singular vectors are for rows without a norm"
            raise OptionError(f"norm=True with basis={self.basis!r}", why=why, mend='basis="learned"')

    @property
    def trained(self) -> bool:
        """Whether the basis is a trained part of the model."""
        return self.basis != "shared"

    def numbers(self, dims: Dims) -> tuple[Dims, ...] | None:
        """The sizes of the coordinates, row by row."""
        return ((*dims[:-1], self.r),) if self.r < dims[-1] else None

    def cost(self, m: int, n: int) -> Cost:
        """A product with the basis on each side."""
        product = 2.0 * m * n * self.r / FLOPS
        return Cost(product + COPY_SECONDS * m * self.r, product + COPY_SECONDS * m * n)

    def renewal_seconds(self, m: int, n: int) -> float:
        """Seconds per step of sampling rows, and of renewing the basis every `RENEWAL_STEPS` steps."""
        made = (
            _ITERATIONS * (2 * n * n * self.r + 6 * n * self.r**2) / (FLOPS / 2)
            + _SVD_FACTOR * EIGEN_SECONDS * self.r**3
        )
        return gram_seconds(min(m, SAMPLED_ROWS), n) + made / RENEWAL_STEPS

    def init(self, dims: Dims) -> Shared:
        """The initial state, without a basis."""
        return Shared()

    def fits(self, state: Shared, dims: Dims) -> bool:
        """Whether the basis has the tensor's number of columns, and the rank's number of directions."""
        return state.q is None or tuple(state.q.shape) == (dims[-1], self.r)

    def news(self, dims: Dims) -> tuple[Part, ...]:
        """The array of the basis."""
        return (Part("float16", (dims[-1], self.r)),)

    def refresh(self, state: Shared, x: Any, step: int) -> tuple[Shared, tuple[Any, ...] | None]:
        """Update the statistics; the basis is sent with the first step and every fiftieth step."""
        rows = tf.reshape(x, rows_and_columns(x.shape))
        if state.q is None:
            gram = low_rank.compute_gram(rows)
            made = Shared(low_rank.initial_basis(gram.numpy(), self.r), gram)
            return made, (made.q,)
        gram = low_rank.decay_and_add(state.gram, low_rank.compute_gram(rows, rows=SAMPLED_ROWS))
        if step == 0 or step % RENEWAL_STEPS:
            return Shared(state.q, gram), None
        made = Shared(low_rank.renew_basis(gram.numpy(), state.q), gram)
        return made, (made.q,)

    def learn(self, state: Shared, news: Sequence[Any], dims: Dims) -> Shared:
        """Adopt the received basis."""
        return Shared(news[0])

    def reduce(self, state: Shared, x: Any) -> Reduced:
        """Coordinates on the basis."""
        return Reduced((low_rank.project(x, state.q),), residue=state.q)

    def expand(self, state: Shared, numbers: Sequence[Any], extras: Sequence[Any], dims: Dims) -> tuple[Any, Any]:
        """The rows that have these coordinates."""
        return low_rank.expand(numbers[0], state.q), state.q

    def reduce_back(self, residue: Any, gradient: Any) -> tuple[Any, ...]:
        """Project the gradient on the basis."""
        return (low_rank.project(gradient, residue),)

    def expand_back(self, residue: Any, numbers: Sequence[Any], dims: Dims) -> Any:
        """Restore the gradient by the transposed projection."""
        return low_rank.expand(numbers[0], residue)


@dataclass(frozen=True)
class TopK(Structure):
    """Top-k sparsification: the largest `fraction` of each row's entries by magnitude."""

    name = "topk"
    returns = True
    fraction: float

    def __post_init__(self) -> None:
        check_share("TopK", "fraction", self.fraction)

    def numbers(self, dims: Dims) -> tuple[Dims, ...] | None:
        """The kept entries of each row."""
        m, n = rows_and_columns(dims)
        return ((m, self._kept_count(n)),) if self._kept_count(n) < n else None

    def extras(self, dims: Dims) -> tuple[Part, ...]:
        """The positions of the kept entries."""
        m, n = rows_and_columns(dims)
        return (Part("uint8", (packed_bytes(m, n, self._kept_count(n)),)),)

    def cost(self, m: int, n: int) -> Cost:
        """The cost of a selection in each row."""
        return _TOP_K_COST.times(m * n)

    def reduce(self, state: Any, x: Any) -> Reduced:
        """Select the largest entries of each row, with their positions."""
        m, n = rows_and_columns(x.shape)
        rows = tf.reshape(x, (m, n))
        places = find_largest(rows, self._kept_count(n))
        return Reduced((gather(rows, places),), (pack_positions(places, n),), places)

    def expand(self, state: Any, numbers: Sequence[Any], extras: Sequence[Any], dims: Dims) -> tuple[Any, Any]:
        """Scatter the entries; all others are zero."""
        m, n = rows_and_columns(dims)
        places = unpack_positions(extras[0], m, n, self._kept_count(n))
        return self.expand_back(places, numbers, dims), places

    def reduce_back(self, residue: Any, gradient: Any) -> tuple[Any, ...]:
        """Gather the gradient at the same positions."""
        return (gather(tf.reshape(gradient, rows_and_columns(gradient.shape)), residue),)

    def expand_back(self, residue: Any, numbers: Sequence[Any], dims: Dims) -> Any:
        """Scatter the gradient; all other entries are zero."""
        return tf.reshape(scatter(numbers[0], residue, dims[-1]), dims)

    def _kept_count(self, n: int) -> int:
        return kept_count(n, self.fraction)


def check_share(codec: str, option: str, value: object) -> None:
    """Refuse a fraction that is not above 0 and at most 1."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= 1:  # type: ignore[operator]
        raise OptionError(
            f"{codec}({value!r}) is out of range",
            why=f"{option} is a fraction of the tensor: it must be above 0 and at most 1",
            mend=f"{codec}(0.6)",
        )
