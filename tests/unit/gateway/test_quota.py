"""Limits of one authenticated identity at a gateway's port."""

from __future__ import annotations

from pathlib import Path

import pytest

from whale_nebula.errors import TransportError
from whale_nebula.gateway import entry
from whale_nebula.gateway.entry import Quota, Quotas, connections, most_streams, pairs_of
from whale_nebula.gateway.site import Site
from whale_nebula.security.identity import GATEWAY, Identity
from whale_nebula.transport.grpc.connection import Lane
from whale_nebula.transport.grpc.limits import TokenBucket

OWN, THEIRS = Identity("mt", "gpu"), Identity("mt", "npu", GATEWAY)


def site(own: int = 0, others: int = 0) -> Site:
    workers = {f"gpu/{n}": "h:1" for n in range(own)} | {f"npu/{n}": "h:1" for n in range(others)}
    return Site("mt", "gpu", "h:2", workers, {"npu": "h:3"}, audit=Path("audit.jsonl"))


def test_streams_at_a_time_are_bounded_and_come_back_when_they_end() -> None:
    found = Quota("npu/gateway", 1)
    lanes = [Lane() for _ in range(found.most)]
    for lane in lanes:
        found.take(lane, 0)
    with pytest.raises(TransportError, match=f"has {found.most} streams here"):
        found.take(Lane(), 0)
    lanes[0].end("over")
    found.take(Lane(), 0)


def test_streams_that_end_at_once_are_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "TokenBucket", lambda burst, rate: TokenBucket(burst, rate, now=lambda: 0.0))
    found = Quota("npu/gateway", 4)

    def knock(number: int) -> None:
        lane = Lane()
        found.take(lane, number)
        lane.end("over")

    for _ in range(100 + 2 * 4):
        knock(0)
    for number in (0, 1):
        with pytest.raises(TransportError, match="too many new streams"):
            knock(number)


def test_one_identity_has_one_quota_whatever_names_it_speaks_of() -> None:
    quotas = Quotas(site())
    for number in range(most_streams(64)):
        quotas.take(THEIRS, Lane(), number % 4)
    with pytest.raises(TransportError, match="streams here"):
        quotas.take(THEIRS, Lane(), 0)
    quotas.take(OWN, Lane(), 0)  # whose places are his


@pytest.mark.parametrize(("own", "others"), [(0, 0), (8, 8), (2, 1)])
def test_all_quotas_together_fit_the_port(own: int, others: int) -> None:
    found = site(own, others)
    workers = (own or 8) * most_streams(pairs_of(found, OWN))
    assert connections(found) >= workers + most_streams(pairs_of(found, THEIRS))


def test_who_has_not_come_for_a_while_is_forgotten() -> None:
    quotas, lane = Quotas(site()), Lane()
    quotas.take(THEIRS, lane, 0)
    quotas.remove_unused()
    assert len(quotas._quotas) == 1
