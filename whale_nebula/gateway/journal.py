"""What a gateway writes into its audit log, and its log for people; a full disk does not stop what already runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from whale_nebula.errors import AuditError, NebulaError, TransportError
from whale_nebula.gateway.half import Half
from whale_nebula.gateway.pair import Pair
from whale_nebula.security.audit import AuditLog

_LOG = logging.getLogger("whale_nebula.gateway")
_AGAIN_SECONDS = 10.0
_MOST = 1000


class Refusals:
    """The same refusal again and again is one record in ten seconds, with how often it was.

    >>> clock = iter([0.0, 1.0, 2.0, 12.0])
    >>> refusals = Refusals(now=lambda: next(clock))
    >>> [refusals.times("npu/0", "expired") for _ in range(4)]
    [1, 0, 0, 3]
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, ...], tuple[float, int]] = {}

    def times(self, *what: str) -> int:
        """How often it was since it was last written down; 0: it is not to be written down now."""
        now = self._now()
        with self._lock:
            since, times = self._seen.get(what, (float("-inf"), 0))
            if now - since < _AGAIN_SECONDS:
                self._seen[what] = since, times + 1
                return 0
            if len(self._seen) >= _MOST:
                self._seen.clear()
            self._seen[what] = now, 0
        return times + 1


class Journal:
    """The audit log of a gateway, with a word for everything that is written there."""

    def __init__(self, log: AuditLog) -> None:
        self.log = log
        self._refusals = Refusals()

    def opened(self, pair: Pair, half: Half) -> None:
        """A half has come. A stream that cannot be written down is not taken."""
        try:
            self.log.record(
                "open",
                actor=half.who,
                target=str(pair),
                decision="allow",
                side=half.side.value,
                dialled=half.dialled,
                connection=half.connection.name,
                serial=next((guest.serial for guest in half.guests), ""),
            )
        except AuditError as error:
            _LOG.error("%s", error)
            raise TransportError("the gateway's audit log cannot be written", why=error.why) from None

    def ended(self, pair: Pair, half: Half, why: str) -> None:
        """A half is over, after so much was handed on from it; with a fault if it sent what is not allowed."""
        self.note(
            "end",
            actor=half.who,
            target=str(pair),
            decision="deny" if half.fault else "",
            reason=half.fault or why,
            side=half.side.value,
            connection=half.connection.name,
            frames=half.frames,
            bytes=half.bytes,
        )

    def refused(self, actor: str, target: str, error: NebulaError) -> None:
        """Somebody was not let in."""
        times = self._refusals.times(actor, target, error.what)
        if times:
            reason = f"{error.code} {error.what}" + (f": {error.why}" if error.why else "")
            self.note("refuse", actor=actor, target=target, decision="deny", reason=reason, times=times)

    def note(self, action: str, **said: Any) -> None:
        """Anything else; where it cannot be written, the log for people says so."""
        _LOG.info("%s %s", action, said)
        try:
            self.log.record(action, **said)
        except AuditError as error:
            _LOG.error("%s", error)

    def close(self, why: str) -> None:
        """The last record, and the last head."""
        try:
            self.log.close(why)
        except AuditError as error:
            _LOG.error("%s", error)
