"""A gateway's records of frequent refusals, and of a disk that is nearly full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.gateway.town import written
from whale_nebula.errors import IdentityError
from whale_nebula.gateway import journal
from whale_nebula.gateway.journal import Journal, Refusals
from whale_nebula.security import Identity
from whale_nebula.security.audit import AuditLog

NPU = "nebula://mt/npu/worker/0"


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Journal]:
    one = Journal(AuditLog(tmp_path / "audit.jsonl", Identity("mt", "gpu", "gateway"), None))
    yield one
    one.close("a test")


def test_refusals_that_were_left_out_are_counted_once_a_minute_and_at_the_end(made: Journal) -> None:
    begin = made._next_summary
    for number in range(20):
        made.note_refused(NPU, f"{NPU} - another each time {number}", IdentityError("it was revoked"))
    made.look_after(begin)
    for _ in range(5):
        made.note_refused(NPU, "once more", IdentityError("it was revoked"))
    made.look_after(begin + 59.0)
    made.close("a test")
    made.note("refuse", actor="after the end")
    times = [each["times"] for each in written(made.log.path) if each["action"] == "refuse"]
    assert times == [1] * 8 + [12, 5]


def test_refusals_are_not_waited_for(made: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("whale_nebula.security.audit.os.fsync", synced.append)
    made.note_refused(NPU, "gpu/0", IdentityError("it was revoked"))
    assert synced == []
    made.note("trunk", decision="allow")
    assert len(synced) == 1


def test_identities_in_numbers_share_what_one_has() -> None:
    refusals = Refusals(now=lambda: 0.0)
    counts = [refusals.count(f"npu/{number}") for number in range(journal._MOST + 50)]
    assert sum(counts) == journal._MOST + 8 and len(refusals._buckets._buckets) == journal._MOST + 1
    assert refusals.take_unwritten() == {"others": 42}


def test_a_disk_that_is_nearly_full_is_said_once(
    made: Journal, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free in (5 << 30, 900 << 20, 800 << 20, 5 << 30, 100 << 20):
        monkeypatch.setattr("shutil.disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        made._next_space = 0.0
        made.look_after(1.0)
    assert [each["free"] for each in written(made.log.path) if each["action"] == "low space"] == [900 << 20, 100 << 20]
    assert [each for each in caplog.messages if "has 900 MiB left" in each]
