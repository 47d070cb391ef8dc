"""Top-k sparsification by row, and its gradient: all other entries are zero.

Entries are selected by magnitude, row by row: over the whole tensor it takes seven times as long, and a row of large
entries would displace the others. The gradient uses the same positions, so they are sent once.

The selection runs on the host, by numpy: it finds the k-th largest number of a row without sorting, in a fifth of the
time of TensorFlow's `top_k`, and entries at least as large are in order of position. XLA gives no benefit here: call
these functions eagerly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from whale_nebula.errors import RemoteProtocolError
from whale_nebula.tf import tf

Positions = npt.NDArray[np.int32]


def largest(x: Any, k: int) -> Positions:
    """The positions [m, k] of the `k` numbers of largest magnitude in each row of `x` [m, n], ascending.

    Among equal ones the first are selected; NaN is larger than infinity.

    >>> largest(tf.constant([[3.0, -5.0, 1.0, 5.0, 5.0]]), 2).tolist()
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


def pack(positions: npt.NDArray[Any], n: int) -> Bytes:
    """The bytes of positions [m, k], ascending within each row, out of n columns.

    >>> pack(np.array([[0, 2, 3]]), 8).tolist()
    [13]
    """
    m, k = positions.shape
    if _index_bytes(m, n, k) < _mask_bytes(m, n):
        return _to_indices(positions, n)
    mask = np.zeros((m, n), np.bool_)
    np.put_along_axis(mask, positions.astype(np.int64), True, axis=1)
    return np.packbits(mask.reshape(-1), bitorder="little")


def unpack(data: Bytes, m: int, n: int, k: int) -> Positions:
    """Unpack positions [m, k]; raises for invalid positions.

    >>> unpack(np.array([13], np.uint8), 1, 8, 3).tolist()
    [[0, 2, 3]]
    """
    if data.size != packed_bytes(m, n, k):
        raise _positions_error(f"{data.size} bytes came, and {packed_bytes(m, n, k)} are due", m, n, k)
    if _index_bytes(m, n, k) < _mask_bytes(m, n):
        return _from_indices(data, m, n, k)
    return _from_mask(data, m, n, k)


def _mask_bytes(m: int, n: int) -> int:
    return -(-m * n // 8)


def _index_bytes(m: int, n: int, k: int) -> int:
    return -(-m * k * _INDEX_BITS // 8) + 2 * m * (_chunks(n) - 1)


def _chunks(n: int) -> int:
    return max(1, -(-n // CHUNK))


def _from_mask(data: Bytes, m: int, n: int, k: int) -> Positions:
    bits = np.unpackbits(data, bitorder="little")
    if bits[m * n :].any():
        raise _positions_error("bits are set behind the last column", m, n, k)
    mask = bits[: m * n].view(np.bool_).reshape(m, n)
    if (np.count_nonzero(mask, axis=1) != k).any():
        raise _positions_error("a row has another number of them", m, n, k)
    return (np.flatnonzero(mask) % max(n, 1)).astype(np.int32).reshape(m, k)


def _to_indices(positions: npt.NDArray[Any], n: int) -> Bytes:
    m = positions.shape[0]
    chunk = positions // CHUNK
    counts = [np.count_nonzero(chunk == each, axis=1) for each in range(_chunks(n) - 1)]
    table = np.array(counts, "<u2").reshape(-1, m).T
    pairs = np.zeros((-(-positions.size // 2), 2), np.uint16)
    pairs.reshape(-1)[: positions.size] = (positions % CHUNK).reshape(-1)
    low, high = pairs[:, 0], pairs[:, 1]
    triples = np.stack([low & 255, (low >> 8) | ((high & 15) << 4), high >> 4], axis=1).astype(np.uint8)
    used = -(-positions.size * _INDEX_BITS // 8)
    return np.concatenate([np.ascontiguousarray(table).view(np.uint8).reshape(-1), triples.reshape(-1)[:used]])


def _from_indices(data: Bytes, m: int, n: int, k: int) -> Positions:
    head = 2 * m * (_chunks(n) - 1)
    start = _chunk_starts(data[:head], m, n, k)
    triples = np.zeros((-(-m * k // 2), 3), np.uint16)
    triples.reshape(-1)[: data.size - head] = data[head:]
    low = triples[:, 0] | ((triples[:, 1] & 15) << 8)
    high = (triples[:, 1] >> 4) | (triples[:, 2] << 4)
    flat = np.stack([low, high], axis=1).reshape(-1)
    if flat[m * k :].any():
        raise _positions_error("bits are set behind the last index", m, n, k)
    positions = flat[: m * k].astype(np.int32).reshape(m, k) + start
    if (positions >= n).any():
        raise _positions_error("a position is behind the last column", m, n, k)
    if (positions[:, 1:] <= positions[:, :-1]).any():
        raise _positions_error("the positions of a row do not ascend", m, n, k)
    return positions


def _chunk_starts(table: Bytes, m: int, n: int, k: int) -> Any:
    """The first column of the chunk to which each of the [m, k] indices is relative."""
    if not table.size:
        return np.int32(0)
    counts = np.ascontiguousarray(table).view("<u2").reshape(m, -1).astype(np.int64)
    ends = counts.cumsum(axis=1)
    if (ends > k).any():
        raise _positions_error("a row's chunks hold more", m, n, k)
    order = np.arange(k)[None]
    return np.int32(CHUNK) * sum((order >= end[:, None]).astype(np.int32) for end in ends.T)


def _positions_error(what: str, m: int, n: int, k: int) -> RemoteProtocolError:
    return RemoteProtocolError(f"these are no positions of {k} columns out of {n} in {m} rows: {what}")
