"""A gateway's records of frequent refusals, and of a disk that is nearly full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.gateway.networks import read_log
from whale_nebula.errors import IdentityError
from whale_nebula.gateway import journal
from whale_nebula.gateway.journal import Journal, Refusals
from whale_nebula.security import Identity
from whale_nebula.security.audit import AuditLog

NPU = "nebula://mt/npu/worker/0"


@pytest.fixture
def audit_journal(tmp_path: Path) -> Iterator[Journal]:
    one = Journal(AuditLog(tmp_path / "audit.jsonl", Identity("mt", "gpu", "gateway"), None))
    yield one
    one.close("a test")


def test_omitted_refusals_are_recorded_every_minute_and_at_close(audit_journal: Journal) -> None:
    begin = audit_journal._next_summary
    for number in range(20):
        audit_journal.note_refused(NPU, f"{NPU} - another each time {number}", IdentityError("it was revoked"))
    audit_journal.check_periodically(begin)
    for _ in range(5):
        audit_journal.note_refused(NPU, "once more", IdentityError("it was revoked"))
    audit_journal.check_periodically(begin + 59.0)
    audit_journal.close("a test")
    audit_journal.note("refuse", actor="after the end")
    times = [each["times"] for each in read_log(audit_journal.log.path) if each["action"] == "refuse"]
    assert times == [1] * 8 + [12, 5]


def test_refusal_record_does_not_wait_for_the_disk(audit_journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    synced_files: list[int] = []
    monkeypatch.setattr("whale_nebula.security.audit.os.fsync", synced_files.append)
    audit_journal.note_refused(NPU, "gpu/0", IdentityError("it was revoked"))
    assert synced_files == []
    audit_journal.note("trunk", decision="allow")
    assert len(synced_files) == 1


def test_surplus_identities_share_one_limit() -> None:
    refusals = Refusals(now=lambda: 0.0)
    counts = [refusals.count(f"npu/{number}") for number in range(journal._MAX_IDENTITIES + 50)]
    assert sum(counts) == journal._MAX_IDENTITIES + 8 and len(refusals._buckets._buckets) == journal._MAX_IDENTITIES + 1
    assert refusals.take_omitted() == {"others": 42}


def test_nearly_full_disk_is_recorded_once(
    audit_journal: Journal, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free in (5 << 30, 900 << 20, 800 << 20, 5 << 30, 100 << 20):
        monkeypatch.setattr("shutil.disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        audit_journal._next_space = 0.0
        audit_journal.check_periodically(1.0)
    assert [each["free"] for each in read_log(audit_journal.log.path) if each["action"] == "low space"] == [
        900 << 20,
        100 << 20,
    ]
    assert [each for each in caplog.messages if "has 900 MiB left" in each]
