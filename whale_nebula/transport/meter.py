"""What a line carries, seen from its end: acknowledged bytes over the time in which there was something to carry."""

from __future__ import annotations

_SPAN_SECONDS = 1.0


class Meter:
    """Bytes per second of a busy line; None until it was busy for a second.

    >>> meter = Meter()
    >>> meter.busy(0.0)
    >>> for second in (1.0, 2.0): meter.carried(7_500_000, second, more=True)
    >>> meter.rate
    7500000.0
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        self._since: float | None = None
        self._bytes = 0

    def busy(self, now: float) -> None:
        """Something is on its way."""
        if self._since is None:
            self._since, self._bytes = now, 0

    def carried(self, size: int, now: float, *, more: bool) -> None:
        """So many bytes have arrived; `more`: others are still on their way."""
        if self._since is None:
            return
        self._bytes += size
        elapsed = now - self._since
        if elapsed >= _SPAN_SECONDS:
            seen = self._bytes / elapsed
            self.rate = seen if self.rate is None else (self.rate + seen) / 2
            self._since, self._bytes = now, 0
        if not more:
            self._since = None

    def idle(self) -> None:
        """The line is down: that time says nothing about it."""
        self._since = None
