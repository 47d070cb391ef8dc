"""All gRPC links of one worker: one listening port, and dialling for the rest."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import ConfigError, IdentityError, NebulaError, OtherWorkersError
from whale_nebula.security import Credentials, CurrentCredentials, Identity, Prover
from whale_nebula.security.identity import Call, check_call
from whale_nebula.transport.base import Carrier
from whale_nebula.transport.deadlines import Announce, Deadlines, OwnAbsence, log_wait
from whale_nebula.transport.grpc.carrier import AwaitingCarrier
from whale_nebula.transport.grpc.connection import Lane
from whale_nebula.transport.grpc.dialling import DiallingCarrier, Target
from whale_nebula.transport.grpc.listener import Dialler, FrameHandler, Listener, StreamRequest
from whale_nebula.transport.grpc.options import count_lanes, make_server_credentials
from whale_nebula.transport.mailbox import Waiters
from whale_nebula.transport.peer import PeerLink
from whale_nebula.transport.protocol import ExpectKey
from whale_nebula.wire.conversation import BUDGET_BYTES
from whale_nebula.wire.greeting import Greeting


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a worker in a run, and how it reaches the others.

    `peers` has each other worker's address, or None if it has none; `listen` is this worker's own. With a `gateway`
    (this cluster's) the workers of other clusters are reached through it. Without `credentials` nothing is encrypted or
    authenticated. `all_workers` are all workers of the run, as frames and gateways number them, if there are more than
    `peers` and `here`. `epoch` is the number of restarts of the run, as known to this worker. In elastic runs, `absent`
    are the workers without which the run continues, `launched` those that this worker's launcher may start, `joining`
    the addresses of the absent ones of other launchers, and the `anchor` decides on these; `max_workers`
    are the numbers of workers that clusters may have, where they are limited.

    >>> place = Place("mt", "npu/0", {"gpu/0": "10.77.0.1:7101"}, listen="10.77.0.2:7101")
    >>> place.dials("gpu/0"), Place("mt", "gpu/0", {"npu/0": None}, listen="10.77.0.1:7101").dials("npu/0")
    (True, False)
    """

    run: str
    here: str
    peers: Mapping[str, str | None]
    listen: str | None = None
    gateway: str | None = None
    credentials: Credentials | None = None
    all_workers: tuple[str, ...] = ()
    epoch: int = 0
    absent: tuple[str, ...] | None = None
    launched: tuple[str, ...] = ()
    anchor: str | None = None
    joining: Mapping[str, str | None] = field(default_factory=dict)
    max_workers: Mapping[str, int] = field(default_factory=dict)

    @property
    def free_places(self) -> dict[str, int]:
        """The numbers of workers that may come, by cluster, where there are limits."""
        present = Counter(map(cluster_of, (self.here, *self.peers)))
        return {cluster: limit - present[cluster] for cluster, limit in self.max_workers.items()}

    @property
    def workers(self) -> tuple[str, ...]:
        """All workers of the run."""
        return self.all_workers or (*self.peers, self.here)

    def uses_gateway(self, there: str) -> bool:
        """Whether frames to a worker go through the gateways."""
        return self.gateway is not None and cluster_of(there) != cluster_of(self.here)

    def find_address(self, there: str) -> str | None:
        """The address at which a worker listens."""
        return self.joining[there] if there in self.joining else self.peers[there]

    def dials(self, there: str) -> bool:
        """Whether this worker dials the other one: through a gateway both dial; otherwise the one without an address,
        or with the later name.
        """
        if self.uses_gateway(there):
            return True
        if self.find_address(there) is None:
            if self.listen is None:
                raise _no_route_error(self.here, there)
            return False
        return self.listen is None or self.here > there


class GrpcLinks:
    """The links of one worker, by the other worker's name, and the port on which it is dialled.

    `expect`, `budget`, `deadlines` and `announce` are those of PeerLink. Links begin to connect at once; waits are
    announced. `arrive` is called when absent workers connect that are not spare.
    """

    def __init__(
        self,
        place: Place,
        *,
        expect: ExpectKey | None = None,
        budget: int = BUDGET_BYTES,
        deadlines: Deadlines | None = None,
        announce: Announce = log_wait,
        versions: Mapping[str, str] | None = None,
        arrive: Callable[[OtherWorkersError], None] = lambda error: None,
    ) -> None:
        self._place = place
        self._deadlines = deadlines or Deadlines()
        self._current = CurrentCredentials(place.credentials) if place.credentials else None
        self._awaiting_carriers: dict[str, AwaitingCarrier] = {}
        self._own_absence = OwnAbsence()
        self._lock = threading.Lock()
        _keep_freed_memory()
        carriers = {there: self._make_carrier(there) for there in sorted({**place.peers, **place.joining})}
        options: dict[str, Any] = {"expect": expect, "budget": budget, "announce": announce, "waiters": Waiters()}
        options["own_absence"] = self._own_absence

        self._listener = self._start_listener()  # first: once a peer is connected, both ports are open
        self.address = self._listener.address if self._listener else None
        self._versions = dict(versions or {})
        self.links = {there: self._make_link(carriers[there], options) for there in sorted(place.peers)}
        self._absent_options = {**options, "announce": lambda wait: None, "arrive": arrive}
        self._absent_links = [self._make_link(carriers[there], self._absent_options) for there in sorted(place.joining)]

    def await_return(self, workers: Collection[str]) -> None:
        """Accept connections from workers that were lost, whose links are not used any more: the run goes on without
        them, and `arrive` is called when their new processes connect. An old process is refused.
        """
        with self._lock:
            place = self._place
            workers = [there for there in sorted(workers) if there not in place.joining]
            self._place = replace(
                place,
                all_workers=place.workers,
                peers={there: address for there, address in place.peers.items() if there not in workers},
                absent=tuple(sorted({*(place.absent or ()), *workers})),
                joining={**place.joining, **{there: place.find_address(there) for there in workers}},
            )
            for there in workers:
                self._absent_links.append(self._make_link(self._make_carrier(there), self._absent_options))

    def is_absent(self) -> bool:
        """Whether another worker has reported within the patience that the run goes on without this one."""
        return time.monotonic() - self._own_absence.reported_at < self._deadlines.patience

    def close(self) -> None:
        """Close all links together, each gracefully, and then the port."""
        links = [*self.links.values(), *self._absent_links]
        for link in links:
            link.send_farewell()
        for link in links:
            link.close()
        if self._listener is not None:
            self._listener.stop()

    def _make_link(self, carrier: Carrier, options: dict[str, Any]) -> PeerLink:
        place, absent = self._place, carrier.there in self._place.joining
        return PeerLink(
            carrier,
            Greeting(
                place.run,
                place.here,
                carrier.there,
                versions=self._versions,
                epoch=place.epoch,
                absent=place.absent,
                launched=place.launched,
                anchor=place.anchor,
                free_places=place.free_places,
            ),
            place.workers,
            prover=Prover(self._current) if self._current else None,
            sealed=self._current is not None and place.uses_gateway(carrier.there),
            deadlines=replace(self._deadlines, patience=math.inf) if absent else self._deadlines,
            **options,
        )

    def _make_carrier(self, there: str) -> Carrier:
        place = self._place
        if place.dials(there):
            return DiallingCarrier(place.run, place.here, there, self._make_target(there), deadlines=self._deadlines)
        self._awaiting_carriers[there] = AwaitingCarrier(
            place.here, there, place.find_address(there) or "", deadlines=self._deadlines
        )
        return self._awaiting_carriers[there]

    def _make_target(self, there: str) -> Target:
        gateway = self._place.gateway if self._place.uses_gateway(there) else None
        name = f"{cluster_of(self._place.here)}/gateway" if gateway else there
        address = gateway or self._place.find_address(there)
        if address is None:
            raise _no_route_error(self._place.here, there)
        return Target.for_peer(self._place.run, name, address, self._current, gateway=gateway is not None)

    def _start_listener(self) -> Listener | None:
        if self._place.listen is None:
            return None
        listener = Listener(
            self._place.listen,
            make_server_credentials(self._current) if self._current else None,
            self._accept,
            deadlines=self._deadlines,
            # no more than the peers need, as strangers would use the rest
            connections=count_lanes() * len(self._awaiting_carriers),
        )
        listener.start()
        return listener

    def _accept(self, request: StreamRequest, dialler: Dialler, lane: Lane) -> FrameHandler:
        """Assign an incoming stream to its link, if its dialler is authenticated as the link's other worker."""
        if (request.run, request.destination) != (self._place.run, self._place.here):
            raise IdentityError(
                f"this is worker '{self._place.here}' of run '{self._place.run}'",
                why=f"'{request.source}' tries to connect to '{request.destination}' of run '{request.run}'",
                mend="compare the addresses in the clusters' configs, and stop remaining processes of earlier runs",
            )
        carrier = self._awaiting_carriers.get(request.source)
        if carrier is None:
            raise IdentityError(f"worker '{self._place.here}' does not expect '{request.source}'")
        if self._current is not None:  # the link checks continuously that the certificate stays valid
            credentials = self._current()
            identity = Identity.of_worker(request.run, request.source)
            certified_peer = credentials.trust.check(dialler.certificate, identity, subject=request.source)
            check_call(certified_peer.identity, Call.OPEN_PAIR, credentials.identity)
        return carrier.accept_stream(request, lane)


def _keep_freed_memory() -> None:
    """Keep freed memory of frames in the allocator: otherwise the kernel zeroes up to half of it again.

    glibc keeps twice the size of the largest block that was ever mapped and freed, which it counts up to 32 MiB; a
    process that trains reaches that by itself. This block is never written, so that it uses no memory.
    """
    np.empty(_LARGEST_COUNTED, np.uint8)


_LARGEST_COUNTED = (32 << 20) - (64 << 10)


def _no_route_error(here: str, there: str) -> NebulaError:
    return ConfigError(
        f"no route between '{here}' and '{there}'",
        why="neither has an address at which the other can reach it",
        mend='configure an address of one of them: workers: ["10.77.0.1:7101"], or a gateway for each cluster',
    )
