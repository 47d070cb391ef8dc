"""Tensors as one to four bits a number, block by block (`whale_nebula.codec.turned` says how), and back.

The numbers of a turned block are nearly normal, and for those the best distance of levels is known: with it four bits
lose 0.11 of the norm, three 0.19, two 0.34 and one 0.6. It is told from the mean of their magnitudes, which no square
can make too large or too small for its type.

The scale is then the best for the levels that were chosen. Where a tensor must be right on the whole (a gradient), it
is a little larger: such that the tensor that comes has the same product with the one that was sent as that has with
itself. Then signs are drawn by chance, and numbers are rounded to the nearest: to round them by chance loses twice as
much.

A tensor becomes the same bytes on machines of one kind, as it is with all products of matrices; the same bytes become
the same tensor everywhere, since sums of few small whole numbers are exact in any order.

A block that holds a NaN or an infinity has the scale NaN, and becomes NaN as a whole. Scales below 2^-100 are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.codec.blocks import SCALE, rows_and_columns
from whale_nebula.codec.bytes.turned import turner, unsigned
from whale_nebula.codec.graph import counter
from whale_nebula.codec.turned import PLANES, block_of, parts
from whale_nebula.errors import RemoteProtocolError

_DISTANCE = {1: 2.0, 2: 1.248, 3: 0.7344, 4: 0.4201}
"""Between two levels, times the mean magnitude: 0.9957, 0.586 and 0.3352 deviations of a normal distribution. One bit
has two levels alone, which are as far apart as the scale says.
"""
_ROOM = 2.0**-20
"""Numbers are made so much smaller while they are added up, so that no sum is too large."""
_SMALLEST = 2.0**-100
_FIXED = np.zeros(2, np.uint32)


def quantise(x: Any, *, bits: int, block: int, key: Any = None) -> tuple[Any, Any, Any]:
    """Scales, packed integers and the key; rows are cut into blocks of at most so many numbers.

    >>> scales, packed, _ = quantise(tf.constant([[8.0, 0, 0, 0, 0, 0, 0, 0]]), bits=2, block=8)
    >>> scales.numpy().tolist(), tuple(packed.shape)
    ([[1.0]], (1, 2))
    """
    rows, columns = rows_and_columns(tuple(x.shape))
    if not rows or not columns:
        return tuple(tf.zeros(part.dims, part.dtype) for part in parts((rows, columns), bits, block))
    encode = _quantiser(bits, block, columns, x.dtype.name, key is not None)
    used = tf.constant(_FIXED) if key is None else key
    return *encode(tf.reshape(x, [rows, columns]), used), used


def dequantise(scales: Any, packed: Any, key: Any, *, dims: tuple[int, ...], bits: int, block: int, dtype: str) -> Any:
    """The tensor: the integers turned back, times the scales, and not beyond what its type can hold.

    >>> made = quantise(tf.constant([8.0, 0, 0, 0, 0, 0, 0, 0]), bits=2, block=8)
    >>> dequantise(*made, dims=(8,), bits=2, block=8, dtype="float32").numpy().tolist()
    [8.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    _check((scales, packed, key), dims, bits, block)
    rows, columns = rows_and_columns(dims)
    if not rows or not columns:
        return tf.zeros(dims, dtype)
    by_chance = bool(np.asarray(key).any())
    return tf.reshape(_dequantiser(bits, block, columns, dtype, by_chance)(scales, packed, key), dims)


def _check(got: tuple[Any, ...], dims: tuple[int, ...], bits: int, block: int) -> None:
    expected = [(part.dtype, part.dims) for part in parts(dims, bits, block)]
    if [(tf.as_dtype(part.dtype).name, tuple(part.shape)) for part in got] != expected:
        shown = ", ".join(f"{tf.as_dtype(part.dtype).name}{list(part.shape)}" for part in got)
        raise RemoteProtocolError(f"{shown} are not the parts of a tensor {list(dims)} in {bits} bits")


@lru_cache(maxsize=1024)
def _quantiser(bits: int, most: int, columns: int, dtype: str, by_chance: bool) -> Callable[..., tuple[Any, Any]]:
    block = block_of(columns, bits, most)
    count = -(-columns // block)

    def encode(matrix: Any, key: Any) -> tuple[Any, Any]:
        wide = tf.pad(tf.cast(matrix, tf.float32), [[0, 0], [0, count * block - columns]])
        blocks = tf.reshape(wide, [-1, block])
        turned = (_signed(blocks, key) if by_chance else blocks) @ _turner(block, by_chance)
        mean = tf.reduce_mean(tf.abs(turned), axis=1, keepdims=True)
        whole = mean < float("inf")
        relative = tf.where(whole, tf.math.divide_no_nan(turned, mean), 0.0)
        half = float(2 ** (bits - 1))
        steps = tf.clip_by_value(tf.floor(relative / _DISTANCE[bits]), -half, half - 1)
        scales = _best(relative, 2 * steps + 1, by_chance) * mean * (1 / _ROOM / block)
        sent = tf.where(whole, tf.where(scales < _SMALLEST, 0.0, scales), float("nan"))
        codes = tf.reshape(tf.cast(steps + half, tf.uint8), [-1, count * block])
        return tf.cast(tf.reshape(sent, [-1, count]), SCALE), _packed(codes, bits)

    signature = [tf.TensorSpec([None, columns], dtype), tf.TensorSpec([2], tf.uint32)]
    return tf.function(encode, input_signature=signature, autograph=False)


def _turner(block: int, by_chance: bool) -> Any:
    return tf.constant((unsigned(block) if by_chance else turner(block)) * _ROOM, tf.float32)


def _signed(blocks: Any, key: Any) -> Any:
    """Each number, or its opposite: as the key and its place have it."""
    places = tf.reshape(tf.range(tf.size(blocks)), tf.shape(blocks))
    lowest = counter.bits(key, tf.bitcast(places, tf.uint32)) & 1
    return blocks * (1 - 2 * tf.cast(tf.bitcast(lowest, tf.int32), tf.float32))


def _best(numbers: Any, odd: Any, unbiased: bool) -> Any:
    """The scale of odd integers for each row of numbers: with the least error, or with the whole of its own share."""
    product = tf.reduce_sum(numbers * odd, axis=1, keepdims=True)
    if unbiased:
        return tf.math.divide_no_nan(tf.reduce_sum(numbers * numbers, axis=1, keepdims=True), product)
    return product / tf.reduce_sum(odd * odd, axis=1, keepdims=True)


def _packed(codes: Any, bits: int) -> Any:
    """Plane by plane; of each, a part of a row after the other, from the lowest bits to the highest."""
    planes, below = [], 0
    for width in PLANES[bits]:
        of_width = _right(codes, below) & (1 << width) - 1
        made, *rest = tf.split(of_width, 8 // width, axis=1)
        for place, piece in enumerate(rest, start=1):
            made |= tf.bitwise.left_shift(piece, tf.constant(place * width, tf.uint8))
        planes.append(made)
        below += width
    return tf.concat(planes, axis=1)


def _unpacked(packed: Any, bits: int, columns: int) -> Any:
    """The codes of rows of so many columns."""
    codes, below = tf.constant(0, tf.uint8), 0
    planes = tf.split(packed, [columns * width // 8 for width in PLANES[bits]], axis=1)
    for width, plane in zip(PLANES[bits], planes, strict=True):
        pieces = [_right(plane, shift) & (1 << width) - 1 for shift in range(0, 8, width)]
        codes |= tf.bitwise.left_shift(tf.concat(pieces, axis=1), tf.constant(below, tf.uint8))
        below += width
    return codes


def _right(codes: Any, places: int) -> Any:
    return tf.bitwise.right_shift(codes, tf.constant(places, tf.uint8)) if places else codes


@lru_cache(maxsize=1024)
def _dequantiser(bits: int, most: int, columns: int, dtype: str, by_chance: bool) -> Callable[..., Any]:
    block = block_of(columns, bits, most)
    count = -(-columns // block)
    *sent, drawn = parts((1, columns), bits, most)
    signature = [tf.TensorSpec([None, part.dims[1]], part.dtype) for part in sent] + [
        tf.TensorSpec(drawn.dims, drawn.dtype)
    ]
    largest = min(float(tf.as_dtype(dtype).max), float(tf.float32.max))

    def decode(scales: Any, packed: Any, key: Any) -> Any:
        odd = 2 * tf.cast(_unpacked(packed, bits, count * block), tf.float32) - float(2**bits - 1)
        back = tf.constant((unsigned(block) if by_chance else turner(block)).T, tf.float32)
        turned = tf.reshape(odd, [-1, block]) @ back
        integers = _signed(turned, key) if by_chance else turned
        wide = integers * tf.reshape(tf.cast(scales, tf.float32), [-1, 1])
        bounded = tf.where(tf.abs(wide) > largest, tf.sign(wide) * largest, wide)
        return tf.cast(tf.reshape(bounded, [-1, count * block])[:, :columns], dtype)

    return tf.function(decode, input_signature=signature, autograph=False)
