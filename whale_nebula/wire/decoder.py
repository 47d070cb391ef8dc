"""Bytes in, events out: the receiving half of the frame codec. It reads no socket and keeps no time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.frame import HEADER_BYTES, Flag, Header, Kind, checksum, unpack
from whale_nebula.wire.message import decode_message
from whale_nebula.wire.tensor import Bytes, array_from, dtype_of

WHOLE_LIMIT = 1 << 30


class Bound(NamedTuple):
    """What the plan allows a tensor to be: its element type and, for every axis, the largest size."""

    dtype: str
    most: tuple[int, ...]

    def admits(self, dtype: str, dims: tuple[int, ...]) -> bool:
        """Whether such a tensor keeps within the bound.

        >>> bound = Bound("float32", (8, 64))
        >>> bound.admits("float32", (3, 64)), bound.admits("float32", (9, 64))
        (True, False)
        """
        fits = len(dims) == len(self.most) and all(
            size <= most for size, most in zip(dims, self.most, strict=True)
        )
        return fits and dtype == self.dtype


class TensorArrived(NamedTuple):
    """A whole tensor; the header is that of its last frame."""

    header: Header
    array: npt.NDArray[Any]


class MessageArrived(NamedTuple):
    """A control message."""

    header: Header
    message: dict[str, Any]


Event: TypeAlias = TensorArrived | MessageArrived
Expect: TypeAlias = Callable[[Header], Bound | None]


class FrameDecoder:
    """Turns a stream of bytes into tensors and messages; anything wrong raises `RemoteProtocolError`.

    `expect` is asked before anything is allocated. It gives for a header what the plan allows, raises
    `RemoteProtocolError` for a tensor that nobody expects, or gives None: then, as without `expect`, a tensor
    may have up to `limit` bytes. Frames are numbered from `first` on without a gap. Control messages may come
    between the chunks of a tensor, other tensors may not.

    `receive` takes bytes as they come. Who reads a socket saves a copy with `room`, which says where the
    next bytes belong (inside the tensor being received, as a rule), and `filled`, which says how many were
    put there.
    """

    def __init__(self, expect: Expect | None = None, *, limit: int = WHOLE_LIMIT, first: int = 0) -> None:
        self._expect = expect
        self._limit = limit
        self._next = first
        self._head = bytearray(HEADER_BYTES)
        self._header: Header | None = None  # of the frame whose payload is being filled
        self._crc = 0
        self._target: Bytes = np.frombuffer(self._head, np.uint8)
        self._filled = 0
        self._tensor: tuple[Header, Bytes] | None = None  # the tensor whose chunks are coming in
        self._received = 0  # of that tensor, in bytes
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
            self._tensor = None
            raise

    @property
    def between(self) -> bool:
        """Whether the stream may end here: no frame and no tensor is half received."""
        return self._header is None and self._filled == 0 and self._tensor is None

    def _complete(self) -> list[Event]:
        if self._header is None:
            self._header, self._crc = unpack(bytes(self._head))
            self._await(self._admit(self._header))
            if self._target.size:
                return []
        header, chunk = self._header, self._target
        if checksum(chunk) != self._crc:
            raise RemoteProtocolError("the checksum of a frame's payload is wrong")
        self._header = None
        self._await(np.frombuffer(self._head, np.uint8))
        return self._finish(header, chunk)

    def _await(self, target: Bytes) -> None:
        self._target, self._filled = target, 0

    def _admit(self, header: Header) -> Bytes:
        """Check a header against what came before it, and give the place for its payload."""
        if header.sequence != self._next:
            raise RemoteProtocolError(f"frame {header.sequence} came where frame {self._next} was due")
        self._next += 1
        if header.kind == Kind.CONTROL:
            return np.empty(header.length, np.uint8)
        if self._tensor is None:
            self._tensor, self._received = (header, self._allocate(header)), 0
        first, data = self._tensor
        if header.offset != self._received or _same_tensor(first) != _same_tensor(header):
            raise RemoteProtocolError("a chunk does not continue the tensor that is being received")
        self._received = header.offset + header.length
        return data[header.offset : self._received]

    def _allocate(self, header: Header) -> Bytes:
        bound = None if self._expect is None else self._expect(header)
        dtype = dtype_of(header.dtype)
        name = dtype.name if dtype else "?"
        if bound is not None and not bound.admits(name, header.dims):
            wanted = f"{bound.dtype}, at most {list(bound.most)}"
            raise RemoteProtocolError(f"{name}{list(header.dims)} came where the plan expects {wanted}")
        if header.whole > self._limit:
            raise RemoteProtocolError(
                f"a tensor of {header.whole} bytes is above this link's limit of {self._limit}"
            )
        try:
            return np.empty(header.whole, np.uint8)
        except MemoryError:
            raise RemoteProtocolError(f"no memory for a tensor of {header.whole} bytes") from None

    def _finish(self, header: Header, chunk: Bytes) -> list[Event]:
        if header.kind == Kind.CONTROL:
            return [MessageArrived(header, decode_message(chunk.tobytes()))]
        if not header.last or self._tensor is None:
            return []
        data, self._tensor = self._tensor[1], None
        if header.dtype == 1 and data.size and data.max() > 1:
            raise RemoteProtocolError("a bool that is neither 0 nor 1")
        return [TensorArrived(header, array_from(data, header.dtype, header.dims))]


def _same_tensor(header: Header) -> Header:
    """What all frames of one tensor have in common."""
    return header._replace(sequence=0, offset=0, length=0, flags=header.flags & ~Flag.LAST)
