"""Delta encoding by sample (AQ-SGD): of samples that both ends of a boundary have cached only the change is sent.

Each side holds a cache for one direction of a boundary, in half precision, and applies the same writes to it, in the
same order: the arithmetic is numpy's, in a fixed order of element-wise steps, so both are bit-identical. `version`
changes with every write and eviction, so that a divergence of the two sides is detected. The reader computes with its
cached rows.

A new sample is sent in full, in half precision, and then cached; if there is no room for it, or its rows have
a different shape from the cached ones, it is sent as integers only, without differences. The encoding begins with a bit
for each sample: whether it is sent as integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod
from typing import Any, TypeGuard

import google_crc32c
import numpy as np
import numpy.typing as npt

from whale_nebula.codec.blocks import unpack_pairs
from whale_nebula.codec.objects import Codec
from whale_nebula.codec.packing import Dims, Mask, Part, join, pack, scatter_rows, select_rows, split, unpack
from whale_nebula.codec.precisions import Integers, is_integers
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.tf import tf
from whale_nebula.wire.tensor import Bytes

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float16]

_ROW_OVERHEAD = 160  # of one cached row, in memory
_STALE_FACTOR = 16  # the cache is stale after this many unknown samples per cached row without a known one
_LARGEST = float(np.finfo(np.float16).max)


class Cache:
    """The last float16 row of every cached sample id, the same on both sides; all rows have one shape.

    It holds up to `limit_bytes`; beyond that the least recently written rows are evicted. An id may occur several times
    in one call: all of its changes are relative to the row before the call, and the last one is kept.

    >>> cache = Cache(1 << 20)
    >>> ids, row = np.array([7]), np.array([[1.0, 2.0]], "float16")
    >>> cache.put(ids, row).tolist(), cache.contains(np.array([7, 8])).tolist()
    ([[1.0, 2.0]], [True, False])
    >>> cache.add(ids, np.array([[4, -2]], "int8"), np.array([[0.25]], "float32"), block=2).tolist()
    [[2.0, 1.5]]
    """

    def __init__(self, limit_bytes: int) -> None:
        self.version = 0
        self._limit = limit_bytes
        self._rows: dict[int, Rows] = {}  # the least recently written is first
        self._unknown_samples = 0  # unknown samples since the last known one

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """The approximate memory use in bytes."""
        return len(self._rows) * self._row_bytes()

    def copy(self) -> Cache:
        """A copy that later writes do not affect. Rows are shared, as they are never changed in place."""
        again = Cache(self._limit)
        again._rows = dict(self._rows)
        again._unknown_samples, again.version = self._unknown_samples, self.version
        return again

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether rows of this shape can be written: all have the shape of the first ones."""
        return not self._rows or shape == self._shape()

    def contains(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """For each id, whether its row is cached."""
        return np.fromiter((each in self._rows for each in ids.tolist()), np.bool_, len(ids))

    def admits(self, ids: Ids, nbytes: int) -> npt.NDArray[np.bool_]:
        """For each unknown id, whether there is room for a row of `nbytes`, in order of arrival.

        Keeping the first samples gives the same number of hits in every epoch. Evicting the oldest for new ones would
        give none, if there are more samples than room.
        """
        room = self._limit // (nbytes + _ROW_OVERHEAD) - len(self._rows)
        new = dict.fromkeys(each for each in ids.tolist() if each not in self._rows)
        taken = set(islice(new, max(room, 0)))
        return np.fromiter((each in taken for each in ids.tolist()), np.bool_, len(ids))

    def note_arrival(self, ids: Ids) -> None:
        """Record the ids that are about to arrive. If none has been known for long, the cache is cleared, because
        the data have changed.
        """
        if not self._rows or self.contains(ids).any():
            self._unknown_samples = 0
            return
        self._unknown_samples += len(ids)
        if self._unknown_samples >= _STALE_FACTOR * len(self._rows):
            self._update_version(np.fromiter(self._rows, np.int64, len(self._rows)))
            self._rows.clear()
            self._unknown_samples = 0

    def stamp(self, ids: Ids) -> int:
        """A checksum of all writes so far and of the next sample ids, by which the other side detects a difference."""
        return int(google_crc32c.extend(self.version, np.asarray(ids, np.int64).tobytes()))

    def get(self, ids: Ids) -> Rows:
        """The rows of known ids."""
        found = [self._rows.get(each) for each in ids.tolist()]
        rows = [row for row in found if row is not None]
        if len(rows) < len(found):
            raise RemoteProtocolError(
                f"{len(found) - len(rows)} of {len(found)} samples have no cached row on this side",
                why="the other side caches samples that this side does not",
            )
        return np.stack(rows) if rows else np.empty((0, *self._shape()), np.float16)

    def put(self, ids: Ids, rows: npt.NDArray[Any]) -> Rows:
        """Write complete rows; returns them in half precision, as `add` does."""
        return self._write(ids, _clip_to_half(np.asarray(rows).astype(np.float32)))

    def add(self, ids: Ids, ints: npt.NDArray[Any], scales: npt.NDArray[Any], block: int) -> Rows:
        """Add differences to cached rows; each `block` of integers along the last axis shares a scale.

        Returns the new rows, one for each occurrence of an id. NaN is returned in them, but cached as 0: otherwise all
        later changes of the row would be NaN.
        """
        old = self.get(ids) if len(ids) else np.empty((0, *ints.shape[1:]), np.float16)
        if ints.shape != old.shape or not np.issubdtype(ints.dtype, np.integer):
            raise RemoteProtocolError(f"differences {ints.dtype}{list(ints.shape)} do not match rows {list(old.shape)}")
        return self._write(ids, apply_changes(old, ints, scales, block))

    def as_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Its contents: ids and rows in the order of eviction, the version and a count."""
        ids = np.fromiter(self._rows, np.int64, len(self._rows))
        return {"ids": ids, "rows": self.get(ids), "version": np.array([self.version, self._unknown_samples])}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], limit_bytes: int) -> Cache:
        """Restore a cache from the arrays of `as_arrays`."""
        cache = cls(limit_bytes)
        cache._rows = {number: row.copy() for number, row in zip(arrays["ids"].tolist(), arrays["rows"], strict=True)}
        cache.version, cache._unknown_samples = map(int, arrays["version"])
        return cache

    @property
    def limit(self) -> int:
        """The maximum size in bytes."""
        return self._limit

    def _write(self, ids: Ids, rows: Rows) -> Rows:
        held = np.where(np.isnan(rows), np.float16(0), rows)
        self._update_version(np.asarray(ids, np.int64), held)
        for number, row in zip(ids.tolist(), held, strict=True):
            self._rows.pop(number, None)
            self._rows[number] = row.copy()  # a view would keep its entire batch
        beyond = len(self._rows) - self._limit // max(self._row_bytes(), 1)
        if beyond > 0:
            gone = list(islice(self._rows, beyond))
            for each in gone:
                del self._rows[each]
            self._update_version(np.array(gone, np.int64))
        return rows

    def _update_version(self, *arrays: npt.NDArray[Any]) -> None:
        self.version = google_crc32c.extend(self.version, join(arrays).tobytes())

    def _shape(self) -> tuple[int, ...]:
        return next((row.shape for row in self._rows.values()), ())

    def _row_bytes(self) -> int:
        return next((row.nbytes + _ROW_OVERHEAD for row in self._rows.values()), 0)


def apply_changes(old: Rows | None, ints: npt.NDArray[Any], scales: npt.NDArray[Any], block: int) -> Rows:
    """Rows with differences added; without old rows, the differences alone."""
    change = ints.astype(np.float32)
    change *= _expand_scales(scales, ints.shape, block)
    if old is not None:
        change += old.astype(np.float32)
    return _clip_to_half(change)


def _clip_to_half(rows: npt.NDArray[np.float32]) -> Rows:
    """Round to half precision, saturating."""
    return np.clip(rows, -_LARGEST, _LARGEST).astype(np.float16)


def _expand_scales(scales: npt.NDArray[Any], shape: tuple[int, ...], block: int) -> npt.NDArray[np.float32]:
    """Expand the scales to one for every number."""
    columns = shape[-1]
    due = (*shape[:-1], -(-columns // block))
    if scales.size != int(np.prod(due)):
        raise RemoteProtocolError(f"received {scales.size} scales, expected {due}")
    return np.repeat(scales.astype(np.float32).reshape(due), block, axis=-1)[..., :columns]


LIMIT = 1 << 30
"""The limit in bytes of the samples that an end of a boundary caches, in order of arrival."""


@dataclass(frozen=True)
class Samples:
    """The samples of a micro-batch of sizes `dims`: their ids, which of them are sent as integers, and which rows are
    sent.

    The tensor is viewed as a matrix with the last axis as columns; all samples have the same number of rows.
    """

    ids: Ids
    dims: Dims
    integers: Mask
    rows: Mask | None = None

    @cached_property
    def integer_rows(self) -> Mask:
        """For each row of the matrix whether its sample is sent as integers."""
        return np.repeat(self.integers, prod(self.dims[1:-1]))

    @cached_property
    def sent_rows(self) -> Mask:
        """For each row of the matrix whether it is sent."""
        return np.ones(prod(self.dims[:-1]), np.bool_) if self.rows is None else self.rows

    def parts(self, codec: Integers) -> tuple[Part, ...]:
        """The arrays that are sent: scales and integers, then the rows of samples that are sent in full."""
        columns = self.dims[-1]
        some, whole = (int(np.count_nonzero(self.sent_rows & each)) for each in (self.integer_rows, ~self.integer_rows))
        return *codec.parts((some, columns), "float32"), Part("float16", (whole, columns))


def can_cache_differences(codec: Codec | None, dims: Dims, ids: Ids | None) -> TypeGuard[Integers]:
    """Whether differences of such a tensor can be cached: its codec makes integers, and each sample has an id."""
    return is_integers(codec) and len(dims) > 1 and ids is not None and ids.shape == dims[:1]


def explain_full_samples(cache: Cache, dims: Dims, ids: Ids) -> tuple[str, ...]:
    """The reasons why samples are sent as integers without a cached row."""
    if not cache.fits(dims[1:]):
        return (
            f"samples {list(dims[1:])} are sent without differences: cached rows differ in shape; pad to one length",
        )
    if not (cache.contains(ids) | cache.admits(ids, _sample_bytes(dims))).all():
        return ("samples for which the cache has no room are sent without differences",)
    return ()


def encode(codec: Integers, x: Any, ids: Ids, cache: Cache, rows: Mask | None = None) -> tuple[Bytes, Rows]:
    """Encode a tensor and update the cache; returns the bytes, and the tensor as the other side decodes it."""
    cache.note_arrival(ids)
    dims = tuple(int(size) for size in x.shape)
    with np.errstate(over="ignore"):
        matrix = np.asarray(x).astype(np.float32, copy=False).reshape(-1, dims[-1])
    samples = Samples(ids, dims, ~_find_full_samples(cache, ids, dims, matrix), rows)
    old = _cached_rows(cache, ids[samples.integers], dims).reshape(-1, dims[-1])
    changes = select_rows(matrix, samples.integer_rows & samples.sent_rows) - select_rows(
        old, samples.sent_rows[samples.integer_rows]
    )
    scales, integers = (np.asarray(part) for part in codec.encode(tf.constant(changes)))
    others = _clip_finite_to_half(select_rows(matrix, ~samples.integer_rows & samples.sent_rows))
    data = join([pack(samples.integers), scales, integers, others])
    return data, _update_cache(codec, samples, cache, scales, integers, others)


def decode(
    codec: Codec | None, data: Bytes, dims: Dims, ids: Ids | None, cache: Cache, rows: Mask | None = None
) -> Rows:
    """Decode the tensor at the receiving side, and update the cache."""
    if ids is None or not can_cache_differences(codec, dims, ids):
        raise RemoteProtocolError(f"received differences for a tensor {list(dims)} whose samples are not cached")
    marks = -(-dims[0] // 8)
    samples = Samples(ids, dims, unpack(data[:marks], "bool", (dims[0],)), rows)
    scales, integers, others = split(data[marks:], samples.parts(codec))
    cache.note_arrival(ids)
    if not (samples.integers.all() or cache.fits(dims[1:])):
        raise RemoteProtocolError(f"received complete samples {list(dims[1:])}, but cached rows have another shape")
    return _update_cache(codec, samples, cache, scales, integers, others)


def most_bytes(dims: Dims) -> int:
    """Upper bound of a tensor's encoded bytes before zstd: all samples in full, or all as integers."""
    return 3 * prod(dims) + dims[0] // 8 + 1


def _sample_bytes(dims: Dims) -> int:
    """Bytes of a cached sample."""
    return 2 * prod(dims[1:])


def _find_known(cache: Cache, ids: Ids, dims: Dims) -> Mask:
    """Mask of the cached samples, of which changes can be sent."""
    return cache.contains(ids) if cache.fits(dims[1:]) else np.zeros(len(ids), np.bool_)


def _find_full_samples(cache: Cache, ids: Ids, dims: Dims, matrix: Any) -> Mask:
    """Mask of the samples that are sent in full: those to be cached, and those with non-finite values."""
    if not cache.fits(dims[1:]):
        return np.zeros(len(ids), np.bool_)
    spoilt = ~np.isfinite(matrix).reshape(len(ids), -1).all(axis=1)
    return cache.admits(ids, _sample_bytes(dims)) | (cache.contains(ids) & spoilt)


def _cached_rows(cache: Cache, ids: Ids, dims: Dims) -> Rows:
    """The cached rows of samples; zeros for unknown ones."""
    known = _find_known(cache, ids, dims)
    if known.all() and known.size:
        return cache.get(ids)
    held = np.zeros((len(ids), *dims[1:]), np.float16)
    if known.any():
        held[known] = cache.get(ids[known])
    return held


def _update_cache(codec: Integers, samples: Samples, cache: Cache, scales: Any, integers: Any, others: Any) -> Rows:
    """Update the cache by the sent arrays, and return the tensor, in the same way on both sides. Samples are known, or
    sent as integers only, or in full.
    """
    ids, sizes, made = samples.ids, samples.dims[1:], np.zeros(samples.dims, np.float16)
    single = integers if integers.dtype == np.int8 else unpack_pairs(integers, sizes[-1])
    sent_rows = samples.sent_rows[samples.integer_rows]
    ints = scatter_rows(single, sent_rows).reshape(-1, *sizes)
    wide = scatter_rows(scales.astype(np.float32), sent_rows).reshape(*ints.shape[:-1], scales.shape[-1])
    known = _find_known(cache, ids, samples.dims) & samples.integers
    if known.any():
        of = known[samples.integers]
        made[known] = cache.add(ids[known], select_rows(ints, of), select_rows(wide, of), codec.block)
    if (alone := samples.integers & ~known).any():
        of = alone[samples.integers]
        made[alone] = apply_changes(None, select_rows(ints, of), select_rows(wide, of), codec.block)
    if (whole := ~samples.integers).any():
        made[whole] = scatter_rows(others, samples.sent_rows[~samples.integer_rows]).reshape(-1, *sizes)
        cache.put(ids[whole], made[whole])
    if samples.rows is not None:
        made.reshape(-1, samples.dims[-1])[~samples.sent_rows] = 0
    return made


def _clip_finite_to_half(rows: Any) -> Any:
    """Round to half precision; finite numbers saturate."""
    held = np.where(np.isfinite(rows), np.clip(rows, -_LARGEST, _LARGEST), rows)
    return held.astype(np.float16)
