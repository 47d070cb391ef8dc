"""Bytes that the workers of each account have exchanged over the line today, and the enforcement of daily limits.

Days are in UTC. The counts are stored in a file beside the audit log, so that they outlive the gateway: after a crash
those of the last seconds may be missing.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import date, datetime, timedelta
from functools import partial
from pathlib import Path

from whale_nebula.errors import AuditError, CredentialsError, NotAllowedError
from whale_nebula.security import Peer, files
from whale_nebula.security.allowance import format_bytes
from whale_nebula.security.chain import canonical

SAVE_SECONDS = 5.0
_LOG = logging.getLogger("whale_nebula.gateway")


class Traffic:
    """The counts of a gateway. Thread-safe.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "traffic.json")
    ...     traffic = Traffic(path)
    ...     traffic.count("ana", 1000)
    ...     traffic.save()
    ...     Traffic(path).find("ana")
    1000
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = files.now) -> None:
        self._path, self._now = path, now
        self._lock = threading.Lock()
        self._changed = self._failed = False
        self._saved = float("-inf")
        self._day, self._counts = self._read()
        self._turn_day()

    def _read(self) -> tuple[date, dict[str, int]]:
        if not self._path.exists():
            return self._now().date(), {}
        try:
            said = json.loads(self._path.read_text("utf-8"))
            return date.fromisoformat(said["day"]), {str(who): int(size) for who, size in dict(said["bytes"]).items()}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise AuditError(
                "what accounts have sent over the line today cannot be read",
                where=str(self._path),
                why=str(error),
                mend=f"mv {self._path} {self._path}.broken: they are counted from nothing then",
            ) from None

    def meter(self, guest: Peer | None) -> Callable[[int], None]:
        """The byte counter for an identity's account; without an account it counts nothing."""
        return (lambda size: None) if guest is None or not guest.account else partial(self.count, guest.account)

    def count(self, account: str, size: int) -> None:
        """Add bytes that were sent to or received from an account."""
        with self._lock:
            self._counts[account] = self._counts.get(account, 0) + size
            self._changed = True

    def find(self, account: str) -> int:
        """The bytes of an account, today."""
        with self._lock:
            self._turn_day()
            return self._counts.get(account, 0)

    def _turn_day(self) -> None:
        """Reset the counts on a later day; a clock that was set back does not reset them."""
        day = self._now().date()
        if day > self._day:
            self._day, self._counts, self._changed = day, {}, True

    def check(self, guest: Peer | None) -> None:
        """Check whether an identity may send more today, by its account's certificate."""
        most = None if guest is None else guest.allowance.line
        if guest is None or most is None:
            return
        count = self.find(guest.account)
        if count >= most:
            begin = self._now().replace(hour=0, minute=0, second=0) + timedelta(days=1)
            raise NotAllowedError(
                f"account {guest.account} may send and be sent {format_bytes(most)} a day over the line, and has had "
                f"{format_bytes(count)}",
                why=f"it may go on at {files.format_time(begin)}, or with more from its owner",
                mend=f"whale-nebula accounts limit {guest.account} --line SIZE, and then log in again",
            )

    def save(self, pause: float = 0.0) -> None:
        """Write changed counts, at most once in `pause` seconds."""
        with self._lock:
            if not self._changed or time.monotonic() - self._saved < pause:
                return
            self._turn_day()
            said, self._changed, self._saved = (
                {"day": self._day.isoformat(), "bytes": self._counts},
                False,
                time.monotonic(),
            )
            data = canonical(said) + b"\n"
        try:
            files.write(self._path, data, files.SECRET)
            self._failed = False
        except CredentialsError as error:
            with self._lock:
                self._changed = True
            if not self._failed:
                _LOG.error("what accounts have sent today is counted, and is forgotten with this process: %s", error)
            self._failed = True
