"""Delta encoding by sample (AQ-SGD): for samples seen before only the change crosses a boundary.

Both ends hold every sample as they last knew it, in half precision. Of a sample that they know the integers of its
difference to that cross; then both write what crossed, in the same order and by the same arithmetic, and so hold the
same bits. The reader computes with what it holds. A sample that is new crosses whole, in half precision, and is held
from then on; where there is no room for it, or its rows have another shape than those that are held, it crosses as
integers alone, as it would without differences. What is sent begins with a bit for each sample: whether it crosses as
integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeGuard

import numpy as np
import tensorflow as tf

from whale_nebula.codec.blocks import apart
from whale_nebula.codec.deltas import Cache, Ids, Rows, apply_changes
from whale_nebula.codec.objects import Codec
from whale_nebula.codec.packing import Dims, Mask, Part, join, keep, pack_mask, put_back, split, unpack_mask
from whale_nebula.codec.precisions import Integers, is_integers
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.tensor import Bytes

LIMIT = 1 << 30
"""Bytes of samples that an end of a boundary holds: the first that come."""
_LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Samples:
    """A micro-batch of sizes `dims`: the ids of its samples, which of them cross as integers, and which rows cross.

    The tensor is seen as a matrix, its last axis are the columns; a sample has the same number of rows as any other.
    """

    ids: Ids
    dims: Dims
    integers: Mask
    rows: Mask | None = None

    @cached_property
    def of_integers(self) -> Mask:
        """For each row of the matrix whether its sample crosses as integers."""
        return np.repeat(self.integers, prod(self.dims[1:-1]))

    @cached_property
    def sent(self) -> Mask:
        """For each row of the matrix whether it crosses."""
        return np.ones(prod(self.dims[:-1]), np.bool_) if self.rows is None else self.rows

    def parts(self, codec: Integers) -> tuple[Part, ...]:
        """What crosses: scales and integers, then the rows of the samples that cross whole."""
        columns = self.dims[-1]
        some, whole = (int(np.count_nonzero(self.sent & each)) for each in (self.of_integers, ~self.of_integers))
        return *codec.parts((some, columns), "float32"), Part("float16", (whole, columns))


def keeps_differences(codec: Codec | None, dims: Dims, ids: Ids | None) -> TypeGuard[Integers]:
    """Whether differences of such a tensor can be kept: integers are what it gets, and each sample has an id."""
    return is_integers(codec) and len(dims) > 1 and ids is not None and ids.shape == dims[:1]


def doubts(cache: Cache, dims: Dims, ids: Ids) -> tuple[str, ...]:
    """Why samples cross as integers alone that are not the difference to anything."""
    if not cache.fits(dims[1:]):
        return (f"samples {list(dims[1:])} have no differences: others are held; pad every batch to one length",)
    if not (cache.known(ids) | cache.admits(ids, _nbytes(dims))).all():
        return ("samples beyond those that there is room for have no differences",)
    return ()


def encode(codec: Integers, x: Any, ids: Ids, cache: Cache, rows: Mask | None = None) -> tuple[Bytes, Rows]:
    """At the side that makes the tensor: what crosses, and the tensor that the other side will have."""
    cache.saw(ids)
    dims = tuple(int(size) for size in x.shape)
    with np.errstate(over="ignore"):
        matrix = np.asarray(x).astype(np.float32, copy=False).reshape(-1, dims[-1])
    samples = Samples(ids, dims, ~_whole(cache, ids, dims, matrix), rows)
    old = _held_rows(cache, ids[samples.integers], dims).reshape(-1, dims[-1])
    changes = keep(matrix, samples.of_integers & samples.sent) - keep(old, samples.sent[samples.of_integers])
    scales, integers = (np.asarray(part) for part in codec.encode(tf.constant(changes)))
    others = _half(keep(matrix, ~samples.of_integers & samples.sent))
    data = join([pack_mask(samples.integers), scales, integers, others])
    return data, _remember_rows(codec, samples, cache, scales, integers, others)


def decode(
    codec: Codec | None, data: Bytes, dims: Dims, ids: Ids | None, cache: Cache, rows: Mask | None = None
) -> Rows:
    """At the side that reads it: the tensor."""
    if not is_integers(codec) or ids is None or ids.shape != dims[:1] or len(dims) < 2:
        raise RemoteProtocolError(f"differences of samples came for a tensor {list(dims)}, of which none are kept")
    marks = -(-dims[0] // 8)
    samples = Samples(ids, dims, unpack_mask(data[:marks], dims[0]), rows)
    scales, integers, others = split(data[marks:], samples.parts(codec))
    cache.saw(ids)
    if not (samples.integers.all() or cache.fits(dims[1:])):
        raise RemoteProtocolError(f"samples {list(dims[1:])} came whole, and others are held")
    return _remember_rows(codec, samples, cache, scales, integers, others)


def most_bytes(dims: Dims) -> int:
    """The most that a tensor of these sizes takes, before zstd: all samples whole, or all of them as integers."""
    return 3 * prod(dims) + dims[0] // 8 + 1


def _nbytes(dims: Dims) -> int:
    """Of a sample that is held."""
    return 2 * prod(dims[1:])


def _known_samples(cache: Cache, ids: Ids, dims: Dims) -> Mask:
    """The samples that changes can be made to."""
    return cache.known(ids) if cache.fits(dims[1:]) else np.zeros(len(ids), np.bool_)


def _whole(cache: Cache, ids: Ids, dims: Dims, matrix: Any) -> Mask:
    """The samples that cross whole: those that come to be held, and those in which something is not finite."""
    if not cache.fits(dims[1:]):
        return np.zeros(len(ids), np.bool_)
    spoilt = ~np.isfinite(matrix).reshape(len(ids), -1).all(axis=1)
    return cache.admits(ids, _nbytes(dims)) | (cache.known(ids) & spoilt)


def _held_rows(cache: Cache, ids: Ids, dims: Dims) -> Rows:
    """What both sides have of samples: nothing but zeros of those that they do not know."""
    known = _known_samples(cache, ids, dims)
    if known.all() and known.size:
        return cache.get(ids)
    held = np.zeros((len(ids), *dims[1:]), np.float16)
    if known.any():
        held[known] = cache.get(ids[known])
    return held


def _remember_rows(codec: Integers, samples: Samples, cache: Cache, scales: Any, integers: Any, others: Any) -> Rows:
    """What both sides do with what crossed: remember it, and make the tensor."""
    made = np.zeros(samples.dims, np.float16)
    for mask, rows in _pieces(codec, samples, cache, scales, integers, others):
        made[mask] = rows
    if samples.rows is not None:
        made.reshape(-1, samples.dims[-1])[~samples.sent] = 0
    return made


def _pieces(
    codec: Integers, samples: Samples, cache: Cache, scales: Any, integers: Any, others: Any
) -> Iterator[tuple[Mask, Rows]]:
    """The samples that are known, those that cross as integers alone, and those that cross whole."""
    ids, sizes, known = (
        samples.ids,
        samples.dims[1:],
        _known_samples(cache, samples.ids, samples.dims) & samples.integers,
    )
    single, scales, block = _multiples(codec, scales, integers, sizes[-1])
    sent = samples.sent[samples.of_integers]
    ints = put_back(single, sent).reshape(-1, *sizes)
    wide = put_back(scales.astype(np.float32), sent).reshape(*ints.shape[:-1], scales.shape[-1])
    if known.any():
        of = known[samples.integers]
        yield known, cache.add(ids[known], keep(ints, of), keep(wide, of), block)
    if (alone := samples.integers & ~known).any():
        of = alone[samples.integers]
        yield alone, apply_changes(None, keep(ints, of), keep(wide, of), block)
    if not samples.integers.all():
        whole = put_back(others, samples.sent[~samples.of_integers]).reshape(-1, *sizes)
        yield ~samples.integers, whole
        cache.put(ids[~samples.integers], whole)


def _multiples(codec: Integers, scales: Any, integers: Any, columns: int) -> tuple[Any, Any, int]:
    """What rows are whole multiples of: the integers, the scales, and how many neighbours share one."""
    return integers if integers.dtype == np.int8 else apart(integers, columns), scales, codec.block


def _half(rows: Any) -> Any:
    """In half precision; what is too large for it is as large as can be."""
    held = np.where(np.isfinite(rows), np.clip(rows, -_LARGEST, _LARGEST), rows)
    return held.astype(np.float16)
