"""The accepting side of gRPC streams, and the metadata of a stream that both sides read."""

from __future__ import annotations

import errno
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar
from urllib.parse import quote, unquote

import grpc

from whale_nebula.config.place import split_address
from whale_nebula.errors import (
    ExpiredError,
    IdentityError,
    LinkClosedError,
    NebulaError,
    RemoteProtocolError,
    TransportError,
)
from whale_nebula.security import Identity, Peer, Prover, files
from whale_nebula.security.chain import encode_canonical
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.grpc import options
from whale_nebula.transport.grpc.connection import Lane
from whale_nebula.transport.grpc.limits import LIMITS, ConnectionGuard, Limits, TokenBucket

METHOD = "/nebula.Wire/Talk"
VERSION = 1
LANES = "nebula-lanes"
TROUBLE = "nebula-trouble"  # in the answer to a request, if known: why workers beyond are unreachable at present
_PREFIX = "nebula-"
_MAX_NAME_LENGTH = 200
_CONNECTION = re.compile(r"[0-9a-f]{16}")


class StreamRequest(NamedTuple):
    """The metadata of a stream. `connection` is a random number for each attempt; its lanes share it."""

    run: str
    source: str
    destination: str
    connection: str
    lane: int = 0

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The fields as gRPC metadata."""
        words = {**self._asdict(), "version": VERSION}
        return tuple((_PREFIX + key, quote(str(value), safe="/")) for key, value in words.items())

    @classmethod
    def from_metadata(cls, metadata: Iterable[tuple[str, str | bytes]]) -> StreamRequest:
        """Parse and check received metadata; raises `RemoteProtocolError`."""
        fields = {str(key).removeprefix(_PREFIX): value for key, value in metadata if str(key).startswith(_PREFIX)}
        text = {key: unquote(value) for key, value in fields.items() if isinstance(value, str)}
        if text.get("version") != str(VERSION):
            raise RemoteProtocolError(
                f"unsupported protocol version {text.get('version', 'none')!r:.20} of a stream",
                why=f"this side uses version {VERSION}",
            )
        names = {key: text.get(key, "") for key in ("run", "source", "destination")}
        for key, name in names.items():
            if not 0 < len(name) <= _MAX_NAME_LENGTH or not name.isprintable():
                raise RemoteProtocolError(f"a stream without a valid {key}")
        connection, lane = text.get("connection", ""), text.get("lane", "")
        if not _CONNECTION.fullmatch(connection):
            raise RemoteProtocolError("a stream without a valid connection number")
        if lane not in {str(number) for number in range(options.LANES_WITHOUT_BBR)}:
            raise RemoteProtocolError("a stream with an invalid lane")
        return cls(**names, connection=connection, lane=int(lane))


CERTIFICATE, SIGNATURE = "nebula-certificate-bin", "nebula-signature-bin"
"""The metadata of the answer to a request; keys that end in "-bin" hold bytes."""
Metadata = tuple[tuple[str, bytes], ...]
_LABEL = b"whale_nebula stream 1\0"


def prove_identity(prover: Prover, request: StreamRequest, here: Identity) -> Metadata:
    """The proof of the dialled side, as metadata of its answer."""
    credentials = prover.credentials
    return ((CERTIFICATE, credentials.cert_pem), (SIGNATURE, prover.sign(_transcript(request, here))))


def check_proof(prover: Prover, request: StreamRequest, answer: Mapping[str, Any], there: Identity) -> Peer:
    """The authenticated certificate of the dialled side; raises an `IdentityError` if it is invalid."""
    certificate, signature = answer.get(CERTIFICATE), answer.get(SIGNATURE)
    if not isinstance(certificate, bytes) or not isinstance(signature, bytes):
        raise IdentityError(
            f"{there.worker} does not prove its identity",
            why="its answer has no certificate or no signature",
            mend="install the same release of whale_nebula in every cluster",
        )
    text = certificate.decode("ascii", "replace")
    prover.verify(text, signature, _transcript(request, there), there.worker)
    return files.read_peer(files.parse_certificate(certificate, f"what {there.worker} sent"))


def _transcript(request: StreamRequest, signer: Identity) -> bytes:
    return _LABEL + encode_canonical({**request._asdict(), "signer": signer.uri})


_LOG = logging.getLogger("whale_nebula.transport")
_REFUSALS, _REFUSALS_A_SECOND = 32, 2.0  # that are answered at once, and logged
_RETRIES, _RETRIES_A_SECOND = 512, 64.0  # that are answered at once
_REFUSAL_DELAY_SECONDS = 1.0

T = TypeVar("T")


class Dialler(NamedTuple):
    """The other end of a call: the names in its certificate and the certificate (PEM), which are empty without TLS, and
    its address as gRPC writes it.
    """

    names: tuple[str, ...] = ()
    certificate: bytes = b""
    address: str = ""

    @property
    def host(self) -> str:
        """The address without its port, which differs for each connection."""
        return self.address.rpartition(":")[0]


FrameHandler: TypeAlias = Callable[[bytes], None]
Accept: TypeAlias = Callable[[StreamRequest, Dialler, Lane], FrameHandler]
"""Accepts a stream or raises the reason of its refusal. Returns the handler of its frames, called in a thread of that
stream.
"""


class Front(Protocol):
    """Listener at the public port in place of gRPC, which forwards gRPC's connections to it."""

    def open(self, max_connections: int) -> tuple[str, int]:
        """Bind the port; returns the address for gRPC, and the port. At most `max_connections` are open at a time."""

    def start(self) -> None:
        """Accept connections from now on."""

    def find_peer(self, name: str) -> str:
        """The remote address of a connection, by gRPC's name of it."""

    def stop(self) -> None:
        """Refuse new connections, and end existing ones once everything is sent."""


_FILES_BEHIND = 3  # of a connection that is forwarded by a front


class Listener:
    """Server of streams at one address. `accept` is called for each stream, and raises a NebulaError to refuse it.

    A refusal reaches the dialling side with the error's text and a code: FAILED_PRECONDITION for a LinkClosedError (the
    requested worker has ended permanently); PERMISSION_DENIED, which is final, for an IdentityError and for a stream
    that violates the protocol; UNAVAILABLE, which is retried, for everything else: an expired certificate, which may be
    renewed, and errors of this side. `connections` is the expected maximum, and `limits` apply to those without an
    accepted stream; `other_handlers` are further services on this port, and a `front` may listen at the port instead.
    If there are many refusals of identities, they are answered with a delay, and not all of them are logged.
    """

    def __init__(
        self,
        address: str,
        credentials: Any | None,
        accept: Accept,
        *,
        deadlines: Deadlines | None = None,
        connections: int = 64,
        limits: Limits = LIMITS,
        other_handlers: Sequence[Any] = (),
        front: Front | None = None,
    ) -> None:
        self._front = front
        self._limits = limits
        self._guard: ConnectionGuard | None = None
        self._refusals = TokenBucket(_REFUSALS, _REFUSALS_A_SECOND)
        self._retries = TokenBucket(_RETRIES, _RETRIES_A_SECOND)
        self._unlogged = 0
        self._is_stopping = threading.Event()
        self._other_handlers = other_handlers
        self._requested_address = address
        self._credentials = credentials
        self._accept = accept
        self._deadlines = deadlines or Deadlines()
        self._connections = connections
        self._server: Any = None
        self.address = address

    def start(self) -> str:
        """Start listening; returns the address, with the chosen port if 0 was requested."""
        address, public = self._open_port()
        server = grpc.server(
            _ThreadPerStream(),
            handlers=[_StreamHandler(self._serve_stream), *self._other_handlers],
            options=options.make_server_options(self._deadlines, self._connections),
        )
        try:
            if self._credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._credentials)
        except RuntimeError:
            port = 0
        if not port:
            if self._front is not None:
                self._front.stop()
            raise self._port_error("this host does not have the address, or another process uses the port")
        port = public or port
        server.start()
        self._server = server
        self._guard = ConnectionGuard(port, self._limits)
        self._guard.start()
        if self._front is not None:
            self._front.start()
        self.address = f"{self._requested_address.rpartition(':')[0]}:{port}"
        return self.address

    def _open_port(self) -> tuple[str, int]:
        """The address at which gRPC listens, and the public port, at which a front may listen."""
        if self._front is None:
            self._check_port_is_free()
            return self._requested_address, 0
        try:
            return self._front.open(options.find_max_connections(self._connections, _FILES_BEHIND))
        except (OSError, UnicodeError) as error:
            self._front.stop()
            raise self._port_error(getattr(error, "strerror", None) or str(error)) from None

    def _check_port_is_free(self) -> None:
        """Refuse a port that is in use, the most frequent error, before gRPC writes its own line to standard error."""
        try:
            address = split_address(self._requested_address)
            addresses = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            with socket.socket(*addresses[0][:2]) as probe_socket:
                probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe_socket.bind(addresses[0][4])
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise self._port_error(error.strerror or "another process uses the port") from None

    def _port_error(self, why: str) -> TransportError:
        port = self._requested_address.rpartition(":")[2]
        return TransportError(
            f"cannot listen on {self._requested_address}",
            why=why,
            mend=f"ss -ltnp | grep {port}, or use a different address in the config",
        )

    def stop(self, grace: float = 1.0) -> None:
        """Refuse new streams, let existing ones end for a grace period, and close the port."""
        self._is_stopping.set()
        if self._guard is not None:
            self._guard.stop()
        if self._server is not None:
            self._server.stop(grace).wait(grace + 5.0)
            self._server = None
        if self._front is not None:
            self._front.stop()

    def _serve_stream(self, incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Serve one stream in a separate thread; yields outgoing frames."""
        lane, dialler = Lane(), read_dialler(context)
        peer = dialler.address if self._front is None else self._front.find_peer(dialler.address)
        try:
            request = StreamRequest.from_metadata(context.invocation_metadata())
            receive = self._accept(request, dialler._replace(address=peer), lane)
        except NebulaError as error:
            self._note_refusal(peer, error)
            context.abort(_refusal(error), f"{error.what}: {error.why}" if error.why else error.what)
        if self._guard is not None:
            self._guard.add_stream(peer)
        lane.attach_stream(lambda why: context.cancel())
        if not context.add_callback(lambda: self._end_stream(peer, lane)):
            self._end_stream(peer, lane)
        trouble = ((TROUBLE, quote(lane.trouble)),) if lane.trouble else ()
        context.send_initial_metadata(((LANES, str(options.count_lanes())), *trouble, *lane.proof))
        reader = threading.Thread(target=lane.read, args=(incoming, receive), name="nebula-receive", daemon=True)
        reader.start()
        yield from lane.yield_frames()

    def _end_stream(self, peer: str, lane: Lane) -> None:
        if self._guard is not None:
            self._guard.remove_stream(peer)
        lane.mark_lost("the connection is broken, or the other side has closed it")

    def _note_refusal(self, peer: str, error: NebulaError) -> None:
        """Log a refusal. Those beyond the rate limit are only counted, and answered with a delay: at most four streams
        of a connection wait.
        """
        if type(error) is TransportError:  # it is retried
            _LOG.info("refused a stream from %s: %s", peer, error.what)
            if not self._retries.take():
                self._is_stopping.wait(_REFUSAL_DELAY_SECONDS)
        elif self._refusals.take():
            unlogged, self._unlogged = self._unlogged, 0
            more = f" (and {unlogged} earlier refusals)" if unlogged else ""
            _LOG.warning("refused a stream from %s: %s%s", peer, error.what, more)
        else:
            self._unlogged += 1
            self._is_stopping.wait(_REFUSAL_DELAY_SECONDS)


def read_dialler(context: Any) -> Dialler:
    """The certificate and the address at the other end of a call."""
    auth_context = context.auth_context()
    names = tuple(name.decode("utf-8", "replace") for name in auth_context.get("x509_subject_alternative_name", ()))
    return Dialler(names, next(iter(auth_context.get("x509_pem_cert", ())), b""), context.peer())


def _refusal(error: NebulaError) -> Any:
    if isinstance(error, LinkClosedError):
        return grpc.StatusCode.FAILED_PRECONDITION
    final = isinstance(error, IdentityError | RemoteProtocolError) and not isinstance(error, ExpiredError)
    return grpc.StatusCode.PERMISSION_DENIED if final else grpc.StatusCode.UNAVAILABLE


class _StreamHandler(grpc.GenericRpcHandler):
    """Generic gRPC handler of one method with raw bytes as messages."""

    def __init__(self, serve: Callable[..., Iterator[bytes]]) -> None:
        self._method = grpc.stream_stream_rpc_method_handler(serve)

    def service(self, handler_call_details: Any) -> Any:
        return self._method if handler_call_details.method == METHOD else None


class _ThreadPerStream(futures.Executor):
    """Executor with a thread for each stream, as streams are long-lived. Python does not wait for them at its exit."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> futures.Future[T]:
        future: futures.Future[T] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        try:
            threading.Thread(target=run, name="nebula-stream", daemon=True).start()
        except RuntimeError as error:  # no thread available; if raised, it would end the thread in which gRPC serves
            future.set_exception(error)
        return future
