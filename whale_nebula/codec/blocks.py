"""Block-wise integer quantisation: the layout of blocks, scales and integers.

A tensor [..., n] is a matrix of m rows and n columns. Each row is divided into blocks of neighbours; the last may be
shorter. A block has one scale, and its numbers are whole multiples of it, from -Q to Q with Q = 2^(bits - 1) - 1.

Scales are bfloat16 and not float16, though both take two bytes: gradients of a mean over a batch are around 1e-8, for
which a float16 scale (1e-8 / 127) is zero, and values above 8e6 would exceed its range. The lower precision of bfloat16
makes a scale up to 0.8 % too large, and the error 1 % larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from whale_nebula.codec.packing import Part
from whale_nebula.tf import tf

_GOLDEN = 0x9E3779B9


def random_bits(key: Any, places: Any) -> Any:
    """32 random bits (uint32) for each of these places (uint32); the key is a uint32[2].

    >>> random_bits(tf.constant([1, 2], tf.uint32), tf.constant([0, 1, 2], tf.uint32)).numpy().tolist()
    [3154396438, 1645042667, 2632225220]
    """
    first = mix_bits(key[0] + tf.constant(_GOLDEN, tf.uint32))
    second = mix_bits(tf.bitwise.bitwise_xor(first, key[1]))
    first = mix_bits(first + second)
    return mix_bits(mix_bits(tf.bitwise.bitwise_xor(places, first)) + second)


def random_uniform(key: Any, places: Any) -> Any:
    """A number in [0, 1) for each place: the upper 24 bits, which float32 holds exactly.

    >>> float(random_uniform(tf.constant([1, 2], tf.uint32), tf.constant(0, tf.uint32)))
    0.7344...
    """
    upper = tf.bitwise.right_shift(random_bits(key, places), tf.constant(8, tf.uint32))
    return tf.cast(tf.bitcast(upper, tf.int32), tf.float32) * 2.0**-24


def mix_bits(x: Any) -> Any:
    """Mix the bits of 32-bit integers: a bijection in which every output bit depends on every input bit."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        x = _xor_shifted(x, shift) * tf.constant(factor, tf.uint32)
    return _xor_shifted(x, 15)


def _xor_shifted(x: Any, shift: int) -> Any:
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(shift, tf.uint32)))


_UPPER_HALF, _LARGEST = 0xFFFF0000, 0x7F7FFFFF
_FP16_OVERFLOW = 65520.0  # the least number that half precision rounds to infinity


def to_fp16(x: Any) -> Any:
    """Round to IEEE half precision, to nearest; larger numbers saturate at 65504.

    Infinities and NaN are kept, as loss scaling detects them. `count_clamped` counts the saturated ones. Rounding is
    never stochastic: with eleven bits its bias is far below the noise of a gradient.

    >>> to_fp16(tf.constant([1e9, -1e9, 1.0, float("inf"), float("nan")])).numpy().tolist()
    [65504.0, -65504.0, 1.0, inf, nan]
    """
    half = _halve_precision(x)
    return tf.cond(tf.reduce_any(tf.math.is_inf(half)), lambda: _clamp(x), lambda: half)


def count_overflows(x: Any) -> Any:
    """Count the finite numbers that overflow in half precision (an int64 scalar).

    >>> int(count_overflows(tf.constant([1e9, -65521.0, 65519.0, float("inf")])))
    2
    """
    return tf.math.count_nonzero(tf.math.is_finite(x) & ~tf.math.is_finite(_halve_precision(x)))


def count_clamped(x: Any) -> int:
    """Count the numbers of a tensor that saturate in half precision.

    Usually there are none: so its maximum and minimum are checked first, and numbers are counted only if these
    overflow.

    >>> [count_clamped(tf.constant(x)) for x in ([1e9, -1e9, 1.0, float("inf")], [65504.0], [])]
    [2, 0, 0]
    """
    if x.dtype.size < 4 or not x.shape.num_elements():
        return 0 if x.dtype != tf.bfloat16 else int(count_overflows(x))
    fits = float(tf.reduce_max(x)) < _FP16_OVERFLOW and float(tf.reduce_min(x)) > -_FP16_OVERFLOW
    return 0 if fits else int(count_overflows(x))


def to_bf16(x: Any, key: Any = None) -> Any:
    """Round to the upper half of a float32, to the nearest; with a key (uint32[2]) stochastically, so that the mean is
    x.

    >>> to_bf16(tf.constant([1.00390625, 1e30])).numpy().tolist()
    [1.0, 1.0002...e+30]
    """
    single = tf.cast(x, tf.float32)
    return tf.cast(single if key is None else _round_float_stochastically(single, key), tf.bfloat16)


def restore(x: Any, dtype: str) -> Any:
    """Cast two-byte numbers back to their own type, saturating at its largest number.

    >>> restore(to_bf16(tf.constant([65504.0], tf.float16)), "float16").numpy().tolist()
    [65504.0]
    """
    return to_fp16(x) if dtype == "float16" else tf.cast(x, dtype)


def _halve_precision(x: Any) -> Any:
    return tf.cast(tf.cast(x, tf.float32), tf.float16)  # a float64 in the same two steps, compiled or not


def _clamp(x: Any) -> Any:
    """Saturate to the range, but keep infinities; needed only if something overflows."""
    single = tf.cast(x, tf.float32)
    within = tf.clip_by_value(single, tf.float16.min, tf.float16.max)
    return tf.cast(tf.where(tf.math.is_finite(x), within, single), tf.float16)


def _round_float_stochastically(single: Any, key: Any) -> Any:
    """Stochastic rounding: add sixteen random bits below the kept ones; finite numbers stay finite."""
    patterns = tf.bitcast(single, tf.uint32)
    places = tf.reshape(tf.bitcast(tf.range(tf.size(single)), tf.uint32), tf.shape(single))
    drawn = tf.bitwise.right_shift(random_bits(key, places), tf.constant(16, tf.uint32))
    sign = tf.bitwise.bitwise_and(patterns, tf.constant(0x80000000, tf.uint32))
    size = tf.bitwise.bitwise_xor(patterns, sign)
    moved = tf.minimum(size + drawn, tf.constant(_LARGEST, tf.uint32))
    kept = tf.bitwise.bitwise_and(tf.bitwise.bitwise_or(moved, sign), tf.constant(_UPPER_HALF, tf.uint32))
    return tf.where(tf.math.is_finite(single), tf.bitcast(kept, tf.float32), single)


def unpack_pairs(pairs: npt.NDArray[Any], columns: int) -> npt.NDArray[np.int8]:
    """Unpack rows of 4-bit integers: the left half of a row is in the lower bits, the right half in the upper bits.

    >>> unpack_pairs(np.array([[0x9F, 0x01]], np.uint8), 3).tolist()
    [[7, -7, 1]]
    """
    left, right = pairs & 15, pairs >> 4
    single = np.concatenate([left, right[:, : columns - left.shape[1]]], axis=1).astype(np.int8)
    return single - np.int8(8)


SCALE = "bfloat16"


def levels(bits: int) -> int:
    """The largest multiple: the number of levels, 2 * levels + 1, is odd, so that zero is a level and both signs are
    symmetric.

    >>> levels(8), levels(4)
    (127, 7)
    """
    return int(2 ** (bits - 1) - 1)


def rows_and_columns(dims: tuple[int, ...]) -> tuple[int, int]:
    """The sizes of a tensor viewed as a matrix.

    >>> rows_and_columns((4, 16, 768)), rows_and_columns((768,)), rows_and_columns(())
    ((64, 768), (1, 768), (1, 1))
    """
    return math.prod(dims[:-1]), dims[-1] if dims else 1


def parts(dims: tuple[int, ...], bits: int, block: int) -> tuple[Part, ...]:
    """The scales, then the integers: as int8, or two in a byte, so that a row of n takes half of n bytes, rounded up.

    >>> parts((64, 100), 8, 64)
    (Part(dtype='bfloat16', dims=(64, 2)), Part(dtype='int8', dims=(64, 100)))
    >>> parts((64, 99), 4, 32)
    (Part(dtype='bfloat16', dims=(64, 4)), Part(dtype='uint8', dims=(64, 50)))
    """
    rows, columns = rows_and_columns(dims)
    integers = Part("int8", (rows, columns)) if bits == 8 else Part("uint8", (rows, -(-columns // 2)))
    return Part(SCALE, (rows, -(-columns // block))), integers


_SIGN, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
_SMALLEST = (127 - 100) << 23
_UPPER_MASK, _LOWER_MASK = -0x10000, 0xFFFF
_LEAST_COMPILED_SIZE = 1 << 20


def quantise(x: Any, *, bits: int, block: int, key: Any = None) -> tuple[Any, Any]:
    """Quantise to scales and integers. Without a key a number is rounded to the nearest multiple of its scale (ties to
    even).

    With a key (uint32[2]) it is rounded to one of the two nearest with the probabilities that make the result unbiased;
    the random bits depend on the key and the number's place, so the same key gives the same bytes.

    >>> scales, integers = quantise(tf.constant([[127.0, -1.0, 0.5, 1.6]]), bits=8, block=64)
    >>> scales.numpy().tolist(), integers.numpy().tolist()
    ([[1.0]], [[127, -1, 0, 2]])
    """
    rows, columns = rows_and_columns(tuple(x.shape))
    matrix = tf.reshape(x, [rows, columns])
    if not rows or not columns:
        return tuple(tf.zeros(part.dims, part.dtype) for part in parts((rows, columns), bits, block))
    compiled = rows * columns >= _LEAST_COMPILED_SIZE
    more = round_up_rows(rows) - rows if compiled else 0
    made = _make_quantiser(bits, block, columns, x.dtype.name, key is not None, compiled)
    scales, integers = made(tf.pad(matrix, [[0, more], [0, 0]]) if more else matrix, *([] if key is None else [key]))
    return (scales[:rows], integers[:rows]) if more else (scales, integers)


def round_up_rows(rows: int) -> int:
    """Round a number of rows up, by at most an eighth: with eight values in each octave, few functions are compiled.

    >>> [round_up_rows(rows) for rows in (7, 16, 17, 8192, 8193)]
    [7, 16, 18, 8192, 9216]
    """
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def dequantise(scales: Any, integers: Any, *, dims: tuple[int, ...], bits: int, block: int, dtype: str) -> Any:
    """Restore the tensor: integers times scales, rounded once more only if `dtype` is narrower than float32.

    >>> scales, integers = quantise(tf.constant([7.0, -1.2, 0.5, 1.75]), bits=4, block=2)
    >>> dequantise(scales, integers, dims=(4,), bits=4, block=2, dtype="float32").numpy().tolist()
    [7.0, -1.0, 0.5, 1.75]
    """
    rows, columns = rows_and_columns(dims)
    if not rows or not columns:
        return tf.zeros(dims, dtype)
    return tf.reshape(_make_dequantiser(bits, block, columns, dtype)(scales, integers), dims)


@lru_cache(maxsize=1024)
def _make_quantiser(
    bits: int, block: int, columns: int, dtype: str, by_chance: bool, compiled: bool
) -> Callable[..., tuple[Any, Any]]:
    signature = [tf.TensorSpec([None, columns], dtype)] + [tf.TensorSpec([2], tf.uint32)] * by_chance
    from whale_nebula.tf import private  # loads TensorFlow

    divided = tf.function(
        partial(_compute_integers, levels(bits), columns), autograph=False, jit_compile=compiled or None
    )

    def encode(matrix: Any, *key: Any) -> tuple[Any, Any]:
        blocks = _split_blocks(tf.cast(matrix, tf.float32), columns, block)
        scales, whole = _compute_scales(blocks, bits, dtype)
        integers = _join_blocks(divided(blocks, scales, whole, *key), columns)
        sent = tf.where(whole, tf.bitcast(scales, tf.int32), _NAN)[:, :, 0]
        return _bitcast_upper_half(sent), integers if bits == 8 else _pair_nibbles(integers, columns)

    return private.silence_retracing_warning(tf.function(encode, input_signature=signature, autograph=False))


@lru_cache(maxsize=1024)
def _make_dequantiser(bits: int, block: int, columns: int, dtype: str) -> Callable[..., Any]:
    from whale_nebula.tf import private  # loads TensorFlow

    scales, integers = parts((1, columns), bits, block)
    signature = [tf.TensorSpec([None, part.dims[1]], part.dtype) for part in (scales, integers)]

    def decode(scales: Any, integers: Any) -> Any:
        single = integers if bits == 8 else _unpair_nibbles(integers, columns)
        blocks = tf.cast(_split_blocks(single, columns, block), tf.float32)
        return tf.cast(_join_blocks(blocks * tf.cast(scales, tf.float32)[:, :, None], columns), dtype)

    return private.silence_retracing_warning(tf.function(decode, input_signature=signature, autograph=False))


def _split_blocks(matrix: Any, columns: int, block: int) -> Any:
    """[m, n] as [m, blocks, block]; the last block is padded with zeros."""
    count = -(-columns // block)
    if columns != count * block:
        matrix = tf.pad(matrix, [[0, 0], [0, count * block - columns]])
    return tf.reshape(matrix, [-1, count, block])


def _join_blocks(blocks: Any, columns: int) -> Any:
    """Invert `_split_blocks`, without its padding."""
    whole = tf.reshape(blocks, [-1, blocks.shape[1] * blocks.shape[2]])
    return whole if whole.shape[1] == columns else whole[:, :columns]


def _compute_scales(blocks: Any, bits: int, dtype: str) -> tuple[Any, Any]:
    """For each block its scale as a float32 that is exact in bfloat16, and whether all of its numbers are finite."""
    patterns = tf.bitwise.bitwise_and(tf.bitcast(blocks, tf.int32), _SIGN)
    largest = tf.reduce_max(patterns, axis=2, keepdims=True)
    whole = largest < _INFINITY
    exact = tf.bitcast(tf.where(whole, largest, 0), tf.float32) * (1 / levels(bits))
    rounded_up = tf.bitwise.bitwise_and(tf.bitcast(exact, tf.int32) + _LOWER_MASK, _UPPER_MASK)
    return tf.bitcast(tf.clip_by_value(rounded_up, _SMALLEST, _largest_scale(bits, dtype)), tf.float32), whole


def _largest_scale(bits: int, dtype: str) -> int:
    """The bit pattern of the largest scale whose multiples are all representable in the tensor's type."""
    most = min(float(tf.as_dtype(dtype).max), float(tf.float32.max))
    return int(np.float32(most / levels(bits)).view(np.int32)) & _UPPER_MASK


def _compute_integers(most: int, columns: int, blocks: Any, scales: Any, whole: Any, *key: Any) -> Any:
    """The integers of each block; zeros if a block is not finite, as the conversion of NaN depends on the processor."""
    exact = blocks / scales
    rounded = _round_stochastically(exact, columns, *key) if key else tf.round(exact)
    return tf.cast(tf.clip_by_value(rounded, -most, most), tf.int8) * tf.cast(whole, tf.int8)


def _round_stochastically(exact: Any, columns: int, key: Any) -> Any:
    """Round stochastically by the remainder; whole multiples are unchanged."""
    rows, count, block = tf.shape(exact)[0], exact.shape[1], exact.shape[2]
    column = tf.bitcast(tf.reshape(tf.range(count * block), [1, count, block]), tf.uint32)
    row = tf.bitcast(tf.range(rows)[:, None, None], tf.uint32)
    chance = random_uniform(key, row * tf.constant(columns, tf.uint32) + column)
    lower = tf.floor(exact)
    return lower + tf.cast(chance < exact - lower, tf.float32)


def _bitcast_upper_half(patterns: Any) -> Any:
    """The bfloat16 with these bits as the upper half of a float32."""
    return tf.bitcast(tf.cast(tf.bitwise.right_shift(tf.bitcast(patterns, tf.uint32), 16), tf.uint16), SCALE)


def _pair_nibbles(integers: Any, columns: int) -> Any:
    """Pack two in a byte: the left half of a row in the lower four bits, the right half in the upper ones."""
    half = -(-columns // 2)
    shifted = tf.bitcast(integers + 8, tf.uint8)
    right = shifted[:, half:] if columns == 2 * half else tf.pad(shifted[:, half:], [[0, 0], [0, 1]])
    return tf.bitwise.bitwise_or(shifted[:, :half], tf.bitwise.left_shift(right, tf.constant(4, tf.uint8)))


def _unpair_nibbles(pairs: Any, columns: int) -> Any:
    left = tf.bitwise.bitwise_and(pairs, tf.constant(15, tf.uint8))
    right = tf.bitwise.right_shift(pairs, tf.constant(4, tf.uint8))
    return tf.bitcast(tf.concat([left, right[:, : columns - left.shape[1]]], axis=1), tf.int8) - 8
