"""The rows of a registry, in a SQLite file next to the authority that signs them.

Every change is one transaction. It increments the registry's number, and the authority's key signs that number and the
digest of all rows: a file that was changed by other means is refused. So is an older copy: the highest number on this
host is stored next to it (`accounts.db.highest`). Decisions and changes are recorded as events in a hash chain, whose
last link is among the signed rows.

Processes change the file in the order of their requests, by a lock next to it (`accounts.db.lock`): with SQLite alone,
a waiting process only tries again from time to time, and others that change the file often would always go first.
"""

from __future__ import annotations

import base64
import hashlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cryptography import x509

from whale_nebula.errors import AccountError
from whale_nebula.security import chain, files, trust
from whale_nebula.security.authority import Authority
from whale_nebula.security.chain import encode_canonical
from whale_nebula.security.files import format_time

FILE = "accounts.db"
_SIGNATURE_PREFIX = b"whale_nebula accounts 1\0"
_LOCK = f"{FILE}.lock"
_BUSY_SECONDS = 60.0
"""How long SQLite waits for a process that commits or reads, which takes milliseconds on an idle machine."""
_LONGEST_REASON = 500
_SCHEMA = """
create table account (name text primary key, role text not null, state text not null, password text not null,
    workers integer not null, failures integer not null, locked text not null, created text not null) strict;
create table secret (number text primary key, account text not null references account(name) on delete cascade,
    kind text not null, digest text not null, until text not null) strict;
create table certificate (serial text primary key, account text not null, identity text not null, key text not null,
    until text not null) strict;
create table event (seq integer primary key, line text not null) strict;
create table about (name text primary key, value text not null) strict;
"""
_DATA_SCHEMA = """
create table if not exists dataset (name text primary key, digest text not null, document text not null,
    folder text not null, state text not null, published text not null, expires text not null) strict;
create table if not exists permission (number text primary key, dataset text not null,
    account text not null references account(name) on delete cascade, purpose text not null, state text not null,
    asked text not null, decided text not null, until text not null) strict;
create index if not exists permission_of on permission (dataset, account);
"""
_TABLES = ("about", "account", "certificate", "secret", "dataset", "permission")


class SignedRows:
    """The rows of an open registry. Thread-safe; changes are written before the call returns."""

    def __init__(
        self, folder: Path, authority: Authority | x509.Certificate, now: Callable[[], datetime] = files.now
    ) -> None:
        self.folder, self.now = folder, now
        self._authority = authority if isinstance(authority, Authority) else None
        self._certificate = authority.certificate if isinstance(authority, Authority) else authority
        self._lock = threading.RLock()
        self._checked_version = -1
        self._encoded_rows: dict[str, dict[tuple[Any, ...], bytes]] = {}
        path = folder / FILE
        if not path.exists() and (self._authority is None or self._read_highest_number()):
            raise self._missing_error()
        try:
            with self._hold_lock(), ExitStack() as opened:  # no other process makes the file meanwhile
                if self._authority is not None:
                    path.touch(files.SECRET)
                self.database = sqlite3.connect(
                    f"file:{quote(str(path))}?mode={'ro' if self._authority is None else 'rw'}",
                    uri=True,
                    check_same_thread=False,
                    isolation_level=None,
                    timeout=_BUSY_SECONDS,
                )
                opened.callback(self.database.close)
                self.database.execute("pragma foreign_keys = on")
                self.database.execute("pragma synchronous = extra")
                fresh = self._make_tables()
                opened.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise AccountError("cannot open the registry", where=str(path), why=str(error)) from None
        if fresh and self._authority is not None:
            with self.write_transaction():
                self.set_value("run", self._authority.run)

    def _make_tables(self) -> bool:
        """Create the tables of a new registry, and those of datasets in one that predates them; returns whether it is
        new.
        """
        if self._authority is None:
            return False
        tables = self._list_tables()
        fresh = "account" not in tables
        if "permission" in tables:
            return False
        if fresh and self._read_highest_number():
            raise self._missing_error()
        self.database.executescript(f"begin immediate; {_SCHEMA * fresh} {_DATA_SCHEMA} commit;")
        return fresh

    def _missing_error(self) -> AccountError:
        highest = self._read_highest_number()
        why = f"{FILE} is missing, but this host has seen number {highest}"
        return changed_error(self.folder, why if highest else f"{FILE} is missing")

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Hold the lock of changes, in the order in which processes ask for it; without a key there is nothing to
        change.
        """
        if self._authority is None:
            yield
            return
        with files.hold_lock(self.folder / _LOCK):
            yield

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self.database.close()

    # ------------------------------------------------------------------ integrity
    @contextmanager
    def write_transaction(self) -> Iterator[None]:
        """A transaction that is signed at its end; an error rolls it back."""
        if self._authority is None:
            mend = "run this on the host with the authority"
            raise AccountError("this host does not have the authority's key", where=str(self.folder), mend=mend)
        with self._lock, self._hold_lock():
            try:
                self.database.execute("begin immediate")
                self._verify_rows(self._read_highest_number())
                yield
                number = int(self.find_value("number") or 0) + 1
                self.set_value("number", str(number))
                signature = self._authority.key.sign(self._make_message(), files.SIGNATURE)
                self.set_value("signature", base64.b64encode(signature).decode("ascii"))
                self.database.execute("commit")
                trust.remember_highest(self.folder / FILE, self._signer_digest, number)
                self._checked_version = self._read_version()
            except BaseException as error:
                if self.database.in_transaction:
                    self.database.execute("rollback")
                self._checked_version = -1
                if isinstance(error, sqlite3.Error):
                    raise _unusable_error(self.folder, error) from None
                raise

    @contextmanager
    def read_transaction(self) -> Iterator[None]:
        """A read transaction, which sees a consistent snapshot while other processes write."""
        with self._lock:
            highest = self._read_highest_number()  # read before the rows, which are then at least as new
            try:
                self.database.execute("begin")
                if self._checked_version != self._read_version():
                    trust.remember_highest(self.folder / FILE, self._signer_digest, self._verify_rows(highest))
                    self._checked_version = self._read_version()
                yield
            except sqlite3.Error as error:
                raise _unusable_error(self.folder, error) from None
            finally:
                if self.database.in_transaction:
                    self.database.execute("rollback")

    def _read_version(self) -> int:
        return int(self.database.execute("pragma data_version").fetchone()[0])

    def find_value(self, name: str) -> str | None:
        """The text that is stored under a name, within a transaction."""
        row = self.database.execute("select value from about where name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def set_value(self, name: str, value: str | None) -> None:
        """Store a text under a name within a change; None removes it."""
        self.database.execute("delete from about where name = ?", (name,))
        if value is not None:
            self.database.execute("insert into about values (?, ?)", (name, value))

    def _make_message(self) -> bytes:
        """The signed message: the digest of all rows, including the number. Every row is read each time, and encoded
        once.
        """
        digest, tables = hashlib.sha256(), self._list_tables()
        for table in (each for each in _TABLES if each in tables):
            rows = self.database.execute(f"select * from {table} order by 1").fetchall()  # noqa: S608 - our own names
            signed = [row for row in rows if (table, row[0]) != ("about", "signature")]
            before = self._encoded_rows.get(table, {})
            lines = [before.get(row) or encode_canonical({"table": table, "row": list(row)}) for row in signed]
            self._encoded_rows[table] = dict(zip(signed, lines, strict=True))
            digest.update(b"".join(lines))
        return _SIGNATURE_PREFIX + digest.digest()

    def _list_tables(self) -> set[str]:
        query = "select name from sqlite_master where type = 'table'"
        return {name for (name,) in self.database.execute(query)}

    @cached_property
    def _signer_digest(self) -> str:
        return files.digest_certificate_key(self._certificate)

    def _read_highest_number(self) -> int:
        return trust.read_highest_number(self.folder / FILE, self._signer_digest)

    def _verify_rows(self, highest: int) -> int:
        """Verify that the rows are signed and not older than the highest number on this host; returns
        the registry's number.
        """
        number, signature = int(self.find_value("number") or 0), self.find_value("signature") or ""
        try:
            is_valid = files.verify_signature(self._certificate, base64.b64decode(signature), self._make_message())
        except ValueError:
            is_valid = False
        if not is_valid and (number or highest):
            raise changed_error(self.folder, "its rows are not the ones that the authority's key has signed")
        if number < highest:
            raise changed_error(self.folder, f"its number is {number}, but this host has seen number {highest}")
        return number

    # ------------------------------------------------------------------ events
    def record_event(self, action: str, account: str, decision: str = "", reason: str = "", **more: Any) -> None:
        """Record a decision about an account, or an action on it."""
        with self.write_transaction():
            self.add_event(action, account, decision, reason, more)

    def add_event(self, action: str, account: str, decision: str, reason: str, more: Mapping[str, Any]) -> None:
        """Like `record_event`, within a change."""
        record = {
            "time": format_time(self.now()),
            "action": action,
            "account": account[:64],
            "decision": decision,
            **more,
        }
        line, link = chain.make_line(self._last_link(), {**record, "reason": reason[:_LONGEST_REASON]})
        self.database.execute("insert into event values (?, ?)", (link.seq, line.decode("ascii")))
        self.set_value("event", f"{link.seq} {link.digest}")

    def _last_link(self) -> chain.Link:
        seq, _, digest = (self.find_value("event") or "").partition(" ")
        return chain.Link(int(seq), digest) if seq else chain.START

    def list_events(self) -> list[dict[str, Any]]:
        """All events in order: verifies that each follows the previous one, and that the last one is signed."""
        with self.read_transaction():
            lines = [str(line).encode() for (line,) in self.database.execute("select line from event order by seq")]
            last = self._last_link()
        events, link = [], chain.START
        try:
            for line in lines:
                record, link = chain.verify_line(line, link)
                events.append(record)
        except chain.BrokenChainError as error:
            raise changed_error(self.folder, f"event {link.seq + 1}: {error}") from None
        if link != last:
            raise changed_error(self.folder, f"its events end at {link.seq}, but {last.seq} is signed")
        return events


def changed_error(folder: Path, why: str) -> AccountError:
    """The error for rows that were changed by other means, or that are outdated."""
    return AccountError(
        "the registry of accounts was modified by other means, or is an older copy",
        where=str(folder / FILE),
        why=why,
        mend=f"restore the latest {FILE}, from where it was moved to or from the latest backup",
    )


def _unusable_error(folder: Path, error: sqlite3.Error) -> AccountError:
    return AccountError("cannot use the registry of accounts", where=str(folder / FILE), why=str(error))
