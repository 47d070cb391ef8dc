"""Limits on unauthenticated connections to a port, by source address.

gRPC limits only the total number of connections, so that one source can exhaust it. Here they are counted by source
address. If there are too many, the oldest connections of the address with the most are closed: other addresses keep
theirs, and clients at the same address need only a moment to finish their handshakes. Among addresses with equally many
connections, those of the fullest networks are closed first, and those of addresses with earlier accepted streams last.

The accepted sockets are found among the files of this process (`/dev/fd`), as gRPC does not expose them, and shut down
there, which gRPC treats as the end of the connection. No byte of a stream passes through here.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import unquote

_LOG = logging.getLogger("whale_nebula.transport")
_FILES = "/dev/fd"
_QUIET_SECONDS, _BUSY_SECONDS = 0.2, 0.05  # between two scans


class Limits(NamedTuple):
    """Limits of connections without a stream: their number, in total and of one address, and their age in seconds."""

    total: int = 192
    address: int = 96
    seconds: float = 30.0


class TokenBucket:
    """A thread-safe token bucket: `burst` tokens at once, refilled at `rate` a second.

    >>> clock = iter([0.0, 0.0, 0.0, 0.0, 2.0])
    >>> bucket = TokenBucket(2, 0.5, now=lambda: next(clock))
    >>> [bucket.take() for _ in range(4)]
    [True, True, False, True]
    """

    def __init__(self, burst: float, rate: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._rate, self._now = burst, rate, now
        self._lock = threading.Lock()
        self._tokens, self._updated_at = burst, now()

    def take(self, count: float = 1.0) -> bool:
        """Take tokens if there are enough; returns whether there were."""
        with self._lock:
            now = self._now()
            self._tokens = min(self._burst, self._tokens + (now - self._updated_at) * self._rate)
            self._updated_at = now
            if self._tokens < count:
                return False
            self._tokens -= count
            return True

    @property
    def is_full(self) -> bool:
        """Whether it is full, as a new one would be."""
        with self._lock:
            return self._tokens + (self._now() - self._updated_at) * self._rate >= self._burst


LIMITS = Limits()


class Buckets:
    """Token buckets by name, `most` at a time; further names share one bucket.

    >>> buckets = Buckets(1, 0.0, most=2)
    >>> [buckets.take(name) for name in ("a", "a", "b", "c", "d")]
    [('a', True), ('a', False), ('b', True), ('others', True), ('others', False)]
    """

    def __init__(
        self, burst: float, rate: float, *, most: int = 1000, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst, self._rate, self._most, self._now = burst, rate, most, now
        self._lock = threading.Lock()
        self._buckets: dict[str, TokenBucket] = {}

    def take(self, name: str, count: float = 1.0) -> tuple[str, bool]:
        """Take tokens for a name; returns the name of the bucket that counts them, and whether it had enough."""
        with self._lock:
            if name not in self._buckets and len(self._buckets) >= self._most:
                self._buckets = {name: bucket for name, bucket in self._buckets.items() if not bucket.is_full}
                name = name if len(self._buckets) < self._most else "others"
            if name not in self._buckets:
                self._buckets[name] = TokenBucket(self._burst, self._rate, now=self._now)
            return name, self._buckets[name].take(count)


class Endpoint(NamedTuple):
    """The address of the other end of a connection."""

    host: str
    port: int


def parse_endpoint(peer: str) -> Endpoint | None:
    """The address of the other end of a call, from gRPC's text for it; None if it is not an IP address.

    >>> parse_endpoint("ipv4:10.77.0.2:51022"), parse_endpoint("ipv6:%5B::1%5D:7101"), parse_endpoint("unix:/run/x")
    (Endpoint(host='10.77.0.2', port=51022), Endpoint(host='::1', port=7101), None)
    """
    kind, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    return (
        Endpoint(normalize_address(host.strip("[]")), int(port)) if kind.startswith("ipv") and port.isdigit() else None
    )


def find_surplus(
    idle: Mapping[Endpoint, float], now: float, limits: Limits, known: Container[str] = frozenset()
) -> list[Endpoint]:
    """The connections to close, among those without a stream, by age and number.

    Of each source the newest are kept, and among equal sources those of the emptiest networks. A few connections of a
    `known` source, from which a stream was accepted before, take precedence over all others.

    >>> crowd = {Endpoint("10.0.0.9", port): port / 100 for port in range(3)} | {Endpoint("10.0.0.1", 7): 0.0}
    >>> find_surplus(crowd, 1.0, Limits(total=3, address=2))
    [Endpoint(host='10.0.0.9', port=0)]
    """
    newest_first = sorted(idle, key=lambda end: -idle[end])
    counts: Counter[str] = Counter()
    surplus: list[Endpoint] = []
    ranked: list[tuple[bool, list[int], Endpoint]] = []
    for end in newest_first:
        source, *networks = find_networks(end.host)
        if now - idle[end] > limits.seconds or counts[source] >= limits.address:
            surplus.append(end)
            continue
        newer = [counts[each] for each in (source, *networks)]
        counts.update((source, *networks))
        ranked.append((source not in known or newer[0] >= limits.address // 4, newer, end))
    ranked.sort(key=lambda each: each[:2])  # stable: ordered by time where equal
    return surplus + [end for _, _, end in ranked[limits.total :]]


@functools.lru_cache(1 << 12)
def find_networks(host: str) -> tuple[str, str, str]:
    """The source of a connection, and two networks that one party may own.

    A source is an IPv4 address, or the /64 network of an IPv6 address, which a single host may own.

    >>> find_networks("10.77.0.2"), find_networks("2001:db8:0:100::1")
    (('10.77.0.2/32', '10.77.0.0/24', '10.77.0.0/16'), ('2001:db8:0:100::/64', '2001:db8:0:100::/56', '2001:db8::/48'))
    """
    address = ipaddress.ip_address(host)
    a, b, c = (str(ipaddress.ip_network((address, bits), strict=False)) for bits in _NETWORKS[address.version])
    return a, b, c


_NETWORKS = {4: (32, 24, 16), 6: (64, 56, 48)}
_SOURCES = 4096  # the most that are remembered


class KnownSources:
    """The sources of clients that were accepted, as many as are remembered. Not thread-safe.

    >>> known = KnownSources()
    >>> known.add("10.0.0.9/32")
    >>> "10.0.0.9/32" in known, "10.0.0.1/32" in known
    (True, False)
    """

    def __init__(self) -> None:
        self._sources: dict[str, None] = {}  # the latest last

    def add(self, source: str) -> None:
        """Remember a source, in place of the one that was not seen for longest if there are too many."""
        self._sources.pop(source, None)
        self._sources[source] = None
        if len(self._sources) > _SOURCES:
            del self._sources[next(iter(self._sources))]

    def __contains__(self, source: object) -> bool:
        return source in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)


class ConnectionGuard:
    """Keeps the connections of one port within limits, from `start` to `stop`, in a separate thread."""

    def __init__(self, port: int, limits: Limits) -> None:
        self._port, self._limits = port, limits
        self._lock = threading.Lock()
        self._streams: Counter[Endpoint] = Counter()
        self._idle_since: dict[Endpoint, float] = {}  # when each without a stream was first seen
        self._sources = KnownSources()
        # the remote end by file and inode; None for one that is no accepted connection of this port, or is shut
        self._endpoint_by_file: dict[tuple[int, int], Endpoint | None] = {}
        self._has_failed = False
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._watch_connections, name="nebula-guard", daemon=True)

    def start(self) -> None:
        """Enforce the limits from now on; if a process cannot list its own files, only gRPC's limit applies."""
        if os.path.isdir(_FILES):
            self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop_event.set()

    def add_stream(self, peer: str) -> None:
        """A stream of this peer was accepted: its connection is kept while the stream is open."""
        self._count_stream(peer, 1)

    def remove_stream(self, peer: str) -> None:
        """A stream that was added has ended."""
        self._count_stream(peer, -1)

    def _count_stream(self, peer: str, more: int) -> None:
        end = parse_endpoint(peer)
        if end is None:
            return
        with self._lock:
            self._streams[end] += more
            self._sources.add(find_networks(end.host)[0])
            if not self._streams[end]:
                del self._streams[end]

    def _watch_connections(self) -> None:
        crowded = False
        while not self._stop_event.wait(_BUSY_SECONDS if crowded else _QUIET_SECONDS):
            try:
                crowded = self._close_surplus(time.monotonic()) > self._limits.address // 2
            except Exception:  # no file or memory at present; the thread must continue, or nothing is limited
                crowded = True
                if not self._has_failed:
                    _LOG.warning("cannot check the connections at present", exc_info=True)
                self._has_failed = True
            else:
                self._has_failed = False

    def _close_surplus(self, now: float) -> int:
        """Close surplus connections; returns the number of those without a stream."""
        accepted = self._find_accepted_connections()
        with self._lock:
            idle = {end: self._idle_since.get(end, now) for end in accepted.values() if not self._streams[end]}
            surplus = set(find_surplus(idle, now, self._limits, self._sources))
        for socket_id, end in accepted.items():
            if end in surplus:
                _shut_connection(socket_id[0], self._port, end)
                self._endpoint_by_file[socket_id] = None  # until gRPC closes it, it is not counted as a new one
        self._idle_since = {end: since for end, since in idle.items() if end not in surplus}
        return len(idle)

    def _find_accepted_connections(self) -> dict[tuple[int, int], Endpoint]:
        known: dict[tuple[int, int], Endpoint | None] = {}
        for name in os.listdir(_FILES):
            with contextlib.suppress(OSError):
                file = int(name)
                status = os.fstat(file)
                if stat.S_ISSOCK(status.st_mode):
                    socket_id = file, status.st_ino
                    if socket_id in self._endpoint_by_file:
                        known[socket_id] = self._endpoint_by_file[socket_id]
                    else:
                        with _copy_socket(file) as accepted:
                            known[socket_id] = _find_other_end(accepted, self._port)
        self._endpoint_by_file = known
        return {socket_id: end for socket_id, end in known.items() if end is not None}


def _find_other_end(accepted: socket.socket, port: int) -> Endpoint | None:
    """The remote address of an accepted connection of a port; None for any other socket."""
    if accepted.family in (socket.AF_INET, socket.AF_INET6) and accepted.getsockname()[1] == port:
        host, number, *_ = accepted.getpeername()
        return Endpoint(normalize_address(host), number)
    return None


def _shut_connection(file: int, port: int, end: Endpoint) -> None:
    """Shut down a connection, if the file descriptor was not reused for another one."""
    with contextlib.suppress(OSError), _copy_socket(file) as accepted:
        if _find_other_end(accepted, port) == end:
            accepted.shutdown(socket.SHUT_RDWR)


def _copy_socket(file: int) -> socket.socket:
    """The socket of an open file, under a duplicate descriptor; an `OSError` if it is not usable."""
    copy = os.dup(file)
    try:
        return socket.socket(fileno=copy)
    except BaseException:
        os.close(copy)
        raise


def normalize_address(host: str) -> str:
    """The shortest form of an address; an IPv4-mapped IPv6 address as IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
