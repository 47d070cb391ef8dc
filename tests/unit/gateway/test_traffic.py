"""Daily traffic limits of accounts, through two gateways with real TLS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from tests.unit.gateway.networks import GPU, NPU, GatewayNetwork, make_key, open_network, read_records
from tests.unit.transport.grpc_workers import Certificates
from tests.unit.transport.link_pairs import TIMEOUT_SECONDS
from whale_nebula.errors import AuditError, IdentityError, NotAllowedError
from whale_nebula.gateway.admission import Traffic
from whale_nebula.gateway.relay import Side
from whale_nebula.gateway.route import SharedLines
from whale_nebula.security import Files, files
from whale_nebula.security.allowance import Allowance

OTHER = "gpu/1"
NAMES = (GPU, OTHER, NPU, "gpu/gateway", "npu/gateway")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[GatewayNetwork]:
    """A network in which both workers of gpu belong to the account ana."""
    home = Certificates(tmp_path / "home")
    home.issue(*NAMES)
    for worker in (GPU, OTHER):
        home.issue_to_account(worker, "ana", Allowance(line=1 << 20))
    found = {name: Files.in_folder(home.folder, home.identity(name)) for name in NAMES}
    with open_network(tmp_path, found, workers=(GPU, OTHER, NPU)) as network:
        network.start_gateways()
        yield network


def test_account_above_its_daily_traffic_is_refused(network: GatewayNetwork) -> None:
    settings = network.settings_by_cluster["gpu"]
    network.start_workers(GPU, NPU)
    network.exchange_steps(GPU, NPU)
    network.exchange_tensors(range(1), size=100_000)  # 400 kB in each direction
    network.link(GPU, NPU).send(make_key(1, GPU, NPU), np.zeros(100_000, np.int32))
    with pytest.raises(IdentityError, match=r"account ana has used .* of its 1 MiB a day over the WAN link"):
        network.link(GPU, NPU).take("SESSION", TIMEOUT_SECONDS)
    refused = [each for each in read_records(settings) if each["action"] == "refuse"]
    assert refused and all(each["decision"] == "deny" and "account ana has used" in each["reason"] for each in refused)
    assert {each["account"] for each in refused} == {"ana"}
    network.gateways["gpu"].stop("a test")
    assert json.loads(settings.traffic_path.read_text())["bytes"]["ana"] >= 1 << 20
    assert settings.traffic_path.stat().st_mode & 0o777 == 0o600
    network.kill_worker(GPU)
    network.start_gateways("gpu")  # the counts persist, also for another worker of the account
    network.start_workers(OTHER)
    with pytest.raises(IdentityError, match="account ana has used"):
        network.link(OTHER, NPU).take("SESSION", TIMEOUT_SECONDS)
    network.kill_worker(OTHER)
    network.kill_worker(NPU)


def test_traffic_is_reset_on_a_later_day_only(tmp_path: Path) -> None:
    clock = [files.now()]
    home = Certificates(tmp_path / "home")
    home.issue(GPU)
    home.issue_to_account(GPU, "ana", Allowance(line=1000))
    certified_peer = home.of(GPU).peer
    traffic = Traffic(tmp_path / "traffic.json", lambda: clock[0])
    traffic.make_meter(certified_peer)(999)
    traffic.check(certified_peer)
    traffic.make_meter(certified_peer)(1)
    for days in (0, -1):
        clock[0] += timedelta(days=days)
        with pytest.raises(
            NotAllowedError, match="has used 1000 bytes of its 1000 bytes a day over the WAN link"
        ) as refused:
            traffic.check(certified_peer)
    assert refused.value.why is not None and "T00:00:00Z" in refused.value.why
    clock[0] += timedelta(days=2)
    traffic.check(certified_peer)
    traffic.check(None)
    traffic.make_meter(None)(1 << 40)


def test_unreadable_traffic_file_prevents_start(tmp_path: Path) -> None:
    (tmp_path / "traffic.json").write_text("{")
    with pytest.raises(AuditError, match="cannot read the traffic") as refused:
        Traffic(tmp_path / "traffic.json")
    assert refused.value.mend is not None and refused.value.mend.startswith("mv ")


def test_run_with_many_pairs_does_not_starve_another_run(tmp_path: Path) -> None:
    """Ana's run has one pair and Bob's three; each pair has 1.6 MB to send on a line of 4 MB/s that both runs share."""
    lines, theirs, slots = SharedLines(), tuple(f"npu/{number}" for number in range(3)), range(8)
    (tmp_path / "b").mkdir()
    with (
        open_network(tmp_path, None, rate=4e6, lines=lines) as ana,
        open_network(tmp_path / "b", None, rate=4e6, lines=lines, workers=(GPU, *theirs)) as bob,
    ):
        pairs = [*((bob, there) for there in theirs), (ana, NPU)]
        for each in (ana, bob):
            each.start_gateways()
            each.start_workers()
        for each, there in pairs:
            each.exchange_steps(GPU, there)
        for slot in slots:
            for each, there in pairs:
                each.link(GPU, there).send(make_key(slot, GPU, there), np.zeros(50_000, np.int32))
        for slot in slots:
            ana.link(NPU, GPU).receive(make_key(slot, GPU, NPU), TIMEOUT_SECONDS)
        halves = [pair.find_half(Side.NEAR) for pair in bob.gateways["gpu"]._list_pairs()]
        sent = sum(half.bytes for half in halves if half is not None)
        assert sent < 2.4e6  # of 4.8 MB: about as much as Ana, and not as much by each pair
        for slot in slots:
            for there in theirs:
                bob.link(there, GPU).receive(make_key(slot, GPU, there), TIMEOUT_SECONDS)
