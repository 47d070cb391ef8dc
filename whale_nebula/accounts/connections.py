"""The connections of a service whose clients it has not accepted yet, which strangers can open at will.

Their number and their age are bounded. If there are too many, the oldest of the address with the most end first, as at
a gateway's port: a client that sends its request a byte at a time keeps no other client out.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from whale_nebula.transport.grpc.limits import (
    Endpoint,
    KnownSources,
    Limits,
    find_networks,
    find_surplus,
    normalize_address,
)


def find_source(host: str) -> str:
    """The source that the limits of an address count: an IPv4 address, or the /64 network of an IPv6 address.

    >>> find_source("::ffff:10.0.0.1"), find_source("2001:db8::1") == find_source("2001:db8::2")
    ('10.0.0.1/32', True)
    """
    return find_networks(normalize_address(host))[0]


class PendingConnections:
    """The pending connections of a server. Thread-safe."""

    def __init__(self, limits: Limits, now: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._now = limits, now
        self._lock = threading.Lock()
        self._sockets: dict[Endpoint, socket.socket] = {}
        self._opened_at: dict[Endpoint, float] = {}
        self._known_sources = KnownSources()

    def add(self, end: Endpoint, line: socket.socket) -> None:
        """Add a new connection, and close surplus ones."""
        with self._lock:
            self._sockets[end], self._opened_at[end] = line, self._now()
        self.close_surplus()

    def replace(self, end: Endpoint, line: socket.socket) -> bool:
        """Replace the socket of a connection by the one that wraps it; False if the connection was closed meanwhile."""
        with self._lock:
            is_pending = end in self._sockets
            if is_pending:
                self._sockets[end] = line
        return is_pending

    def remove(self, end: Endpoint) -> None:
        """Remove a connection that was accepted, or has ended."""
        with self._lock:
            self._sockets.pop(end, None)
            self._opened_at.pop(end, None)

    def close_surplus(self) -> None:
        """Close connections that are too old or too many."""
        with self._lock:
            for end in find_surplus(self._opened_at, self._now(), self._limits, self._known_sources):
                del self._opened_at[end]
                with contextlib.suppress(OSError):  # the base class's method: the thread that serves it still uses TLS
                    socket.socket.shutdown(self._sockets.pop(end), socket.SHUT_RDWR)

    def note_accepted(self, host: str) -> None:
        """Remember the source of an accepted client, which takes precedence from now on."""
        with self._lock:
            self._known_sources.add(find_source(host))

    def is_known(self, host: str) -> bool:
        """Whether a client of this source was accepted before."""
        with self._lock:
            return find_source(host) in self._known_sources
