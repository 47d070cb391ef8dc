"""Four bits a number and fewer, block by block: what the parts are, and how long blocks are.

A tensor [..., n] is a matrix of m rows and n columns. Each row is cut into blocks of b neighbours, and filled up with
zeros. A block x crosses as a scale s and as odd integers q (1, 3, 5 and 7 and their opposites with three bits) for
which s * q is near turn(x). To turn is to multiply by a matrix H of ones and minus ones whose rows stand at right
angles (Hadamard's, its columns with fixed signs): every number of the block goes into each of the b that cross, so
these are nearly normal whatever the block holds (outliers, zeros, numbers of one sign), and few levels at even
distances are nearly the best for that. Of a gradient each number changes its sign by chance before that, and not by a
fixed rule: what is lost then is another thing in every row and step, and little of it in the sum. What the signs are
drawn by crosses with it; it is zero where they are fixed.

What comes back is an integer, H^T q, times a scale of few digits: the same bits on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from whale_nebula.codec import rounding
from whale_nebula.codec.blocks import SCALE, rows_and_columns
from whale_nebula.codec.objects import Part
from whale_nebula.errors import OptionError, RemoteProtocolError
from whale_nebula.tf.lazy import tf

LEAST, MOST = 8, 256
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}
"""How many bits of each number lie together, from the lowest on: so many as go into a byte without a rest."""


def check_block(codec: str, block: object) -> None:
    """Refuse what no block can be."""
    whole = isinstance(block, int) and not isinstance(block, bool)
    if not whole or not LEAST <= block <= MOST or block & (block - 1):  # type: ignore[operator]
        raise OptionError(
            f"{codec}({block!r}) cannot be",
            why=f"a block is turned by halves: it is a power of two from {LEAST} to {MOST}",
            mend=f"nb.codec.{codec}(128)",
        )


def block_of(columns: int, bits: int, most: int) -> int:
    """The block, `most` or less, with which rows of so many columns take the fewest bytes; the longest of these.

    >>> [block_of(columns, 2, 128) for columns in (768, 100, 48, 20, 1)]
    [128, 128, 64, 32, 8]
    """
    sizes = [most >> halved for halved in range(most.bit_length()) if most >> halved >= LEAST]
    return min(sizes, key=lambda size: -(-columns // size) * (size * bits // 8 + 2))


def parts(dims: tuple[int, ...], bits: int, most: int) -> tuple[Part, ...]:
    """The scales, then the integers, in as many bits as they have, then what signs were drawn by.

    >>> parts((64, 768), 2, 128)[:2]
    (Part(dtype='bfloat16', dims=(64, 6)), Part(dtype='uint8', dims=(64, 192)))
    >>> parts((3, 20), 3, 128)[1:]
    (Part(dtype='uint8', dims=(3, 12)), Part(dtype='uint32', dims=(2,)))
    """
    rows, columns = rows_and_columns(dims)
    block = block_of(columns, bits, most)
    count = -(-columns // block)
    return Part(SCALE, (rows, count)), Part("uint8", (rows, count * block * bits // 8)), Part("uint32", (2,))


_BITS = np.frombuffer(hashlib.sha256(b"whale_nebula turned").digest(), np.uint8)
_SIGNS = 1 - 2 * np.unpackbits(_BITS)[:MOST].astype(np.int8)
"""Of the numbers of a block before they are turned: without them one of equal numbers would be a number and zeros."""


@cache
def turner(block: int) -> npt.NDArray[np.int8]:
    """The matrix that a block's rows are multiplied by, [block, block]; with its transpose it gives `block` times one.

    >>> h = turner(8).astype(int)
    >>> bool((h @ h.T == 8 * np.eye(8)).all())
    True
    """
    return _SIGNS[:block, None] * remove_signs(block)


@cache
def remove_signs(block: int) -> npt.NDArray[np.int8]:
    """The same for blocks whose signs were changed before."""
    made = np.ones((1, 1), np.int8)
    while len(made) < block:
        made = np.block([[made, made], [made, -made]])
    return made


def apart(packed: npt.NDArray[Any], bits: int) -> npt.NDArray[np.int8]:
    """The odd integers of rows. The first part of a row of a plane lies in the lowest bits, the last in the highest.

    >>> apart(np.array([[0b11100100, 0b00011011]], np.uint8), 2).tolist()
    [[-3, 3, -1, 1, 1, -1, 3, -3]]
    """
    numbers = packed.shape[1] * 8 // bits
    codes = np.zeros((len(packed), numbers), np.uint8)
    start, below = 0, 0
    for width in PLANES[bits]:
        size = numbers * width // 8
        plane = packed[:, start : start + size]
        pieces = [plane >> shift & (1 << width) - 1 for shift in range(0, 8, width)]
        codes |= np.concatenate(pieces, axis=1) << below
        start, below = start + size, below + width
    return 2 * codes.astype(np.int8) - np.int8(2**bits - 1)


def turned_back(packed: npt.NDArray[Any], columns: int, bits: int, most: int) -> npt.NDArray[np.int16]:
    """The integers of which, with its scale, each number of the rows is a multiple: `columns` of them in a row.

    >>> turned_back(np.array([[0b10101010, 0b10101010]], np.uint8), 3, 2, 64).shape
    (1, 3)
    """
    block = block_of(columns, bits, most)
    single = apart(packed, bits).astype(np.float32)
    blocks = single.reshape(-1, block) @ turner(block).T.astype(np.float32)  # whole numbers below 2^11: they are exact
    return blocks.astype(np.int16).reshape(single.shape)[:, :columns]


def spread(scales: npt.NDArray[Any], columns: int, bits: int, most: int) -> npt.NDArray[Any]:
    """A scale for each of so many columns.

    >>> spread(np.array([[1, 2]]), 9, 2, 8).tolist()
    [[1, 1, 1, 1, 1, 1, 1, 1, 2]]
    """
    return np.repeat(scales, block_of(columns, bits, most), axis=1)[:, :columns]


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
        turned = (_apply_signs(blocks, key) if by_chance else blocks) @ _turner(block, by_chance)
        mean = tf.reduce_mean(tf.abs(turned), axis=1, keepdims=True)
        whole = mean < float("inf")
        relative = tf.where(whole, tf.math.divide_no_nan(turned, mean), 0.0)
        half = float(2 ** (bits - 1))
        steps = tf.clip_by_value(tf.floor(relative / _DISTANCE[bits]), -half, half - 1)
        scales = _best(relative, 2 * steps + 1, by_chance) * mean * (1 / _ROOM / block)
        sent = tf.where(whole, tf.where(scales < _SMALLEST, 0.0, scales), float("nan"))
        codes = tf.reshape(tf.cast(steps + half, tf.uint8), [-1, count * block])
        return tf.cast(tf.reshape(sent, [-1, count]), SCALE), _pack_planes(codes, bits)

    signature = [tf.TensorSpec([None, columns], dtype), tf.TensorSpec([2], tf.uint32)]
    return tf.function(encode, input_signature=signature, autograph=False)


def _turner(block: int, by_chance: bool) -> Any:
    return tf.constant((remove_signs(block) if by_chance else turner(block)) * _ROOM, tf.float32)


def _apply_signs(blocks: Any, key: Any) -> Any:
    """Each number, or its opposite: as the key and its place have it."""
    places = tf.reshape(tf.range(tf.size(blocks)), tf.shape(blocks))
    lowest = rounding.bits(key, tf.bitcast(places, tf.uint32)) & 1
    return blocks * (1 - 2 * tf.cast(tf.bitcast(lowest, tf.int32), tf.float32))


def _best(numbers: Any, odd: Any, unbiased: bool) -> Any:
    """The scale of odd integers for each row of numbers: with the least error, or with the whole of its own share."""
    product = tf.reduce_sum(numbers * odd, axis=1, keepdims=True)
    if unbiased:
        return tf.math.divide_no_nan(tf.reduce_sum(numbers * numbers, axis=1, keepdims=True), product)
    return product / tf.reduce_sum(odd * odd, axis=1, keepdims=True)


def _pack_planes(codes: Any, bits: int) -> Any:
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


def _unpack_planes(packed: Any, bits: int, columns: int) -> Any:
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
        odd = 2 * tf.cast(_unpack_planes(packed, bits, count * block), tf.float32) - float(2**bits - 1)
        back = tf.constant((remove_signs(block) if by_chance else turner(block)).T, tf.float32)
        turned = tf.reshape(odd, [-1, block]) @ back
        integers = _apply_signs(turned, key) if by_chance else turned
        wide = integers * tf.reshape(tf.cast(scales, tf.float32), [-1, 1])
        bounded = tf.where(tf.abs(wide) > largest, tf.sign(wide) * largest, wide)
        return tf.cast(tf.reshape(bounded, [-1, count * block])[:, :columns], dtype)

    return tf.function(decode, input_signature=signature, autograph=False)
