"""The replay buffer: frames sent and not yet acknowledged, kept for retransmission after a cut."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.tensor import Bytes

Packet: TypeAlias = tuple[bytes, Bytes]
"""One whole frame: the bytes of its header, and its payload as it travels."""

FIRST = 1  # the number of the first frame; 0 stands on what is not numbered
_OVERHEAD = 512  # of one held frame, in memory


def held_bytes(size: int) -> int:
    """What a frame of so many bytes takes in memory while it waits: both sides count budgets in it."""
    return size + _OVERHEAD


class Acknowledged(NamedTuple):
    """The other side has these frames: so many, of so many bytes."""

    frames: int
    bytes: int


class Replay:
    """The frames that were sent, from the first that is not acknowledged on.

    It keeps the very bytes (a view of the tensor, or the ciphertext), so a frame that is sent again is the one that
    was sent first. It never drops any: who sends looks at `room` first, and waits while there is none.
    """

    def __init__(self, budget: int) -> None:
        self.next = FIRST
        self.bytes = 0
        self.budget = budget  # in memory
        self._kept: deque[Packet] = deque()

    @property
    def room(self) -> int:
        """How many bytes may still be kept. The frame that makes it negative was still let in."""
        return self.budget - self.bytes - len(self._kept) * held_bytes(0)

    def keep(self, packet: Packet) -> None:
        """A frame goes out: the one with the number `next`."""
        self._kept.append(packet)
        self.bytes += len(packet[0]) + packet[1].size
        self.next += 1

    def check(self, ack: int) -> None:
        """The other side cannot expect what was never sent."""
        if ack > self.next:
            raise RemoteProtocolError(f"frame {ack} is asked for, and only {self.next - FIRST} were sent")

    def acknowledge(self, ack: int) -> Acknowledged:
        """All frames before this number have come; an older number than one told before says nothing new."""
        self.check(ack)
        before = len(self._kept), self.bytes
        while self._kept and self.oldest < ack:
            head, chunk = self._kept.popleft()
            self.bytes -= len(head) + chunk.size
        return Acknowledged(before[0] - len(self._kept), before[1] - self.bytes)

    def since(self, number: int) -> list[Packet]:
        """What is to be sent again to a side that expects this number."""
        if not self.oldest <= number <= self.next:
            raise LocalProtocolError(f"frame {number} is not kept", why=f"kept are {self.oldest} to {self.next - 1}")
        return [packet for at, packet in enumerate(self._kept, start=self.oldest) if at >= number]

    @property
    def oldest(self) -> int:
        """The number of the oldest frame that is kept, or the next one's."""
        return self.next - len(self._kept)


T = TypeVar("T")

_MOST_HELD = 1 << 14


class Turn(Enum):
    """What a frame's number says of it."""

    DUE = auto()
    EARLY = auto()
    TWICE = auto()


class Arrivals(Generic[T]):
    """The order of what comes. A frame that is early is held, in all up to `window` bytes; 0 allows no gap."""

    def __init__(self, window: int = 0) -> None:
        self.expected = FIRST
        self._window = window
        self._held: dict[int, tuple[T, int]] = {}
        self.bytes = 0

    def turn(self, number: int) -> Turn:
        """Whether the frame with this number is the next, came before, or must wait."""
        if number == self.expected:
            return Turn.DUE
        if number < self.expected or number in self._held:
            return Turn.TWICE
        return Turn.EARLY

    def hold(self, number: int, frame: T, size: int) -> None:
        """Keep an early frame until those before it have come."""
        size = held_bytes(size)
        if self.bytes + size > self._window or number - self.expected > _MOST_HELD:
            raise RemoteProtocolError(
                f"frame {number} came where frame {self.expected} was due",
                why=f"{len(self._held)} frames wait for it, and no more than {self._window} bytes may",
            )
        self._held[number] = (frame, size)
        self.bytes += size

    def advance(self) -> T | None:
        """The due frame was taken; gives the one that is due now, if it was held."""
        self.expected += 1
        frame, size = self._held.pop(self.expected, (None, 0))
        self.bytes -= size
        return frame

    def forget(self) -> None:
        """Let go what is held: it comes again on the next connection."""
        self._held.clear()
        self.bytes = 0
