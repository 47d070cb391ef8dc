"""Limits of one authenticated identity at a gateway's port."""

from __future__ import annotations

from pathlib import Path

import pytest

from whale_nebula.errors import TransportError
from whale_nebula.gateway import admission
from whale_nebula.gateway.admission import Quota, Quotas, count_connections, count_pairs, find_max_streams
from whale_nebula.gateway.settings import GatewaySettings
from whale_nebula.security.identity import GATEWAY, Identity
from whale_nebula.transport.grpc.connection import Lane
from whale_nebula.transport.grpc.limits import TokenBucket

OWN, THEIRS = Identity("mt", "gpu"), Identity("mt", "npu", GATEWAY)


def make_settings(own: int = 0, others: int = 0) -> GatewaySettings:
    workers = {f"gpu/{n}": "h:1" for n in range(own)} | {f"npu/{n}": "h:1" for n in range(others)}
    return GatewaySettings("mt", "gpu", "h:2", workers, {"npu": "h:3"}, audit=Path("audit.jsonl"))


def test_concurrent_streams_are_limited_until_one_ends() -> None:
    found = Quota("npu/gateway", 1)
    lanes = [Lane() for _ in range(found.max_streams)]
    for lane in lanes:
        found.take(lane, 0)
    with pytest.raises(TransportError, match=f"has {found.max_streams} streams here"):
        found.take(Lane(), 0)
    lanes[0].end("over")
    found.take(Lane(), 0)


def test_rate_of_short_streams_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "TokenBucket", lambda burst, rate: TokenBucket(burst, rate, now=lambda: 0.0))
    found = Quota("npu/gateway", 4)

    def open_short_stream(number: int) -> None:
        lane = Lane()
        found.take(lane, number)
        lane.end("over")

    for _ in range(100 + 2 * 4):
        open_short_stream(0)
    for number in (0, 1):
        with pytest.raises(TransportError, match="too many new streams"):
            open_short_stream(number)


def test_identity_has_one_quota_for_all_its_pairs() -> None:
    quotas = Quotas(make_settings())
    for number in range(find_max_streams(64)):
        quotas.take(THEIRS, Lane(), number % 4)
    with pytest.raises(TransportError, match="streams here"):
        quotas.take(THEIRS, Lane(), 0)
    quotas.take(OWN, Lane(), 0)  # another identity, with its own quota


@pytest.mark.parametrize(("own", "others"), [(0, 0), (8, 8), (2, 1)])
def test_connection_limit_covers_all_quotas(own: int, others: int) -> None:
    found = make_settings(own, others)
    workers = (own or 8) * find_max_streams(count_pairs(found, OWN))
    assert count_connections(found) >= workers + find_max_streams(count_pairs(found, THEIRS))


def test_quota_in_use_is_not_removed() -> None:
    quotas, lane = Quotas(make_settings()), Lane()
    quotas.take(THEIRS, lane, 0)
    quotas.remove_unused()
    assert len(quotas._quotas) == 1
