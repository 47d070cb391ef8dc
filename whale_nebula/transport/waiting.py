"""Every wait says whom it is for, where that is, and how long it may take; nobody waits in silence.

What is said goes to the log, and to whoever draws the live table.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

_LOG = logging.getLogger("whale_nebula.transport")
_AGAIN_SECONDS = 10.0


class Wait(NamedTuple):
    """A wait that goes on, or (`over`) has just ended.

    >>> print(Wait("worker 'npu/0'", "10.77.0.2:7101", "it is not up yet", seconds=30.0, limit=120.0))
    waiting for worker 'npu/0' at 10.77.0.2:7101, 30 s of 120 s: it is not up yet
    >>> print(Wait("worker 'npu/0'", "", "", seconds=31.0, limit=120.0, over=True))
    worker 'npu/0' is there, after 31 s
    """

    who: str
    where: str
    why: str
    seconds: float
    limit: float
    over: bool = False

    def __str__(self) -> str:
        if self.over:
            return f"{self.who} is there, after {self.seconds:.0f} s"
        place = f" at {self.where}" if self.where else ""
        reason = f": {self.why}" if self.why else ""
        return f"waiting for {self.who}{place}, {self.seconds:.0f} s of {self.limit:.0f} s{reason}"


Announce: TypeAlias = Callable[[Wait], None]


def log_wait(wait: Wait) -> None:
    """Say it in the log: what is new or goes on as a warning, what is over as information."""
    _LOG.log(logging.INFO if wait.over else logging.WARNING, "%s", wait)


class Waiting:
    """One thing that may have to be waited for again and again: said at once, every ten seconds, and at its end.

    The owner calls `on` whenever it sees that it still waits, and `off` when it does not.

    >>> waiting = Waiting("worker 'npu/0'", "10.0.0.2:7101", lambda wait: print(wait))
    >>> waiting.on("it is not up yet", limit=120.0)
    waiting for worker 'npu/0' at 10.0.0.2:7101, 0 s of 120 s: it is not up yet
    >>> waiting.on("it is not up yet", limit=120.0)
    >>> waiting.off()
    worker 'npu/0' is there, after 0 s
    >>> waiting.off()
    """

    def __init__(
        self,
        who: str,
        where: str,
        announce: Announce = log_wait,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._who = who
        self._where = where
        self._announce = announce
        self._now = now
        self._since: float | None = None
        self._said = 0.0
        self._why = ""

    def on(self, why: str, *, limit: float, since: float | None = None) -> None:
        """It is waited for, at most `limit` seconds, counted from `since` or the first call."""
        now = self._now()
        if self._since is None:
            self._since = now if since is None else since
        elif why == self._why and now - self._said < _AGAIN_SECONDS:
            return
        self._said, self._why = now, why
        self._announce(Wait(self._who, self._where, why, now - self._since, limit))

    def off(self) -> None:
        """It is no longer waited for."""
        if self._since is not None:
            seconds = self._now() - self._since
            self._since = None
            self._announce(Wait(self._who, self._where, self._why, seconds, seconds, over=True))
