"""Small whole numbers in about as many bits as their frequencies ask for, columns in groups.

Neighbouring columns of a matrix are a group, which has a Huffman code of its own: where columns differ in how large
their numbers are, few bits are spent on those that are small. Where a group has few values two or four neighbours
of a row are one symbol, so that a number may take less than a bit; and where nearly all are zeros, runs of
equal symbols take less still. The code is that of raw deflate without other matches, which every Python has: what comes
from elsewhere is opened by zlib, into no more bytes than are due.

Before a group stand how many numbers are a symbol (0: a number is two bytes), the largest magnitude, and its bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from whale_nebula.codec.coded import GROUPS
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.tensor import Bytes

Integers = npt.NDArray[np.int16]

WHOLE, TOGETHER = 8, (4, 2, 1)
HEAD = 6  # bytes before a group
MOST = 32767
_SINGLE, _SYMBOLS = 127, 256
_WORTH = 2048  # numbers, for a code of their own
_TRIED = 1 << 15  # numbers of a group, up to which every way to make symbols is tried


def width_of(rows: int, columns: int) -> int:
    """How many neighbouring columns are a group: whole symbols, and at most eight groups; fewer where a code would take
    more than it saves.

    >>> [width_of(400, columns) for columns in (1, 64, 128, 768)], width_of(32, 128)
    ([8, 8, 16, 96], 64)
    """
    groups = min(GROUPS, max(1, rows * columns // _WORTH))
    return WHOLE * -(-columns // (WHOLE * groups))


def pack(numbers: Integers) -> Bytes:
    """The numbers of a matrix, small.

    >>> pack(np.zeros((1000, 64), "int16")).size, pack(np.eye(64, dtype="int16")).size < 64 * 64 // 8
    (48, True)
    """
    found: list[bytes] = []
    if not numbers.size:
        return np.empty(0, np.uint8)
    for group in _groups(numbers):
        together, most, made = _packed(group)
        found += [bytes([together, most]), len(made).to_bytes(4, "little"), made]
    return np.frombuffer(b"".join(found), np.uint8)


def unpack(data: Bytes, rows: int, columns: int) -> tuple[Integers, int]:
    """The numbers of so many rows and columns, and how many bytes they took.

    >>> numbers = np.array([[0, -3, 900], [1, 0, 0]], "int16")
    >>> again, size = unpack(pack(numbers), 2, 3)
    >>> bool((again == numbers).all()), size == pack(numbers).size
    (True, True)
    """
    if not rows or not columns:
        return np.empty((rows, columns), np.int16), 0
    width, place = width_of(rows, columns), 0
    made = np.empty((rows, -(-columns // width) * width), np.int16)
    for start in range(0, columns, width):
        head = data[place : place + HEAD]
        if head.size < HEAD:
            raise RemoteProtocolError("packed numbers end before their last group")
        size = int.from_bytes(head[2:].tobytes(), "little")
        body = data[place + HEAD : place + HEAD + size]
        made[:, start : start + width] = _unpacked(int(head[0]), int(head[1]), body, size, rows, width)
        place += HEAD + size
    return made[:, :columns], place


def deflated(data: bytes, *, runs: bool = False) -> bytes:
    """Bytes by the frequencies of their values; with `runs` also by runs of equal ones, where these are less.

    >>> opened(deflated(b"aaab"), 4), len(deflated(bytes(900), runs=True)) < len(deflated(bytes(900)))
    (b'aaab', True)
    """
    ways = (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE) if runs else (zlib.Z_HUFFMAN_ONLY,)
    return min((_by(way, data) for way in ways), key=len)


def _by(way: int, data: bytes) -> bytes:
    made = zlib.compressobj(6, zlib.DEFLATED, -15, 9, way)
    return made.compress(data) + made.flush()


def opened(data: bytes, size: int) -> bytes:
    """The bytes before, of which there must be so many: no more are made."""
    stream = zlib.decompressobj(-15)
    try:
        found = stream.decompress(data, size + 1)
    except zlib.error:
        raise RemoteProtocolError("packed numbers cannot be opened") from None
    if len(found) != size or not stream.eof or stream.unused_data or stream.unconsumed_tail:
        raise RemoteProtocolError(f"packed numbers are not the {size} bytes that were due")
    return found


def _groups(numbers: Integers) -> Iterator[Integers]:
    """Filled up with zeros to whole groups."""
    width = width_of(*numbers.shape)
    for start in range(0, numbers.shape[1], width):
        group = numbers[:, start : start + width]
        yield group if group.shape[1] == width else np.pad(group, [(0, 0), (0, width - group.shape[1])])


def _packed(group: Integers) -> tuple[int, int, bytes]:
    """How many numbers are a symbol, the largest magnitude, and the bytes; none for zeros."""
    most = max(int(group.max(initial=0)), -int(group.min(initial=0)))
    if not most:
        return 1, 0, b""
    if most > _SINGLE:
        return 0, 0, deflated(np.ascontiguousarray(group, "<i2").view(np.uint8).reshape(-1, 2).T.tobytes())
    fitting = [together for together in TOGETHER if (2 * most + 1) ** together <= _SYMBOLS]
    tried = fitting if group.size <= _TRIED else fitting[:1]
    made = ((each, most, deflated(_symbols(group, each, most), runs=most == 1)) for each in tried)
    return min(made, key=lambda one: len(one[2]))


def _symbols(group: Integers, together: int, most: int) -> bytes:
    digits = (group + most).astype(np.uint8).reshape(-1, together)
    made = digits[:, 0].copy()
    for place in range(1, together):
        made *= np.uint8(2 * most + 1)
        made += digits[:, place]
    return made.tobytes()


def _unpacked(together: int, most: int, body: Bytes, size: int, rows: int, width: int) -> Any:
    levels = 2 * most + 1
    known = together in (0, *TOGETHER) and levels ** max(together, 1) <= _SYMBOLS
    if body.size != size or not known:
        raise RemoteProtocolError("a group of packed numbers begins with bytes that mean nothing")
    if together == 1 and most == size == 0:
        return 0
    if together == 0:
        halves = np.frombuffer(opened(body.tobytes(), 2 * rows * width), np.uint8).reshape(2, -1)
        return np.ascontiguousarray(halves.T).view("<i2").reshape(rows, width)
    symbols = np.frombuffer(opened(body.tobytes(), rows * width // together), np.uint8)
    if int(symbols.max(initial=0)) >= levels**together:
        raise RemoteProtocolError("a packed number is larger than its group's largest")
    return _digits(together, most)[symbols].reshape(rows, width)


def _digits(together: int, most: int) -> Integers:
    """The numbers that each symbol stands for."""
    levels = 2 * most + 1
    symbols = np.arange(levels**together)[:, None]
    return (symbols // levels ** np.arange(together - 1, -1, -1) % levels - most).astype(np.int16)
