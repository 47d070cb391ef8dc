"""Attacks on the data service by accounts that may read, by strangers, and by a service that lies to its readers."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.unit.datasets.conftest import Site, certify
from tests.unit.datasets.test_service import is_refusal_logged
from whale_nebula.accounts.members import DISABLED
from whale_nebula.accounts.registry import Registry
from whale_nebula.accounts.rows import FILE
from whale_nebula.datasets import guard, interface, service, sources
from whale_nebula.datasets.grants import GRANTED, WITHDRAWN, Grants, Permission
from whale_nebula.datasets.guard import ANONYMOUS, Reader, ReadRequest
from whale_nebula.datasets.interface import find_rows
from whale_nebula.datasets.reading import LocalClient, RowSelection
from whale_nebula.datasets.schema import REFUSED, Frame
from whale_nebula.errors import AccessError, NotAllowedError
from whale_nebula.security import Credentials, authority, files, issue

ANA = Reader("ana", "nebula://mt/gpu/worker/0", run="run-1")


@pytest.fixture
def read_counts(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Publish a dataset whose factory counts the rows that it computes."""
    counts: list[int] = []

    class Wide:
        """100,000 rows of 8 KB."""

        count = 100_000

        def read(self, rows: Any) -> dict[str, Any]:
            counts.append(len(rows))
            return {"x": np.zeros((len(rows), 1024))}

    module = types.ModuleType("wide")
    module.open_rows = Wide  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wide", module)
    site.owner.publish(
        source={"factory": "wide:open_rows"},
        transform=[],
        schema={"x": {"dtype": "float64", "shape": [1024]}},
        limits={"account": {"rows": 100}},
    )
    site.owner.grant("ana")
    site.guard.open(ANA, "corpus")
    counts.clear()
    return counts


@pytest.mark.parametrize(
    ("rows", "message"), [(65536, "a batch of 536870912 bytes is too large"), (101, "reached the total limit")]
)
def test_refused_batch_is_not_computed(rows: int, message: str, site: Site, read_counts: list[int]) -> None:
    """Its rows would fill the memory of the owner's machine, or keep it busy."""
    with pytest.raises(AccessError, match=message):
        site.guard.read(ANA, ReadRequest("corpus", None, 0, 0, rows))
    assert not read_counts and is_refusal_logged(site, message)
    assert site.guard.read(ANA, ReadRequest("corpus", None, 0, 0, 100)).rows == 100 and read_counts == [100]


def test_records_too_large_together_are_not_copied(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema does not show how large a text is before it is tokenised."""
    (site.owner.home / "files/long.txt").write_text("a" * 600 + "\n" + "b" * 600 + "\n")
    site.owner.publish(source={"text": "long.txt"}, transform=[], schema={"text": {"dtype": "string", "raw": True}})
    site.owner.grant("ana")
    monkeypatch.setattr(sources, "MOST_RECORD_BYTES", 1000)
    with pytest.raises(AccessError, match="too large to be read at once"):
        site.guard.read(ANA, ReadRequest("corpus", None, 0, 0, 2))
    assert site.guard.read(ANA, ReadRequest("corpus", None, 0, 1, 2)).rows == 1


def test_order_of_a_few_rows_is_not_computed_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader could name another pass in each request for one row."""
    computed: list[int] = []
    order_rows = interface._order_rows
    monkeypatch.setattr(interface, "_order_rows", lambda *a: (computed.append(a[4] - a[3]), order_rows(*a))[1])
    for number in range(5):
        find_rows(1 << 20, 1, 1000 + number, 500_000, 500_001)
    assert computed == [interface._BLOCK] * 5


ENDS: dict[str, tuple[Callable[[Site, Permission], object], str]] = {
    "a withdrawn grant": (lambda site, grant: site.owner.grants.decide(grant.number, WITHDRAWN), "was withdrawn"),
    "a disabled account": (lambda site, grant: site.owner.registry.set_state("ana", DISABLED), "is not enabled"),
}


@pytest.mark.parametrize(("end", "message"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("is_remote", [True, False], ids=["over the line", "on the owner's machine"])
def test_batch_that_waits_is_not_delivered_after_access_ends(
    end: Callable[[Site, Permission], object],
    message: str,
    is_remote: bool,
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a rate limit a batch waits up to five minutes."""
    monkeypatch.setattr(service, "_LIVE_SECONDS", 0.02)
    site.owner.publish(limits={"rate": "10bit"})
    grant = site.owner.grant("ana")
    local = LocalClient(site.guard, ANA, sleep=lambda seconds: None if seconds < 60 else end(site, grant))
    reader = site.open_reader("ana") if is_remote else local
    batches = reader.read(RowSelection("corpus", None, 0, 0, 100, 10), reader.describe("corpus"))
    assert len(next(batches)["age"]) == 10
    if is_remote:
        end(site, grant)  # the second batch waits for a minute
    with pytest.raises(AccessError, match=message):
        next(batches)
    assert is_refusal_logged(site, message)


def test_batch_that_waits_is_not_delivered_after_revocation(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_LIVE_SECONDS", 0.02)
    site.owner.publish(limits={"rate": "10bit"})
    site.owner.grant("ana")
    paths, home = certify(site.owner, "ana", site.tmp / "of-ana"), site.owner.home / "certs"
    peer = Credentials.load(paths._replace(revoked=None)).peer
    (home / authority.ISSUED / f"{peer.serial}.pem").write_bytes(paths.cert.read_bytes())
    reader = site.open_reader("ana")
    batches = reader.read(RowSelection("corpus", None, 0, 0, 100, 10), reader.describe("corpus"))
    next(batches)
    issue.revoke(home, site.owner.signer, [peer.serial], "stolen")
    with pytest.raises(AccessError, match="was revoked"):
        next(batches)
    assert is_refusal_logged(site, "was revoked")


def test_list_requests_of_one_account_are_limited(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.owner.publish()
    with site.open_reader("ana")._open() as line, pytest.raises(AccessError, match="sends too many requests"):
        for _ in range(30):
            line.ask({"ask": "list"})
    assert is_refusal_logged(site, "too many requests")
    assert site.open_reader("bob").list_datasets()


def test_refusals_without_a_certificate_share_a_limit(site: Site) -> None:
    """Each of many addresses could have some refusals recorded."""
    for number in range(500):
        site.guard.refuse(Reader("", f"{ANONYMOUS}2001:db8:{number:x}::1"), "", NotAllowedError("no certificate"))
    assert len(site.access_records) <= guard._ANONYMOUS_REFUSALS + 3
    assert len(site.guard._unlogged_refusals) == 1
    site.guard.refuse(ANA, "corpus", AccessError("another"))
    assert is_refusal_logged(site, "another")


def test_text_of_a_service_cannot_control_the_terminal(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    line = site.open_reader("ana")
    message = {"what": "no\x1b[2J", "why": "\u202e", "mend": "\x07"}
    monkeypatch.setattr("whale_nebula.datasets.reading.read_frame", lambda *_: Frame(REFUSED, message, memoryview(b"")))
    with pytest.raises(AccessError) as caught:
        line.describe("corpus")
    assert not {"\x1b", "\u202e", "\x07"} & set(str(caught.value))


def test_grant_during_the_withdrawal_of_its_dataset_is_refused(site: Site) -> None:
    """Otherwise it would be valid once the dataset is published again."""
    site.owner.publish()
    asked = site.owner.grants.ask("ana", "corpus", "study")
    folder, errors = site.owner.home / "certs", []
    registries = [Registry(folder, site.owner.signer) for _ in range(2)]

    def grant() -> None:
        try:
            Grants(registries[1]).decide(asked.number, GRANTED)
        except AccessError as error:
            errors.append(error.what)

    threads = [threading.Thread(target=Grants(registries[0]).withdraw, args=["corpus"]), threading.Thread(target=grant)]
    with files.hold_lock(folder / f"{FILE}.lock"):
        for each in threads:  # each waits for the lock, in this order
            each.start()
            each.join(0.5)
    for each in threads:
        each.join(60)
    for registry in registries:
        registry.close()
    assert errors == ["dataset 'corpus' was withdrawn"]
    site.owner.publish()
    with pytest.raises(AccessError, match="may not read"):
        site.owner.grants.check("ana", "corpus")
