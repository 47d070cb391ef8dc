"""Tensors out of their chunks: what the plan allows, where each chunk belongs, and the array at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from whale_nebula.errors import DamagedFrameError, RemoteProtocolError
from whale_nebula.wire.frame import BARE, HEADER_BYTES, Flag, Header, Kind, checksum, unpack
from whale_nebula.wire.message import decode_message
from whale_nebula.wire.tensor import Bytes, array_from, dtype_of, raw_bytes

__all__ = ["WHOLE_LIMIT", "Bound", "Event", "Expect", "FrameDecoder", "MessageArrived", "TensorArrived"]


WHOLE_LIMIT = 1 << 30
_NO_MORE = 2**32 - 1
"""The largest size that a header has room for: a bound that is no bound."""


class Bound(NamedTuple):
    """What the plan allows a tensor to be: its element type and, for every axis, the largest size.

    `codecs` are those that may have encoded it (none, unless the plan says so), and `extra` is how many bytes more
    than the tensor itself what they made may have: heads of what was packed, and rows that did not get smaller.
    """

    dtype: str
    most: tuple[int, ...]
    codecs: frozenset[int] = frozenset()
    extra: int = 0

    @property
    def said(self) -> str:
        """The sizes, for a message.

        >>> Bound("float16", (2**32 - 1, 8)).said
        '[any, 8]'
        """
        return f"[{', '.join('any' if size >= _NO_MORE else str(size) for size in self.most)}]"

    def admits(self, dtype: str, dims: tuple[int, ...]) -> bool:
        """Whether such a tensor keeps within the bound.

        >>> bound = Bound("float32", (8, 64))
        >>> bound.admits("float32", (3, 64)), bound.admits("float32", (9, 64))
        (True, False)
        """
        fits = len(dims) == len(self.most) and all(size <= most for size, most in zip(dims, self.most, strict=True))
        return fits and dtype == self.dtype

    def admits_encoded(self, codec: int, size: int, raw: int) -> bool:
        """Whether this codec may have made so many bytes of a tensor of `raw` bytes.

        >>> bound = Bound("float32", (8, 64), frozenset({5}), extra=16)
        >>> [bound.admits_encoded(*given) for given in ((5, 116, 100), (5, 117, 100), (6, 50, 100))]
        [True, False, False]
        """
        return codec in self.codecs and size <= raw + self.extra


class TensorArrived(NamedTuple):
    """A whole tensor; the header is that of its last frame. Of one that is encoded, `array` are the codec's bytes."""

    header: Header
    array: npt.NDArray[Any]


Expect: TypeAlias = Callable[[Header], Bound | None]


class Assembly:
    """Puts the tensors of one direction together: one after the other, each from its first chunk to its last.

    `expect` is asked before anything is allocated. It gives for a header what the plan allows, raises
    `RemoteProtocolError` for a tensor that nobody expects, or gives None: then, as without `expect`, a tensor
    may have up to `limit` bytes, and one that is encoded so many before and after. What `place` refuses changes
    nothing, and a chunk that was given its place but did not come whole may be placed again.
    """

    def __init__(self, expect: Expect | None = None, *, limit: int = WHOLE_LIMIT) -> None:
        self._expect = expect
        self._limit = limit
        self._tensor: tuple[Header, Bytes] | None = None  # the tensor whose chunks are coming in
        self._received = 0  # of that tensor, in bytes

    @property
    def between(self) -> bool:
        """Whether no tensor is half received."""
        return self._tensor is None

    def place(self, header: Header) -> Bytes:
        """Where the chunk of this (checked) header belongs."""
        if self._tensor is None and header.offset == 0:
            self._tensor, self._received = (header, self._allocate(header)), 0
        if self._tensor is None or header.offset != self._received or not _continues(self._tensor[0], header):
            raise RemoteProtocolError("a chunk does not continue the tensor that is being received")
        return self._tensor[1][header.offset : header.offset + header.length]

    def placed(self, header: Header) -> list[TensorArrived]:
        """Say that the chunk of this header lies in its place; gives the tensor that it completes."""
        self._received = header.offset + header.length
        if not header.last or self._tensor is None:
            return []
        data, self._tensor = self._tensor[1], None
        if header.encoded:
            return [TensorArrived(header, data)]
        if header.dtype == 1 and data.size and data.max() > 1:
            raise RemoteProtocolError("a bool that is neither 0 nor 1")
        return [TensorArrived(header, array_from(data, header.dtype, header.dims))]

    def forget(self) -> None:
        """Let a half received tensor go."""
        self._tensor = None

    def _allocate(self, header: Header) -> Bytes:
        if self._expect is not None and (bound := self._expect(header)) is not None:
            _check_bound(header, bound)
        if (size := max(header.whole, raw_bytes(header.dtype, header.dims))) > self._limit:
            raise RemoteProtocolError(f"a tensor of {size} bytes is above this link's limit of {self._limit}")
        try:
            return np.empty(header.whole, np.uint8)
        except MemoryError:
            raise RemoteProtocolError(f"no memory for a tensor of {header.whole} bytes") from None


def _check_bound(header: Header, bound: Bound) -> None:
    dtype = dtype_of(header.dtype)
    name = dtype.name if dtype else "?"
    if not bound.admits(name, header.dims):
        wanted = f"{bound.dtype}, at most {bound.said}"
        raise RemoteProtocolError(f"{name}{list(header.dims)} came where the plan expects {wanted}")
    raw = raw_bytes(header.dtype, header.dims)
    if header.encoded and not bound.admits_encoded(header.codec, header.whole, raw):
        allowed = f"codecs {sorted(bound.codecs)} and {bound.extra} bytes more" if bound.codecs else "no codec"
        raise RemoteProtocolError(
            f"{header.whole} bytes of codec {header.codec} came for a tensor of {raw}, where the plan allows {allowed}"
        )


def _continues(first: Header, header: Header) -> bool:
    """Whether both are frames of one tensor: all fields are equal but those in which frames differ."""
    return _common(first) == _common(header)


def _common(header: Header) -> Header:
    return header._replace(sequence=0, ack=0, offset=0, length=0, flags=header.flags & ~Flag.LAST)


class MessageArrived(NamedTuple):
    """A control message."""

    header: Header
    message: dict[str, Any]


Event: TypeAlias = TensorArrived | MessageArrived


class FrameDecoder:
    """Turns a stream of bytes into tensors and messages; anything wrong raises `RemoteProtocolError`.

    `expect` and `limit` are those of `Assembly`. Frames are numbered from `first` on without a gap, and
    acknowledge nothing. Control messages may come between the chunks of a tensor, other tensors may not.

    `receive` takes bytes as they come. Who reads a socket saves a copy with `room`, which says where the
    next bytes belong (inside the tensor being received, as a rule), and `filled`, which says how many were
    put there.
    """

    def __init__(self, expect: Expect | None = None, *, limit: int = WHOLE_LIMIT, first: int = 0) -> None:
        self._assembly = Assembly(expect, limit=limit)
        self._next = first
        self._head = bytearray(HEADER_BYTES)
        self._header: Header | None = None  # of the frame whose payload is being filled
        self._crc = 0
        self._target: Bytes = np.frombuffer(self._head, np.uint8)
        self._filled = 0
        self._error: RemoteProtocolError | None = None

    def receive(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """Take any number of bytes; give what they complete, in order."""
        events: list[Event] = []
        view = memoryview(data)
        while view.nbytes:
            room = self.room()
            count = min(room.nbytes, view.nbytes)
            room[:count] = view[:count]
            view = view[count:]
            events += self.filled(count)
        return events

    def room(self) -> memoryview:
        """Where the next bytes of the stream belong; never empty."""
        if self._error:
            raise self._error
        return self._target.data[self._filled :]

    def filled(self, count: int) -> list[Event]:
        """Say that the first `count` bytes of `room` were put there; give what is now complete."""
        self._filled += count
        if self._filled < self._target.size:
            return []
        try:
            return self._complete()
        except RemoteProtocolError as error:
            self._error = error
            self._assembly.forget()
            raise

    @property
    def between(self) -> bool:
        """Whether the stream may end here: no frame and no tensor is half received."""
        return self._header is None and self._filled == 0 and self._assembly.between

    def _complete(self) -> list[Event]:
        if self._header is None:
            self._header, self._crc = unpack(bytes(self._head))
            self._await(self._admit(self._header))
            if self._target.size:
                return []
        header, chunk = self._header, self._target
        if checksum(chunk) != self._crc:
            raise DamagedFrameError("the checksum of a frame's payload is wrong")
        self._header = None
        self._await(np.frombuffer(self._head, np.uint8))
        if header.kind == Kind.CONTROL:
            return [MessageArrived(header, decode_message(chunk.tobytes()))]
        return list(self._assembly.placed(header))

    def _await(self, target: Bytes) -> None:
        self._target, self._filled = target, 0

    def _admit(self, header: Header) -> Bytes:
        """Check a header against what came before it, and give the place for its payload."""
        if header.sequence != self._next:
            raise RemoteProtocolError(f"frame {header.sequence} came where frame {self._next} was due")
        if header.ack or header.kind in BARE:
            raise RemoteProtocolError("a frame acknowledges others on a link where nothing is acknowledged")
        self._next += 1
        if header.kind == Kind.CONTROL:
            return np.empty(header.length, np.uint8)
        return self._assembly.place(header)
