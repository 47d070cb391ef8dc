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
from whale_nebula.gateway.site import UNLISTED, Site
from whale_nebula.security import CurrentCredentials, Peer, files
from whale_nebula.security.allowance import format_bytes
from whale_nebula.security.chain import encode_canonical
from whale_nebula.security.identity import GATEWAY, WORKER, Call, Identity, check_call
from whale_nebula.transport.grpc.connection import Lane
from whale_nebula.transport.grpc.limits import TokenBucket
from whale_nebula.transport.grpc.listener import Knock, Visitor
from whale_nebula.transport.grpc.options import LANES_WITHOUT_BBR, lanes


class Purpose(Enum):
    """The purpose of a stream."""

    OUT = "a worker of this cluster, for one of another"
    IN = "another gateway, for a worker of its cluster"
    CONTROL = "another gateway, for itself"


class Entry(NamedTuple):
    """An admitted stream: its purpose and its caller. `here` and `there` are the pair, "" for a control stream."""

    purpose: Purpose
    caller: Identity
    guest: Peer | None
    here: str = ""
    there: str = ""


def entry(site: Site, current: CurrentCredentials | None, knock: Knock, visitor: Visitor) -> Entry:
    """Check a request to enter; everything that is not explicitly allowed is denied."""
    if knock.run != site.run:
        raise IdentityError(
            f"this is the gateway of cluster '{site.cluster}' of run '{site.run}'",
            why=f"'{knock.source}' belongs to run '{knock.run}'",
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
    """Admit a request for the gateway's state, which needs only a valid certificate."""
    if current is not None:
        guest = current().trust.check(visitor.certificate, subject="the caller of the health service")
        check_call(guest.identity, Call.HEALTH, site.identity)


def _check_worker(site: Site, name: str, cluster: str | None) -> None:
    """Check that frames may go to and from a worker: one of this cluster, or of one in this gateway's config."""
    identity = Identity.of_worker(site.run, name)
    known = (cluster,) if cluster is not None else tuple(site.gateways)
    listed = [worker for worker in site.workers if cluster_of(worker) == identity.cluster]
    if identity.role != WORKER or identity.cluster not in known or (listed and name not in listed):
        raise NotAllowedError(
            f"this gateway does not relay frames of '{name}'",
            where=site.identity.worker,
            why=f"it connects {', '.join(listed) or site.cluster} with workers of {', '.join(site.gateways)}"
            if not listed
            else f"the workers of cluster '{identity.cluster}' are {', '.join(listed)}",
            mend="use the same list of workers in all clusters, and restart this gateway",
        )


_SECONDS = 10.0


class FinalErrors:
    """Errors that end a pair of workers, by the requesting and the requested worker. They are stored for some seconds,
    within which a worker retries, so that a new run with the same workers is not affected.

    >>> final_errors = FinalErrors(now=lambda: 0.0)
    >>> final_errors.give("npu/0", "gpu/0", NebulaError("worker 'gpu/0' is gone"))
    True
    >>> final_errors.find("npu/0", "gpu/0").what, final_errors.find("npu/1", "gpu/0")
    ("worker 'gpu/0' is gone", None)

    A lost worker sends no requests; an error stored for it would be delivered to the worker that replaces it.

    >>> final_errors.forget("npu/0")
    >>> final_errors.give("npu/0", "gpu/0", NebulaError("worker 'gpu/0' is gone"))
    False
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._given: dict[tuple[str, str], tuple[NebulaError, float]] = {}
        self._gone: set[str] = set()

    def give(self, asks: str, wanted: str, error: NebulaError) -> bool:
        """Store an error for the next request of `asks` for `wanted`; returns False if `asks` is lost."""
        with self._lock:
            if asks in self._gone:
                return False
            self._given[asks, wanted] = error, self._now() + _SECONDS
            return True

    def remove_old(self, workers: Set[str]) -> None:
        """Drop expired errors, and lost workers that are not in `workers`."""
        with self._lock:
            self._gone &= workers
            now = self._now()
            self._given = {pair: given for pair, given in self._given.items() if now < given[1]}

    def find(self, asks: str, wanted: str, *, once: bool = False) -> NebulaError | None:
        """The stored error for `asks`, if any. With `once` it is removed, as `asks` gives up after receiving it."""
        with self._lock:
            error, until = self._given.get((asks, wanted), (None, 0.0))
            if once:
                self._given.pop((asks, wanted), None)
            return error if self._now() < until else None

    def forget(self, worker: str) -> None:
        """Note that a worker is lost, and drop the errors that are stored for it."""
        with self._lock:
            self._gone.add(worker)
            self._given = {pair: given for pair, given in self._given.items() if pair[0] != worker}

    def asks(self, worker: str) -> None:
        """Note that a worker is alive, as it sends requests."""
        with self._lock:
            self._gone.discard(worker)

    def back(self, worker: str) -> None:
        """Note that a worker can be reached again."""
        with self._lock:
            self._given = {pair: given for pair, given in self._given.items() if pair[1] != worker}


def raise_file_limit() -> None:
    """Raise this process's limit of open files to the maximum, if permitted."""
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


_TRIM, _PAD, _MMAP = -1, -2, -3  # malloc.h: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD


def keep_freed() -> None:
    """Let this process keep freed memory, up to 256 MiB; without effect if the C library has no such settings."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for setting, size in ((_MMAP, 32 << 20), (_TRIM, 256 << 20), (_PAD, 16 << 20)):
            library.mallopt(setting, size)


_SPARE = 4
_BURST, _A_SECOND = 100, 2.0  # connections of pairs, each of which is written to the audit log
_LANES_A_CONNECTION = 16.0  # a further lane is not recorded


class Quota:
    """Limit of one identity's streams, `most` at a time. The rate limit allows twice the connections of all its pairs
    plus 100 at once, then 2 a second.
    """

    def __init__(self, who: str, pairs: int) -> None:
        self.most = most_streams(pairs)
        self._who = who
        self._lock = threading.Lock()
        self._lanes: list[Lane] = []
        self._opens = TokenBucket(_BURST + 2 * pairs, _A_SECOND)

    def take(self, lane: Lane, number: int) -> None:
        """Count one more stream, the lane of this number of its connection; raises above the limit."""
        with self._lock:
            self._lanes = [each for each in self._lanes if not each.over]
            if len(self._lanes) >= self.most:
                raise TransportError(f"{self._who} has {self.most} streams here, which is the limit")
            if not self._opens.take(1.0 if number == 0 else 1.0 / _LANES_A_CONNECTION):
                raise TransportError(f"too many new streams of {self._who}", why="each is recorded in the audit log")
            self._lanes.append(lane)

    @property
    def unused(self) -> bool:
        """Whether the identity has had no stream for long enough to drop the record."""
        with self._lock:
            return self._opens.full and all(lane.over for lane in self._lanes)


class Quotas:
    """The quotas of a gateway's callers, by the identities in their certificates."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = threading.Lock()
        self._quotas: dict[str, Quota] = {}

    def take(self, caller: Identity, lane: Lane, number: int) -> None:
        """Count one more stream of a caller; raises above the caller's limit. Without authentication, all callers of a
        cluster share one limit.
        """
        who = caller.uri if self._site.files is not None or caller.role == GATEWAY else caller.cluster
        pairs = pairs_of(self._site, caller) * (UNLISTED if who == caller.cluster else 1)
        with self._lock:
            quota = self._quotas.setdefault(who, Quota(caller.worker, pairs))
        quota.take(lane, number)

    def remove_unused(self) -> None:
        """Drop records of callers that have not connected for a while."""
        with self._lock:
            self._quotas = {who: quota for who, quota in self._quotas.items() if not quota.unused}


def most_streams(pairs: int) -> int:
    """The maximum number of streams for this many pairs."""
    return max(lanes(), LANES_WITHOUT_BBR) * pairs + _SPARE


def pairs_of(site: Site, caller: Identity) -> int:
    """The number of pairs that a caller may need streams for: a worker of this cluster, or another gateway."""
    if caller.role == GATEWAY:
        return site.count(site.cluster) * site.count(caller.cluster)
    return sum(site.count(cluster) for cluster in site.gateways)


def connections(site: Site) -> int:
    """The maximum number of connections: the total of all callers' streams, so that no caller can exhaust it."""
    own = Identity.of_worker(site.run, f"{site.cluster}/0")
    gateways = [Identity(site.run, cluster, GATEWAY) for cluster in site.gateways]
    of_own, of_gateways = most_streams(pairs_of(site, own)), [most_streams(pairs_of(site, each)) for each in gateways]
    return site.count(site.cluster) * of_own + sum(of_gateways) + 4 * len(gateways)


# ---------------------------------------------------------------------- bytes of accounts by day
SAVE_SECONDS = 5.0
_LOG = logging.getLogger("whale_nebula.gateway")


class Traffic:
    """The counts of a gateway. Thread-safe.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "traffic.json")
    ...     traffic = Traffic(path)
    ...     traffic.count("ana", 1000)
    ...     traffic.save()
    ...     Traffic(path).find("ana")
    1000
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = files.now) -> None:
        self._path, self._now = path, now
        self._lock = threading.Lock()
        self._changed = self._failed = False
        self._saved = float("-inf")
        self._day, self._counts = self._read()
        self._turn_day()

    def _read(self) -> tuple[date, dict[str, int]]:
        if not self._path.exists():
            return self._now().date(), {}
        try:
            content = json.loads(self._path.read_text("utf-8"))
            return date.fromisoformat(content["day"]), {
                str(who): int(size) for who, size in dict(content["bytes"]).items()
            }
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise AuditError(
                "cannot read the traffic of accounts today",
                where=str(self._path),
                why=str(error),
                mend=f"mv {self._path} {self._path}.broken, which resets the counts of today to 0",
            ) from None

    def meter(self, guest: Peer | None) -> Callable[[int], None]:
        """The byte counter for an identity's account; without an account it counts nothing."""
        return (lambda size: None) if guest is None or not guest.account else partial(self.count, guest.account)

    def count(self, account: str, size: int) -> None:
        """Add bytes that were sent to or received from an account."""
        with self._lock:
            self._counts[account] = self._counts.get(account, 0) + size
            self._changed = True

    def find(self, account: str) -> int:
        """The bytes of an account, today."""
        with self._lock:
            self._turn_day()
            return self._counts.get(account, 0)

    def _turn_day(self) -> None:
        """Reset the counts on a later day; a clock that was set back does not reset them."""
        day = self._now().date()
        if day > self._day:
            self._day, self._counts, self._changed = day, {}, True

    def check(self, guest: Peer | None) -> None:
        """Check whether an identity may send more today, by its account's certificate."""
        most = None if guest is None else guest.allowance.line
        if guest is None or most is None:
            return
        count = self.find(guest.account)
        if count >= most:
            begin = self._now().replace(hour=0, minute=0, second=0) + timedelta(days=1)
            raise NotAllowedError(
                f"account {guest.account} has used {format_bytes(count)} of its {format_bytes(most)} a day over "
                "the WAN link",
                why=f"it can continue at {files.format_time(begin)}, or if the owner raises the limit",
                mend=f"whale-nebula accounts limit {guest.account} --line SIZE, and then log in again",
            )

    def save(self, pause: float = 0.0) -> None:
        """Write changed counts, at most once in `pause` seconds."""
        with self._lock:
            if not self._changed or time.monotonic() - self._saved < pause:
                return
            self._turn_day()
            content, self._changed, self._saved = (
                {"day": self._day.isoformat(), "bytes": self._counts},
                False,
                time.monotonic(),
            )
            data = encode_canonical(content) + b"\n"
        try:
            files.write(self._path, data, files.SECRET)
            self._failed = False
        except CredentialsError as error:
            with self._lock:
                self._changed = True
            if not self._failed:
                _LOG.error("cannot store the traffic of accounts today, which is lost if this process stops: %s", error)
            self._failed = True
