"""Bytes in, events out: the receiving half of the frame codec. It reads no socket and keeps no time."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from whale_nebula.errors import DamagedFrameError, RemoteProtocolError
from whale_nebula.wire.assembly import WHOLE_LIMIT, Assembly, Bound, Expect, TensorArrived
from whale_nebula.wire.frame import BARE, HEADER_BYTES, Header, Kind, checksum, unpack
from whale_nebula.wire.message import decode_message
from whale_nebula.wire.tensor import Bytes

__all__ = ["WHOLE_LIMIT", "Bound", "Event", "Expect", "FrameDecoder", "MessageArrived", "TensorArrived"]


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
