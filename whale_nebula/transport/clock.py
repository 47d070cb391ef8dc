"""The clock of links, as a value, so that tests can supply their own."""

from __future__ import annotations

import threading
import time
from typing import Protocol

_LONGEST_WAIT = 3600.0
_OVERSLEEP = 0.00025  # a timed wait ends about so much too late


class Clock(Protocol):
    """Tells the time and waits for a condition."""

    def now(self) -> float:
        """Seconds from some fixed moment; it never goes back."""

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Wait until the (held) condition is notified, at most so long."""


class MonotonicClock:
    """The clock of this machine."""

    def now(self) -> float:
        """Seconds since the machine started, or thereabouts."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Wait for the condition, at most so long, and wake early rather than late: who asked looks again.

        So the end of a wait is hit closer than the system's timers alone would hit it.
        """
        if seconds > _OVERSLEEP:
            condition.wait(min(seconds, _LONGEST_WAIT) - _OVERSLEEP)
        else:
            time.sleep(0.0)
