"""Admission to a gateway: classify each connection as a local worker, a gateway for a pair, or a gateway's control
stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import threading
import time
from collections.abc import Callable, Set
from enum import Enum
from typing import NamedTuple

from whale_nebula.errors import IdentityError, NebulaError, NotAllowedError
from whale_nebula.gateway.site import Site, cluster_of
from whale_nebula.security import CurrentCredentials, Identity, Peer
from whale_nebula.security.identity import GATEWAY, WORKER, Call, check_call
from whale_nebula.transport.grpc.listener import Knock, Visitor


class Purpose(Enum):
    """What a stream is for."""

    OUT = "a worker of this cluster, for one of another"
    IN = "another gateway, for a worker of its cluster"
    CONTROL = "another gateway, for itself"


class Entry(NamedTuple):
    """A stream that may come in: what for, and from whom. `here` and `there` are the pair, "" for a control stream."""

    purpose: Purpose
    caller: Identity
    guest: Peer | None
    here: str = ""
    there: str = ""


def entry(site: Site, current: CurrentCredentials | None, knock: Knock, visitor: Visitor) -> Entry:
    """What a knock asks for, if who knocks may ask for it; whatever is not allowed here by name is denied."""
    if knock.run != site.run:
        raise IdentityError(
            f"this is the gateway of cluster '{site.cluster}' of run '{site.run}'",
            why=f"'{knock.source}' is of run '{knock.run}'",
            mend="compare 'run' and the addresses in the clusters' configs",
        )
    source = Identity.of_worker(knock.run, knock.source)
    purpose = Purpose.CONTROL if source.role == GATEWAY else Purpose.IN
    if source.cluster == site.cluster:
        purpose = Purpose.OUT
    caller = Identity(site.run, source.cluster, GATEWAY) if purpose is Purpose.IN else source
    guest = None if current is None else current().trust.check(visitor.certificate, caller)
    call = Call.AUDIT_HEADS if purpose is Purpose.CONTROL else Call.RELAY
    check_call(caller, call, site.identity)
    if purpose is Purpose.CONTROL:
        return Entry(purpose, caller, guest)
    here, there = (knock.source, knock.destination)[:: 1 if purpose is Purpose.OUT else -1]
    _check_worker(site, here, site.cluster)
    _check_worker(site, there, None)
    return Entry(purpose, caller, guest, here, there)


def admit(current: CurrentCredentials | None, site: Site, visitor: Visitor) -> None:
    """Whether somebody may ask how the gateway is: anybody whose certificate is good."""
    if current is not None:
        guest = current().trust.check(visitor.certificate, whose="who asks for the health")
        check_call(guest.identity, Call.HEALTH, site.identity)


def _check_worker(site: Site, name: str, cluster: str | None) -> None:
    """Whether frames may go to and from a worker: one of this cluster, or of one that this gateway knows."""
    identity = Identity.of_worker(site.run, name)
    known = (cluster,) if cluster is not None else tuple(site.gateways)
    listed = [worker for worker in site.workers if cluster_of(worker) == identity.cluster]
    if identity.role != WORKER or identity.cluster not in known or (listed and name not in listed):
        raise NotAllowedError(
            f"no frames go to or from '{name}' here",
            where=site.identity.worker,
            why=f"this gateway joins {', '.join(listed) or site.cluster} with workers of {', '.join(site.gateways)}"
            if not listed
            else f"the workers of cluster '{identity.cluster}' are {', '.join(listed)}",
            mend="give all clusters the same list of workers, and start this gateway again",
        )


_SECONDS = 10.0


class FinalErrors:
    """Errors by who asks and whom he asks for. A worker tries again within seconds, so none of them lasts long: a new
    run with the same workers begins without them.

    >>> final_errors = FinalErrors(now=lambda: 0.0)
    >>> final_errors.give("npu/0", "gpu/0", NebulaError("worker 'gpu/0' is gone"))
    True
    >>> final_errors.find("npu/0", "gpu/0").what, final_errors.find("npu/1", "gpu/0")
    ("worker 'gpu/0' is gone", None)

    One that is gone himself asks nothing: what he would be told must not wait for who is started in his place.

    >>> final_errors.gone("npu/0")
    >>> final_errors.give("npu/0", "gpu/0", NebulaError("worker 'gpu/0' is gone"))
    False
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._given: dict[tuple[str, str], tuple[NebulaError, float]] = {}
        self._gone: set[str] = set()

    def give(self, asks: str, wanted: str, error: NebulaError) -> bool:
        """Tell `asks` so when he next asks for `wanted`; False if he is gone."""
        with self._lock:
            if asks in self._gone:
                return False
            self._given[asks, wanted] = error, self._now() + _SECONDS
            return True

    def remove_old(self, workers: Set[str]) -> None:
        """Forget what nobody has asked for in time, and who is gone and none of these workers."""
        with self._lock:
            self._gone &= workers
            now = self._now()
            self._given = {pair: given for pair, given in self._given.items() if now < given[1]}

    def find(self, asks: str, wanted: str, *, once: bool = False) -> NebulaError | None:
        """What `asks` is to be told, if anything. With `once` he gives up when he hears it."""
        with self._lock:
            error, until = self._given.get((asks, wanted), (None, 0.0))
            if once:
                self._given.pop((asks, wanted), None)
            return error if self._now() < until else None

    def gone(self, worker: str) -> None:
        """A worker is gone: it asks for nobody, and whatever it was to be told is forgotten."""
        with self._lock:
            self._gone.add(worker)
            self._given = {pair: given for pair, given in self._given.items() if pair[0] != worker}

    def asks(self, worker: str) -> None:
        """A worker asks: it is there."""
        with self._lock:
            self._gone.discard(worker)

    def back(self, worker: str) -> None:
        """A worker can be reached again."""
        with self._lock:
            self._given = {pair: given for pair, given in self._given.items() if pair[1] != worker}


def raise_file_limit() -> None:
    """Let this process open as many files as it may; where it may not raise its limit, nothing is done."""
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


_TRIM, _PAD, _MMAP = -1, -2, -3  # malloc.h: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD


def keep_freed() -> None:
    """Let this process keep what it frees, up to 256 MiB; where the C library has no such settings, nothing is done."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for setting, size in ((_MMAP, 32 << 20), (_TRIM, 256 << 20), (_PAD, 16 << 20)):
            library.mallopt(setting, size)
