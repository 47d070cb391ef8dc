"""What one proved identity may take of a gateway's port: streams at a time, and streams that it opens in a while."""

from __future__ import annotations

import threading

from whale_nebula.errors import TransportError
from whale_nebula.gateway.site import Site, cluster_of
from whale_nebula.security.identity import GATEWAY, Identity
from whale_nebula.transport.grpc.connection import Lane
from whale_nebula.transport.grpc.limits import TokenBucket
from whale_nebula.transport.grpc.options import LANES_WITHOUT_BBR, lanes

_UNLISTED = 8  # workers that a cluster is thought to have which does not list them
_SPARE = 4
_BURST, _A_SECOND = 100, 2.0  # connections of pairs, each of which is written into the audit log
_LANES_A_CONNECTION = 16.0  # a further lane is not written down


class Quota:
    """The streams of one identity, `most` at a time. It opens as many connections as all its pairs need twice and 100
    more, then 2 a second.
    """

    def __init__(self, who: str, pairs: int) -> None:
        self.most = most_streams(pairs)
        self._who = who
        self._lock = threading.Lock()
        self._lanes: list[Lane] = []
        self._opens = TokenBucket(_BURST + 2 * pairs, _A_SECOND)

    def take(self, lane: Lane, number: int) -> None:
        """One more stream, the lane of this number of its connection: raises if that is one too many."""
        with self._lock:
            self._lanes = [each for each in self._lanes if not each.over]
            if len(self._lanes) >= self.most:
                raise TransportError(f"{self._who} has {self.most} streams here, and is given no more")
            if not self._opens.take(1.0 if number == 0 else 1.0 / _LANES_A_CONNECTION):
                raise TransportError(f"streams of {self._who} come too often", why="each is written down")
            self._lanes.append(lane)

    @property
    def unused(self) -> bool:
        """Whether it has no stream, and had none for long enough to forget it."""
        with self._lock:
            return self._opens.full and all(lane.over for lane in self._lanes)


class Quotas:
    """The quotas of a gateway's callers, by what their certificates prove."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = threading.Lock()
        self._quotas: dict[str, Quota] = {}

    def take(self, caller: Identity, lane: Lane, number: int) -> None:
        """One more stream of a caller: raises if that is one too many. Where nobody proves who he is, those of one
        cluster are one caller.
        """
        who = caller.uri if self._site.files is not None or caller.role == GATEWAY else caller.cluster
        pairs = pairs_of(self._site, caller) * (_UNLISTED if who == caller.cluster else 1)
        with self._lock:
            quota = self._quotas.setdefault(who, Quota(caller.worker, pairs))
        quota.take(lane, number)

    def remove_unused(self) -> None:
        """Forget who has not come for a while."""
        with self._lock:
            self._quotas = {who: quota for who, quota in self._quotas.items() if not quota.unused}


def most_streams(pairs: int) -> int:
    """How many streams at a time so many pairs need."""
    return max(lanes(), LANES_WITHOUT_BBR) * pairs + _SPARE


def pairs_of(site: Site, caller: Identity) -> int:
    """How many pairs a caller may need streams for: a worker of this cluster, or another cluster's gateway."""
    if caller.role == GATEWAY:
        return _count(site, site.cluster) * _count(site, caller.cluster)
    return sum(_count(site, cluster) for cluster in site.gateways)


def connections(site: Site) -> int:
    """How many connections there may be: as many as all callers together may have streams, so that none of them can
    take the place of another.
    """
    own = Identity.of_worker(site.run, f"{site.cluster}/0")
    gateways = [Identity(site.run, cluster, GATEWAY) for cluster in site.gateways]
    of_own, of_gateways = most_streams(pairs_of(site, own)), [most_streams(pairs_of(site, each)) for each in gateways]
    return _count(site, site.cluster) * of_own + sum(of_gateways) + 4 * len(gateways)


def _count(site: Site, cluster: str) -> int:
    return sum(cluster_of(worker) == cluster for worker in site.workers) or _UNLISTED
