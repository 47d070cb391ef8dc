"""Grants: requested, granted and denied in signed rows of the registry."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from tests.unit.datasets.conftest import Owner
from whale_nebula.accounts.members import DISABLED, ENABLED
from whale_nebula.accounts.registry import Registry
from whale_nebula.accounts.rows import FILE
from whale_nebula.datasets.grants import DENIED, GRANTED, MOST_REQUESTS, WITHDRAWN, Grants
from whale_nebula.datasets.guard import Usage
from whale_nebula.datasets.interface import Limits
from whale_nebula.errors import AccessError, AccountError
from whale_nebula.security import authority, files


def events(owner: Owner) -> list[tuple[str, str, str]]:
    found = owner.registry.list_events()
    return [(each["action"], each["account"], each["decision"]) for each in found if each["action"] != "add"]


def test_grant_is_valid_after_request_and_decision_for_its_purpose(owner: Owner) -> None:
    owner.publish()
    with pytest.raises(AccessError, match="may not read") as caught:
        owner.grants.check("ana", "corpus")
    assert caught.value.why == "it has not requested access"
    request = owner.grants.ask("ana", "corpus", " my\n study ")
    with pytest.raises(AccessError) as caught:
        owner.grants.check("ana", "corpus")
    assert (request.purpose, caught.value.why) == ("my study", "its request has not been answered yet")
    owner.grants.decide(request.number, GRANTED, 7)
    assert owner.grants.check("ana", "corpus")[1].number == request.number
    with pytest.raises(AccessError, match="bob may not read"):
        owner.grants.check("bob", "corpus")
    with pytest.raises(AccessError) as caught:
        owner.grants.check("ana", "corpus", "another")
    assert ", not for this purpose" in caught.value.why
    assert events(owner) == [("publish", "", ""), ("request", "ana", ""), ("grant", "ana", "allow")]


def test_expired_grant_is_refused(owner: Owner) -> None:
    owner.publish()
    owner.grant("ana", days=2)
    owner.pass_days(1)
    owner.grants.check("ana", "corpus")
    owner.pass_days(1)
    with pytest.raises(AccessError) as caught:
        owner.grants.check("ana", "corpus")
    assert caught.value.why.startswith("its grant expired at")


def test_withdrawn_grant_is_refused(owner: Owner) -> None:
    owner.publish()
    grant = owner.grant("ana")
    owner.grants.decide(grant.number, WITHDRAWN)
    with pytest.raises(AccessError) as caught:
        owner.grants.check("ana", "corpus")
    assert caught.value.why == "its grant was withdrawn"
    owner.grants.decide(owner.grants.ask("ana", "corpus", "again").number, DENIED)
    with pytest.raises(AccessError) as caught:
        owner.grants.check("ana", "corpus")
    assert "was denied at" in caught.value.why


def test_grant_expires_with_its_dataset(owner: Owner) -> None:
    end = (owner.clock[0].date().replace(year=owner.clock[0].year + 1)).isoformat()
    owner.publish(expires=end)
    assert owner.grant("ana", days=3000).until == f"{end}T00:00:00Z"
    owner.pass_days(366)
    with pytest.raises(AccessError, match="expired at"):
        owner.grants.check("ana", "corpus")


def test_republished_dataset_needs_new_grants(owner: Owner) -> None:
    owner.publish()
    owner.grant("ana")
    owner.grants.withdraw("corpus")
    with pytest.raises(AccessError, match="was withdrawn"):
        owner.grants.check("ana", "corpus")
    owner.publish()
    with pytest.raises(AccessError, match="may not read"):
        owner.grants.check("ana", "corpus")


def test_disabled_or_removed_account_has_no_grant(owner: Owner) -> None:
    owner.publish()
    owner.grant("ana")
    owner.registry.set_state("ana", DISABLED)
    with pytest.raises(AccessError, match="is not enabled"):
        owner.grants.check("ana", "corpus")
    owner.registry.set_state("ana", ENABLED)
    owner.grants.check("ana", "corpus")
    owner.registry.remove("ana")
    owner.registry.add("ana")
    with pytest.raises(AccessError, match="may not read"):
        owner.grants.check("ana", "corpus")


def test_invalid_or_excessive_grant_request_is_refused(owner: Owner) -> None:
    owner.publish()
    for number in range(MOST_REQUESTS):
        owner.grants.ask("ana", "corpus", f"study {number}")
    with pytest.raises(AccessError, match="unanswered requests"):
        owner.grants.ask("ana", "corpus", "one more")
    owner.grants.ask("bob", "corpus", "mine")
    for purpose in ("", " ", "x" * 301, "a\x1b[2Jb"):
        with pytest.raises(AccessError, match="the purpose must have"):
            owner.grants.ask("bob", "corpus", purpose)
    with pytest.raises(AccessError, match="unknown dataset 'corpsu'"):
        owner.grants.ask("bob", "corpsu", "mine")
    with pytest.raises(AccessError, match="unknown request"):
        owner.grants.decide("nothing", GRANTED)


@pytest.mark.parametrize(
    "change",
    [
        "update permission set account = 'bob'",
        "update permission set until = '2998-01-01T00:00:00Z'",
        "update dataset set folder = '/etc'",
        'update dataset set document = replace(document, \'"age": {"dtype"\', \'"name": {"dtype"\')',
        "insert into permission select 'ff', dataset, 'bob', purpose, state, asked, decided, until from permission",
        "delete from permission",
    ],
)
def test_modified_registry_rows_are_refused(owner: Owner, change: str) -> None:
    owner.publish()
    owner.grant("ana")
    with sqlite3.connect(owner.registry.folder / FILE) as other:
        other.execute(change)
    other.close()
    with pytest.raises(AccountError, match="was modified by other means"):
        owner.grants.check("ana", "corpus")


def test_older_copy_of_grants_is_refused(owner: Owner, tmp_path: Path) -> None:
    """The copy is from before a grant was withdrawn."""
    owner.publish()
    grant = owner.grant("ana")
    path = owner.registry.folder / FILE
    shutil.copy(path, tmp_path / "old.db")
    owner.grants.decide(grant.number, WITHDRAWN)
    owner.registry.close()
    shutil.copy(tmp_path / "old.db", path)
    owner.registry = Registry(owner.home / "certs", owner.signer)
    with pytest.raises(AccountError, match="is an older copy"):
        owner.grants.check("ana", "corpus")


def test_host_without_authority_key_can_only_read_grants(owner: Owner, tmp_path: Path) -> None:
    owner.publish()
    grant = owner.grant("ana")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in (FILE, authority.CA):
        shutil.copy(owner.home / "certs" / name, copy / name)
    reader = Registry(copy, authority.load_certificate(copy))
    Grants(reader).check("ana", "corpus")
    with pytest.raises(AccountError, match="does not have the authority's key"):
        Grants(reader).withdraw("corpus")
    old = (copy / FILE).read_bytes()
    owner.grants.decide(grant.number, WITHDRAWN)
    shutil.copy(owner.home / "certs" / FILE, copy / FILE)
    reader.close()
    reader = Registry(copy, authority.load_certificate(copy))
    with pytest.raises(AccessError):
        Grants(reader).check("ana", "corpus")
    reader.close()
    (copy / FILE).write_bytes(old)
    reader = Registry(copy, authority.load_certificate(copy))
    with pytest.raises(AccountError, match="is an older copy"):
        Grants(reader).check("ana", "corpus")
    reader.close()
    with pytest.raises(AccountError, match="older copy"):
        Registry(tmp_path, authority.load_certificate(copy))


def test_registry_without_dataset_tables_is_upgraded(owner: Owner) -> None:
    """Missing tables are added, and earlier signatures stay valid."""
    database = owner.registry.database
    database.executescript("drop table dataset; drop table permission;")
    owner.registry.close()
    owner.registry = Registry(owner.home / "certs", owner.signer)
    assert [each.name for each in owner.registry.list_accounts()] == ["ana", "bob"]
    owner.publish()
    assert [each.name for each in owner.grants.list_datasets()] == ["corpus"]


def test_grant_check_time_is_independent_of_number_of_changes(owner: Owner) -> None:
    """The stored highest numbers are read only when they change."""
    owner.publish()
    owner.grant("ana")
    with (owner.registry.folder / f"{FILE}.highest").open("a") as file:
        file.write(f"{'f' * 64} 7\n" * 200_000)
    owner.grants.check("ana", "corpus")
    started = time.process_time()
    for _ in range(50):
        owner.grants.check("ana", "corpus")
    assert time.process_time() - started < 1


def test_usage_database_is_opened_under_a_lock(tmp_path: Path) -> None:
    """Two processes that set the journal mode at once would get a lock error from SQLite."""
    opened: list[Usage] = []
    thread = threading.Thread(target=lambda: opened.append(Usage(tmp_path)))
    with files.hold_lock(tmp_path / "usage.db.lock"):
        thread.start()
        thread.join(0.2)
        assert not opened and not (tmp_path / "usage.db").exists()
    thread.join(30)
    opened[0].count("corpus", "ana", "run-1", Limits(), 3, 24)
    assert opened[0].find("corpus", "ana") == (3, 24)
    opened[0].close()
