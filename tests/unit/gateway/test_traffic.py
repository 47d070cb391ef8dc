"""Daily traffic limits of accounts, through two gateways with real TLS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from tests.unit.gateway.town import GPU, NPU, Town, key, records, town
from tests.unit.transport.cable import SOON
from tests.unit.transport.crossing import Certificates
from whale_nebula.errors import AuditError, IdentityError, NotAllowedError
from whale_nebula.gateway.entry import Traffic
from whale_nebula.gateway.relay import Side
from whale_nebula.gateway.route import Lines
from whale_nebula.security import Files, files
from whale_nebula.security.allowance import Allowance

OTHER = "gpu/1"
ALL = (GPU, OTHER, NPU, "gpu/gateway", "npu/gateway")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Town]:
    """A town in which both workers of gpu are of the account ana."""
    home = Certificates(tmp_path / "home")
    home.issue(*ALL)
    for worker in (GPU, OTHER):
        home.certify(worker, "ana", Allowance(line=1 << 20))
    found = {name: Files.in_folder(home.folder, home.identity(name)) for name in ALL}
    with town(tmp_path, found, workers=(GPU, OTHER, NPU)) as made:
        made.start()
        yield made


def test_who_has_had_his_bytes_of_the_day_is_refused_until_tomorrow(made: Town) -> None:
    site = made.sites["gpu"]
    made.join(GPU, NPU)
    made.meet(GPU, NPU)
    made.cross(range(1), size=100_000)  # 400 kB, to and fro
    made.link(GPU, NPU).send(key(1, GPU, NPU), np.zeros(100_000, np.int32))
    with pytest.raises(IdentityError, match=r"account ana has used .* of its 1 MiB a day over the WAN link"):
        made.link(GPU, NPU).take("SESSION", SOON)
    refused = [each for each in records(site) if each["action"] == "refuse"]
    assert refused and all(each["decision"] == "deny" and "account ana has used" in each["reason"] for each in refused)
    made.gateways["gpu"].stop("a test")
    assert json.loads(site.traffic.read_text())["bytes"]["ana"] >= 1 << 20
    assert site.traffic.stat().st_mode & 0o777 == 0o600
    made.kill(GPU)
    made.start("gpu")  # which knows it still, and of another worker of the account
    made.join(OTHER)
    with pytest.raises(IdentityError, match="account ana has used"):
        made.link(OTHER, NPU).take("SESSION", SOON)
    made.kill(OTHER)
    made.kill(NPU)


def test_a_day_ends_and_a_clock_that_is_set_back_begins_none(tmp_path: Path) -> None:
    clock = [files.now()]
    home = Certificates(tmp_path / "home")
    home.issue(GPU)
    home.certify(GPU, "ana", Allowance(line=1000))
    guest = home.of(GPU).peer
    traffic = Traffic(tmp_path / "traffic.json", lambda: clock[0])
    traffic.meter(guest)(999)
    traffic.check(guest)
    traffic.meter(guest)(1)
    for days in (0, -1):
        clock[0] += timedelta(days=days)
        with pytest.raises(
            NotAllowedError, match="has used 1000 bytes of its 1000 bytes a day over the WAN link"
        ) as refused:
            traffic.check(guest)
    assert refused.value.why is not None and "T00:00:00Z" in refused.value.why
    clock[0] += timedelta(days=2)
    traffic.check(guest)
    traffic.check(None)
    traffic.meter(None)(1 << 40)


def test_counts_that_cannot_be_read_let_no_gateway_start(tmp_path: Path) -> None:
    (tmp_path / "traffic.json").write_text("{")
    with pytest.raises(AuditError, match="cannot read the traffic") as refused:
        Traffic(tmp_path / "traffic.json")
    assert refused.value.mend is not None and refused.value.mend.startswith("mv ")


def test_a_run_with_many_pairs_does_not_starve_another_at_the_same_gateway(tmp_path: Path) -> None:
    """Ana's run has one pair and Bob's three; each pair has 1.6 MB to send on a line of 4 MB/s that both runs share."""
    lines, theirs, slots = Lines(), tuple(f"npu/{number}" for number in range(3)), range(8)
    (tmp_path / "b").mkdir()
    with (
        town(tmp_path, None, rate=4e6, lines=lines) as ana,
        town(tmp_path / "b", None, rate=4e6, lines=lines, workers=(GPU, *theirs)) as bob,
    ):
        pairs = [*((bob, there) for there in theirs), (ana, NPU)]
        for each in (ana, bob):
            each.start()
            each.join()
        for each, there in pairs:
            each.meet(GPU, there)
        for slot in slots:
            for each, there in pairs:
                each.link(GPU, there).send(key(slot, GPU, there), np.zeros(50_000, np.int32))
        for slot in slots:
            ana.link(NPU, GPU).receive(key(slot, GPU, NPU), SOON)
        halves = [pair.half(Side.NEAR) for pair in bob.gateways["gpu"]._list_pairs()]
        sent = sum(half.bytes for half in halves if half is not None)
        assert sent < 2.4e6  # of 4.8 MB: about as much as Ana, and not as much by each pair
        for slot in slots:
            for there in theirs:
                bob.link(there, GPU).receive(key(slot, GPU, there), SOON)
