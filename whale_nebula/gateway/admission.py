"""Admission to a gateway: the purpose of each connection (a local worker, a gateway for a pair, or a gateway's control
stream), the quota of each authenticated identity (its concurrent streams, and the rate at which it opens them), and the
daily limit of each account on the bytes of its workers.

Days are in UTC. The bytes are stored in a file next to the audit log, so that they outlive the gateway; after a crash
those of the last seconds may be missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import resource
import threading
import time
from collections.abc import Callable, Set
from datetime import date, datetime, timedelta
from enum import Enum
from functools import partial
from pathlib import Path
from typing import NamedTuple

from whale_nebula.config.schema import cluster_of
from whale_nebula.errors import (
    AuditError,
    CredentialsError,
    IdentityError,
    NebulaError,
    NotAllowedError,
    TransportError,
)
from whale_nebula.gateway.control import MAX_CONTROL_STREAMS
from whale_nebula.gateway.settings import ASSUMED_WORKERS, GatewaySettings
from whale_nebula.security import CurrentCredentials, Peer, files
from whale_nebula.security.allowance import format_bytes
from whale_nebula.security.chain import encode_canonical
from whale_nebula.security.identity import GATEWAY, WORKER, Call, Identity, check_call
from whale_nebula.transport.grpc.connection import Lane
from whale_nebula.transport.grpc.limits import TokenBucket
from whale_nebula.transport.grpc.listener import Dialler, StreamRequest
from whale_nebula.transport.grpc.options import LANES_WITHOUT_BBR, count_lanes


class Purpose(Enum):
    """The purpose of a stream."""

    OUT = "a worker of this cluster, for one of another"
    IN = "another gateway, for a worker of its cluster"
    CONTROL = "another gateway, for itself"


class Admission(NamedTuple):
    """An admitted stream: its purpose and its caller. `here` and `there` are the pair, "" for a control stream."""

    purpose: Purpose
    caller: Identity
    certified_peer: Peer | None
    here: str = ""
    there: str = ""


def admit_stream(
    settings: GatewaySettings, current: CurrentCredentials | None, request: StreamRequest, dialler: Dialler
) -> Admission:
    """The purpose and the caller of a requested stream; everything that is not explicitly allowed is refused."""
    if request.run != settings.run:
        raise IdentityError(
            f"this is the gateway of cluster '{settings.cluster}' of run '{settings.run}'",
            why=f"'{request.source}' belongs to run '{request.run}'",
            mend="compare 'run' and the addresses in the clusters' configs",
        )
    source = Identity.of_worker(request.run, request.source)
    purpose = Purpose.CONTROL if source.role == GATEWAY else Purpose.IN
    if source.cluster == settings.cluster:
        purpose = Purpose.OUT
    caller = Identity(settings.run, source.cluster, GATEWAY) if purpose is Purpose.IN else source
    certified_peer = None if current is None else current().trust.check(dialler.certificate, caller)
    call = Call.AUDIT_HEADS if purpose is Purpose.CONTROL else Call.RELAY
    check_call(caller, call, settings.identity)
    if purpose is Purpose.CONTROL:
        if caller.cluster not in settings.gateways:
            raise NotAllowedError(
                f"this gateway has no route to cluster '{caller.cluster}'",
                where=settings.identity.worker,
                why=f"its config has the clusters {', '.join(sorted({settings.cluster, *settings.gateways}))}",
                mend="use the same clusters in all configs, and restart this gateway",
            )
        return Admission(purpose, caller, certified_peer)
    here, there = (request.source, request.destination)[:: 1 if purpose is Purpose.OUT else -1]
    _check_worker(settings, here, settings.cluster)
    _check_worker(settings, there, None)
    return Admission(purpose, caller, certified_peer, here, there)


def admit_health_request(current: CurrentCredentials | None, settings: GatewaySettings, dialler: Dialler) -> None:
    """Admit a request for the gateway's state, which needs only a valid certificate."""
    if current is not None:
        certified_peer = current().trust.check(dialler.certificate, subject="the caller of the health service")
        check_call(certified_peer.identity, Call.HEALTH, settings.identity)


def _check_worker(settings: GatewaySettings, name: str, cluster: str | None) -> None:
    """Check that frames may go to and from a worker: one of this cluster, or of one in this gateway's config."""
    identity = Identity.of_worker(settings.run, name)
    known = (cluster,) if cluster is not None else tuple(settings.gateways)
    listed = [worker for worker in settings.workers if cluster_of(worker) == identity.cluster]
    if identity.role != WORKER or identity.cluster not in known or (listed and name not in listed):
        raise NotAllowedError(
            f"this gateway does not relay frames of '{name}'",
            where=settings.identity.worker,
            why=f"it connects {', '.join(listed) or settings.cluster} with workers of {', '.join(settings.gateways)}"
            if not listed
            else f"the workers of cluster '{identity.cluster}' are {', '.join(listed)}",
            mend="use the same list of workers in all clusters, and restart this gateway",
        )


_STORED_SECONDS = 10.0


class PairErrors:
    """Errors that end a pair of workers, by the requesting and the requested worker. They are stored for some seconds,
    within which a worker retries, so that a new run with the same workers is not affected.

    >>> pair_errors = PairErrors(now=lambda: 0.0)
    >>> pair_errors.store("npu/0", "gpu/0", NebulaError("worker 'gpu/0' is gone"))
    True
    >>> pair_errors.find("npu/0", "gpu/0").what, pair_errors.find("npu/1", "gpu/0")
    ("worker 'gpu/0' is gone", None)

    A lost worker sends no requests; an error stored for it would be delivered to the worker that replaces it.

    >>> pair_errors.mark_lost("npu/0")
    >>> pair_errors.store("npu/0", "gpu/0", NebulaError("worker 'gpu/0' is gone"))
    False
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._errors: dict[tuple[str, str], tuple[NebulaError, float]] = {}
        self._lost_workers: set[str] = set()

    def store(self, requester: str, requested: str, error: NebulaError) -> bool:
        """Store an error for the next request of `requester` for `requested`; returns False if `requester` is lost."""
        with self._lock:
            if requester in self._lost_workers:
                return False
            self._errors[requester, requested] = error, self._now() + _STORED_SECONDS
            return True

    def remove_old(self, workers: Set[str]) -> None:
        """Drop expired errors, and lost workers that are not in `workers`."""
        with self._lock:
            self._lost_workers &= workers
            now = self._now()
            self._errors = {pair: stored for pair, stored in self._errors.items() if now < stored[1]}

    def find(self, requester: str, requested: str, *, remove: bool = False) -> NebulaError | None:
        """The stored error for `requester`, if any. With `remove` it is removed, as `requester` then gives up."""
        with self._lock:
            error, until = self._errors.get((requester, requested), (None, 0.0))
            if remove:
                self._errors.pop((requester, requested), None)
            return error if self._now() < until else None

    def mark_lost(self, worker: str) -> None:
        """Note that a worker is lost, and drop the errors that are stored for it."""
        with self._lock:
            self._lost_workers.add(worker)
            self._errors = {pair: stored for pair, stored in self._errors.items() if pair[0] != worker}

    def mark_alive(self, worker: str) -> None:
        """Note that a worker is alive, as it sends requests."""
        with self._lock:
            self._lost_workers.discard(worker)

    def clear_errors_about(self, worker: str) -> None:
        """Drop the errors about a worker that can be reached again."""
        with self._lock:
            self._errors = {pair: stored for pair, stored in self._errors.items() if pair[1] != worker}


def raise_file_limit() -> None:
    """Raise this process's limit of open files to the maximum, if permitted."""
    with contextlib.suppress(OSError, ValueError):
        _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))


_TRIM, _PAD, _MMAP = -1, -2, -3  # malloc.h: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD


def keep_freed_memory() -> None:
    """Let this process keep freed memory, up to 256 MiB; without effect if the C library has no such settings."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for setting, size in ((_MMAP, 32 << 20), (_TRIM, 256 << 20), (_PAD, 16 << 20)):
            library.mallopt(setting, size)


_SPARE_STREAMS = 4
_BURST, _A_SECOND = 100, 2.0  # connections of pairs, each of which is written to the audit log
_LANES_A_CONNECTION = 16.0  # a further lane is not recorded


class Quota:
    """Limit of one identity's streams, `max_streams` at a time. The rate limit allows twice the connections of all its
    pairs plus 100 at once, then 2 a second.
    """

    def __init__(self, caller_name: str, pairs: int) -> None:
        self.max_streams = find_max_streams(pairs)
        self._caller_name = caller_name
        self._lock = threading.Lock()
        self._lanes: list[Lane] = []
        self._opens = TokenBucket(_BURST + 2 * pairs, _A_SECOND)

    def take(self, lane: Lane, number: int) -> None:
        """Count one more stream, the lane of this number of its connection; raises above the limit."""
        with self._lock:
            self._lanes = [each for each in self._lanes if not each.is_over]
            if len(self._lanes) >= self.max_streams:
                raise TransportError(f"{self._caller_name} has {self.max_streams} streams here, which is the limit")
            if not self._opens.take(1.0 if number == 0 else 1.0 / _LANES_A_CONNECTION):
                raise TransportError(
                    f"too many new streams of {self._caller_name}", why="each is recorded in the audit log"
                )
            self._lanes.append(lane)

    @property
    def is_unused(self) -> bool:
        """Whether the identity has had no stream for long enough to drop the record."""
        with self._lock:
            return self._opens.is_full and all(lane.is_over for lane in self._lanes)


class Quotas:
    """The quotas of a gateway's callers, by the identities in their certificates."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._quotas: dict[str, Quota] = {}

    def take(self, caller: Identity, lane: Lane, number: int) -> None:
        """Count one more stream of a caller; raises above the caller's limit. Without authentication, all callers of a
        cluster share one limit.
        """
        caller_name = caller.uri if self._settings.files is not None or caller.role == GATEWAY else caller.cluster
        pairs = count_pairs(self._settings, caller) * (ASSUMED_WORKERS if caller_name == caller.cluster else 1)
        with self._lock:
            quota = self._quotas.setdefault(caller_name, Quota(caller.worker, pairs))
        quota.take(lane, number)

    def remove_unused(self) -> None:
        """Drop records of callers that have not connected for a while."""
        with self._lock:
            self._quotas = {caller_name: quota for caller_name, quota in self._quotas.items() if not quota.is_unused}


def find_max_streams(pairs: int) -> int:
    """The maximum number of streams for this many pairs."""
    return max(count_lanes(), LANES_WITHOUT_BBR) * pairs + _SPARE_STREAMS


def count_pairs(settings: GatewaySettings, caller: Identity) -> int:
    """The number of pairs that a caller may need streams for: a worker of this cluster, or another gateway."""
    if caller.role == GATEWAY:
        return settings.count_workers(settings.cluster) * settings.count_workers(caller.cluster)
    return sum(settings.count_workers(cluster) for cluster in settings.gateways)


def count_connections(settings: GatewaySettings) -> int:
    """The maximum number of connections: the total of all callers' streams, so that no caller can exhaust it."""
    own_worker = Identity.of_worker(settings.run, f"{settings.cluster}/0")
    gateways = [Identity(settings.run, cluster, GATEWAY) for cluster in settings.gateways]
    worker_streams = settings.count_workers(settings.cluster) * find_max_streams(count_pairs(settings, own_worker))
    gateway_streams = sum(find_max_streams(count_pairs(settings, gateway)) for gateway in gateways)
    return worker_streams + gateway_streams + MAX_CONTROL_STREAMS * len(gateways)


# ---------------------------------------------------------------------- bytes of accounts by day
SAVE_SECONDS = 5.0
_LOG = logging.getLogger("whale_nebula.gateway")


def find_account(certificate: bytes) -> str:
    """The account that a certificate of this run names, also one that is refused; "" if it names none."""
    with contextlib.suppress(IdentityError):
        return files.read_peer(files.parse_certificate(certificate, "a refused caller")).account
    return ""


class Traffic:
    """The bytes that each account has sent and received today through a gateway, kept in a file. Thread-safe.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "traffic.json")
    ...     traffic = Traffic(path)
    ...     traffic.count("ana", 1000)
    ...     traffic.save()
    ...     Traffic(path).find_bytes("ana")
    1000
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = files.now) -> None:
        self._path, self._now = path, now
        self._lock = threading.Lock()
        self._changed = self._failed = False
        self._saved_at = float("-inf")
        self._day, self._counts = self._read()
        self._start_new_day()

    def _read(self) -> tuple[date, dict[str, int]]:
        if not self._path.exists():
            return self._now().date(), {}
        try:
            content = json.loads(self._path.read_text("utf-8"))
            counts = {str(account): int(size) for account, size in dict(content["bytes"]).items()}
            return date.fromisoformat(content["day"]), counts
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise AuditError(
                "cannot read the traffic of accounts today",
                where=str(self._path),
                why=str(error),
                mend=f"mv {self._path} {self._path}.broken, which resets the counts of today to 0",
            ) from None

    def make_meter(self, certified_peer: Peer | None) -> Callable[[int], None]:
        """The function that counts bytes for an identity's account; without an account it counts nothing."""
        return (
            (lambda size: None)
            if certified_peer is None or not certified_peer.account
            else partial(self.count, certified_peer.account)
        )

    def count(self, account: str, size: int) -> None:
        """Add bytes that were sent to or received from an account."""
        with self._lock:
            self._counts[account] = self._counts.get(account, 0) + size
            self._changed = True

    def find_bytes(self, account: str) -> int:
        """The bytes of an account, today."""
        with self._lock:
            self._start_new_day()
            return self._counts.get(account, 0)

    def _start_new_day(self) -> None:
        """Reset the counts on a later day; a clock that was set back does not reset them."""
        day = self._now().date()
        if day > self._day:
            self._day, self._counts, self._changed = day, {}, True

    def check(self, peer: Peer | None) -> None:
        """Raise `NotAllowedError` if an identity's account has used up the bytes of a day in its certificate."""
        limit = None if peer is None else peer.allowance.line
        if peer is None or limit is None:
            return
        count = self.find_bytes(peer.account)
        if count >= limit:
            next_day = self._now().replace(hour=0, minute=0, second=0) + timedelta(days=1)
            raise NotAllowedError(
                f"account {peer.account} has used {format_bytes(count)} of its {format_bytes(limit)} a day over "
                "the WAN link",
                why=f"it can continue at {files.format_time(next_day)}, or if the owner raises the limit",
                mend=f"whale-nebula accounts limit {peer.account} --line SIZE, and then log in again",
            )

    def save(self, pause: float = 0.0) -> None:
        """Write changed counts, at most once in `pause` seconds."""
        with self._lock:
            if not self._changed or time.monotonic() - self._saved_at < pause:
                return
            self._start_new_day()
            self._changed, self._saved_at = False, time.monotonic()
            data = encode_canonical({"day": self._day.isoformat(), "bytes": self._counts}) + b"\n"
        try:
            files.write(self._path, data, files.SECRET)
            self._failed = False
        except CredentialsError as error:
            with self._lock:
                self._changed = True
            if not self._failed:
                _LOG.error("cannot store the traffic of accounts today, which is lost if this process stops: %s", error)
            self._failed = True
