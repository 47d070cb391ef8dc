"""The guard of an owner's data: authorizes each batch, counts it, and records it.

It is used both by the service and by processes that read on the owner's machine. What accounts have read is counted in
a SQLite file next to the registry, across connections and runs. The file is unsigned: only its owner can write it. A
count is stored before the rows are sent; after a crash of the machine the last ones may be missing, which the audit log
shows.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whale_nebula.datasets.grants import Dataset, Grants
from whale_nebula.datasets.interface import Bound, Limits, OpenDataset, open_dataset
from whale_nebula.datasets.schema import count_bytes
from whale_nebula.errors import AccessError, InterfaceError, NebulaError
from whale_nebula.security import files
from whale_nebula.security.audit import AuditLog
from whale_nebula.transport.grpc.limits import Buckets, TokenBucket

MOST_ROWS = 1 << 16
MOST_BYTES = 256 << 20
OWNER = "owner"
"""The reader in records of reads without an account: the owner, on the owner's machine."""
ANONYMOUS = "address "
"""Beginning of the actor in records of connections without a valid certificate."""
_REFUSALS, _REFUSALS_RATE = 8, 0.1
_ANONYMOUS_REFUSALS, _ANONYMOUS_REFUSALS_RATE = 64, 1.0
_MOST_RUNS = 10_000  # whose versions are remembered; for others each record has the versions


@dataclass(frozen=True, slots=True)
class Reader:
    """The reader: account ("" is the owner) and `actor`, its identity; and its stated run, program, purpose and
    versions.
    """

    account: str
    actor: str
    run: str = ""
    program: str = ""
    purpose: str | None = None
    versions: str = ""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """The requested rows: the seed and the number of the pass, and the positions from `first` to before `last`."""

    dataset: str
    seed: int | None
    number: int
    first: int
    last: int
    edition: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that may be sent, and the seconds to wait before that."""

    rows: int
    columns: dict[str, Any]
    pause: float


class Guard:
    """Authorises, counts and records reads. Thread-safe."""

    def __init__(self, grants: Grants, usage: Usage, log: AuditLog) -> None:
        self.grants, self.usage, self.log = grants, usage, log
        self._pacer, self._refusals = Pacer(), Buckets(_REFUSALS, _REFUSALS_RATE)
        self._anonymous_refusals = TokenBucket(_ANONYMOUS_REFUSALS, _ANONYMOUS_REFUSALS_RATE)
        self._lock = threading.Lock()
        self._opening_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._open_datasets: dict[str, tuple[Dataset, OpenDataset]] = {}
        self._unlogged_refusals: dict[str, int] = {}
        self._versions: set[tuple[str, str, str, str]] = set()

    def open(self, reader: Reader, name: str) -> OpenDataset:
        """Open a dataset for an authorised reader."""

        def open_checked() -> OpenDataset:
            opened = self._open(self._authorize(reader, name)[0])
            self.usage.check_remaining(name, reader.account or OWNER, reader.run, opened.interface.limits)
            return opened

        found: OpenDataset = self._run_logged(reader, name, open_checked)
        return found

    def read(self, reader: Reader, request: ReadRequest) -> Batch:
        """Read rows for an authorised reader; refusals raise, and are logged."""
        return self._run_logged(reader, request.dataset, lambda: self._read(reader, request))

    def _read(self, reader: Reader, request: ReadRequest) -> Batch:
        dataset, grant, purpose = self._authorize(reader, request.dataset)
        opened = self._open(dataset)
        if request.edition and request.edition != opened.edition:
            why = f"it was edition {request.edition} when the run began to read, but is now {opened.edition}"
            raise AccessError(f"dataset {request.dataset!r} has changed", why=why, mend="start the run again")
        if not 0 <= request.first < request.last <= opened.count or request.last - request.first > MOST_ROWS:
            what = f"rows {request.first} to {request.last} of {opened.count} cannot be read at once"
            raise AccessError(what, mend=f"use batch={MOST_ROWS} or less")
        limits, account, count = opened.interface.limits, reader.account or OWNER, request.last - request.first
        _check_batch_size(count * sum(each.row_bytes for each in opened.interface.schema))
        if limits.account.rows is not None or limits.run.rows is not None:  # before the rows are computed
            self.usage.check_remaining(request.dataset, account, reader.run, limits, count)
        rows, columns = opened.read(request.seed, request.number, request.first, request.last)
        size = count_bytes(opened.interface.schema, columns)
        _check_batch_size(size)
        pause = self._pacer.find_pause(request.dataset, account, limits.rate, size)
        self.usage.count(request.dataset, account, reader.run, limits, rows, size)
        self.log.record(
            "read", actor=reader.actor, target=request.dataset, decision="allow", durable=False, account=account,
            purpose=purpose, grant=grant, interface=dataset.digest[:16], run=reader.run, program=reader.program,
            seed=request.seed, number=request.number, first=request.first, rows=rows, bytes=size,
            **self._select_versions(reader, request.dataset),
        )  # fmt: skip
        return Batch(rows, columns, pause)

    def confirm(self, reader: Reader, name: str) -> None:
        """Check that a reader may still read a dataset, after a batch has waited for the rate limit."""
        self._run_logged(reader, name, lambda: self._authorize(reader, name))

    def _select_versions(self, reader: Reader, dataset: str) -> dict[str, str]:
        """The versions of a run for the first record of its reads."""
        entry = (reader.account, reader.run, dataset, reader.versions)
        with self._lock:
            known = entry in self._versions
            if not known and len(self._versions) < _MOST_RUNS:
                self._versions.add(entry)
        return {} if known or not reader.versions else {"versions": reader.versions}

    def _authorize(self, reader: Reader, name: str) -> tuple[Dataset, str, str]:
        """The dataset, and the number and the purpose of the grant; raises if the reader may not read it."""
        if not reader.account:
            return self.grants.find_readable(name), "", reader.purpose or ""
        dataset, grant = self.grants.check(reader.account, name, reader.purpose)
        return dataset, grant.number, grant.purpose

    def _open(self, dataset: Dataset) -> OpenDataset:
        """The latest publication of a dataset. A new one is opened again, for which only its own readers wait."""
        with self._lock:
            opening = self._opening_locks[dataset.name]
        with opening:
            published, opened = self._open_datasets.get(dataset.name, (None, None))
            if opened is None or published != dataset:
                opened = open_dataset(dataset.parse(), Path(dataset.folder))
                self._open_datasets[dataset.name] = dataset, opened
            return opened

    def _run_logged(self, reader: Reader, name: str, act: Callable[[], Any]) -> Any:
        """Execute an operation, or log its failure. Errors of the owner's functions are reported to the owner, not to
        the reader.
        """
        try:
            return act()
        except NebulaError as error:
            self.refuse(reader, name, error)
            if isinstance(error, InterfaceError) and reader.account:
                what = f"the rows of dataset {name!r} do not match its interface, so none is sent"
                raise AccessError(what, mend="ask its owner, whose log has the details") from None
            raise
        except Exception as error:
            found = InterfaceError(
                f"a function of dataset {name!r} raised {type(error).__name__}", why=str(error)[:300]
            )
            self.refuse(reader, name, found)
            if not reader.account:
                raise found from error
            what = f"the rows of dataset {name!r} cannot be read: the reason is in its owner's log"
            raise AccessError(what, mend="ask its owner") from None

    def refuse(self, reader: Reader, name: str, error: NebulaError) -> None:
        """Record a refusal: the first ones of a reader at once, then one in ten seconds, with their number; of all
        addresses without a certificate together, 64 at once and then one a second.
        """
        subject, free = self._refusals.take(reader.account or reader.actor)
        if free and reader.actor.startswith(ANONYMOUS) and not self._anonymous_refusals.take():
            subject, free = ANONYMOUS, False
        if not free:
            with self._lock:
                self._unlogged_refusals[subject] = self._unlogged_refusals.get(subject, 0) + 1
            return
        with self._lock:
            times = self._unlogged_refusals.pop(subject, 0) + 1
        self.log.record(
            "read", actor=reader.actor, target=name[:64], decision="deny", durable=False, account=reader.account,
            purpose=reader.purpose or "", run=reader.run, program=reader.program, times=times,
            reason=f"{error.code} {error.what}" + f": {error.why}" * bool(error.why),
        )  # fmt: skip


# ---------------------------------------------------------------------- usage by account
FILE = "usage.db"
LONGEST_PAUSE = 300.0
"""The longest wait of a batch in seconds: a longer one would look like a lost connection."""
_BUSY_SECONDS = 60.0
ALL_RUNS = ""
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
    """The rows and bytes that accounts have read of an owner's datasets, in total and by run. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        self._lock, self._lock_path = threading.Lock(), folder / f"{FILE}.lock"
        try:
            with files.hold_lock(self._lock_path):  # SQLite does not wait for others to change the mode of the journal
                path.touch(files.SECRET)
                self._database = sqlite3.connect(
                    path, check_same_thread=False, isolation_level=None, timeout=_BUSY_SECONDS
                )
                self._database.execute("pragma journal_mode = wal")
                self._database.execute("pragma synchronous = off")
                self._database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise AccessError("cannot count reads", where=str(path), why=str(error)) from None

    def close(self) -> None:
        """Close the file."""
        with self._lock, contextlib.ExitStack() as database:
            with contextlib.suppress(OSError):  # the folder is gone
                database.enter_context(files.hold_lock(self._lock_path))
            self._database.close()  # the last one removes the journal

    def count(self, dataset: str, account: str, run: str, limits: Limits, rows: int, size: int) -> None:
        """Count rows that are about to be sent; if that would exceed the limits, nothing is counted."""
        with self._lock:
            try:
                self._database.execute("begin immediate")
                total = (0, 0)
                for counted_run, bound, what in ((ALL_RUNS, limits.account, "total"), (run, limits.run, "run")):
                    if what != "total" and bound == Bound():
                        continue
                    if what == "total" or counted_run != ALL_RUNS:  # a reader without a run counts in the total only
                        row = (dataset, account, counted_run, rows, size)
                        total = self._database.execute(_COUNT, row).fetchone()
                    _check_bound(bound, total, f"{account} has reached the {what} limit of dataset {dataset!r}")
                self._database.execute("commit")
            except sqlite3.Error as error:
                raise AccessError("cannot count reads", why=str(error)) from None
            finally:
                if self._database.in_transaction:
                    self._database.execute("rollback")

    def check_remaining(self, dataset: str, account: str, run: str, limits: Limits, count: int = 1) -> None:
        """Check that this many more rows may be read."""
        for counted_run, bound, what in ((ALL_RUNS, limits.account, "total"), (run, limits.run, "run")):
            if bound == Bound():
                continue
            rows, size = self.find(dataset, account, counted_run)
            _check_bound(
                bound, (rows + count, size + 1), f"{account} has reached the {what} limit of dataset {dataset!r}"
            )

    def find(self, dataset: str, account: str, run: str = ALL_RUNS) -> tuple[int, int]:
        """The rows and bytes that an account has read, in a run or in total."""
        query = "select rows, bytes from usage where dataset = ? and account = ? and run = ?"
        with self._lock:
            found = self._database.execute(query, (dataset, account, run)).fetchone()
        return (0, 0) if found is None else (int(found[0]), int(found[1]))


def _check_batch_size(size: int) -> None:
    if size > MOST_BYTES:
        raise AccessError(f"a batch of {size} bytes is too large", mend="use a smaller batch=")


def _check_bound(bound: Bound, total: tuple[int, int], what: str) -> None:
    for limit, count, unit in ((bound.rows, total[0], "rows"), (bound.bytes, total[1], "bytes")):
        if limit is not None and count > limit:
            why = f"the limit is {limit} {unit}, and this request would increase the count to {count}"
            raise AccessError(what, why=why, mend="ask the owner of the data for a higher limit")


class Pacer:
    """Rate limit of an account's reads, in bits per second for all its connections together."""

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
                what = f"{account} exceeds its rate limit of dataset {dataset!r}"
                why = (
                    f"at {rate:g} bits per second this batch would wait {begin - moment:.0f} s; "
                    f"the limit is {LONGEST_PAUSE:g} s"
                )
                raise AccessError(what, why=why, mend="use a smaller batch=, or fewer processes")
            self._free[dataset, account] = begin + 8 * size / rate
        return begin - moment
