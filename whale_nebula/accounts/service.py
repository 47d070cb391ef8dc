"""The service at which accounts log in: HTTP over TLS, whose client shows no certificate and checks that of the server.

Who asks too often is told to wait, by address and in all, before anything is computed; what is asked is bounded in size
and in time, and so are the connections.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from whale_nebula.accounts.login import Asked, Desk, read_lists
from whale_nebula.accounts.registry import refuse_login
from whale_nebula.errors import AccountError, ConfigError, LoginError, NebulaError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import OPERATOR, Files, Identity, files, issue
from whale_nebula.security.authority import certificate_bytes
from whale_nebula.security.trust import DenyList, Trust
from whale_nebula.transport.grpc.limits import Buckets, TokenBucket

LOGIN, LISTS = "/login", "/lists"
DAYS = 30.0
_SECONDS = 10.0
_MOST_BYTES = 512 << 10
_MOST_ANSWERED = 8 << 20
_CONNECTIONS = 32
_OPEN_BURST, _OPEN_RATE = 60, 5.0  # connections of one address
_BURST, _RATE = 10, 0.5  # logins of one address
_ALL_BURST, _ALL_RATE = 20, 1.0
_NICE = 15
_LOG = logging.getLogger("whale_nebula.accounts")


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], desk: Desk, identity: Identity) -> None:
        self.desk, self.identity = desk, identity
        self.open = threading.BoundedSemaphore(_CONNECTIONS)
        self.opened = Buckets(_OPEN_BURST, _OPEN_RATE)
        self.each, self.all = Buckets(_BURST, _RATE), TokenBucket(_ALL_BURST, _ALL_RATE)
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._until = files.now()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, if there are not too many; others end before their handshake."""
        if not self.opened.take(str(client_address[0]))[1] or not self.open.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The connection, from its handshake on."""
        try:
            with contextlib.suppress(OSError):  # what trains on this machine goes first
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            request.settimeout(_SECONDS)
            with (
                contextlib.suppress(OSError, ssl.SSLError),
                self.context().wrap_socket(request, server_side=True) as secured,
            ):
                self.finish_request(secured, client_address)
        finally:
            self.shutdown_request(request)
            self.open.release()

    def context(self) -> ssl.SSLContext:
        """TLS with the certificate of this service, which is renewed in the last quarter of its life."""
        with self._lock:
            moment = files.now()
            if self._context is None or self._until - moment < timedelta(days=DAYS / 4):
                found = _certify(self.desk, self.identity)
                self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                self._context.minimum_version = ssl.TLSVersion.TLSv1_2
                self._context.load_cert_chain(found.cert, found.key)
                self._until = files.peer(files.certificate(found.cert.read_bytes(), str(found.cert))).not_after
            return self._context


def _certify(desk: Desk, identity: Identity) -> Files:
    """The files of the service's own certificate, made or renewed."""
    known = [each for each in issue.list_issued(desk.folder) if each.identity == identity]
    make = issue.renew if known and Files.under(desk.folder, identity).key.exists() else issue.issue
    return make(desk.folder, desk.authority, [identity], DAYS)[0].files


_NOTHING = AccountError(f"there is POST {LOGIN} here, and GET {LISTS}")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version, timeout = "whale-nebula", "", _SECONDS

    def do_GET(self) -> None:
        """The deny lists, which are signed and for everybody."""
        if self.path != LISTS:
            self._refuse(404, _NOTHING)
            return
        try:
            self._send(200, {"lists": read_lists(self.server.desk.folder)})
        except NebulaError as error:
            self._refuse(503, error)

    def do_POST(self) -> None:
        """Log in."""
        source = str(self.client_address[0])
        if self.path != LOGIN:
            self._refuse(404, _NOTHING)
            return
        if not (self.server.each.take(source)[1] and self.server.all.take()):
            self._refuse(429, AccountError("too many ask at this service", mend="try again in some seconds"))
            return
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or len(size) > len(str(_MOST_BYTES)) or int(size) > _MOST_BYTES:
            self._refuse(413, AccountError(f"a request has at most {_MOST_BYTES} bytes, and says how many"))
            return
        try:
            asked = Asked.parse(json.loads(self.rfile.read(int(size))))
        except (ValueError, RecursionError):
            self._refuse(400, AccountError("a request to log in is JSON"))
        except AccountError as error:
            self._refuse(400, error)
        else:
            self._answer(asked, source)

    def _answer(self, asked: Asked, source: str) -> None:
        try:
            self._send(200, self.server.desk.log_in(asked, source))
        except LoginError as error:
            self._refuse(401, error)
        except NebulaError as error:
            self._refuse(403, error)

    def _refuse(self, code: int, error: NebulaError) -> None:
        self._send(code, {"what": error.what, "why": error.why, "mend": error.mend})

    def _send(self, code: int, answer: Mapping[str, Any]) -> None:
        content = json.dumps(answer).encode() + b"\n"
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as its base class has it
        """What is decided stands in the audit log."""
        _LOG.debug("%s %s", self.address_string(), escape_foreign_text(format % args, 200))


@contextlib.contextmanager
def serve(desk: Desk, cluster: str, host: str, port: int) -> Iterator[int]:
    """Serve logins while this is open; gives the port."""
    try:
        server = _Server((host, port), desk, Identity(desk.authority.run, cluster, OPERATOR))
    except (OSError, TypeError, UnicodeError) as error:  # the last two of what is no name of a host
        why, mend = getattr(error, "strerror", None) or str(error), "--listen 0.0.0.0:7200"
        raise ConfigError("the service cannot listen", where=f"{host}:{port}", why=why, mend=mend) from None
    try:
        server.context()
    except NebulaError:
        server.server_close()
        raise
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="nebula-accounts", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


class Service(NamedTuple):
    """A service, as a client knows it: its certificate must be that of the operator of the cluster, by an authority in
    `ca`.
    """

    host: str
    port: int
    ca: bytes
    run: str
    cluster: str

    def log_in(self, asked: Asked) -> Mapping[str, Any]:
        """The certificates that an account asks for, with the deny lists."""
        content = json.dumps({name: value for name, value in asked._asdict().items() if value is not None})
        answer = self._ask("POST", LOGIN, content)
        if not isinstance(answer.get("certificates"), list) or len(answer["certificates"]) != len(asked.requests):
            raise AccountError("the service gives other certificates than were asked for", where=self.host)
        return answer

    def fetch_lists(self) -> Mapping[str, str]:
        """The deny lists as they are now."""
        return dict(self._ask("GET", LISTS)["lists"])

    def _ask(self, method: str, path: str, content: str | None = None) -> dict[str, Any]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        known = files.certificates(self.ca, "ca.pem")
        context.load_verify_locations(cadata=b"".join(map(certificate_bytes, known)).decode("ascii"))
        expected, where = Identity(self.run, self.cluster, OPERATOR), f"{self.host}:{self.port}"
        try:
            with (
                socket.create_connection((self.host, self.port), _SECONDS) as plain,
                context.wrap_socket(plain, server_hostname=expected.dns) as secured,
            ):
                shown = ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"")
                Trust(known, DenyList(None)).check(files.certificate(shown, where), expected, whose=where)
                connection = http.client.HTTPConnection(self.host, timeout=_SECONDS)
                connection.sock = secured
                connection.request(method, path, content, {"Connection": "close"})
                response = connection.getresponse()
                return _read_answer(response.status, response.read(_MOST_ANSWERED))
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error.reason or str(error)
            mend = f"is this where accounts of {self.cluster} log in? Compare ca.pem with the owner's"
            what = f"{where} does not prove that it is {expected.worker}"
            raise AccountError(what, why=str(why), mend=mend) from None
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            raise AccountError(
                f"{where} cannot be asked", why=str(error), mend="--at HOST:PORT of its service"
            ) from None


def _read_answer(status: int, data: bytes) -> dict[str, Any]:
    if status == 401:
        raise refuse_login()
    try:
        answer = dict(json.loads(data))
        what, why, mend = (escape_foreign_text(str(answer.get(part, "")), 2000) for part in ("what", "why", "mend"))
        answer["lists"] = {str(name): str(text) for name, text in dict(answer.get("lists", {})).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise AccountError("the service does not answer as one of ours", mend="--at HOST:PORT of its service") from None
    if status != 200:
        raise AccountError(what or f"the service answers with {status}", why=why, mend=mend or None)
    return answer
