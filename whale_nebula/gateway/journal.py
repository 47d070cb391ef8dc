"""The gateway's audit log and its log for operators; a full disk does not stop running pairs."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from whale_nebula.errors import AuditError, NebulaError, TransportError
from whale_nebula.gateway.relay import Half, Pair
from whale_nebula.security.audit import AuditLog
from whale_nebula.transport.grpc.limits import Buckets

_LOG = logging.getLogger("whale_nebula.gateway")
_BURST, _INTERVAL_SECONDS, _MAX_IDENTITIES = 8, 10.0, 1000
_SUMMARY_SECONDS, _SPACE_SECONDS = 60.0, 30.0
_LOW_BYTES = 1 << 30
_LONGEST_TEXT = 200  # characters of a refused client's text


class Refusals:
    """Rate limit of logged refusals: `_BURST` of one identity at once, then one every `_INTERVAL_SECONDS`, with the
    number of refusals since the previous one. Identities above `_MAX_IDENTITIES` share one limit.

    >>> clock = iter([0.0] * 12 + [20.0])
    >>> refusals = Refusals(now=lambda: next(clock))
    >>> [refusals.count("npu/0") for _ in range(12)]
    [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 4]
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._buckets = Buckets(_BURST, 1.0 / _INTERVAL_SECONDS, most=_MAX_IDENTITIES, now=now)
        self._omitted: Counter[str] = Counter()

    def count(self, caller_name: str) -> int:
        """Count a refusal of an identity: returns the number since the last record, 0 if none is due."""
        with self._lock:
            caller_name, is_due = self._buckets.take(caller_name)
            if not is_due:
                self._omitted[caller_name] += 1
                return 0
            return 1 + self._omitted.pop(caller_name, 0)

    def take_omitted(self) -> dict[str, int]:
        """The numbers of refusals by caller that are not logged yet, which count as logged afterwards."""
        with self._lock:
            omitted, self._omitted = dict(self._omitted), Counter()
            return omitted


class Journal:
    """The audit log of a gateway, with a method for each kind of record. Thread-safe."""

    def __init__(self, log: AuditLog) -> None:
        self.log = log
        self._refusals = Refusals()
        self._changed = threading.Condition()
        self._open: set[Half] = set()
        self._ending = self._closed = self._low = False
        self._next_summary = self._next_space = time.monotonic()

    def note_opened(self, pair: Pair, half: Half) -> None:
        """Record a new half. A stream that cannot be recorded is refused."""
        with self._changed:
            if self._ending:
                raise TransportError("this gateway is stopping")
            self._open.add(half)
        try:
            self.log.record(
                "open",
                actor=half.identity_uri,
                target=str(pair),
                decision="allow",
                side=half.side.value,
                dialled=half.dialled,
                connection=half.connection.name,
                serial=next((peer.serial for peer in half.certified_peers), ""),
                account=next((peer.account for peer in half.certified_peers), ""),
            )
        except AuditError as error:
            self._forget(half)
            _LOG.error("%s", error)
            raise TransportError("cannot write the gateway's audit log", why=error.why) from None

    def note_ended(self, pair: Pair, half: Half, why: str) -> None:
        """Record the end of a half and the amount forwarded from it; with a fault if it sent an invalid frame."""
        self.note(
            "end",
            actor=half.identity_uri,
            target=str(pair),
            decision="deny" if half.fault else "",
            reason=half.fault or why,
            side=half.side.value,
            connection=half.connection.name,
            frames=half.frames,
            bytes=half.bytes,
        )
        self._forget(half)

    def _forget(self, half: Half) -> None:
        with self._changed:
            self._open.discard(half)
            self._changed.notify_all()

    def note_refused(self, actor: str, target: str, error: NebulaError, account: str = "") -> None:
        """Record a refusal, of an account if the actor's certificate names one. It does not wait for the disk, as
        unauthenticated clients can cause it.
        """
        times = self._refusals.count(actor)
        if times:
            reason = f"{error.code} {error.what}" + (f": {error.why}" if error.why else "")
            texts = {"target": target, "reason": reason, **({"account": account} if account else {})}
            fields = {name: text[:_LONGEST_TEXT] for name, text in texts.items()}
            self.note("refuse", actor=actor, decision="deny", durable=False, times=times, **fields)

    def check_periodically(self, now: float) -> None:
        """Record once a minute the number of omitted refusals, and warn when the disk is nearly full."""
        if now >= self._next_summary:
            self._next_summary = now + _SUMMARY_SECONDS
            self._record_omitted()
        if now >= self._next_space:
            self._next_space = now + _SPACE_SECONDS
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(self.log.path.parent).free
                low, self._low = self._low, free < _LOW_BYTES
                if self._low and not low:
                    self.note("low space", free=free)
                    _LOG.warning(
                        "the disk of the audit log %s has %d MiB left; when it is full, new connections are refused. "
                        "Move its complete files, whose names have a number, to an archive",
                        self.log.path,
                        free >> 20,
                    )

    def _record_omitted(self) -> None:
        for actor, times in self._refusals.take_omitted().items():
            reason = "refusals that were not recorded one by one"
            self.note("refuse", actor=actor, decision="deny", reason=reason, times=times, durable=False)

    def refuse_new_halves(self) -> None:
        """Admit no more halves from now on."""
        with self._changed:
            self._ending = True

    def wait_all_ended(self, seconds: float) -> bool:
        """Wait until the ends of all halves are recorded, at most this long; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, seconds)

    def note(self, action: str, **fields: Any) -> None:
        """Record any other event; a failure is written to the plain log."""
        _LOG.info("%s %s", action, fields)
        if self._closed:
            return
        try:
            self.log.record(action, **fields)
        except AuditError as error:
            if not self._closed:
                _LOG.error("%s", error)

    def close(self, why: str) -> None:
        """Write the last record and the last head. Later events are only in the plain log."""
        self._record_omitted()
        self._closed = True
        try:
            self.log.close(why)
        except AuditError as error:
            _LOG.error("%s", error)
