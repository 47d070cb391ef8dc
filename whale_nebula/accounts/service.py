"""The service at which accounts log in: HTTP over TLS with a certificate of the server only, which the client verifies.

Requests are rate limited, by address and in total, before anything is computed; their size, their time and the number
of connections are bounded.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

from whale_nebula.accounts.login import LoginIssuer, LoginRequest, read_deny_lists
from whale_nebula.accounts.registry import refused_login_error
from whale_nebula.accounts.server import (
    SECONDS,
    TlsServer,
    dial,
    find_source,
    make_client_context,
    read_endpoint,
    run_server,
    unreachable_error,
)
from whale_nebula.errors import AccountError, LoginError, NebulaError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import OPERATOR, Identity, files
from whale_nebula.transport import handover
from whale_nebula.transport.grpc.limits import Buckets, TokenBucket

LOGIN, LISTS = "/login", "/lists"
_MOST_BYTES = 512 << 10
_MOST_ANSWER_BYTES = files.MOST_LIST_BYTES + (8 << 20)
_ADDRESS_BURST, _RATE = 10, 0.5  # rate limit of logins of one address
_ALL_BURST, _ALL_RATE = 20, 1.0
_LOG = logging.getLogger("whale_nebula.accounts")


class _Server(TlsServer):
    protocol = handover.LOGIN
    low_priority = True

    def __init__(self, address: tuple[str, int], issuer: LoginIssuer, identity: Identity) -> None:
        self.address_buckets = Buckets(_ADDRESS_BURST, _RATE)
        self.total_buckets = {is_known: TokenBucket(_ALL_BURST, _ALL_RATE) for is_known in (False, True)}
        super().__init__(address, _Handler, issuer, identity)


_UNKNOWN_REQUEST = AccountError(f"unknown request; available: POST {LOGIN}, GET {LISTS}")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version, timeout = "whale-nebula", "", SECONDS

    def do_GET(self) -> None:
        """Answer with the deny lists, which are signed and public."""
        if self.path != LISTS:
            self._refuse(404, _UNKNOWN_REQUEST)
            return
        try:
            self._send(200, {"lists": read_deny_lists(self.server.issuer.folder)})
        except NebulaError as error:
            self._refuse(503, error)

    def do_POST(self) -> None:
        """Answer a login."""
        host, server = str(self.client_address[0]), self.server
        if self.path != LOGIN:
            self._refuse(404, _UNKNOWN_REQUEST)
            return
        # sources from which an account has logged in have a limit apart, which strangers cannot exhaust
        total_bucket = server.total_buckets[server.pending.is_known(host)]
        if not (server.address_buckets.take(find_source(host))[1] and total_bucket.take()):
            self._refuse(429, AccountError("too many requests", mend="try again in some seconds"))
            return
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or len(size) > len(str(_MOST_BYTES)) or int(size) > _MOST_BYTES:
            self._refuse(413, AccountError(f"a request must have a Content-Length of at most {_MOST_BYTES} bytes"))
            return
        try:
            request = LoginRequest.parse(json.loads(self.rfile.read(int(size))))
        except (ValueError, RecursionError):
            self._refuse(400, AccountError("a login request must be JSON"))
        except AccountError as error:
            self._refuse(400, error)
        else:
            server.pending.remove(read_endpoint(self.client_address))  # what is computed from here on is limited above
            self._answer_login(request, host)

    def _answer_login(self, request: LoginRequest, host: str) -> None:
        try:
            answer = self.server.issuer.log_in(request, host)
            self.server.pending.note_accepted(host)
            self._send(200, answer)
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
        """Log at debug level only, as decisions are in the audit log."""
        _LOG.debug("%s %s", self.address_string(), escape_foreign_text(format % args, 200))


@contextlib.contextmanager
def serve(issuer: LoginIssuer, cluster: str, host: str, port: int, services: Path | None = None) -> Iterator[int]:
    """Serve logins while the context is open; yields the port. A gateway with the folder `services` hands over
    connections.
    """
    identity = Identity(issuer.authority.run, cluster, OPERATOR)
    server = run_server(lambda address: _Server(address, issuer, identity), host, port, "nebula-accounts", services)
    with server as port_in_use:
        yield port_in_use


class LoginClient(NamedTuple):
    """A client of the service, whose certificate must be that of the cluster's operator, by an authority in `ca`."""

    host: str
    port: int
    ca: bytes
    run: str
    cluster: str

    def log_in(self, request: LoginRequest) -> Mapping[str, Any]:
        """Request certificates for an account; returns them with the deny lists."""
        content = json.dumps({name: value for name, value in request._asdict().items() if value is not None})
        answer = self._send_request("POST", LOGIN, content)
        if not isinstance(answer.get("certificates"), list) or len(answer["certificates"]) != len(request.requests):
            raise AccountError("the service returned different certificates than requested", where=self.host)
        return answer

    def fetch_deny_lists(self) -> Mapping[str, str]:
        """The current deny lists."""
        return dict(self._send_request("GET", LISTS)["lists"])

    def _send_request(self, method: str, path: str, content: str | None = None) -> dict[str, Any]:
        where = f"{self.host}:{self.port}"
        context, authorities = make_client_context(self.ca, handover.LOGIN)
        expected = Identity(self.run, self.cluster, OPERATOR)
        with dial(self.host, self.port, context, authorities, expected, handover.LOGIN) as secured:
            try:
                connection = http.client.HTTPConnection(self.host, timeout=SECONDS)
                connection.sock = secured
                connection.request(method, path, content, {"Connection": "close"})
                response = connection.getresponse()
                return _read_answer(response.status, response.read(_MOST_ANSWER_BYTES))
            except (OSError, UnicodeError, http.client.HTTPException) as error:
                raise unreachable_error(where, error) from None


def _read_answer(status: int, data: bytes) -> dict[str, Any]:
    if status == 401:
        raise refused_login_error()
    try:
        answer = dict(json.loads(data))
        parts = ("what", "why", "mend", "account", "role")
        answer |= {part: escape_foreign_text(answer.get(part, ""), 2000) for part in parts}
        answer["lists"] = {str(name): str(text) for name, text in dict(answer.get("lists", {})).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise AccountError("the service sent an invalid answer", mend="--at HOST:PORT of its service") from None
    if status != 200:
        what = answer["what"] or f"the service answered with status {status}"
        raise AccountError(what, why=answer["why"], mend=answer["mend"] or None)
    return answer
