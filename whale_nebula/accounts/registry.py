"""The registry of a cluster's owner: accounts, and the passwords, tokens and invitations by which they log in."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509

from whale_nebula.accounts.members import ENABLED, SCOPE, Account, Accounts
from whale_nebula.accounts.passwords import (
    check_password,
    digest_secret,
    hash_password,
    make_secret,
    verify_password,
)
from whale_nebula.accounts.rows import FILE
from whale_nebula.accounts.scope import UNBOUNDED, Scope
from whale_nebula.errors import LoginError
from whale_nebula.security import authority, files
from whale_nebula.security.authority import Authority
from whale_nebula.security.files import format_time

TOKEN, INVITATION, PASSWORD = "token", "invitation", "password"
TOKEN_DAYS, INVITATION_DAYS = 30.0, 3.0
_FREE_FAILURES, _LONGEST_LOCK = 5, 900.0


@cache
def _make_dummy_hash() -> str:
    """The hash with which the password of an unknown name is compared, which takes the same time."""
    return hash_password(secrets.token_hex(16))


class LoginResult(NamedTuple):
    """An account that has logged in, and the scope of its token."""

    account: Account
    scope: Scope


class Registry(Accounts):
    """An open registry, at which accounts log in."""

    def __init__(
        self, folder: Path, authority: Authority | x509.Certificate, now: Callable[[], datetime] = files.now
    ) -> None:
        super().__init__(folder, authority, now)
        _make_dummy_hash()  # beforehand, as its time would reveal the first unknown name

    def make_secret(self, name: str, kind: str, days: float, scope: Scope = UNBOUNDED) -> str:
        """Create a token, for logins within its scope until it expires, or an invitation, to set a password once."""
        self.find(name)
        number = secrets.token_hex(4)
        secret = make_secret(kind, number)
        row = (number, name, kind, digest_secret(secret), format_time(self.now() + timedelta(days=days)))
        with self.write_transaction():
            self.database.execute("insert into secret values (?, ?, ?, ?, ?)", row)
            self.set_value(SCOPE + number, scope.encode().decode("ascii") if scope else None)
            fields = {"number": number, "until": row[-1]}
            self.add_event(kind, name, "", "", {**fields, "scope": str(scope)} if scope else fields)
        return secret

    def list_secrets(self, name: str) -> list[tuple[str, str, str, str]]:
        """The number, the kind, the expiry and the scope (in words) of each secret of an account."""
        with self.read_transaction():
            query = "select number, kind, until from secret where account = ? order by until"
            found = self.database.execute(query, (name,)).fetchall()
            return [(number, kind, until, str(self._find_scope(number))) for number, kind, until in found]

    def _find_scope(self, number: str) -> Scope:
        text = self.find_value(SCOPE + number)
        return UNBOUNDED if text is None else Scope.decode(text)

    # ------------------------------------------------------------------ log in
    def log_in(self, name: str, kind: str, value: str, new_password: str | None = None) -> LoginResult:
        """Authenticate an account. All failures give the same error after the same work; `reason` is for the owner's
        log.
        """
        with self.read_transaction():
            row = self.database.execute("select password from account where name = ?", (name,)).fetchone()
        stored_password = row[0] if row and kind == PASSWORD else ""
        scope = UNBOUNDED if verify_password(value, stored_password or _make_dummy_hash()) and stored_password else None
        with self.read_transaction():
            account = self.look_up(name)
            if kind != PASSWORD:
                scope = self._find_secret(name, kind, value)
        reason = self._explain_refusal(account, kind)
        if kind == PASSWORD and (reason or scope is None):
            reason = self._record_failure(name) or reason
        if reason or scope is None:
            raise refused_login_error(reason or f"wrong {kind}")
        if kind == INVITATION:
            self._accept_invitation(name, value, new_password or "")
        elif kind == PASSWORD and account is not None and account.failures:
            with self.write_transaction():
                self.database.execute("update account set failures = 0, locked = '' where name = ?", (name,))
        return LoginResult(self.find(name), scope)

    def _explain_refusal(self, account: Account | None, kind: str) -> str:
        """Why an account cannot log in at present, with any credentials."""
        if account is None:
            return "no such account"
        if account.state != ENABLED:
            return "the account is disabled"
        now = self.now()  # a later end was set while the clock was wrong
        locked = format_time(now) < account.locked <= format_time(now + timedelta(seconds=_LONGEST_LOCK))
        locked = locked and kind == PASSWORD
        return f"the account is locked until {account.locked}" * locked

    def check_enabled(self, name: str) -> Account:
        """The current state of an account that has logged in."""
        with self.read_transaction():
            account = self.look_up(name)
        if account is None or account.state != ENABLED:
            raise refused_login_error(self._explain_refusal(account, TOKEN))
        return account

    def _find_secret(self, name: str, kind: str, value: str) -> Scope | None:
        """The scope of a token or an invitation that is valid; None if it is not. Within a transaction."""
        query = "select number, until from secret where account = ? and kind = ? and digest = ?"
        row = self.database.execute(query, (name, kind, digest_secret(value))).fetchone()
        return None if row is None or row[1] <= format_time(self.now()) else self._find_scope(row[0])

    def _accept_invitation(self, name: str, invitation: str, password: str) -> None:
        """Set a password by an invitation, which is valid once."""
        stored_password = hash_password(check_password(password))
        with self.write_transaction():
            query = "delete from secret where account = ? and kind = ? and digest = ?"
            if not self.database.execute(query, (name, INVITATION, digest_secret(invitation))).rowcount:
                raise refused_login_error("the invitation was already used")
            query = "update account set password = ?, failures = 0, locked = '' where name = ?"
            self.database.execute(query, (stored_password, name))

    def _record_failure(self, name: str) -> str:
        """Count a failed login: after several consecutive ones each locks the account, for twice as long as the
        previous one. Returns the reason if concurrent requests had already caused a refusal. The work is the same for
        an unknown name.
        """
        with self.write_transaction():
            account = self.look_up(name)
            reason = self._explain_refusal(account, PASSWORD)
            failures = 1 if account is None else account.failures + (not reason)
            seconds = min(_LONGEST_LOCK, 2.0 ** (failures - _FREE_FAILURES)) if failures >= _FREE_FAILURES else 0.0
            until = format_time(self.now() + timedelta(seconds=seconds)) if seconds else ""
            query = "update account set failures = ?, locked = ? where name = ?"
            self.database.execute(query, (failures, until, "" if reason else name))
        return reason


def refused_login_error(reason: str = "") -> LoginError:
    """The error of a refused login, whose text is always the same.

    >>> print(refused_login_error("no such account"))
    NB-432 the account cannot log in
      why: the name, the password, token or invitation is wrong, or the account is disabled or locked
      mend: try again in a few minutes, or ask the owner of the cluster
    """
    why = "the name, the password, token or invitation is wrong, or the account is disabled or locked"
    error = LoginError("the account cannot log in", why=why)
    error.reason = reason
    return error


def record_action(folder: Path, action: str, reason: str = "", **more: Any) -> None:
    """Record an action of the owner, if the authority in this folder has a registry of accounts."""
    if (folder / FILE).exists():
        with contextlib.closing(Registry(folder, authority.load(folder))) as registry:
            registry.record_event(action, "", "", reason, **more)
