"""The public port of a gateway, if accounts also log in and read data there.

The first TLS message of a client (ClientHello) contains the requested protocol (ALPN). It is peeked at and left in the
socket: TLS is not terminated here. Connections for logins and data are handed over, open, to their services on this
host; bytes of links are forwarded to gRPC, which listens at an internal socket. All others are refused, and logged.
One thread does all of this: an unauthenticated client occupies one of the limited connections for some seconds. All
sizes in a ClientHello are checked before they are used, and a ClientHello in many records costs no more to read than
one in a single record. Bytes are forwarded in parts, one connection after the other, so that none blocks another; one
side is read only as fast as the other side accepts.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from whale_nebula.config.place import split_address
from whale_nebula.errors import NebulaError, NotAllowedError, PlaintextError, RemoteProtocolError, TransportError
from whale_nebula.transport.grpc.limits import normalize_address
from whale_nebula.transport.handover import COMMANDS, NOUNS, hand_over

HELLO_SECONDS = 5.0
"""Timeout of a first message."""
_LINK_PROTOCOLS = ("h2", "grpc-exp")
_TICK_SECONDS, _STOP_SECONDS = 0.2, 1.0
_MAX_ACCEPTS, _BACKLOG = 64, 512
_MAX_QUEUED_REFUSALS = 256
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - accepted in configs
# Alerts of TLS: no_application_protocol, internal_error, decode_error.
_NO_PROTOCOL, _NO_SERVICE, _DECODE_ERROR = 120, 80, 50
_LOG = logging.getLogger("whale_nebula.gateway")


@dataclass
class _PendingConnection:
    """A connection whose protocol is not known yet."""

    connection: socket.socket
    peer: str
    deadline: float
    size: int = 0


class Front:
    """Public listener, from `open` to `stop`. `services` are the sockets for connections that are handed over, by
    protocol; `on_refused(address, error)` is called for refusals, in a separate thread.
    """

    def __init__(
        self, address: str, services: Mapping[str, Path], on_refused: Callable[[str, NebulaError], None]
    ) -> None:
        self._address, self._services, self._on_refused = address, services, on_refused
        self._poll = Poll()
        self._listening: list[socket.socket] = []
        self._pending: dict[int, _PendingConnection] = {}  # by their files, the oldest first
        self._pipes: set[Pipe] = set()
        self._peers: dict[str, str] = {}  # the remote end of each connection to gRPC, by the name of our end
        self._refusal_queue: queue.Queue[tuple[str, NebulaError] | None] = queue.Queue(_MAX_QUEUED_REFUSALS)
        self._folder, self._grpc_socket = "", -1  # a file descriptor of the socket at which gRPC listens
        self._max_connections, self._unlogged, self._paused_until = 0, 0, 0.0
        self._stop_event = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name="nebula-front", daemon=True),
            threading.Thread(target=self._log_refusals, name="nebula-front-notes", daemon=True),
        ]

    # ------------------------------------------------------------------ used by the listener behind
    def open(self, max_connections: int) -> tuple[str, int]:
        """Bind the public port; returns the address for gRPC, and the port."""
        self._max_connections = max_connections
        self._listening = _open_sockets(*split_address(self._address))
        self._folder = tempfile.mkdtemp(prefix="whale-nebula-")
        return f"unix:{self._folder}/links", int(self._listening[0].getsockname()[1])

    def start(self) -> None:
        """Begin to accept connections. The internal socket is unlinked, so that no other process can connect to it."""
        self._grpc_socket = os.open(f"{self._folder}/links", os.O_PATH)
        shutil.rmtree(self._folder, ignore_errors=True)
        for each in self._listening:
            each.setblocking(False)
            self._poll.watch(each, select.EPOLLIN, partial(self._accept, each))
        for thread in self._threads:
            thread.start()

    def find_peer(self, name: str) -> str:
        """The remote address of a connection, by gRPC's name of our end."""
        return self._peers.get(name, name)

    def stop(self) -> None:
        """Refuse new connections, and end existing ones once everything is sent, after at most a second."""
        self._stop_event.set()
        if self._threads[0].ident is not None:
            self._threads[0].join(2 * _STOP_SECONDS + _TICK_SECONDS)
            with contextlib.suppress(queue.Full):  # the disk is blocked, and so is the thread that writes to it
                self._refusal_queue.put(None, timeout=_STOP_SECONDS)
            self._threads[1].join(_STOP_SECONDS)
        self._poll.close()
        for each in self._listening:
            each.close()
        if self._grpc_socket >= 0:
            os.close(self._grpc_socket)
            self._grpc_socket = -1
        elif self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        while not self._stop_event.is_set():
            try:
                self._poll.handle(_TICK_SECONDS)
                self._check_timeouts(time.monotonic())
            except Exception:  # the next iteration may succeed, and must take place
                _LOG.exception("error while serving the public port")
        for each in self._listening:
            self._poll.unwatch(each)
            each.close()
        for pending in list(self._pending.values()):
            self._drop(pending)
        end = time.monotonic() + _STOP_SECONDS
        while self._pipes and time.monotonic() < end:
            self._poll.handle(_TICK_SECONDS)
        for pipe in list(self._pipes):
            pipe.close()

    def _check_timeouts(self, now: float) -> None:
        """End connections without a first message in time, and accept connections again after a pause."""
        while self._pending and (pending := next(iter(self._pending.values()))).deadline < now:
            if pending.size:
                error = TransportError(
                    "incomplete TLS ClientHello", why=f"it did not arrive within {HELLO_SECONDS:g} s"
                )
                self._refuse(pending, error, _DECODE_ERROR)
            else:
                self._drop(pending)
        if self._paused_until and now > self._paused_until:
            self._paused_until = 0.0
            for each in self._listening:
                self._poll.watch(each, select.EPOLLIN, partial(self._accept, each))

    def _accept(self, listening: socket.socket, events: int) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                connection, end = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    self._paused_until = time.monotonic() + _TICK_SECONDS
                    for each in self._listening:
                        self._poll.unwatch(each)
                    return
                continue  # it has ended already
            if len(self._pending) + len(self._pipes) >= self._max_connections:
                connection.close()
                continue
            connection.setblocking(False)
            pending = _PendingConnection(connection, format_peer(end[0], end[1]), time.monotonic() + HELLO_SECONDS)
            self._pending[connection.fileno()] = pending
            events_to_watch = select.EPOLLIN | select.EPOLLRDHUP
            self._poll.watch(connection, events_to_watch, partial(self._read_first_message, pending))

    def _read_first_message(self, pending: _PendingConnection, events: int) -> None:
        """Read more of a first message, or its end."""
        try:
            data = pending.connection.recv(MAX_HELLO_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            self._drop(pending)
            return
        pending.size = len(data)
        try:
            hello = read_hello(data)
        except NebulaError as error:
            self._refuse(pending, error, _DECODE_ERROR)
            return
        if not isinstance(hello, int):
            self._route(pending, hello)
        elif events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR) or not data:
            if data:
                self._refuse(pending, TransportError("the connection ended within its TLS ClientHello"), _DECODE_ERROR)
            else:
                self._drop(pending)
        else:  # wait until so many bytes have arrived
            pending.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, hello)

    def _route(self, pending: _PendingConnection, protocols: tuple[str, ...]) -> None:
        """Route a connection by its protocol (ALPN); one that offers two is refused."""
        usable = {
            "" if each in _LINK_PROTOCOLS else each
            for each in protocols
            if each in _LINK_PROTOCOLS or each in self._services
        }
        if len(usable) != 1:
            offered = ", ".join(repr(each)[:40] for each in protocols[:4]) or "none"
            what = "the client offers several protocols" if usable else "the client offers no supported protocol"
            self._refuse(pending, NotAllowedError(what, why=f"it offers {offered}"), _NO_PROTOCOL)
            return
        pending.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        (protocol,) = usable
        try:
            if protocol:
                hand_over(pending.connection, self._services[protocol])
                self._drop(pending)
            else:
                self._forward_to_grpc(pending)
        except OSError as error:
            noun, mend = (NOUNS[protocol], COMMANDS[protocol]) if protocol else ("links", None)
            why = error.strerror or str(error)
            self._refuse(pending, TransportError(f"no service for {noun} is running", why=why, mend=mend), _NO_SERVICE)

    def _forward_to_grpc(self, pending: _PendingConnection) -> None:
        inner, name = socket.socket(socket.AF_UNIX), ""
        try:
            inner.setblocking(False)
            inner.bind("")  # the kernel gives it a name, which gRPC reports
            name = f"unix-abstract:{inner.getsockname()[1:].decode('ascii')}"
            self._peers[name] = pending.peer
            inner.connect(f"/proc/self/fd/{self._grpc_socket}")
            pending.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            self._peers.pop(name, None)
            inner.close()
            raise
        self._forget(pending)

        def end() -> None:
            self._peers.pop(name, None)
            self._pipes.discard(pipe)

        pipe = Pipe(self._poll, pending.connection, inner, end)
        self._pipes.add(pipe)

    def _forget(self, pending: _PendingConnection) -> None:
        self._poll.unwatch(pending.connection)
        self._pending.pop(pending.connection.fileno(), None)

    def _drop(self, pending: _PendingConnection) -> None:
        self._forget(pending)
        pending.connection.close()

    def _refuse(self, pending: _PendingConnection, error: NebulaError, alert: int) -> None:
        """End a connection with a TLS alert of the reason, and log it."""
        try:
            self._refusal_queue.put_nowait((pending.peer.rpartition(":")[0], error))
        except queue.Full:
            self._unlogged += 1
        with contextlib.suppress(OSError):
            pending.connection.recv(MAX_HELLO_BYTES)  # closing with unread data would discard the alert
            pending.connection.send(bytes([21, 3, 3, 0, 2, 2, alert]))
            pending.connection.shutdown(socket.SHUT_WR)
        self._drop(pending)

    def _log_refusals(self) -> None:
        """Report refusals in a separate thread, as writing may wait for the disk and the public port must not."""
        while (refusal := self._refusal_queue.get()) is not None:
            lost, self._unlogged = self._unlogged, 0
            try:
                self._on_refused(*refusal)
                if lost:
                    self._on_refused("others", TransportError(f"{lost} more refusals were not recorded"))
            except Exception:
                _LOG.exception("cannot record a refusal")


def format_peer(host: str, port: int) -> str:
    """The remote end of a connection in gRPC's notation.

    >>> format_peer("::ffff:10.77.0.2", 51022), format_peer("::1", 7101)
    ('ipv4:10.77.0.2:51022', 'ipv6:[::1]:7101')
    """
    plain = normalize_address(host)
    return f"ipv6:[{plain}]:{port}" if ":" in plain else f"ipv4:{plain}:{port}"


def _open_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at a host, on all its addresses; at all of this host if it is a wildcard, as gRPC does."""
    if host in _WILDCARDS and socket.has_dualstack_ipv6():
        return [socket.create_server(("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)]
    listening: list[socket.socket] = []
    try:
        for family, _, _, _, end in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            at = (end[0], listening[0].getsockname()[1] if listening and not port else end[1], *end[2:])
            listening.append(socket.create_server(at, family=family, backlog=_BACKLOG))
    except OSError:
        for each in listening:
            each.close()
        raise
    return listening


# ---------------------------------------------------------------------- the first message of TLS
MAX_HELLO_BYTES = 16 << 10
"""The largest first message, with the headers of its records."""
_MAX_RECORDS = 8
_HANDSHAKE, _CLIENT_HELLO, _ALPN = 22, 1, 16
_RECORD_HEADER, _MESSAGE_HEADER = 5, 4


def read_hello(data: bytes) -> tuple[str, ...] | int:
    """The protocols that a first message offers; or, if it is incomplete, the number of bytes that are needed to
    continue.

    >>> read_hello(b""), read_hello(bytes([22, 3, 1, 1, 0]))
    (5, 261)
    """
    message, at = b"", 0
    for _ in range(_MAX_RECORDS):
        if data[at : at + 1] not in (b"", bytes([_HANDSHAKE])):
            raise (
                PlaintextError("the connection is not TLS")
                if not at
                else _hello_error("it has a record of another type")
            )
        if len(data) < at + _RECORD_HEADER:
            return at + _RECORD_HEADER
        size = int.from_bytes(data[at + 3 : at + 5])
        if data[at + 1] != 3 or not 0 < size <= 1 << 14:
            raise _hello_error("it has an invalid record")
        end = at + _RECORD_HEADER + size
        if end > MAX_HELLO_BYTES:
            raise _hello_error(f"it has more than {MAX_HELLO_BYTES} bytes")
        if len(data) < end:
            return end
        message, at = message + data[at + _RECORD_HEADER : end], end
        if len(message) >= _MESSAGE_HEADER:
            message_size = _MESSAGE_HEADER + int.from_bytes(message[1:4])
            if message[0] != _CLIENT_HELLO or message_size > MAX_HELLO_BYTES:
                raise _hello_error("it is another message, or too large")
            if len(message) >= message_size:
                return _read_protocols(message, message_size)
    raise _hello_error(f"it has more than {_MAX_RECORDS} records")


def _hello_error(why: str) -> RemoteProtocolError:
    return RemoteProtocolError("invalid TLS ClientHello", why=why)


class _Reader:
    """Reads parts of a message one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    @property
    def remaining(self) -> int:
        return len(self.data) - self.at

    def take(self, size: int) -> bytes:
        if size > self.remaining:
            raise _hello_error("a length does not match the data")
        self.at += size
        return self.data[self.at - size : self.at]

    def take_number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def take_vector(self, size: int) -> bytes:
        """A field with a length prefix of this size."""
        return self.take(self.take_number(size))


def _read_protocols(message: bytes, message_size: int) -> tuple[str, ...]:
    if len(message) != message_size:
        raise _hello_error("its record contains further data")
    reader = _Reader(message[_MESSAGE_HEADER:])
    reader.take(2 + 32)  # version, random number
    session, suites, compressions = reader.take_vector(1), reader.take_vector(2), reader.take_vector(1)
    if len(session) > 32 or not suites or len(suites) % 2 or not compressions:
        raise _hello_error("it has invalid fields")
    extensions = _Reader(reader.take_vector(2) if reader.remaining else b"")
    if reader.remaining:
        raise _hello_error("further data follows its extensions")
    extension_by_kind: dict[int, bytes] = {}
    while extensions.remaining:
        kind, content = extensions.take_number(2), extensions.take_vector(2)
        if kind in extension_by_kind:
            raise _hello_error("it has an extension twice")
        extension_by_kind[kind] = content
    if _ALPN not in extension_by_kind:
        return ()
    outer = _Reader(extension_by_kind[_ALPN])
    names = _Reader(outer.take_vector(2))
    protocols: list[str] = []
    while names.remaining:
        protocols.append(names.take_vector(1).decode("latin-1"))
    if outer.remaining or not protocols or not all(protocols):
        raise _hello_error("its list of protocols is invalid")
    return tuple(protocols)


# ---------------------------------------------------------------------- forwarding of bytes
_PART_BYTES = 256 << 10
_ERROR_EVENTS = select.EPOLLHUP | select.EPOLLERR


class Poll:
    """Open files with the handlers that are called when one is readable or writable; used by one thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self.buffer = memoryview(bytearray(_PART_BYTES))

    def watch(self, connection: socket.socket, events: int, handler: Callable[[int], None]) -> None:
        """Set the events of a file that are handled from now on; without events it is no longer watched."""
        file, known = connection.fileno(), connection.fileno() in self._handlers
        if not events:
            self.unwatch(connection)
            return
        (self._epoll.modify if known else self._epoll.register)(file, events)
        self._handlers[file] = handler

    def unwatch(self, connection: socket.socket) -> None:
        """Stop watching a file, which may then be closed."""
        if self._handlers.pop(connection.fileno(), None) is not None:
            self._epoll.unregister(connection)

    def handle(self, seconds: float) -> None:
        """Wait for events for this long, and handle them. An event may be of a closed file with the same number."""
        for file, events in self._epoll.poll(seconds):
            handler = self._handlers.get(file)
            if handler is not None:
                handler(events)

    def close(self) -> None:
        """Stop watching all files."""
        self._epoll.close()


class _Side:
    """One of the two connections: the bytes to be sent over it, whether its input has ended, and its watched events."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.unsent, self.has_ended, self.events = connection, memoryview(b""), False, 0


class Pipe:
    """Two connections whose bytes are forwarded to each other, until both have ended; `on_closed` is called once."""

    def __init__(self, poll: Poll, outer: socket.socket, inner: socket.socket, on_closed: Callable[[], None]) -> None:
        self._poll, self._on_closed = poll, on_closed
        self._sides = _Side(outer), _Side(inner)
        self.closed = False
        self._watch()

    def close(self) -> None:
        """End both connections."""
        if not self.closed:
            self.closed = True
            for side in self._sides:
                self._poll.unwatch(side.connection)
                side.connection.close()
            self._on_closed()

    def _watch(self) -> None:
        for side, other in (self._sides, self._sides[::-1]):
            events = select.EPOLLOUT if side.unsent else 0
            events |= select.EPOLLIN if not side.has_ended and not other.unsent else 0
            if events != side.events:
                side.events = events
                self._poll.watch(side.connection, events, partial(self._handle, side, other))

    def _handle(self, side: _Side, other: _Side, events: int) -> None:
        if self.closed:
            return
        try:
            if events & (select.EPOLLOUT | _ERROR_EVENTS) and side.unsent:
                self._send(side, other, side.unsent)
            if events & (select.EPOLLIN | _ERROR_EVENTS) and not side.has_ended and not other.unsent:
                self._read(side, other)
        except OSError:  # the connection broke
            self.close()
            return
        if all(each.has_ended and not each.unsent for each in self._sides):
            self.close()
        else:
            self._watch()

    def _read(self, side: _Side, other: _Side) -> None:
        try:
            size = side.connection.recv_into(self._poll.buffer)
        except BlockingIOError:
            return
        if size:
            self._send(other, side, self._poll.buffer[:size])
        else:
            side.has_ended = True
            self._forward_end(other, side)

    def _send(self, side: _Side, other: _Side, data: memoryview) -> None:
        try:
            sent = side.connection.send(data)
        except BlockingIOError:
            sent = 0
        if data is not side.unsent and sent < len(data):
            data, sent = memoryview(bytes(data[sent:])), 0  # the buffer is shared
        side.unsent = data[sent:]
        self._forward_end(side, other)

    def _forward_end(self, side: _Side, other: _Side) -> None:
        """Forward an end of input, once everything before it is sent."""
        if other.has_ended and not side.unsent:
            with contextlib.suppress(OSError):
                side.connection.shutdown(socket.SHUT_WR)
