"""Keeping to a line's rate: what is sent faster than the line carries would only wait in it, ahead of all else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SMALL_BYTES = 64 << 10
_BURST_SECONDS = 0.02
_OVERHEAD = 1.04  # what TLS, HTTP/2, TCP and IP add to a frame


class Pacer:
    """Turns on a line, by the bytes that it carries per second, for any number of threads, first come first served.

    On an idle line nobody waits. What is small never waits, and is counted all the same: it is what others wait for.

    >>> waits = []
    >>> pacer = Pacer(1.04e6, now=lambda: 0.0, sleep=waits.append)
    >>> for size in (100_000, 100_000, 100, 100_000): pacer.take(size)
    >>> [round(wait, 3) for wait in waits]
    [0.08, 0.18]
    """

    def __init__(
        self,
        rate: float | None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = rate
        self._now, self._sleep = now, sleep
        self._lock = threading.Lock()
        self._free = float("-inf")  # when the line will have carried all that took its turn

    def take(self, size: int) -> None:
        """Wait for a turn to send so many bytes."""
        if self.rate is None:
            return
        with self._lock:
            now = self._now()
            wait = self._free - _BURST_SECONDS - now
            self._free = max(self._free, now) + size * _OVERHEAD / self.rate
        if wait > 0 and size >= SMALL_BYTES:
            self._sleep(wait)
