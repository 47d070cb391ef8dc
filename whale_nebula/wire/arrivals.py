"""Which frames have come: each is taken once, in order, whatever comes twice or too early."""

from __future__ import annotations

from enum import Enum, auto
from typing import Generic, TypeVar

from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.replay import FIRST, held_bytes

T = TypeVar("T")

_MOST_HELD = 1 << 14


class Turn(Enum):
    """What a frame's number says of it."""

    DUE = auto()
    EARLY = auto()
    TWICE = auto()


class Arrivals(Generic[T]):
    """The order of what comes. A frame that is early is held, in all up to `window` bytes; 0 allows no gap.

    >>> arrivals = Arrivals[str](window=4096)
    >>> arrivals.turn(2)
    <Turn.EARLY: 2>
    >>> arrivals.hold(2, "second", 100); arrivals.turn(2), arrivals.turn(1)
    (<Turn.TWICE: 3>, <Turn.DUE: 1>)
    >>> arrivals.taken(), arrivals.taken(), arrivals.expected
    ('second', None, 3)
    """

    def __init__(self, window: int = 0) -> None:
        self.expected = FIRST
        self.twice = 0
        self._window = window
        self._held: dict[int, tuple[T, int]] = {}
        self.bytes = 0

    def turn(self, number: int) -> Turn:
        """Whether the frame with this number is the next, came before, or must wait."""
        if number == self.expected:
            return Turn.DUE
        if number < self.expected or number in self._held:
            self.twice += 1
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

    def taken(self) -> T | None:
        """The due frame was taken; gives the one that is due now, if it was held."""
        self.expected += 1
        frame, size = self._held.pop(self.expected, (None, 0))
        self.bytes -= size
        return frame

    def forget(self) -> None:
        """Let go what is held: it comes again on the next connection."""
        self._held.clear()
        self.bytes = 0
