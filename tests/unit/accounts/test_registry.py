"""The registry of accounts: manipulated files and older copies are refused."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from whale_nebula.accounts.members import DISABLED, ENABLED, AccountCertificate
from whale_nebula.accounts.registry import INVITATION, PASSWORD, TOKEN, Registry, refused_login_error
from whale_nebula.accounts.rows import FILE
from whale_nebula.accounts.scope import Scope
from whale_nebula.errors import AccountError, LoginError
from whale_nebula.security import authority, files
from whale_nebula.security.allowance import UNLIMITED, Allowance
from whale_nebula.security.authority import Authority

GOOD = "a sentence to remember"


class Clock:
    """The current time, which tests set."""

    def __init__(self) -> None:
        self.at = files.now()

    def __call__(self) -> datetime:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    authority.create(tmp_path / "certs", Authority.create("mt", {}, bound=["gpu"]))
    return tmp_path / "certs"


@pytest.fixture
def registry(folder: Path, clock: Clock) -> Iterator[Registry]:
    opened = Registry(folder, authority.load(folder), clock)
    opened.add("ana", workers=2, password=GOOD, allowance=Allowance(memory=1 << 30))
    yield opened
    opened.close()


def modify_database(folder: Path, query: str) -> None:
    """Change the file without the authority's key."""
    with sqlite3.connect(folder / FILE) as database:
        database.execute(query)
    database.close()


def restore_file_after(folder: Path, act: Callable[[], object]) -> None:
    """Run a function, then restore the earlier copy of the file."""
    copy = folder / "kept.db"
    shutil.copy(folder / FILE, copy)
    act()
    shutil.move(copy, folder / FILE)


EXTERNAL_CHANGES = {
    "a role": "update account set role = 'owner'",
    "another password": "update account set password = 'scrypt$1$8$1$00$00'",
    "a state": "update account set state = 'enabled', failures = 0",
    "more workers": "update account set workers = 99",
    "more memory": "update about set value = '{}' where name = 'limits of ana'",
    "no limits": "delete from about where name = 'limits of ana'",
    "an account": "insert into account values ('eve', 'owner', 'enabled', '', 1, 0, '', '')",
    "a removed account": "delete from account where name = 'ana'",
    "an account named signature": "update account set name = 'signature'",
    "a secret": "insert into secret values ('00', 'ana', 'token', '00', '3')",
    "a later end": "update secret set until = '3'",
    "a wider scope": "delete from about where name like 'scope of %'",
    "a certificate": "delete from certificate",
    "the number": "update about set value = '99' where name = 'number'",
    "the signature": "update about set value = 'AAAA' where name = 'signature'",
    "no signature": "delete from about where name = 'signature'",
    "nothing at all": "delete from about",
    "events": "delete from event where seq = (select max(seq) from event)",
    "one event": "update event set line = replace(line, 'add', 'log') where seq = 0",
    "the last link": "update about set value = '-1 0' where name = 'event'",
}


@pytest.mark.parametrize(
    ("query", "running"),
    [
        pytest.param(query, running, id=f"{name}, {'running' if running else 'opened again'}", marks=marks)
        for number, (name, query) in enumerate(EXTERNAL_CHANGES.items())
        for running, marks in ((number % 2 == 0, ()), (number % 2 == 1, pytest.mark.grid))
    ],
)
def test_external_change_of_registry_is_detected(query: str, running: bool, registry: Registry, folder: Path) -> None:
    registry.make_secret("ana", TOKEN, 1, Scope("worker"))
    registry.set_state("ana", DISABLED)
    registry.add_certificates([AccountCertificate("00", "ana", "nebula://mt/gpu/worker/0", "11", "3000")])
    modify_database(folder, query)
    reader = registry if running else Registry(folder, authority.load(folder))
    with pytest.raises(AccountError, match="modified by other means"):
        reader.list_events()
        reader.find("ana")
    reader.close()


def test_older_copy_of_registry_is_refused(registry: Registry, folder: Path) -> None:
    restore_file_after(folder, lambda: registry.set_state("ana", DISABLED))
    with (
        contextlib.closing(Registry(folder, authority.load(folder))) as opened,
        pytest.raises(AccountError, match=r"its number is \d+, but this host has seen number \d+"),
    ):
        opened.find("ana")


def test_missing_registry_is_not_recreated(registry: Registry, folder: Path) -> None:
    registry.make_secret("ana", TOKEN, 1)
    (folder / FILE).unlink()
    with pytest.raises(AccountError, match=r"accounts.db is missing"):
        Registry(folder, authority.load(folder))


def test_registry_of_another_authority_is_refused(registry: Registry, folder: Path, tmp_path: Path) -> None:
    authority.create(tmp_path / "other", Authority.create("mt", {}))
    shutil.copy(folder / FILE, tmp_path / "other")
    with (
        contextlib.closing(Registry(tmp_path / "other", authority.load(tmp_path / "other"))) as opened,
        pytest.raises(AccountError, match="authority's key"),
    ):
        opened.find("ana")


def test_registry_file_is_private_and_has_no_plain_password(registry: Registry, folder: Path) -> None:
    assert (folder / FILE).stat().st_mode & 0o777 == 0o600
    assert GOOD.encode() not in (folder / FILE).read_bytes()


def test_account_limits_can_change_and_are_removed_with_the_account(registry: Registry) -> None:
    assert registry.find("ana").allowance == Allowance(memory=1 << 30)
    registry.set_limits("ana", 3, Allowance(cpus=1.5, line=1 << 20))
    assert (registry.find("ana").workers, registry.find("ana").allowance) == (3, Allowance(cpus=1.5, line=1 << 20))
    assert registry.list_events()[-1].items() >= {"action": "limit", "workers": 3, "cpus": 1.5, "line": 1 << 20}.items()
    registry.remove("ana")
    registry.add("ana")
    assert registry.find("ana").allowance == UNLIMITED


def test_two_registries_change_one_file_in_turn(registry: Registry, folder: Path) -> None:
    other = Registry(folder, authority.load(folder))
    for number in range(4):
        (registry, other)[number % 2].add(f"user{number}")
    assert [each.name for each in registry.list_accounts()] == [each.name for each in other.list_accounts()]
    other.close()


CHANGING_SCRIPT = """
import sys
from pathlib import Path

from whale_nebula.accounts import rows
from whale_nebula.accounts.registry import Registry
from whale_nebula.security import authority

folder = Path(sys.argv[1])
rows._BUSY_SECONDS = 0.0  # SQLite does not wait: the lock already ensures that the file is free
registry = Registry(folder, authority.load(folder))
for _ in range(20):
    registry.record_event("limit", "ana")
"""


def test_concurrent_processes_take_turns_to_change_the_registry(folder: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", CHANGING_SCRIPT, str(folder)]) for _ in range(3)]
    assert [each.wait(60) for each in processes] == [0, 0, 0]
    registry = Registry(folder, authority.load(folder))
    assert len(registry.list_events()) == 60
    registry.close()


def test_empty_registry_file_is_new_or_missing(folder: Path) -> None:
    (folder / FILE).touch()  # as left by a process that ended while creating it
    registry = Registry(folder, authority.load(folder))
    registry.add("ana")
    registry.close()
    (folder / FILE).write_bytes(b"")
    with pytest.raises(AccountError, match="is missing, but this host has seen number 2"):
        Registry(folder, authority.load(folder))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda r: r.add("Ana"), "is not a valid account name"),
        (lambda r: r.add("../ana"), "is not a valid account name"),
        (lambda r: r.add("ana"), "account 'ana' already exists"),
        (lambda r: r.add("bob", role="admin"), "unknown role 'admin'"),
        (lambda r: r.add("bob", password="short"), "too weak"),
        (lambda r: r.add("bob", password="a" * 40), "too weak"),
        (lambda r: r.find("anna"), "unknown account 'anna'"),
        (lambda r: r.set_password("ana", "a" * 2000), "too weak"),
        (lambda r: r.make_secret("bob", TOKEN, 1), "unknown account 'bob'"),
        (lambda r: r.remove("bob"), "unknown account 'bob'"),
        (lambda r: r.set_state("bob", DISABLED), "unknown account 'bob'"),
        (lambda r: r.set_limits("bob", 1, UNLIMITED), "unknown account 'bob'"),
        (lambda r: r.set_password("bob", GOOD), "unknown account 'bob'"),
    ],
)
def test_refused_account_change_leaves_registry_unchanged(
    act: Callable[[Registry], object], message: str, registry: Registry
) -> None:
    before = registry.list_accounts(), len(registry.list_events())
    with pytest.raises(AccountError, match=message):
        act(registry)
    assert (registry.list_accounts(), len(registry.list_events())) == before


@pytest.mark.parametrize("content", ['{"shift": 1}', "[]", '"worker"'])
@pytest.mark.parametrize("kind", [Scope, Allowance])
def test_unknown_bounds_of_tokens_and_accounts_are_refused(kind: type[Scope | Allowance], content: str) -> None:
    with pytest.raises(ValueError, match="unknown"):
        kind.decode(content)


# ---------------------------------------------------------------------- log in
def test_password_token_and_invitation_log_in(registry: Registry, clock: Clock) -> None:
    assert registry.log_in("ana", PASSWORD, GOOD).account.name == "ana"
    token = registry.make_secret("ana", TOKEN, 1)
    assert registry.log_in("ana", TOKEN, token).account.name == "ana"
    invitation = registry.make_secret("ana", INVITATION, 1)
    assert registry.log_in("ana", INVITATION, invitation, "another sentence").account.name == "ana"
    assert registry.log_in("ana", PASSWORD, "another sentence").account.name == "ana"
    clock.at += timedelta(days=2)
    with pytest.raises(LoginError):
        registry.log_in("ana", TOKEN, token)


REFUSED_LOGINS = {
    "an unknown name": (lambda r, c: None, ("eve", PASSWORD, GOOD), "no such account"),
    "a wrong password": (lambda r, c: None, ("ana", PASSWORD, GOOD + "."), "wrong password"),
    "an empty password": (lambda r, c: r.add("bob"), ("bob", PASSWORD, ""), "wrong password"),
    "a disabled account": (lambda r, c: r.set_state("ana", DISABLED), ("ana", PASSWORD, GOOD), "disabled"),
    "an invalid token": (lambda r, c: None, ("ana", TOKEN, "token-00-guess"), "wrong token"),
    "a password as a token": (lambda r, c: None, ("ana", TOKEN, GOOD), "wrong token"),
    "another kind of secret": (lambda r, c: r.make_secret("ana", INVITATION, 1), ("ana", TOKEN, "last"), "wrong token"),
    "another's token": (
        lambda r, c: (r.add("bob"), r.make_secret("bob", TOKEN, 1))[1], ("ana", TOKEN, "last"), "wrong token"
    ),
    "an invitation that was used": (
        lambda r, c: (s := r.make_secret("ana", INVITATION, 1), r.log_in("ana", INVITATION, s, "another sentence"))[0],
        ("ana", INVITATION, "last"), "wrong invitation",
    ),
    "an expired token": (
        lambda r, c: (r.make_secret("ana", TOKEN, 1), setattr(c, "at", c.at + timedelta(days=1)))[0],
        ("ana", TOKEN, "last"), "wrong token",
    ),
    "a token older than the password": (
        lambda r, c: (r.make_secret("ana", TOKEN, 1), r.set_password("ana", "another sentence"))[0],
        ("ana", TOKEN, "last"), "wrong token",
    ),
    "a removed account": (lambda r, c: r.remove("ana"), ("ana", PASSWORD, GOOD), "no such account"),
}  # fmt: skip


@pytest.mark.parametrize(("prepare", "attempt", "reason"), REFUSED_LOGINS.values(), ids=REFUSED_LOGINS)
def test_refused_login_reveals_no_reason_by_text_or_work(
    prepare: Callable[[Registry, Clock], str | None],
    attempt: tuple[str, str, str],
    reason: str,
    registry: Registry,
    folder: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All refusals have the same text and cost: one hashed password and, for passwords, one signed change."""
    prepared, hashed = prepare(registry, clock), []

    def number() -> int:
        with contextlib.closing(sqlite3.connect(folder / FILE)) as database:
            return int(database.execute("select value from about where name = 'number'").fetchone()[0])

    first_number = number()
    scrypt = hashlib.scrypt
    monkeypatch.setattr(hashlib, "scrypt", lambda *args, **kwargs: (hashed.append(1), scrypt(*args, **kwargs))[1])
    name, kind, secret = attempt
    with pytest.raises(LoginError) as caught:
        registry.log_in(name, kind, str(prepared) if secret == "last" else secret)
    assert str(caught.value) == str(refused_login_error()) and reason in caught.value.reason
    assert len(hashed) == 1 and number() - first_number == (kind == PASSWORD)


def test_repeated_login_failures_lock_account_exponentially(registry: Registry, clock: Clock) -> None:
    def fail() -> str:
        with pytest.raises(LoginError) as caught:
            registry.log_in("ana", PASSWORD, "wrong")
        return caught.value.reason

    token = registry.make_secret("ana", TOKEN, 1)
    assert [fail() for _ in range(5)] == ["wrong password"] * 5
    for seconds in (1, 2, 4, 8):
        assert fail().startswith("the account is locked until")
        with pytest.raises(LoginError):
            registry.log_in("ana", PASSWORD, GOOD)
        clock.at += timedelta(seconds=seconds)
        assert fail() == "wrong password"
    assert registry.log_in("ana", TOKEN, token)  # failed passwords do not lock out tokens
    clock.at += timedelta(seconds=16)
    assert registry.log_in("ana", PASSWORD, GOOD).account.failures == 0
    assert [fail() for _ in range(5)] == ["wrong password"] * 5 and fail() != "wrong password"
    registry.set_state("ana", ENABLED)
    assert registry.log_in("ana", PASSWORD, GOOD)


def test_concurrent_login_failures_are_all_counted(registry: Registry) -> None:
    def guess() -> None:
        with pytest.raises(LoginError):
            registry.log_in("ana", PASSWORD, "wrong")

    guesses = [threading.Thread(target=guess) for _ in range(8)]
    for each in guesses:
        each.start()
    for each in guesses:
        each.join(30)
    assert registry.find("ana").failures == 5  # later attempts are refused because the account is locked


def test_read_during_writes_sees_a_consistent_state(registry: Registry, folder: Path) -> None:
    other, over = Registry(folder, authority.load(folder)), threading.Event()

    def write() -> None:
        while not over.is_set():
            registry.record_event("login", "ana")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            assert len(other.list_accounts()) == 1
    finally:
        over.set()
        writer.join(30)
        other.close()


def test_invitation_is_valid_once(registry: Registry) -> None:
    invitation = registry.make_secret("ana", INVITATION, 1)
    with pytest.raises(AccountError, match="too weak"):  # the invitation stays valid
        registry.log_in("ana", INVITATION, invitation, "weak")
    registry.log_in("ana", INVITATION, invitation, "another sentence")
    with pytest.raises(LoginError):
        registry.log_in("ana", INVITATION, invitation, "a third sentence")
    assert registry.log_in("ana", PASSWORD, "another sentence")
