"""Usage of datasets by account, in a SQLite file beside the registry, shared by all services and processes of an owner,
across connections and runs.

The file is unsigned: only its owner can write it. A count is stored before the rows leave; after a crash of the machine
the last ones may be missing, which the audit log then shows.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from pathlib import Path

from whale_nebula.datasets.interface import Bound, Limits
from whale_nebula.errors import AccessError
from whale_nebula.security import files

FILE = "usage.db"
LONGEST_PAUSE = 300.0
"""The longest wait of a batch in seconds: a longer one would look like a lost connection."""
_BUSY_SECONDS = 60.0
ALL = ""
"""The name of all runs together, in place of a run's."""
_SCHEMA = """
create table if not exists usage (dataset text not null, account text not null, run text not null,
    rows integer not null, bytes integer not null, primary key (dataset, account, run)) strict, without rowid;
"""
_COUNT = """
insert into usage values (?, ?, ?, ?, ?) on conflict do update
    set rows = rows + excluded.rows, bytes = bytes + excluded.bytes returning rows, bytes
"""


class Usage:
    """The counts of an owner. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        self._lock, self._opening = threading.Lock(), folder / f"{FILE}.lock"
        try:
            with files.hold_lock(self._opening):  # SQLite does not wait for others to change the mode of the journal
                path.touch(files.SECRET)
                self._database = sqlite3.connect(
                    path, check_same_thread=False, isolation_level=None, timeout=_BUSY_SECONDS
                )
                self._database.execute("pragma journal_mode = wal")
                self._database.execute("pragma synchronous = off")
                self._database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise AccessError("what was read cannot be counted", where=str(path), why=str(error)) from None

    def close(self) -> None:
        """Close the file."""
        with self._lock, contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):  # the folder is gone
                held.enter_context(files.hold_lock(self._opening))
            self._database.close()  # the last one removes the journal

    def count(self, dataset: str, account: str, run: str, limits: Limits, rows: int, size: int) -> None:
        """Count rows that are about to leave; if that would exceed the limits, nothing is counted."""
        with self._lock:
            try:
                self._database.execute("begin immediate")
                total = (0, 0)
                for which, bound, what in ((ALL, limits.account, "in all"), (run, limits.run, "in a run")):
                    if what != "in all" and bound == Bound():
                        continue
                    if what == "in all" or which != ALL:  # a reader without a run counts in the total only
                        row = (dataset, account, which, rows, size)
                        total = self._database.execute(_COUNT, row).fetchone()
                    _check(bound, total, f"{account} has read as much of dataset {dataset!r} as it may {what}")
                self._database.execute("commit")
            except sqlite3.Error as error:
                raise AccessError("what was read cannot be counted", why=str(error)) from None
            finally:
                if self._database.in_transaction:
                    self._database.execute("rollback")

    def check_left(self, dataset: str, account: str, run: str, limits: Limits) -> None:
        """Check that one more row may be read."""
        for which, bound, what in ((ALL, limits.account, "in all"), (run, limits.run, "in a run")):
            rows, size = self.find(dataset, account, which)
            _check(bound, (rows + 1, size + 1), f"{account} has read as much of dataset {dataset!r} as it may {what}")

    def find(self, dataset: str, account: str, run: str = ALL) -> tuple[int, int]:
        """The rows and bytes that an account has read, in a run or in total."""
        query = "select rows, bytes from usage where dataset = ? and account = ? and run = ?"
        with self._lock:
            found = self._database.execute(query, (dataset, account, run)).fetchone()
        return (0, 0) if found is None else (int(found[0]), int(found[1]))


def _check(bound: Bound, total: tuple[int, int], what: str) -> None:
    for most, found, unit in ((bound.rows, total[0], "rows"), (bound.bytes, total[1], "bytes")):
        if most is not None and found > most:
            why = f"the limit is {most} {unit}, and with these it would be {found}"
            raise AccessError(what, why=why, mend="ask the owner of the data for more")


class Pacer:
    """Rate limit of an account's reads: all its connections together get this many bits a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple[str, str], float] = {}

    def find_pause(self, dataset: str, account: str, rate: float, size: int, now: float | None = None) -> float:
        """The seconds that these bytes wait before they are sent; `AccessError` if that is too long.

        >>> pacer = Pacer()
        >>> [pacer.find_pause("a", "ana", 8e3, 500, 0.0) for _ in range(3)]
        [0.0, 0.5, 1.0]
        """
        if not rate:
            return 0.0
        moment = time.monotonic() if now is None else now
        with self._lock:
            begin = max(moment, self._free.get((dataset, account), moment))
            if begin - moment > LONGEST_PAUSE:
                what = f"{account} reads dataset {dataset!r} in batches that its rate does not let"
                why = (
                    f"at {rate:g} bits a second this one waits for {begin - moment:.0f} s: {LONGEST_PAUSE:g} s at most"
                )
                raise AccessError(what, why=why, mend="a smaller batch=, or fewer processes")
            self._free[dataset, account] = begin + 8 * size / rate
        return begin - moment
