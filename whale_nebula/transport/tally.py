"""Counters of outgoing bytes, the same for memory links and network links."""

from __future__ import annotations

import threading

from whale_nebula.transport.protocol import LinkTotals
from whale_nebula.wire.frame import HEADER_BYTES, frame_count, wire_bytes


class Tally:
    """A sum of what was sent, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = LinkTotals()

    def tensor(self, size: int, raw_bytes: int | None) -> int:
        """Count one tensor; gives its bytes on the wire."""
        total = wire_bytes(size)
        self._count(LinkTotals(size, total, size if raw_bytes is None else raw_bytes, frame_count(size)))
        return total

    def message(self, size: int) -> int:
        """Count one control message; gives its bytes on the wire."""
        total = size + HEADER_BYTES
        self._count(LinkTotals(bytes=total, frames=1))
        return total

    def totals(self) -> LinkTotals:
        """The sum so far."""
        return self._sum

    def _count(self, more: LinkTotals) -> None:
        with self._lock:
            self._sum += more
