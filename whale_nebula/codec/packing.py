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
    return np.concatenate([head, _pack_bits(above, width)])


def unpack(data: Bytes, dtype: str, dims: tuple[int, ...]) -> npt.NDArray[Any]:
    """Invert `pack`; the number of bytes is checked before any allocation.

    >>> unpack(pack(np.array([[-3, 900]])), "int64", (1, 2)).tolist()
    [[-3, 900]]
    """
    kind, count = _numpy_dtype(dtype), math.prod(dims)
    if kind == np.bool_:
        _check_size(data, _count_bytes(count))
        _check_padding(data, count)
        return np.unpackbits(data, count=count, bitorder="little").view(np.bool_).reshape(dims)
    word = _word(kind)
    head = 1 + word.itemsize
    width = int(data[0]) if data.size else 0
    if width > 8 * word.itemsize:
        raise RemoteProtocolError(f"a packed {dtype} has {width} bits")
    _check_size(data, head + _count_bytes(count * width))
    _check_padding(data[head:], count * width)
    above = _unpack_bits(data[head:], width, count, word)
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


def _check_size(data: Bytes, expected_size: int) -> None:
    if data.size != expected_size:
        raise RemoteProtocolError(f"received {data.size} bytes of packed numbers, expected {expected_size}")


def _check_padding(data: Bytes, count: int) -> None:
    """Refuse bits that are set in the padding of the last byte."""
    if count % 8 and data[-1] >> count % 8:
        raise RemoteProtocolError("packed numbers have more bits than there are numbers")


def _pack_bits(values: _Words, width: int) -> Bytes:
    """Keep the lowest `width` bits of each value."""
    lanes = 8 * values.itemsize
    full = values.size - values.size % lanes
    rest = np.zeros(lanes, values.dtype)
    rest[: values.size - full] = values[full:]
    ends = _pack_rows(rest, width).view(np.uint8)[: _count_bytes((values.size - full) * width)]
    return np.concatenate([_pack_rows(values[:full], width).view(np.uint8), ends])


def _pack_rows(values: _Words, width: int) -> _Words:
    """Pack the lowest `width` bits of values, whose number is a multiple of a word's bits, into words."""
    bits = 8 * values.itemsize
    lanes = values.reshape(bits, -1)
    rows = np.zeros((width, lanes.shape[1]), values.dtype)
    for lane, (row, shift) in enumerate(_lane_offsets(bits, width)):
        rows[row] |= lanes[lane] << shift
        if shift + width > bits:
            rows[row + 1] |= lanes[lane] >> (bits - shift)
    return rows.reshape(-1)


def _unpack_bits(data: Bytes, width: int, count: int, word: np.dtype[Any]) -> _Words:
    """Invert `_pack_bits`."""
    lanes = 8 * word.itemsize
    full = count - count % lanes
    place = full // 8 * width
    rest = np.zeros(width * word.itemsize, np.uint8)
    rest[: data.size - place] = data[place:]
    rows = np.frombuffer(data[:place].tobytes(), word)
    values = np.empty(count, word)
    values[:full] = _unpack_rows(rows, width, full)
    values[full:] = _unpack_rows(rest.view(word), width, lanes)[: count - full]
    return values


def _unpack_rows(rows: _Words, width: int, count: int) -> _Words:
    """Invert `_pack_rows`."""
    bits = 8 * rows.itemsize
    if not width:
        return np.zeros(count, rows.dtype)
    rows = rows.reshape(width, -1)
    lanes = np.empty((bits, rows.shape[1]), rows.dtype)
    mask = rows.dtype.type((1 << width) - 1)
    for lane, (row, shift) in enumerate(_lane_offsets(bits, width)):
        lanes[lane] = rows[row] >> shift
        if shift + width > bits:
            lanes[lane] |= rows[row + 1] << (bits - shift)
    lanes &= mask
    return lanes.reshape(-1)


def _lane_offsets(bits: int, width: int) -> list[tuple[int, int]]:
    """The row and the bit at which each lane begins."""
    return [divmod(lane * width, bits) for lane in range(bits)] if width else []


Mask = npt.NDArray[np.bool_]
"""For each row of a matrix, whether it is sent."""


def select_rows(matrix: npt.NDArray[Any], mask: Mask) -> npt.NDArray[Any]:
    """Select the rows of a mask, in order; the matrix itself if all are selected.

    >>> select_rows(np.arange(6).reshape(3, 2), np.array([True, False, True])).tolist()
    [[0, 1], [4, 5]]
    """
    return matrix if mask.all() else matrix[mask]


def scatter_rows(rows: npt.NDArray[Any], mask: Mask) -> npt.NDArray[Any]:
    """Scatter the sent rows into a matrix; the other rows are zero.

    >>> scatter_rows(np.array([[0, 1], [4, 5]]), np.array([True, False, True])).tolist()
    [[0, 1], [0, 0], [4, 5]]
    """
    sent = int(np.count_nonzero(mask))
    if rows.shape[:1] != (sent,):
        raise RemoteProtocolError(f"received rows of shape {rows.shape} with a mask that marks {sent}")
    if sent == mask.size:
        return rows
    matrix = np.zeros((mask.size, *rows.shape[1:]), rows.dtype)
    matrix[mask] = rows
    return matrix


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
        described = ", ".join(f"{part.dtype}{list(part.dims)}" for part in parts)
        raise RemoteProtocolError(
            f"received {buffer.size} bytes, expected {sum(sizes)}",
            why=f"this codec encodes the tensor as {described or 'nothing'}",
        )
    found, place = [], 0
    for part, size in zip(parts, sizes, strict=True):
        data, code = buffer[place : place + size], find_dtype_code(part.dtype)
        if code == _BOOL and size and data.max() > 1:
            raise RemoteProtocolError("a bool that is neither 0 nor 1")
        found.append(decode_array(data, code, part.dims))
        place += size
    return found


SAMPLE_BYTES = 64 << 10
MAX_ZSTD_RATIO = 0.97  # largest ratio of compressed bytes that is worth the time


def compress_zstd(data: Bytes) -> Bytes | None:
    """Compress bytes by Zstandard; None if that saves less than three percent.

    A sample from the middle is tried first, so that incompressible data cost little.
    """
    compressor = _import_zstd().ZstdCompressor(level=1)
    start = (data.size - SAMPLE_BYTES) // 2
    for part in (data[start : start + SAMPLE_BYTES], data) if data.size > SAMPLE_BYTES else (data,):
        made = compressor.compress(part.data)
        if not part.size or len(made) > MAX_ZSTD_RATIO * part.size:
            return None
    return np.frombuffer(made, np.uint8)


def decompress_zstd(data: Bytes, size: int) -> Bytes:
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
_RAW_SIZE_BYTES = 4  # bytes of the size before zstd


class PayloadFlag(IntFlag):
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
    has = (
        PayloadFlag.ROWS * (payload.rows is not None)
        | PayloadFlag.NEWS * (payload.news is not None)
        | PayloadFlag.CHANGES * payload.changes
    )
    body = [] if payload.rows is None else [pack(payload.rows)]
    body += [] if payload.news is None else [payload.news]
    whole = np.concatenate([*body, payload.data])
    small = compress_zstd(whole) if zstd else None
    if small is not None and _RAW_SIZE_BYTES + small.size < whole.size:
        whole = np.concatenate([np.array([whole.size], "<u4").view(np.uint8), small])
        has |= PayloadFlag.ZSTD
    return np.concatenate([np.array([has, 0, 0, 0], np.uint8), whole])


def read_payload(data: Bytes, rows: int, news: int, most: int, *, zstd: bool = True) -> Payload:
    """Parse a payload of `rows` rows, with `news` bytes of news if any; `most` bounds the size of the rest."""
    known = int(PayloadFlag.ROWS | PayloadFlag.NEWS | PayloadFlag.ZSTD | PayloadFlag.CHANGES)
    if data.size < PREFIX or int(data[0]) & ~known or data[1:PREFIX].any():
        raise RemoteProtocolError("an encoded tensor has an invalid header")
    has, body = PayloadFlag(int(data[0])), data[PREFIX:]
    if (PayloadFlag.ZSTD in has and not zstd) or (PayloadFlag.NEWS in has and not news):
        raise RemoteProtocolError("an encoded tensor has parts that this boundary never sends")
    if PayloadFlag.ZSTD in has:
        most += rows // 8 + 1 + news
        size = int(body[:_RAW_SIZE_BYTES].view("<u4")[0]) if body.size >= _RAW_SIZE_BYTES else most + 1
        if size > most:
            raise RemoteProtocolError(
                f"an encoded tensor declares {size} bytes before compression, which exceeds the maximum of {most}"
            )
        body = decompress_zstd(body[_RAW_SIZE_BYTES:], size)
    mask = state_news = None
    if PayloadFlag.ROWS in has:
        mask, body = unpack(body[: -(-rows // 8)], "bool", (rows,)), body[-(-rows // 8) :]
    if PayloadFlag.NEWS in has:
        state_news, body = body[:news], body[news:]
    return Payload(body, mask, state_news, PayloadFlag.CHANGES in has)
