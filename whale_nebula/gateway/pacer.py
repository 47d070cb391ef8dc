"""Keeping to a line's rate: what is sent faster than the line carries would only wait in it, ahead of all else."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable

from whale_nebula.transport.grpc.limits import TokenBucket

FREE_BYTES = 512
"""A frame of so many bytes or fewer, such as an acknowledgement, takes no turn as long as few of them are sent."""
_FREE_SHARE, _FREE_BURST = 0.05, 64 << 10  # of the line's bytes that may go so, and bytes at once
_QUANTUM = 64 << 10
_BURST_SECONDS = 0.02
_STEP_SECONDS = 0.002
_OVERHEAD = 1.04  # what TLS, HTTP/2, TCP and IP add to a frame


class Turn:
    """One frame that waits for its turn on a line; `wakes` is notified when it is `granted`."""

    def __init__(self, size: int, wakes: threading.Condition) -> None:
        self.size = size
        self.wakes = wakes
        self.granted = False


class Turns:
    """Frames of several flows that share a line fairly, by deficit round robin: a queue without a clock.

    In each round a flow that waits may send `_QUANTUM` bytes, or keeps them for a frame that is larger.

    >>> turns, wakes = Turns(), threading.Condition()
    >>> for flow, size in (("a", 100_000), ("a", 100_000), ("b", 30_000), ("b", 30_000)):
    ...     turns.add(flow, Turn(size, wakes))
    >>> [turns.pop().size for _ in range(4)]
    [30000, 30000, 100000, 100000]
    """

    def __init__(self) -> None:
        self._flows: dict[Hashable, deque[Turn]] = {}
        self._round: deque[Hashable] = deque()
        self._deficits: dict[Hashable, int] = {}

    def __bool__(self) -> bool:
        return bool(self._round)

    def add(self, flow: Hashable, turn: Turn) -> None:
        """A frame of a flow waits behind those of the same flow."""
        if flow not in self._flows:
            self._flows[flow], self._deficits[flow] = deque(), 0
            self._round.append(flow)
        self._flows[flow].append(turn)

    def pop(self) -> Turn:
        """The frame that is next."""
        while True:
            flow = self._round[0]
            waiting = self._flows[flow]
            if self._deficits[flow] >= waiting[0].size:
                break
            self._deficits[flow] += _QUANTUM
            self._round.rotate(-1)
        turn = waiting.popleft()
        self._deficits[flow] -= turn.size
        if not waiting:
            del self._flows[flow], self._deficits[flow]
            self._round.popleft()
        return turn

    def peek(self) -> Turn:
        """One that waits."""
        return self._flows[self._round[0]][0]


def _wait(wakes: threading.Condition, seconds: float | None) -> None:
    wakes.wait(seconds)


class Pacer:
    """Turns on a line, by the bytes that it carries per second, for any number of threads and of flows.

    On an idle line nobody waits; on a busy one flows take turns by `Turns`. Frames of `FREE_BYTES` or fewer never wait
    while they are few, and are counted all the same.

    >>> waits = []
    >>> pacer = Pacer(1.04e6, now=lambda: sum(waits), wait=lambda wakes, seconds: waits.append(seconds))
    >>> for size in (100_000, 100_000, 100, 100_000): pacer.take(size)
    >>> [round(wait, 3) for wait in waits]
    [0.08, 0.1]
    """

    def __init__(
        self,
        rate: float | None,
        *,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Condition, float | None], None] = _wait,
    ) -> None:
        self.rate = rate
        self._now, self._wait = now, wait
        self._lock = threading.Lock()
        self._turns = Turns()
        self._timer: Turn | None = None  # whose thread keeps the time for all that wait
        self._free = float("-inf")  # when the line will have carried all that took its turn
        self._free_bytes = TokenBucket(_FREE_BURST, _FREE_SHARE * (rate or 0.0), now=now)

    def take(self, size: int, flow: Hashable = None) -> None:
        """Wait for a turn to send so many bytes of a flow."""
        if self.rate is None:
            return
        with self._lock:
            if size <= FREE_BYTES and self._free_bytes.take(size):
                self._count(size)
            else:
                turn = Turn(size, threading.Condition(self._lock))
                self._turns.add(flow, turn)
                self._wait_for(turn)

    def _wait_for(self, turn: Turn) -> None:
        """Wait until a frame is granted its turn. One of the threads that wait grants the turns of all, in time."""
        while True:
            seconds = self._grant_due()
            if turn.granted:
                break
            self._timer = self._timer or turn
            self._wait(turn.wakes, max(seconds, _STEP_SECONDS) if self._timer is turn else None)
        if self._timer is turn:
            self._timer = None
            if self._turns:
                self._turns.peek().wakes.notify()

    def _grant_due(self) -> float:
        """Grant the turns for which the line is free; how many seconds it is until the next."""
        while self._turns and self._free - _BURST_SECONDS <= self._now():
            turn = self._turns.pop()
            self._count(turn.size)
            turn.granted = True
            turn.wakes.notify()
        return self._free - _BURST_SECONDS - self._now()

    def _count(self, size: int) -> None:
        self._free = max(self._free, self._now()) + size * _OVERHEAD / (self.rate or float("inf"))
