"""The registry of a cluster's owner: accounts, their secrets and certificates, in a SQLite file beside the authority.

Every change is one transaction. It gives the registry the next number, and the authority's key signs that number and
the digest of all rows: a file that was changed by other means is refused. So is an older copy, by the highest number
that this host has had, which is kept beside it (`accounts.db.highest`). What was decided and changed is kept as well:
events in a chain, whose last link is among the rows that are signed.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from whale_nebula.accounts.passwords import (
    check_password,
    digest_secret,
    hash_password,
    make_secret,
    verify_password,
)
from whale_nebula.errors import AccountError, LoginError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.security import chain, files, trust
from whale_nebula.security.authority import Authority
from whale_nebula.security.chain import canonical
from whale_nebula.security.files import format_time

FILE = "accounts.db"
ROLES = OWNER, TRAINER, AUDITOR = ("owner", "trainer", "auditor")
ENABLED, DISABLED = "enabled", "disabled"
TOKEN, INVITATION, PASSWORD = "token", "invitation", "password"
TOKEN_DAYS, INVITATION_DAYS = 30.0, 3.0
_MEANING = b"whale_nebula accounts 1\0"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_LONGEST_REASON = 500
_FREE_FAILURES, _LONGEST_LOCK = 5, 900.0
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
_TABLES = ("about", "account", "certificate", "secret")


@dataclass(frozen=True, slots=True)
class Account:
    """Somebody who may train: his role, whether he is enabled, and how many workers he may have at a time."""

    name: str
    role: str
    state: str
    workers: int
    failures: int
    locked: str
    created: str


@dataclass(frozen=True, slots=True)
class Certified:
    """A certificate that an account was given."""

    serial: str
    account: str
    identity: str
    key: str
    until: str


@cache
def _hash_nothing() -> str:
    """What the password of a name that does not exist is compared with: that takes as long."""
    return hash_password(secrets.token_hex(16))


class Registry:
    """An open registry. Any thread may use it; what changes it is written before the call returns."""

    def __init__(self, folder: Path, authority: Authority, now: Callable[[], datetime] = files.now) -> None:
        self.folder, self._authority, self._now = folder, authority, now
        self._lock = threading.RLock()
        self._seen = -1
        _hash_nothing()  # before anybody asks, who would see how long it takes
        path = folder / FILE
        fresh = not path.exists()
        if fresh and self._highest():
            raise _changed_error(folder, f"{FILE} is gone, and this host has had number {self._highest()}")
        try:
            if fresh:
                path.touch(files.SECRET)
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._database.execute("pragma foreign_keys = on")
            self._database.execute("pragma synchronous = extra")
        except (OSError, sqlite3.Error) as error:
            raise AccountError("the registry cannot be opened", where=str(path), why=str(error)) from None
        if fresh:
            try:
                self._database.executescript(_SCHEMA)
            except sqlite3.Error as error:
                raise _unusable_error(folder, error) from None
            with self._change():
                self._note("run", authority.run)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    # ------------------------------------------------------------------ integrity
    @contextmanager
    def _change(self) -> Iterator[None]:
        """A transaction, which is signed in its end; with an error nothing is changed."""
        with self._lock:
            try:
                self._database.execute("begin immediate")
                self._check(self._highest())
                yield
                number = int(self._about("number") or 0) + 1
                self._note("number", str(number))
                signature = self._authority.key.sign(self._message(), files.SIGNATURE)
                self._note("signature", base64.b64encode(signature).decode("ascii"))
                self._database.execute("commit")
                trust.remember_highest(self.folder / FILE, self._signer, number)
                self._seen = self._version()
            except BaseException as error:
                if self._database.in_transaction:
                    self._database.execute("rollback")
                self._seen = -1
                if isinstance(error, sqlite3.Error):
                    raise _unusable_error(self.folder, error) from None
                raise

    @contextmanager
    def _look(self) -> Iterator[None]:
        """A transaction that reads: all of it is of one moment, while other processes write."""
        with self._lock:
            highest = self._highest()  # before the rows are read, which are as new then
            try:
                self._database.execute("begin")
                if self._seen != self._version():
                    self._check(highest)
                    self._seen = self._version()
                yield
            except sqlite3.Error as error:
                raise _unusable_error(self.folder, error) from None
            finally:
                if self._database.in_transaction:
                    self._database.execute("rollback")

    def _version(self) -> int:
        return int(self._database.execute("pragma data_version").fetchone()[0])

    def _about(self, name: str) -> str | None:
        found = self._database.execute("select value from about where name = ?", (name,)).fetchone()
        return None if found is None else str(found[0])

    def _note(self, name: str, value: str) -> None:
        self._database.execute("insert or replace into about values (?, ?)", (name, value))

    def _message(self) -> bytes:
        """What is signed: the digest of all rows, the number among them."""
        digest = hashlib.sha256()
        for table in _TABLES:
            for row in self._database.execute(f"select * from {table} order by 1"):  # noqa: S608 - names of ours
                if (table, row[0]) != ("about", "signature"):
                    digest.update(canonical({"table": table, "row": list(row)}))
        return _MEANING + digest.digest()

    @cached_property
    def _signer(self) -> str:
        return files.public_key_digest(self._authority.certificate)

    def _highest(self) -> int:
        return trust.highest_number(self.folder / FILE, self._signer)

    def _check(self, highest: int) -> None:
        """Whether the rows are those that were signed, and no older ones than this host has had."""
        number, signature = int(self._about("number") or 0), self._about("signature") or ""
        try:
            right = files.verify_signature(self._authority.certificate, base64.b64decode(signature), self._message())
        except ValueError:
            right = False
        if not right and (number or highest):
            raise _changed_error(self.folder, "its rows are not those that the authority's key has signed")
        if number < highest:
            raise _changed_error(self.folder, f"its number is {number}, and this host has had number {highest}")

    # ------------------------------------------------------------------ events
    def note(self, action: str, account: str, decision: str = "", reason: str = "", **more: Any) -> None:
        """Keep what was decided or done about an account."""
        with self._change():
            self._note_event(action, account, decision, reason, more)

    def _note_event(self, action: str, account: str, decision: str, reason: str, more: Mapping[str, Any]) -> None:
        said = {
            "time": format_time(self._now()),
            "action": action,
            "account": account[:64],
            "decision": decision,
            **more,
        }
        line, link = chain.forge(self._last_link(), {**said, "reason": reason[:_LONGEST_REASON]})
        self._database.execute("insert into event values (?, ?)", (link.seq, line.decode("ascii")))
        self._note("event", f"{link.seq} {link.digest}")

    def _last_link(self) -> chain.Link:
        seq, _, digest = (self._about("event") or "").partition(" ")
        return chain.Link(int(seq), digest) if seq else chain.START

    def list_events(self) -> list[dict[str, Any]]:
        """All events, the first one first: each must follow from the one before, and the last one is signed."""
        with self._look():
            lines = [str(line).encode() for (line,) in self._database.execute("select line from event order by seq")]
            last = self._last_link()
        found, link = [], chain.START
        try:
            for line in lines:
                record, link = chain.follow(line, link)
                found.append(record)
        except chain.BrokenError as error:
            raise _changed_error(self.folder, f"event {link.seq + 1}: {error}") from None
        if link != last:
            raise _changed_error(self.folder, f"its events end at {link.seq}, and it had {last.seq}")
        return found

    # ------------------------------------------------------------------ accounts
    def list_accounts(self) -> list[Account]:
        """All accounts, by name."""
        with self._look():
            return [Account(*row) for row in self._database.execute(f"{_SELECT} order by name")]

    def find(self, name: str) -> Account:
        """An account, or an error that says which was meant."""
        with self._look():
            account = self._known(name) if _NAME.fullmatch(name) else None
            if account is None:
                names = [each for (each,) in self._database.execute("select name from account")]
                mend = did_you_mean(name, names) if names else "whale-nebula accounts add NAME"
                raise AccountError(f"no account is called {name!r}", where=str(self.folder / FILE), mend=mend)
            return account

    def _known(self, name: str) -> Account | None:
        row = self._database.execute(f"{_SELECT} where name = ?", (name,)).fetchone()
        return None if row is None else Account(*row)

    def add(self, name: str, role: str = TRAINER, workers: int = 1, password: str | None = None) -> None:
        """A new account; without a password it needs an invitation."""
        if not _NAME.fullmatch(name):
            raise AccountError(
                f"{name[:64]!r} is no name of an account",
                why="lower-case letters, digits, '_' and '-', a letter or digit first, 32 at most",
                mend="whale-nebula accounts add ana",
            )
        if role not in ROLES:
            raise AccountError(f"no role is called {role!r}", mend=did_you_mean(role, ROLES))
        kept = "" if password is None else hash_password(check_password(password))
        row = (name, role, ENABLED, kept, workers, 0, "", format_time(self._now()))
        with self._change():
            try:
                self._database.execute("insert into account values (?, ?, ?, ?, ?, ?, ?, ?)", row)
            except sqlite3.IntegrityError:
                mend = f"whale-nebula accounts show {name}"
                raise AccountError(f"there is an account {name!r} already", mend=mend) from None
            self._note_event("add", name, "", "", {"role": role, "workers": workers})

    def set_state(self, name: str, state: str) -> None:
        """Enable or disable an account. The certificates of a disabled one must be revoked: `Desk.end_certificates`."""
        self.find(name)
        with self._change():
            self._database.execute(
                "update account set state = ?, failures = 0, locked = '' where name = ?", (state, name)
            )
            self._note_event("enable" if state == ENABLED else "disable", name, "", "", {})

    def remove(self, name: str) -> None:
        """Remove an account and all its secrets; its certificates must be revoked."""
        self.find(name)
        with self._change():
            self._database.execute("delete from account where name = ?", (name,))
            self._note_event("remove", name, "", "", {})

    def set_password(self, name: str, password: str) -> None:
        """A new password; tokens and invitations of before are no longer good."""
        self.find(name)
        kept = hash_password(check_password(password))
        with self._change():
            self._database.execute(
                "update account set password = ?, failures = 0, locked = '' where name = ?", (kept, name)
            )
            self._database.execute("delete from secret where account = ?", (name,))
            self._note_event("password", name, "", "", {})

    def make_secret(self, name: str, kind: str, days: float) -> str:
        """A token, with which one logs in until it ends, or an invitation, with which one sets a password once."""
        self.find(name)
        number = secrets.token_hex(4)
        made = make_secret(kind, number)
        row = (number, name, kind, digest_secret(made), format_time(self._now() + timedelta(days=days)))
        with self._change():
            self._database.execute("insert into secret values (?, ?, ?, ?, ?)", row)
            self._note_event(kind, name, "", "", {"number": number, "until": row[-1]})
        return made

    def list_secrets(self, name: str) -> list[tuple[str, str, str]]:
        """The number, the kind and the end of each secret of an account."""
        with self._look():
            query = "select number, kind, until from secret where account = ? order by until"
            return [tuple(row) for row in self._database.execute(query, (name,))]

    # ------------------------------------------------------------------ log in
    def log_in(self, name: str, kind: str, value: str, new_password: str | None = None) -> Account:
        """The account of who logs in. Whatever is wrong, the error says the same, after the same work: `reason` is for
        the log of the owner.
        """
        with self._look():
            kept = self._database.execute("select password from account where name = ?", (name,)).fetchone()
        if kind == PASSWORD:
            right = verify_password(value, (kept and kept[0]) or _hash_nothing()) and bool(kept and kept[0])
        else:
            verify_password(value, _hash_nothing())
            right = self._is_secret(name, kind, value)
        with self._look():
            account = self._known(name)
        reason = self._refusal(account, kind)
        if kind == PASSWORD and (reason or not right):
            reason = self._note_failure(name) or reason
        if reason or not right:
            raise refuse_login(reason or f"wrong {kind}")
        if kind == INVITATION:
            self._accept(name, value, new_password or "")
        elif kind == PASSWORD and account is not None and account.failures:
            with self._change():
                self._database.execute("update account set failures = 0, locked = '' where name = ?", (name,))
        return self.find(name)

    def _refusal(self, account: Account | None, kind: str) -> str:
        """Why nobody may log in with an account now, whatever he knows."""
        if account is None:
            return "no such account"
        if account.state != ENABLED:
            return "the account is disabled"
        locked = kind == PASSWORD and account.locked > format_time(self._now())
        return f"the account is locked until {account.locked}" * locked

    def check_enabled(self, name: str) -> Account:
        """The account of who has logged in, as it is now."""
        with self._look():
            account = self._known(name)
        if account is None or account.state != ENABLED:
            raise refuse_login(self._refusal(account, TOKEN))
        return account

    def _is_secret(self, name: str, kind: str, value: str) -> bool:
        with self._look():
            query = "select until from secret where account = ? and kind = ? and digest = ?"
            row = self._database.execute(query, (name, kind, digest_secret(value))).fetchone()
        return row is not None and row[0] > format_time(self._now())

    def _accept(self, name: str, invitation: str, password: str) -> None:
        """Set a password by an invitation, which is good once."""
        kept = hash_password(check_password(password))
        with self._change():
            query = "delete from secret where account = ? and kind = ? and digest = ?"
            if not self._database.execute(query, (name, INVITATION, digest_secret(invitation))).rowcount:
                raise refuse_login("an invitation that was used")
            query = "update account set password = ?, failures = 0, locked = '' where name = ?"
            self._database.execute(query, (kept, name))

    def _note_failure(self, name: str) -> str:
        """After some failures in a row each locks the account, for twice as long as the one before. Gives why it was
        refused already, by what others have done meanwhile. The work is the same for a name that does not exist.
        """
        with self._change():
            account = self._known(name)
            reason = self._refusal(account, PASSWORD)
            failures = 1 if account is None else account.failures + (not reason)
            seconds = min(_LONGEST_LOCK, 2.0 ** (failures - _FREE_FAILURES)) if failures >= _FREE_FAILURES else 0.0
            until = format_time(self._now() + timedelta(seconds=seconds)) if seconds else ""
            query = "update account set failures = ?, locked = ? where name = ?"
            self._database.execute(query, (failures, until, "" if reason else name))
        return reason

    # ------------------------------------------------------------------ certificates
    def certificates(self, name: str | None = None) -> list[Certified]:
        """The certificates that are good still, of one account or of all."""
        with self._look():
            query = "select * from certificate where until > ? order by identity, until"
            found = [Certified(*row) for row in self._database.execute(query, (format_time(self._now()),))]
        return [each for each in found if name in (None, each.account)]

    def note_certificates(self, made: Sequence[Certified]) -> None:
        """Remember whom certificates were given; those that are over are forgotten."""
        with self._change():
            self._database.execute("delete from certificate where until <= ?", (format_time(self._now()),))
            for each in made:
                row = (each.serial, each.account, each.identity, each.key, each.until)
                self._database.execute("insert into certificate values (?, ?, ?, ?, ?)", row)

    def forget_certificates(self, revoked: Sequence[Certified]) -> None:
        """Let others have the places of certificates that were revoked."""
        with self._change():
            for each in revoked:
                self._database.execute("delete from certificate where serial = ?", (each.serial,))


def refuse_login(reason: str = "") -> LoginError:
    """The error of whoever may not log in: its text is always the same.

    >>> print(refuse_login("no such account"))
    NB-432 the account may not log in
      why: the name, the password, token or invitation is wrong, or the account is disabled or locked
      mend: try again in some minutes, or ask the owner of the cluster
    """
    why = "the name, the password, token or invitation is wrong, or the account is disabled or locked"
    error = LoginError("the account may not log in", why=why)
    error.reason = reason
    return error


_SELECT = "select name, role, state, workers, failures, locked, created from account"


def _changed_error(folder: Path, why: str) -> AccountError:
    return AccountError(
        "the registry of accounts was changed by somebody else, or is an older copy",
        where=str(folder / FILE),
        why=why,
        mend=f"bring {FILE} back as it was last, from where it was moved to or from the latest backup",
    )


def _unusable_error(folder: Path, error: sqlite3.Error) -> AccountError:
    return AccountError("the registry of accounts cannot be used", where=str(folder / FILE), why=str(error))
