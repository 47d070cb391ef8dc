"""Buffers of a conversation: unacknowledged sent frames, frames that arrived early, and partly received tensors, within
the limits of the plan.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.frame import Flag, Header
from whale_nebula.wire.tensor import Bytes, count_raw_bytes, decode_array, find_dtype

Packet: TypeAlias = tuple[bytes, Bytes]
"""One complete frame: the bytes of its header, and its payload as sent."""

FIRST = 1  # the number of the first frame; 0 marks unnumbered frames
_OVERHEAD = 512  # of one held frame, in memory


def count_held_bytes(size: int) -> int:
    """The memory of a held frame of this size; both sides count their budgets in these units."""
    return size + _OVERHEAD


class Acknowledged(NamedTuple):
    """The other side has received frames: their count, and their bytes."""

    frames: int
    bytes: int


class UnacknowledgedFrames:
    """The sent frames that are not acknowledged.

    It keeps the original bytes (a view of the tensor, or the ciphertext), so a retransmitted frame is identical to the
    first one. It never drops a frame: the sender checks `room` first, and waits while there is none.
    """

    def __init__(self, budget: int) -> None:
        self.next_number = FIRST
        self.bytes = 0
        self.budget = budget  # in memory
        self._frames: deque[Packet] = deque()

    @property
    def room(self) -> int:
        """The remaining budget in bytes; the frame that exceeds it is still accepted."""
        return self.budget - self.bytes - len(self._frames) * count_held_bytes(0)

    def keep(self, packet: Packet) -> None:
        """Keep a frame that is being sent, with the number `next_number`."""
        self._frames.append(packet)
        self.bytes += len(packet[0]) + packet[1].size
        self.next_number += 1

    def check_acknowledgement(self, ack: int) -> None:
        """Refuse an acknowledgement of frames that were never sent."""
        if ack > self.next_number:
            raise RemoteProtocolError(
                f"invalid acknowledgement: frame {ack}, but only {self.next_number - FIRST} were sent"
            )

    def acknowledge(self, ack: int) -> list[Acknowledged]:
        """Drop all frames before this number; returns an event with their count and bytes, if there are any."""
        self.check_acknowledgement(ack)
        before = len(self._frames), self.bytes
        while self._frames and self.oldest_number < ack:
            head, chunk = self._frames.popleft()
            self.bytes -= len(head) + chunk.size
        done = Acknowledged(before[0] - len(self._frames), before[1] - self.bytes)
        return [done] if done.frames else []

    def list_since(self, number: int) -> list[Packet]:
        """The frames to retransmit to a side that expects this number."""
        if not self.oldest_number <= number <= self.next_number:
            raise LocalProtocolError(
                f"frame {number} is no longer stored",
                why=f"frames {self.oldest_number} to {self.next_number - 1} are stored",
            )
        return [packet for at, packet in enumerate(self._frames, start=self.oldest_number) if at >= number]

    @property
    def oldest_number(self) -> int:
        """The number of the oldest frame that is kept, or of the next frame if none is."""
        return self.next_number - len(self._frames)


T = TypeVar("T")

_MAX_HELD_FRAMES = 1 << 14


class Arrivals(Generic[T]):
    """Reorders received frames. Early frames are held, up to `window` bytes in total; with 0 there may be no gap."""

    def __init__(self, window: int = 0) -> None:
        self.expected_number = FIRST
        self.bytes = 0  # of early frames
        self._window = window
        self._early_frames: dict[int, tuple[T, int]] = {}

    def add(self, number: int, frame: T, size: int) -> None:
        """Add a received frame: it is due, or held until the frames before it have arrived."""
        if number < self.expected_number or number in self._early_frames:
            raise RemoteProtocolError(
                f"frame {number} was received twice over one connection",
                why="a frame is retransmitted only over the next connection, if it was lost with this one",
            )
        size = count_held_bytes(size) if number > self.expected_number else 0
        if self.bytes + size > self._window or number - self.expected_number > _MAX_HELD_FRAMES:
            raise RemoteProtocolError(
                f"received frame {number}, but expected frame {self.expected_number}",
                why=f"{len(self._early_frames)} early frames are stored, which may have at most {self._window} bytes",
            )
        self._early_frames[number] = (frame, size)
        self.bytes += size

    @property
    def due_frame(self) -> T | None:
        """The next frame in order, if it has arrived."""
        return self._early_frames[self.expected_number][0] if self.expected_number in self._early_frames else None

    def advance(self) -> None:
        """Remove the due frame."""
        self.bytes -= self._early_frames.pop(self.expected_number)[1]
        self.expected_number += 1

    def drop_held(self) -> None:
        """Drop held frames; they are retransmitted on the next connection."""
        self._early_frames.clear()
        self.bytes = 0


MAX_TENSOR_BYTES = 1 << 30
"""The largest size of a tensor without a limit in the plan."""
_UNLIMITED_SIZE = 2**32 - 1  # the largest size in a header: no limit


class Bound(NamedTuple):
    """The plan's limits of a tensor: element type, and the largest size of every axis.

    `codecs` are those that may have encoded it (by default none), and `extra` is how many bytes more than the tensor
    itself their output may have: headers of packed data, and rows that were not compressed. `due` is the number of its
    bytes that this step accounts for: stored bytes beyond that cause back-pressure.
    """

    dtype: str
    most: tuple[int, ...]
    codecs: frozenset[int] = frozenset()
    extra: int = 0
    due: float = math.inf

    @property
    def sizes(self) -> str:
        """The sizes, for a message.

        >>> Bound("float16", (2**32 - 1, 8)).sizes
        '[any, 8]'
        """
        return f"[{', '.join('any' if size >= _UNLIMITED_SIZE else str(size) for size in self.most)}]"

    def admits(self, dtype: str, dims: tuple[int, ...]) -> bool:
        """Whether such a tensor is within the bound."""
        fits = len(dims) == len(self.most) and all(size <= most for size, most in zip(dims, self.most, strict=True))
        return fits and dtype == self.dtype


class TensorArrived(NamedTuple):
    """A complete tensor, with the header of its last frame. For an encoded one, `array` holds the codec's bytes."""

    header: Header
    array: npt.NDArray[Any]


Expect: TypeAlias = Callable[[Header], Bound | None]
"""Returns the plan's limits of the tensor with this header; see `Assembly`."""


class Assembly:
    """Assembles the tensors of one direction: one after the other, each from its first chunk to its last.

    `expect` is called before memory is allocated. It returns the plan's limits for a header, raises
    `RemoteProtocolError` for an unexpected tensor, or returns None: then, as without `expect`, a tensor may have up to
    `limit` bytes, an encoded one both before and after encoding. If `place` raises, nothing changes, and a chunk that
    was placed but did not arrive completely may be placed again.
    """

    def __init__(self, expect: Expect | None = None, *, limit: int = MAX_TENSOR_BYTES) -> None:
        self._expect = expect
        self._limit = limit
        self._tensor: tuple[Header, Bytes] | None = None  # the tensor that is being received
        self._received = 0  # of that tensor, in bytes

    def keep(self, header: Header, chunk: Bytes) -> bool:
        """Use a chunk that is a complete tensor in place, without a copy; False if it is only a part of one, or if its
        buffer can change.
        """
        if self._tensor is not None or header.length != header.whole or chunk.flags.writeable:
            return False
        self._check(header)
        self._tensor = _select_common_fields(header), chunk
        return True

    def place(self, header: Header) -> Bytes:
        """The destination of the chunk with this (validated) header."""
        if self._tensor is None and header.offset == 0:
            self._check(header)
            self._tensor, self._received = (_select_common_fields(header), _allocate(header.whole)), 0
        if self._tensor is None or header.offset != self._received or _select_common_fields(header) != self._tensor[0]:
            raise RemoteProtocolError("a chunk does not continue the tensor that is being received")
        return self._tensor[1][header.offset : header.offset + header.length]

    def finish_chunk(self, header: Header) -> list[TensorArrived]:
        """Mark the chunk of this header as complete in its place; returns the tensor that it completes."""
        self._received = header.offset + header.length
        if not header.last or self._tensor is None:
            return []
        data, self._tensor = self._tensor[1], None
        if header.encoded:
            return [TensorArrived(header, data)]
        if header.dtype == 1 and data.size and data.max() > 1:
            raise RemoteProtocolError("invalid bool tensor: a value is neither 0 nor 1")
        return [TensorArrived(header, decode_array(data, header.dtype, header.dims))]

    def _check(self, header: Header) -> None:
        """Refuse a tensor that the plan, or this link's limit, does not allow."""
        raw = count_raw_bytes(header.dtype, header.dims)
        if self._expect is not None and (bound := self._expect(header)) is not None:
            dtype = find_dtype(header.dtype)
            name = dtype.name if dtype else "?"
            if not bound.admits(name, header.dims):
                raise RemoteProtocolError(
                    f"received {name}{list(header.dims)}, but the plan expects {bound.dtype}, at most {bound.sizes}"
                )
            if header.encoded and (header.codec not in bound.codecs or header.whole > raw + bound.extra):
                allowed = f"codecs {sorted(bound.codecs)} and {bound.extra} bytes more" if bound.codecs else "no codec"
                raise RemoteProtocolError(
                    f"received {header.whole} bytes of codec {header.codec} for a tensor of {raw} bytes, "
                    f"but the plan allows {allowed}"
                )
        if (size := max(header.whole, raw)) > self._limit:
            raise RemoteProtocolError(f"a tensor of {size} bytes exceeds this link's limit of {self._limit}")


def _allocate(size: int) -> Bytes:
    try:
        return np.empty(size, np.uint8)
    except MemoryError:
        raise RemoteProtocolError(f"cannot allocate memory for a tensor of {size} bytes") from None


def _select_common_fields(header: Header) -> Header:
    """The fields that are the same in all frames of one tensor."""
    return header._replace(sequence=0, ack=0, offset=0, length=0, flags=header.flags & ~Flag.LAST)


class MessageArrived(NamedTuple):
    """A control message."""

    header: Header
    message: dict[str, Any]
