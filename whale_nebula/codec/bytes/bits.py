"""Integers and bools in the bits that they need: a bool in one, integers as what they are above the smallest.

Packed integers begin with their width in bits (one byte) and the smallest of them (in their own type). Then come
`width` bits for each. A word has B bits: first, for as many integers as are a multiple of B, `width` rows of words;
then the rest alike, cut off after its last byte. So the work is a few operations on whole rows, a million ids take
milliseconds, and no bit is spent on padding but in the last byte.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.tensor import Bytes, array_bytes

_Words = npt.NDArray[Any]  # of an unsigned type

TYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def pack(array: npt.NDArray[Any]) -> Bytes:
    """The elements of a bool or integer array, small.

    >>> pack(np.array([True, False, True])).tolist()
    [5]
    >>> pack(np.array([1000, 1001, 1003])).size, pack(np.zeros(10**6, np.int64)).size
    (10, 9)
    """
    dtype = _known(array.dtype.name)
    if dtype == np.bool_:
        return np.packbits(array.reshape(-1), bitorder="little")
    words = array_bytes(array).view(_word(dtype))
    least = words[array.reshape(-1).argmin()] if words.size else words.dtype.type(0)
    above = words - least
    width = int(above.max()).bit_length() if words.size else 0
    head = np.array([width, *np.frombuffer(least.tobytes(), np.uint8)], np.uint8)
    return np.concatenate([head, _squeezed(above, width)])


def unpack(data: Bytes, dtype: str, dims: tuple[int, ...]) -> npt.NDArray[Any]:
    """The array whose `pack` these bytes are; nothing is allocated before their number is known to be right.

    >>> unpack(pack(np.array([[-3, 900]])), "int64", (1, 2)).tolist()
    [[-3, 900]]
    """
    kind, count = _known(dtype), math.prod(dims)
    if kind == np.bool_:
        _check_size(data, _whole_bytes(count))
        _check_rest(data, count)
        return np.unpackbits(data, count=count, bitorder="little").view(np.bool_).reshape(dims)
    word = _word(kind)
    head = 1 + word.itemsize
    width = int(data[0]) if data.size else 0
    if width > 8 * word.itemsize:
        raise RemoteProtocolError(f"{dtype} packed to {width} bits")
    _check_size(data, head + _whole_bytes(count * width))
    _check_rest(data[head:], count * width)
    above = _spread(data[head:], width, count, word)
    least = np.frombuffer(data[1:head].tobytes(), kind)
    if count and int(least[0]) + int(above.max()) > np.iinfo(kind).max:
        raise RemoteProtocolError(f"a packed number is beyond {dtype}")
    above += least.view(word)
    return above.view(kind).reshape(dims)


def _known(name: str) -> np.dtype[Any]:
    if name not in TYPES:
        raise LocalProtocolError(f"{name} is not packed to bits", why=f"that is for {', '.join(TYPES)}")
    return np.dtype(name).newbyteorder("<")


def _word(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The unsigned type of the same size."""
    return np.dtype(f"<u{dtype.itemsize}")


def _whole_bytes(count: int) -> int:
    return -(-count // 8)


def _check_size(data: Bytes, due: int) -> None:
    if data.size != due:
        raise RemoteProtocolError(f"{data.size} bytes of packed numbers came where {due} were due")


def _check_rest(data: Bytes, count: int) -> None:
    """Nothing is said in the bits of the last byte that belong to nobody."""
    if count % 8 and data[-1] >> count % 8:
        raise RemoteProtocolError("packed numbers have more bits than there are numbers")


def _squeezed(values: _Words, width: int) -> Bytes:
    """`width` bits of each value."""
    lanes = 8 * values.itemsize
    full = values.size - values.size % lanes
    rest = np.zeros(lanes, values.dtype)
    rest[: values.size - full] = values[full:]
    ends = _laid(rest, width).view(np.uint8)[: _whole_bytes((values.size - full) * width)]
    return np.concatenate([_laid(values[:full], width).view(np.uint8), ends])


def _laid(values: _Words, width: int) -> _Words:
    """Values, a multiple of the bits of a word, as `width` rows of words: the first row has the lowest bits."""
    bits = 8 * values.itemsize
    lanes = values.reshape(bits, -1)
    rows = np.zeros((width, lanes.shape[1]), values.dtype)
    for lane, (row, shift) in enumerate(_places(bits, width)):
        rows[row] |= lanes[lane] << shift
        if shift + width > bits:
            rows[row + 1] |= lanes[lane] >> (bits - shift)
    return rows.reshape(-1)


def _spread(data: Bytes, width: int, count: int, word: np.dtype[Any]) -> _Words:
    """The values that `_squeezed` made these bytes of."""
    lanes = 8 * word.itemsize
    full = count - count % lanes
    place = full // 8 * width
    rest = np.zeros(width * word.itemsize, np.uint8)
    rest[: data.size - place] = data[place:]
    rows = np.frombuffer(data[:place].tobytes(), word)
    values = np.empty(count, word)
    values[:full] = _lifted(rows, width, full)
    values[full:] = _lifted(rest.view(word), width, lanes)[: count - full]
    return values


def _lifted(rows: _Words, width: int, count: int) -> _Words:
    """The values that `_laid` made these rows of."""
    bits = 8 * rows.itemsize
    if not width:
        return np.zeros(count, rows.dtype)
    rows = rows.reshape(width, -1)
    lanes = np.empty((bits, rows.shape[1]), rows.dtype)
    mask = rows.dtype.type((1 << width) - 1)
    for lane, (row, shift) in enumerate(_places(bits, width)):
        lanes[lane] = rows[row] >> shift
        if shift + width > bits:
            lanes[lane] |= rows[row + 1] << (bits - shift)
    lanes &= mask
    return lanes.reshape(-1)


def _places(bits: int, width: int) -> list[tuple[int, int]]:
    """Where each lane begins: the row, and the bit in it."""
    return [divmod(lane * width, bits) for lane in range(bits)] if width else []
