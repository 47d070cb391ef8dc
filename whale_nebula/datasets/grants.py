"""Published datasets and grants: signed rows of the registry, like those of accounts."""

from __future__ import annotations

import json
import secrets
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from pathlib import Path

from whale_nebula.accounts.members import ENABLED
from whale_nebula.accounts.registry import Registry
from whale_nebula.config.place import Place
from whale_nebula.datasets.interface import Interface, parse_interface
from whale_nebula.errors import AccessError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.security.files import format_time

PUBLISHED, WITHDRAWN = "published", "withdrawn"
REQUESTED, GRANTED, DENIED = "asked", "granted", "denied"
DAYS = 30.0
MOST_REQUESTS = 20
LONGEST_PURPOSE = 300


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset as it was published: the digest and the document of its interface, and the folder of its files."""

    name: str
    digest: str
    document: str
    folder: str
    state: str
    published: str
    expires: str

    def parse(self) -> Interface:
        """The interface."""
        return parse_interface(Place(json.loads(self.document), source=f"dataset {self.name}"))


@dataclass(frozen=True, slots=True)
class Permission:
    """A request of an account for access to a dataset, and its outcome; `asked`, `decided` and `until` are times as
    text.
    """

    number: str
    dataset: str
    account: str
    purpose: str
    state: str
    asked: str
    decided: str
    until: str


class Grants:
    """The datasets of a registry and their grants. Every change is signed, and recorded among its events."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    # ------------------------------------------------------------------ the owner's datasets
    def publish(self, interface: Interface, folder: Path) -> Dataset:
        """Publish an interface; it replaces an existing one of the same name."""
        rows, now = self.registry, format_time(self.registry.now())
        if interface.expires <= now:
            raise AccessError(f"this interface expired at {interface.expires}", mend="set expires: to a later day")
        dataset = Dataset(
            interface.name, interface.digest, interface.text, str(folder), PUBLISHED, now, interface.expires
        )
        with rows.write_transaction():
            rows.database.execute("insert or replace into dataset values (?, ?, ?, ?, ?, ?, ?)", astuple(dataset))
            rows.add_event("publish", "", "", "", {"dataset": dataset.name, "interface": dataset.digest})
        return dataset

    def withdraw(self, name: str) -> None:
        """Withdraw a dataset from publication; its grants end, even if it is published again."""
        self.find(name)
        with self.registry.write_transaction():
            database = self.registry.database
            database.execute("update dataset set state = ? where name = ?", (WITHDRAWN, name))
            database.execute("update permission set state = ? where dataset = ?", (WITHDRAWN, name))
            self.registry.add_event("withdraw", "", "", "", {"dataset": name})

    def list_datasets(self) -> list[Dataset]:
        """All datasets, by name."""
        with self.registry.read_transaction():
            return [Dataset(*row) for row in self.registry.database.execute("select * from dataset order by name")]

    def find(self, name: str) -> Dataset:
        """Find a dataset; the error for an unknown name suggests one."""
        with self.registry.read_transaction():
            return self._look_up(name)

    def _look_up(self, name: str) -> Dataset:
        row = self.registry.database.execute("select * from dataset where name = ?", (name,)).fetchone()
        if row is None:
            query = "select name from dataset where state = ? order by name"
            names = [each for (each,) in self.registry.database.execute(query, (PUBLISHED,))]
            mend = did_you_mean(name, names) if names else "whale-nebula data publish FILE"
            raise AccessError(f"unknown dataset {name[:64]!r}", mend=mend)
        return Dataset(*row)

    def find_readable(self, name: str) -> Dataset:
        """A dataset; raises if it was withdrawn or has expired."""
        return _check_readable(self.find(name), format_time(self.registry.now()))

    # ------------------------------------------------------------------ grants
    def ask(self, account: str, dataset: str, purpose: str) -> Permission:
        """Request read access to a dataset."""
        self.find_readable(dataset)
        purpose = " ".join(purpose.split())
        if not 0 < len(purpose) <= LONGEST_PURPOSE or not purpose.isprintable():
            what = f"the purpose must have 1 to {LONGEST_PURPOSE} printable characters"
            raise AccessError(what, mend='--purpose "what the rows are used for"')
        rows = self.registry
        permission = Permission(
            secrets.token_hex(4), dataset, account, purpose, REQUESTED, format_time(rows.now()), "", ""
        )
        with rows.write_transaction():
            query = "select count(*) from permission where account = ? and state = ?"
            if rows.database.execute(query, (account, REQUESTED)).fetchone()[0] >= MOST_REQUESTS:
                raise AccessError(f"{account} has {MOST_REQUESTS} unanswered requests", mend="ask the owner")
            rows.database.execute("insert into permission values (?, ?, ?, ?, ?, ?, ?, ?)", astuple(permission))
            more = {"dataset": dataset, "purpose": purpose, "number": permission.number}
            rows.add_event("request", account, "", "", more)
        return permission

    def decide(self, number: str, state: str, days: float = DAYS, reason: str = "", by: str = "") -> Permission:
        """Grant, deny or withdraw a request of an account; a grant ends after this many days."""
        rows = self.registry
        now, until = format_time(rows.now()), format_time(rows.now() + timedelta(days=days))
        with rows.write_transaction():  # another process may withdraw the dataset meanwhile
            query = "select * from permission where number = ?"
            row = rows.database.execute(query, (number,)).fetchone()
            if row is None:
                raise AccessError(f"unknown request {number[:64]!r}", mend="whale-nebula data grants")
            permission = Permission(*row)
            if state == GRANTED:
                until = min(until, _check_readable(self._look_up(permission.dataset), now).expires)
            decided = replace(permission, state=state, decided=now, until=until if state == GRANTED else "")
            query = "insert or replace into permission values (?, ?, ?, ?, ?, ?, ?, ?)"
            rows.database.execute(query, astuple(decided))
            more = {"dataset": decided.dataset, "number": number, "until": decided.until, "purpose": decided.purpose}
            decision = "allow" if state == GRANTED else "deny"
            rows.add_event(_ACTIONS[state], decided.account, decision, reason, {**more, "by": by})
        return decided

    def list_permissions(self, *, dataset: str | None = None) -> list[Permission]:
        """All requests with their outcomes, or those for a dataset, the oldest first."""
        query = "select * from permission where :dataset is null or dataset = :dataset order by asked, number"
        with self.registry.read_transaction():
            found = self.registry.database.execute(query, {"dataset": dataset})
            return [Permission(*row) for row in found]

    def check(self, account: str, name: str, purpose: str | None = None) -> tuple[Dataset, Permission]:
        """Check that an account may read a dataset now; returns it and the grant, or raises an `AccessError` with the
        reason.
        """
        now = format_time(self.registry.now())
        with self.registry.read_transaction():
            known_account = self.registry.look_up(account)
            query = "select * from permission where dataset = ? and account = ? order by rowid"
            permissions = [Permission(*row) for row in self.registry.database.execute(query, (name, account))]
            dataset = self._look_up(name)
        if known_account is None or known_account.state != ENABLED:
            raise AccessError(f"account {account!r} is not enabled here", mend="ask the owner of the data")
        _check_readable(dataset, now)
        matching = [each for each in permissions if purpose is None or each.purpose == purpose]
        valid = [each for each in matching if each.state == GRANTED and each.until > now]
        if not valid:
            raise AccessError(
                f"{account} may not read dataset {name!r}", why=_explain_refusal(matching, permissions, now)
            )
        return dataset, max(valid, key=lambda each: each.until)


def _check_readable(dataset: Dataset, now: str) -> Dataset:
    if dataset.state != PUBLISHED:
        raise AccessError(f"dataset {dataset.name!r} was withdrawn", mend="ask its owner")
    if dataset.expires <= now:
        raise AccessError(
            f"dataset {dataset.name!r} expired at {dataset.expires}", mend="ask its owner to publish it again"
        )
    return dataset


_ACTIONS = {GRANTED: "grant", DENIED: "deny", WITHDRAWN: "withdraw grant"}


def _explain_refusal(matching: list[Permission], permissions: list[Permission], now: str) -> str:
    """Why none of these grants an account access."""
    if not permissions:
        return "it has not requested access"
    if not matching:
        return f"access was granted for {permissions[-1].purpose!r}, not for this purpose"
    last = matching[-1]
    if last.state == GRANTED:
        return f"its grant expired at {last.until}"
    return {
        REQUESTED: "its request has not been answered yet",
        DENIED: f"its request was denied at {last.decided}",
        WITHDRAWN: "its grant was withdrawn",
    }[last.state]
