"""The accounts of a registry, and their certificates."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from whale_nebula.accounts.passwords import check_password, hash_password
from whale_nebula.accounts.rows import FILE, SignedRows
from whale_nebula.errors import AccountError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.security.allowance import UNLIMITED, Allowance
from whale_nebula.security.files import format_time
from whale_nebula.security.tenant import ACCOUNT

ROLES = OWNER, TRAINER, AUDITOR = ("owner", "trainer", "auditor")
ENABLED, DISABLED = "enabled", "disabled"
_LIMITS = "limits of "
SCOPE = "scope of "
"""Prefix of the note with a token's scope, followed by the token's number."""
_SELECT = "select name, role, state, workers, failures, locked, created from account"


@dataclass(frozen=True, slots=True)
class Account:
    """A user that may train: role, state (enabled or not), number of concurrent workers, and their resource limits.
    `failures` counts consecutive failed logins by password, which are refused until the time `locked`, if it is not "".
    """

    name: str
    role: str
    state: str
    workers: int
    failures: int
    locked: str
    created: str
    allowance: Allowance = UNLIMITED


@dataclass(frozen=True, slots=True)
class AccountCertificate:
    """A certificate that was issued to an account; `key` is the digest of its public key."""

    serial: str
    account: str
    identity: str
    key: str
    until: str


class Accounts(SignedRows):
    """The accounts of an open registry."""

    def list_accounts(self) -> list[Account]:
        """All accounts, by name."""
        with self.read_transaction():
            return [self._read_row(row) for row in self.database.execute(f"{_SELECT} order by name").fetchall()]

    def find(self, name: str) -> Account:
        """Find an account; the error for an unknown name suggests one."""
        with self.read_transaction():
            account = self.look_up(name) if ACCOUNT.fullmatch(name) else None
            if account is None:
                names = [each for (each,) in self.database.execute("select name from account")]
                mend = did_you_mean(name, names) if names else "whale-nebula accounts add NAME"
                raise AccountError(f"unknown account {name!r}", where=str(self.folder / FILE), mend=mend)
            return account

    def look_up(self, name: str) -> Account | None:
        """An account, if there is one, within a transaction."""
        row = self.database.execute(f"{_SELECT} where name = ?", (name,)).fetchone()
        return None if row is None else self._read_row(row)

    def _read_row(self, row: tuple[Any, ...]) -> Account:
        limits = self.find_value(_LIMITS + row[0])
        return replace(Account(*row), allowance=UNLIMITED if limits is None else Allowance.decode(limits))

    def add(
        self,
        name: str,
        role: str = TRAINER,
        workers: int = 1,
        password: str | None = None,
        allowance: Allowance = UNLIMITED,
    ) -> None:
        """Add an account; without a password it needs an invitation."""
        if not ACCOUNT.fullmatch(name):
            raise AccountError(
                f"{name[:64]!r} is not a valid account name",
                why="a name has at most 32 lower-case letters, digits, '_' and '-', and begins with a letter or digit",
                mend="whale-nebula accounts add ana",
            )
        if role not in ROLES:
            raise AccountError(f"unknown role {role!r}", mend=did_you_mean(role, ROLES))
        stored_password = "" if password is None else hash_password(check_password(password))
        row = (name, role, ENABLED, stored_password, workers, 0, "", format_time(self.now()))
        with self.write_transaction():
            try:
                self.database.execute("insert into account values (?, ?, ?, ?, ?, ?, ?, ?)", row)
            except sqlite3.IntegrityError:
                mend = f"whale-nebula accounts show {name}"
                raise AccountError(f"account {name!r} already exists", mend=mend) from None
            self._store_limits("add", name, allowance, {"role": role, "workers": workers})

    def set_limits(self, name: str, workers: int, allowance: Allowance) -> None:
        """Set the number of workers of an account, and their resource limits: from the next login on."""
        self.find(name)
        with self.write_transaction():
            self.database.execute("update account set workers = ? where name = ?", (workers, name))
            self._store_limits("limit", name, allowance, {"workers": workers})

    def _store_limits(self, action: str, name: str, allowance: Allowance, more: dict[str, Any]) -> None:
        """Store the limits of an account, and record them as an event, within a change."""
        self.set_value(_LIMITS + name, allowance.encode().decode("ascii"))
        self.add_event(action, name, "", "", {**more, **allowance.limits})

    def set_state(self, name: str, state: str) -> None:
        """Enable or disable an account. `LoginIssuer.revoke_certificates` must revoke those of a disabled one."""
        self.find(name)
        with self.write_transaction():
            self.database.execute(
                "update account set state = ?, failures = 0, locked = '' where name = ?", (state, name)
            )
            self.add_event("enable" if state == ENABLED else "disable", name, "", "", {})

    def remove(self, name: str) -> None:
        """Remove an account and all its secrets; its certificates must be revoked."""
        self.find(name)
        with self.write_transaction():
            self._remove_secrets(name)
            self.database.execute("delete from account where name = ?", (name,))
            self.set_value(_LIMITS + name, None)
            self.add_event("remove", name, "", "", {})

    def set_password(self, name: str, password: str) -> None:
        """Set a new password; earlier tokens and invitations become invalid."""
        self.find(name)
        stored_password = hash_password(check_password(password))
        with self.write_transaction():
            self.database.execute(
                "update account set password = ?, failures = 0, locked = '' where name = ?", (stored_password, name)
            )
            self._remove_secrets(name)
            self.add_event("password", name, "", "", {})

    def _remove_secrets(self, name: str) -> None:
        """Remove an account's tokens and invitations, with their scopes, within a change."""
        for (number,) in self.database.execute("select number from secret where account = ?", (name,)).fetchall():
            self.set_value(SCOPE + number, None)
        self.database.execute("delete from secret where account = ?", (name,))

    # ------------------------------------------------------------------ certificates
    def list_certificates(self, name: str | None = None) -> list[AccountCertificate]:
        """The certificates that are still valid, of one account or of all."""
        with self.read_transaction():
            query = "select * from certificate where until > ? order by identity, until"
            found = [AccountCertificate(*row) for row in self.database.execute(query, (format_time(self.now()),))]
        return [each for each in found if name in (None, each.account)]

    def add_certificates(self, certificates: Sequence[AccountCertificate]) -> None:
        """Record issued certificates; expired ones are dropped."""
        with self.write_transaction():
            self.database.execute("delete from certificate where until <= ?", (format_time(self.now()),))
            for each in certificates:
                self.database.execute("insert into certificate values (?, ?, ?, ?, ?)", astuple(each))

    def remove_certificates(self, revoked: Sequence[AccountCertificate]) -> None:
        """Free the identities of revoked certificates for other accounts."""
        with self.write_transaction():
            for each in revoked:
                self.database.execute("delete from certificate where serial = ?", (each.serial,))
