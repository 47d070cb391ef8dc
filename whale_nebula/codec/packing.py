"""Bit packing of integers and bools: one bit per bool; integers as offsets from their minimum.

Packed integers begin with their width in bits (one byte) and the smallest of them (in their own type), followed by
`width` bits for each. A word has B bits: first, for the largest multiple of B integers, `width` rows of words; then the
rest likewise, truncated after its last byte. So packing is a few operations on whole rows, a million ids take
milliseconds, and only the last byte has padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntFlag
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from whale_nebula.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.tensor import Bytes, count_raw_bytes, decode_array, encode_array, find_dtype_code

Dims = tuple[int, ...]


class Part(NamedTuple):
    """An array of a payload, with the element type and sizes that both sides expect.

    >>> Part("bfloat16", (3, 2)).nbytes
    12
    """

    dtype: str
    dims: Dims

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return count_raw_bytes(find_dtype_code(self.dtype), self.dims)


_Words = npt.NDArray[Any]  # an array of an unsigned type

TYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def pack(array: npt.NDArray[Any]) -> Bytes:
    """Pack a bool or integer array into as few bits as its values need.

    >>> pack(np.array([True, False, True])).tolist()
    [5]
    >>> pack(np.array([1000, 1001, 1003])).size, pack(np.zeros(10**6, np.int64)).size
    (10, 9)
    """
    dtype = _numpy_dtype(array.dtype.name)
    if dtype == np.bool_:
        return np.packbits(array.reshape(-1), bitorder="little")
    words = encode_array(array).view(_word(dtype))
    least = words[array.reshape(-1).argmin()] if words.size else words.dtype.type(0)
    above = words - least
    width = int(above.max()).bit_length() if words.size else 0
    head = np.array([width, *np.frombuffer(least.tobytes(), np.uint8)], np.uint8)
    return np.concatenate([head, _squeeze_bits(above, width)])


def unpack(data: Bytes, dtype: str, dims: tuple[int, ...]) -> npt.NDArray[Any]:
    """Invert `pack`; the number of bytes is checked before any allocation.

    >>> unpack(pack(np.array([[-3, 900]])), "int64", (1, 2)).tolist()
    [[-3, 900]]
    """
    kind, count = _numpy_dtype(dtype), math.prod(dims)
    if kind == np.bool_:
        _check_size(data, _count_bytes(count))
        _check_rest(data, count)
        return np.unpackbits(data, count=count, bitorder="little").view(np.bool_).reshape(dims)
    word = _word(kind)
    head = 1 + word.itemsize
    width = int(data[0]) if data.size else 0
    if width > 8 * word.itemsize:
        raise RemoteProtocolError(f"a packed {dtype} has {width} bits")
    _check_size(data, head + _count_bytes(count * width))
    _check_rest(data[head:], count * width)
    above = _spread(data[head:], width, count, word)
    least = np.frombuffer(data[1:head].tobytes(), kind)
    if count and int(least[0]) + int(above.max()) > np.iinfo(kind).max:
        raise RemoteProtocolError(f"a packed number is out of the range of {dtype}")
    above += least.view(word)
    return above.view(kind).reshape(dims)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name not in TYPES:
        raise LocalProtocolError(f"{name} cannot be packed to bits", why=f"supported types are {', '.join(TYPES)}")
    return np.dtype(name).newbyteorder("<")


def _word(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The unsigned type of the same size."""
    return np.dtype(f"<u{dtype.itemsize}")


def _count_bytes(count: int) -> int:
    return -(-count // 8)


def _check_size(data: Bytes, due: int) -> None:
    if data.size != due:
        raise RemoteProtocolError(f"received {data.size} bytes of packed numbers, expected {due}")


def _check_rest(data: Bytes, count: int) -> None:
    """Refuse bits that are set in the padding of the last byte."""
    if count % 8 and data[-1] >> count % 8:
        raise RemoteProtocolError("packed numbers have more bits than there are numbers")


def _squeeze_bits(values: _Words, width: int) -> Bytes:
    """Keep the lowest `width` bits of each value."""
    lanes = 8 * values.itemsize
    full = values.size - values.size % lanes
    rest = np.zeros(lanes, values.dtype)
    rest[: values.size - full] = values[full:]
    ends = _lay_rows(rest, width).view(np.uint8)[: _count_bytes((values.size - full) * width)]
    return np.concatenate([_lay_rows(values[:full], width).view(np.uint8), ends])


def _lay_rows(values: _Words, width: int) -> _Words:
    """Pack the lowest `width` bits of values, whose number is a multiple of a word's bits, into words."""
    bits = 8 * values.itemsize
    lanes = values.reshape(bits, -1)
    rows = np.zeros((width, lanes.shape[1]), values.dtype)
    for lane, (row, shift) in enumerate(_places(bits, width)):
        rows[row] |= lanes[lane] << shift
        if shift + width > bits:
            rows[row + 1] |= lanes[lane] >> (bits - shift)
    return rows.reshape(-1)


def _spread(data: Bytes, width: int, count: int, word: np.dtype[Any]) -> _Words:
    """Invert `_squeeze_bits`."""
    lanes = 8 * word.itemsize
    full = count - count % lanes
    place = full // 8 * width
    rest = np.zeros(width * word.itemsize, np.uint8)
    rest[: data.size - place] = data[place:]
    rows = np.frombuffer(data[:place].tobytes(), word)
    values = np.empty(count, word)
    values[:full] = _lift_rows(rows, width, full)
    values[full:] = _lift_rows(rest.view(word), width, lanes)[: count - full]
    return values


def _lift_rows(rows: _Words, width: int, count: int) -> _Words:
    """Invert `_lay_rows`."""
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
    """The row and the bit at which each lane begins."""
    return [divmod(lane * width, bits) for lane in range(bits)] if width else []


Mask = npt.NDArray[np.bool_]
"""For each row of a matrix, whether it is sent."""


def pack_mask(mask: Mask) -> Bytes:
    """Pack a mask of rows, one bit a row.

    >>> pack_mask(np.array([True, True, False])).tolist()
    [3]
    """
    return pack(_check_mask(mask))


def unpack_mask(data: Bytes, rows: int) -> Mask:
    """Unpack a mask of `rows` rows.

    >>> unpack_mask(np.array([3], np.uint8), 3).tolist()
    [True, True, False]
    """
    return unpack(data, "bool", (rows,))


def keep(matrix: npt.NDArray[Any], mask: Mask) -> npt.NDArray[Any]:
    """Select the rows of a mask, in order; the matrix itself if all are selected.

    >>> keep(np.arange(6).reshape(3, 2), np.array([True, False, True])).tolist()
    [[0, 1], [4, 5]]
    """
    if _check_mask(mask).shape != matrix.shape[:1]:
        raise LocalProtocolError(f"a mask of {mask.size} rows does not match a matrix of shape {matrix.shape}")
    return matrix if mask.all() else matrix[mask]


def put_back(rows: npt.NDArray[Any], mask: Mask) -> npt.NDArray[Any]:
    """Scatter the sent rows into a matrix; the other rows are zero.

    >>> put_back(np.array([[0, 1], [4, 5]]), np.array([True, False, True])).tolist()
    [[0, 1], [0, 0], [4, 5]]
    """
    sent = int(np.count_nonzero(_check_mask(mask)))
    if rows.shape[:1] != (sent,):
        raise RemoteProtocolError(f"received rows of shape {rows.shape} with a mask that marks {sent}")
    if sent == mask.size:
        return rows
    matrix = np.zeros((mask.size, *rows.shape[1:]), rows.dtype)
    matrix[mask] = rows
    return matrix


def _check_mask(mask: Mask) -> Mask:
    if mask.dtype != np.bool_ or mask.ndim != 1:
        raise LocalProtocolError(f"{mask.dtype}{list(mask.shape)} is not a mask", why="a mask is one bool for each row")
    return mask


_BOOL = find_dtype_code("bool")


def join(arrays: Sequence[npt.NDArray[Any]]) -> Bytes:
    """Concatenate arrays into one buffer.

    >>> join([np.array([1, 2], "int16"), np.array(True)]).tolist()
    [1, 0, 2, 0, 1]
    """
    rows = [encode_array(np.asarray(array)) for array in arrays]
    return np.concatenate(rows) if rows else np.empty(0, np.uint8)


def split(buffer: Bytes, parts: Sequence[Part]) -> list[npt.NDArray[Any]]:
    """Split a buffer into arrays, as views; its length must be exactly theirs.

    >>> buffer = join([np.arange(3), np.float32(0.5)])
    >>> [part.tolist() for part in split(buffer, [Part("int64", (3,)), Part("float32", ())])]
    [[0, 1, 2], 0.5]
    """
    sizes = [part.nbytes for part in parts]
    if buffer.size != sum(sizes):
        raise RemoteProtocolError(
            f"received {buffer.size} bytes, expected {sum(sizes)}",
            why=f"this codec encodes the tensor as {_describe_parts(parts)}",
        )
    found, place = [], 0
    for part, size in zip(parts, sizes, strict=True):
        found.append(_array(buffer[place : place + size], part))
        place += size
    return found


def _array(data: Bytes, part: Part) -> npt.NDArray[Any]:
    code = find_dtype_code(part.dtype)
    if code == _BOOL and data.size and data.max() > 1:
        raise RemoteProtocolError("a bool that is neither 0 nor 1")
    return decode_array(data, code, part.dims)


def _describe_parts(parts: Sequence[Part]) -> str:
    return ", ".join(f"{part.dtype}{list(part.dims)}" for part in parts) or "nothing"


SAMPLE_BYTES = 64 << 10
WORTH = 0.97  # largest ratio of compressed bytes that is worth the time


def shrink(data: Bytes) -> Bytes | None:
    """Compress bytes by Zstandard; None if that saves less than three percent.

    A sample from the middle is tried first, so that incompressible data cost little.
    """
    compressor = _import_zstd().ZstdCompressor(level=1)
    start = (data.size - SAMPLE_BYTES) // 2
    for part in (data[start : start + SAMPLE_BYTES], data) if data.size > SAMPLE_BYTES else (data,):
        made = compressor.compress(part.data)
        if not part.size or len(made) > WORTH * part.size:
            return None
    return np.frombuffer(made, np.uint8)


def unshrink(data: Bytes, size: int) -> Bytes:
    """Decompress to a known size; more is never allocated."""
    zstd = _import_zstd()
    try:
        if zstd.frame_content_size(data.data) == size:
            opener = zstd.ZstdDecompressor()
            found = opener.decompress(data.data, max_output_size=size, allow_extra_data=False)
            return np.frombuffer(found, np.uint8)
    except zstd.ZstdError:
        pass
    raise RemoteProtocolError(f"received {data.size} compressed bytes that do not decompress to {size} bytes")


def _import_zstd() -> Any:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ConfigError(
            "zstd=True requires the package zstandard, which is not installed",
            why="it is an optional dependency, used only for zstd compression",
            mend="pip install 'whale-nebula[zstd]' on every host",
        ) from None
    return zstandard


PREFIX = 4
"""Bytes of a payload's header, which has its flags."""
_SIZE = 4  # bytes of the size before zstd


class Has(IntFlag):
    """Flags of the optional parts of a payload."""

    ROWS = 1
    NEWS = 2
    ZSTD = 4
    CHANGES = 8


class Payload(NamedTuple):
    """An encoded tensor: the codec's bytes, the mask of its rows, and news of the codec's state.

    `changes` is true for differences of samples.
    """

    data: Bytes
    rows: Mask | None = None
    news: Bytes | None = None
    changes: bool = False


def write_payload(payload: Payload, *, zstd: bool) -> Bytes:
    """Serialise a payload."""
    has = Has.ROWS * (payload.rows is not None) | Has.NEWS * (payload.news is not None) | Has.CHANGES * payload.changes
    body = [] if payload.rows is None else [pack_mask(payload.rows)]
    body += [] if payload.news is None else [payload.news]
    whole = np.concatenate([*body, payload.data])
    small = shrink(whole) if zstd else None
    if small is not None and _SIZE + small.size < whole.size:
        whole = np.concatenate([np.array([whole.size], "<u4").view(np.uint8), small])
        has |= Has.ZSTD
    return np.concatenate([np.array([has, 0, 0, 0], np.uint8), whole])


def read_payload(data: Bytes, rows: int, news: int, most: int, *, zstd: bool = True) -> Payload:
    """Parse a payload of `rows` rows, with `news` bytes of news if any; `most` bounds the size of the rest."""
    known = int(Has.ROWS | Has.NEWS | Has.ZSTD | Has.CHANGES)
    if data.size < PREFIX or int(data[0]) & ~known or data[1:PREFIX].any():
        raise RemoteProtocolError("an encoded tensor has an invalid header")
    has, body = Has(int(data[0])), data[PREFIX:]
    if (Has.ZSTD in has and not zstd) or (Has.NEWS in has and not news):
        raise RemoteProtocolError("an encoded tensor has parts that this boundary never sends")
    if Has.ZSTD in has:
        most += rows // 8 + 1 + news
        size = int(body[:_SIZE].view("<u4")[0]) if body.size >= _SIZE else most + 1
        if size > most:
            raise RemoteProtocolError(
                f"an encoded tensor declares {size} bytes before compression, which exceeds the maximum of {most}"
            )
        body = unshrink(body[_SIZE:], size)
    mask = state_news = None
    if Has.ROWS in has:
        mask, body = unpack_mask(body[: -(-rows // 8)], rows), body[-(-rows // 8) :]
    if Has.NEWS in has:
        state_news, body = body[:news], body[news:]
    return Payload(body, mask, state_news, Has.CHANGES in has)
