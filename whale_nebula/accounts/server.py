"""An owner's server over TLS, and its client side: the common part of the services of accounts and of data.

The server has a certificate of its cluster's operator, which it renews itself; a client sends nothing before it has
verified it. Connections are bounded by address, in number and in time, before anything is computed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from cryptography import x509

from whale_nebula.accounts.login import LoginIssuer
from whale_nebula.errors import AccountError, ConfigError, NebulaError
from whale_nebula.security import Files, Identity, files, issue
from whale_nebula.security.authority import encode_certificate
from whale_nebula.security.trust import DenyList, Trust
from whale_nebula.transport.grpc.limits import (
    Buckets,
    Endpoint,
    KnownSources,
    Limits,
    find_networks,
    find_surplus,
    normalize_address,
)
from whale_nebula.transport.handover import COMMANDS, NOUNS, receive_connections, socket_path

DAYS = 30.0
SECONDS = 10.0
"""Timeout of a connection's handshake, and of each message."""
_CONNECTIONS, _PENDING_SECONDS = 32, 30.0
_OPEN_BURST, _OPEN_RATE = 60, 5.0  # rate limit of connections of one address
_NICE = 15


def find_source(host: str) -> str:
    """The source that the limits of an address count: an IPv4 address, or the /64 network of an IPv6 address.

    >>> find_source("::ffff:10.0.0.1"), find_source("2001:db8::1") == find_source("2001:db8::2")
    ('10.0.0.1/32', True)
    """
    return find_networks(normalize_address(host))[0]


class PendingConnections:
    """The connections of a server whose clients it has not accepted yet, which strangers can open at will. Thread-safe.

    Their number and their age are bounded. If there are too many, the oldest of the address with the most end first, as
    at a gateway's port: a client that sends its request a byte at a time keeps no other client out.
    """

    def __init__(self, limits: Limits, now: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._now = limits, now
        self._lock = threading.Lock()
        self._sockets: dict[Endpoint, socket.socket] = {}
        self._opened_at: dict[Endpoint, float] = {}
        self._known_sources = KnownSources()

    def add(self, end: Endpoint, connection: socket.socket) -> None:
        """Add a new connection, and close surplus ones."""
        with self._lock:
            self._sockets[end], self._opened_at[end] = connection, self._now()
        self.close_surplus()

    def replace(self, end: Endpoint, connection: socket.socket) -> bool:
        """Replace the socket of a connection by the one that wraps it; False if the connection was closed meanwhile."""
        with self._lock:
            is_pending = end in self._sockets
            if is_pending:
                self._sockets[end] = connection
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


class TlsServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A server with a thread for each connection, for one `protocol` (ALPN). With `low_priority` its threads yield the
    CPU to training.
    """

    protocol: str
    allow_reuse_address = daemon_threads = True
    request_queue_size = 64
    low_priority = closed = False
    connections = _CONNECTIONS
    """The most pending connections."""

    def __init__(self, address: tuple[str, int], handler: type, issuer: LoginIssuer, identity: Identity) -> None:
        self.issuer, self.identity = issuer, identity
        self.pending = PendingConnections(Limits(self.connections, self.connections, _PENDING_SECONDS))
        self.open_buckets = Buckets(_OPEN_BURST, _OPEN_RATE)
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._valid_until = files.now()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its own thread, unless its source has opened too many; it is pending until its client
        is accepted.
        """
        if not self.open_buckets.take(find_source(str(client_address[0])))[1]:
            self.shutdown_request(request)
            return
        self.pending.add(read_endpoint(client_address), request)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close pending connections that are too old: called several times a second."""
        self.pending.close_surplus()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection, from its handshake on."""
        try:
            if self.low_priority:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            request.settimeout(SECONDS)
            with contextlib.suppress(OSError, ssl.SSLError), self._wrap_socket(request, client_address) as secured:
                self.finish_request(secured, client_address)
        except Exception:  # after the service was closed, its resources are gone
            if not self.closed:
                raise
        finally:
            self.pending.remove(read_endpoint(client_address))
            self.shutdown_request(request)

    def _wrap_socket(self, request: socket.socket, client_address: Any) -> ssl.SSLSocket:
        secured = self.context().wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        try:
            if not self.pending.replace(read_endpoint(client_address), secured):
                raise OSError("the connection was closed")
            secured.do_handshake()
        except OSError as error:
            secured.close()
            if isinstance(error, ssl.SSLError):
                self.record_refusal(error, str(client_address[0]))
            raise
        return secured

    def server_close(self) -> None:
        """Accept no more connections; open ones end by themselves."""
        self.closed = True
        super().server_close()

    def record_refusal(self, error: ssl.SSLError, address: str) -> None:
        """Called when a handshake has failed."""

    def context(self) -> ssl.SSLContext:
        """The TLS context with the certificate of this service, renewed in the last quarter of its validity."""
        with self._lock:
            moment = files.now()
            if self._context is None or self._valid_until - moment < timedelta(days=DAYS / 4):
                own_files = certify_service(self.issuer, self.identity)
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.minimum_version = ssl.TLSVersion.TLSv1_2
                context.load_cert_chain(own_files.cert, own_files.key)
                context.set_alpn_protocols([self.protocol])
                self.restrict_context(context)
                self._context = context
                certificate = files.parse_certificate(own_files.cert.read_bytes(), str(own_files.cert))
                self._valid_until = files.read_peer(certificate).not_after
            return self._context

    def restrict_context(self, context: ssl.SSLContext) -> None:
        """Further restrictions of the TLS context."""


def read_endpoint(client_address: Any) -> Endpoint:
    """The other end of a connection, from the address that Python's servers pass."""
    return Endpoint(normalize_address(str(client_address[0])), int(client_address[1]))


def certify_service(issuer: LoginIssuer, identity: Identity) -> Files:
    """Issue or renew the certificate of a service of this host; returns its files."""
    issued = [each for each in issue.list_issued(issuer.folder) if each.identity == identity]
    issue_certificate = issue.renew if issued and Files.in_folder(issuer.folder, identity).key.exists() else issue.issue
    return issue_certificate(issuer.folder, issuer.authority, [identity], DAYS)[0].files


@contextlib.contextmanager
def run_server(
    make_server: Callable[[tuple[str, int]], TlsServer], host: str, port: int, name: str, services: Path | None = None
) -> Iterator[int]:
    """Serve while the context is open; yields the port. In the folder `services`, if given, a gateway of this host
    finds the service, and hands connections over to it.
    """
    try:
        server = make_server((host, port))
    except (OSError, TypeError, UnicodeError) as error:  # the last two for an invalid host name
        why, mend = getattr(error, "strerror", None) or str(error), "--listen 0.0.0.0:7200"
        raise ConfigError("the service cannot listen", where=f"{host}:{port}", why=why, mend=mend) from None
    try:
        server.context()
    except NebulaError:
        server.server_close()
        raise
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name=name, daemon=True)
    thread.start()
    try:
        with contextlib.ExitStack() as stack:
            if services is not None:
                path = socket_path(services, server.protocol, server.identity.cluster)
                stack.enter_context(receive_connections(path, server.process_request))
            yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


# ---------------------------------------------------------------------- the client
def make_client_context(ca: bytes, protocol: str) -> tuple[ssl.SSLContext, list[x509.Certificate]]:
    """The TLS context for a protocol that accepts certificates of the authorities in `ca`; and these authorities."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.set_alpn_protocols([protocol])
    authorities = files.parse_certificates(ca, "ca.pem")
    context.load_verify_locations(cadata=b"".join(map(encode_certificate, authorities)).decode("ascii"))
    return context, authorities


@contextlib.contextmanager
def dial(
    host: str,
    port: int,
    context: ssl.SSLContext,
    authorities: Sequence[x509.Certificate],
    expected: Identity,
    protocol: str,
) -> Iterator[ssl.SSLSocket]:
    """Connect to a service of this protocol, whose certificate must name `expected`, by one of `authorities`."""
    where = f"{host}:{port}"
    try:
        plain = socket.create_connection((host, port), SECONDS)
    except (OSError, UnicodeError) as error:
        raise unreachable_error(where, error) from None
    with plain:
        try:
            secured = context.wrap_socket(plain, server_hostname=expected.dns)
        except ssl.SSLError as error:
            refusal = _find_refusal(where, protocol, error)
            if refusal is not None:
                raise refusal from None
            why = getattr(error, "verify_message", "") or error.reason or str(error)
            mend = f"check that this is the service of {expected.cluster}, and compare ca.pem with the owner's"
            what = f"{where} did not prove that it is {expected.worker}"
            raise AccountError(what, why=str(why), mend=mend) from None
        except OSError as error:
            raise unreachable_error(where, error) from None
        with secured:
            pem = ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"")
            Trust(authorities, DenyList(None)).check(files.parse_certificate(pem, where), expected, subject=where)
            if secured.selected_alpn_protocol() != protocol:
                raise AccountError(f"{where} is a different service of {expected.cluster}", mend=_AT_OPTION)
            yield secured


_AT_OPTION = "--at HOST:PORT of its service, or of its gateway"


def _find_refusal(where: str, protocol: str, error: ssl.SSLError) -> AccountError | None:
    """The error for a connection that a gateway does not hand over to a service."""
    reason, noun = str(error).upper().replace(" ", "_"), NOUNS[protocol]  # Python has no name for some alerts
    if "NO_APPLICATION_PROTOCOL" in reason:
        what = f"the gateway at {where} does not serve {noun}"
        return AccountError(what, mend="whale-nebula gateway --services FOLDER there; or --at HOST:PORT of the service")
    if "INTERNAL_ERROR" in reason:
        mend = f"its owner starts it with: {COMMANDS[protocol]}"
        return AccountError(f"the service for {noun} behind the gateway at {where} is not running", mend=mend)
    return None


def unreachable_error(where: str, error: Exception) -> AccountError:
    """The error for a service that does not answer."""
    return AccountError(f"{where} is unreachable", why=str(error), mend=_AT_OPTION)
