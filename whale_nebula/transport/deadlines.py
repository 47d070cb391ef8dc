"""All deadlines of a link: those that are configured, and those derived from them or from measurements."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

_BACKLOG_BYTES = 4 << 20  # what a sender's kernel may buffer for one connection: a ping queues behind it
_SPAN_SECONDS = 1.0
_RANDOM = random.SystemRandom()  # the state of `random` belongs to the script


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The timeouts of a link in seconds.

    `patience`: for a peer that is silent or not connected yet. `silence`: until a silent peer is detected and reported.
    `gateway_grace`: for a gateway that refuses. `grace`: for a graceful close without progress. `connect`: for one
    attempt to connect.

    >>> Deadlines(silence=8.0).heartbeat_interval, Deadlines(patience=20.0).find_stall_timeout(waiting=0, rate=None)
    (2.0, 20.0)
    """

    patience: float = 120.0
    silence: float = 8.0
    gateway_grace: float = 30.0
    grace: float = 5.0
    connect: float = 5.0
    check_interval: float = 1.0  # between checks of certificates, of deadlines and of a lost peer

    @property
    def heartbeat_interval(self) -> float:
        """Interval of heartbeats: the longest time for which this side is silent."""
        return self.silence / 4

    @property
    def keepalive(self) -> float:
        """Idle time after which a connection is probed."""
        return self.silence * 0.375

    def find_ping_timeout(self, rate: float | None) -> float:
        """Timeout of the probe's answer: the rest of `silence`, or the time that a slow link needs for its queue.

        `rate` is the measured rate of the link in bytes per second.
        """
        usual = self.silence * 0.375
        return max(usual, 1.5 * _BACKLOG_BYTES / rate) if rate else usual

    def find_stall_timeout(self, waiting: int, rate: float | None) -> float:
        """Timeout of a send that waits for room: `patience`, or twice the time that the link needs at its measured
        rate.

        >>> Deadlines().find_stall_timeout(waiting=64 << 20, rate=100_000)
        1342.17728
        """
        return max(self.patience, 2 * waiting / rate) if rate else self.patience

    def draw_retry_pause(self, attempt: int, draw: float | None = None) -> float:
        """Backoff before the `attempt`-th reconnection (from 0); `draw` is random in [0, 1)."""
        draw = _RANDOM.random() if draw is None else draw
        return min(2.0, 0.05 * 2.0 ** min(attempt, 16)) * (0.5 + draw)


@dataclass
class OwnAbsence:
    """When another worker last reported that the run goes on without this one, for all links of a process. That worker
    lets this one take part after a step, however long that takes, so this one waits for all others meanwhile.
    """

    reported_at: float = -math.inf


class Meter:
    """Measures the bytes per second of a busy link; None until it was busy for a second."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self._started_at: float | None = None
        self._bytes = 0

    def start(self, now: float) -> None:
        """Bytes are in flight from now on."""
        if self._started_at is None:
            self._started_at, self._bytes = now, 0

    def count_arrived(self, size: int, now: float, *, more: bool) -> None:
        """Count bytes that have arrived; `more` means that further bytes are in flight."""
        if self._started_at is None:
            return
        self._bytes += size
        elapsed = now - self._started_at
        if elapsed >= _SPAN_SECONDS:
            measured_rate = self._bytes / elapsed
            self.rate = measured_rate if self.rate is None else (self.rate + measured_rate) / 2
            self._started_at, self._bytes = now, 0
        if not more:
            self._started_at = None

    def stop(self) -> None:
        """The link is down: that time is not counted."""
        self._started_at = None


_LOG = logging.getLogger("whale_nebula.transport")
_REPEAT_SECONDS = 10.0


class Wait(NamedTuple):
    """A wait that is in progress or, if `over`, has just ended.

    >>> print(Wait("worker 'npu/0'", "10.77.0.2:7101", "it is not up yet", seconds=30.0, limit=120.0))
    waiting for worker 'npu/0' at 10.77.0.2:7101, 30 s of 120 s: it is not up yet
    >>> print(Wait("gateway 'npu/gateway'", "", "it is not up yet", seconds=30.0, limit=None))  # as long as it takes
    waiting for gateway 'npu/gateway', 30 s: it is not up yet
    >>> print(Wait("worker 'npu/0'", "", "", seconds=31.0, limit=120.0, over=True))
    worker 'npu/0' is connected, after 31 s
    """

    target: str
    address: str
    reason: str
    seconds: float
    limit: float | None
    over: bool = False

    def __str__(self) -> str:
        if self.over:
            return f"{self.target} is connected, after {self.seconds:.0f} s"
        place = f" at {self.address}" if self.address else ""
        reason = f": {self.reason}" if self.reason else ""
        limit = "" if self.limit is None else f" of {self.limit:.0f} s"
        return f"waiting for {self.target}{place}, {self.seconds:.0f} s{limit}{reason}"


Announce: TypeAlias = Callable[[Wait], None]


def log_wait(wait: Wait) -> None:
    """Log the start or the end of a wait as a warning."""
    _LOG.warning("%s", wait)


class WaitAnnouncer:
    """Progress messages of a recurring wait: at its start, every ten seconds, and at its end.

    The owner calls `announce` repeatedly while it waits, then `finish` if the wait has succeeded, or `abandon`.

    >>> waiting = WaitAnnouncer("worker 'npu/0'", "10.0.0.2:7101", lambda wait: print(wait))
    >>> waiting.announce("it is not up yet", limit=120.0)
    waiting for worker 'npu/0' at 10.0.0.2:7101, 0 s of 120 s: it is not up yet
    >>> waiting.announce("it is not up yet", limit=120.0)
    >>> waiting.finish()
    worker 'npu/0' is connected, after 0 s
    >>> waiting.finish()
    """

    def __init__(
        self, target: str, address: str, announce: Announce = log_wait, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._target = target
        self._address = address
        self._announce = announce
        self._now = now
        self._started_at: float | None = None
        self._announced_at = 0.0
        self._reason = ""

    @property
    def is_announced(self) -> bool:
        """Whether a wait is in progress and was announced."""
        return self._started_at is not None

    def announce(self, reason: str, *, limit: float | None = None, since: float | None = None) -> None:
        """Start or continue the wait, with a `limit` in seconds, if there is one, counted from `since` or the first
        call. A long wait is reported less often.
        """
        now = self._now()
        if self._started_at is None:
            self._started_at = now if since is None else since
        elif reason == self._reason and now - self._announced_at < max(_REPEAT_SECONDS, (now - self._started_at) / 10):
            return
        self._announced_at, self._reason = now, reason
        self._announce(Wait(self._target, self._address, reason, now - self._started_at, limit))

    def finish(self) -> None:
        """End the wait with success, which is announced if its start was."""
        if self._started_at is not None:
            seconds = self._now() - self._started_at
            self._started_at = None
            self._announce(Wait(self._target, self._address, self._reason, seconds, seconds, over=True))

    def abandon(self) -> None:
        """End the wait without an announcement."""
        self._started_at = None


_LONGEST_WAIT = 3600.0
_OVERSLEEP = 0.00025  # a timed wait ends about this much too late


class Clock(Protocol):
    """Source of time, and of waits for a condition."""

    def now(self) -> float:
        """Seconds since an arbitrary fixed time; monotonic."""

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Wait until the condition, whose lock is held, is notified; at most this many seconds."""


class MonotonicClock:
    """The clock of this machine."""

    def now(self) -> float:
        """Seconds, approximately since the machine started."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Wait for the condition with a timeout; may wake early, so callers check again.

        The wait ends more precisely than with the system's timers alone.
        """
        if seconds > _OVERSLEEP:
            condition.wait(min(seconds, _LONGEST_WAIT) - _OVERSLEEP)
        else:
            time.sleep(0.0)
