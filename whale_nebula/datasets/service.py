"""The service of an owner's data: rows of published datasets over TLS 1.3, for accounts with certificates of this
owner, and the report of who has read them, for auditors.

The account is the one in the certificate, which this owner's own authority must have signed: other owners may have an
account of the same name. Each connection begins with a random number of this side; a request contains it and its own
number, so that a replay is detected. No code and no graph is sent: requests are JSON, rows are plain arrays.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from socketserver import BaseRequestHandler
from typing import Any, NamedTuple

from whale_nebula.accounts.login import LoginIssuer
from whale_nebula.accounts.members import ENABLED
from whale_nebula.accounts.registry import Registry
from whale_nebula.accounts.server import TlsServer, certify_service, read_endpoint, run_server
from whale_nebula.datasets.grants import PUBLISHED, Dataset, Grants
from whale_nebula.datasets.guard import ANONYMOUS, MOST_ROWS, Guard, Reader, ReadRequest, Usage
from whale_nebula.datasets.report import (
    AUDIT,
    MOST_REPORT_BYTES,
    Period,
    encode_report,
    parse_moment,
    record_position,
    report_accesses,
)
from whale_nebula.datasets.schema import (
    ANSWER,
    ASK,
    BATCH,
    END,
    HELLO,
    REFUSED,
    Schema,
    encode_columns,
    read_frame,
    write_frame,
    write_schema,
)
from whale_nebula.errors import AccessError, NebulaError, NotAllowedError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import OPERATOR, WORKER, Credentials, Identity, files
from whale_nebula.security.audit import AuditLog
from whale_nebula.security.authority import Authority, encode_certificate
from whale_nebula.security.credentials import CurrentCredentials
from whale_nebula.security.files import Peer, format_time
from whale_nebula.security.identity import AUDITOR, Call, explain_refusal
from whale_nebula.security.trust import DenyList, Trust, check_live
from whale_nebula.transport import handover
from whale_nebula.transport.grpc.limits import Buckets

VERSION = 1
_IDLE_SECONDS = 600.0
_LIVE_SECONDS = 1.0
_CONNECTIONS, _ACCOUNT_CONNECTIONS = 128, 32
_ASK_BURST, _ASK_RATE = 5, 0.1  # rate limit of access requests of one account, each of which is a signed change
_LIST_BURST, _LIST_RATE = 20, 1.0
_REPORT_BURST, _REPORT_RATE = 3, 1 / 60  # rate limit of reports of one account, each of which verifies all logs
_REPORT = "the audit report"
_LONGEST = 300
_CONNECTION_ERRORS = (OSError, EOFError, ssl.SSLError)


class DataServer(TlsServer):
    """The server of an owner's datasets."""

    protocol = handover.DATA
    connections = _CONNECTIONS

    def __init__(
        self,
        address: tuple[str, int],
        issuer: LoginIssuer,
        identity: Identity,
        guard: Guard,
        approvals: Path | None = None,
    ) -> None:
        self.guard, self.approvals, self.is_closing = guard, approvals, threading.Event()
        certificate = issuer.authority.certificate
        self.trust = Trust([certificate], DenyList(issuer.folder / files.REVOKED, [certificate]))
        self.requests, self.reports = Buckets(_ASK_BURST, _ASK_RATE), Buckets(_REPORT_BURST, _REPORT_RATE)
        self.lists = Buckets(_LIST_BURST, _LIST_RATE)
        self.report_lock = threading.Lock()
        self._open_connections: set[socket.socket] = set()
        self._account_connections: dict[str, int] = {}
        self._count_lock = threading.Lock()
        super().__init__(address, _Handler, issuer, identity)

    def restrict_context(self, context: ssl.SSLContext) -> None:
        """Require a client certificate of this owner's authority."""
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.load_verify_locations(cadata=encode_certificate(self.issuer.authority.certificate).decode("ascii"))

    def record_refusal(self, error: ssl.SSLError, address: str) -> None:
        """Record a handshake that failed."""
        why = getattr(error, "verify_message", "") or error.reason or ""
        if "certificate" in str(error).lower() or why:
            what = NotAllowedError(f"no certificate of this owner: {str(why)[:100]}")
            self.guard.refuse(Reader("", ANONYMOUS + address), "", what)

    def identify(self, connection: ssl.SSLSocket) -> Peer:
        """The certificate of the other end; raises unless it is one of an account, for a worker or an auditor."""
        pem = ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"")
        peer = self.trust.check(files.parse_certificate(pem, "who reads"))
        if peer.identity.role not in (WORKER, AUDITOR) or not peer.account:
            mend = f"whale-nebula login --cluster {peer.identity.cluster} --at HOST:PORT --account NAME"
            what = f"the certificate of {peer.identity.worker} has no account that may read"
            raise NotAllowedError(what, mend=mend)
        return peer

    @contextlib.contextmanager
    def register_connection(self, connection: socket.socket, account: str) -> Iterator[None]:
        """Count a connection of an account, and close it with the server."""
        with self._count_lock:
            if len(self._open_connections) >= self.connections:
                raise AccessError("the service has too many connections", mend="try again in a minute")
            if self._account_connections.get(account, 0) >= _ACCOUNT_CONNECTIONS:
                what = f"account {account!r} already has {_ACCOUNT_CONNECTIONS} connections"
                raise AccessError(what, mend="read in fewer processes")
            self._account_connections[account] = self._account_connections.get(account, 0) + 1
            self._open_connections.add(connection)
        try:
            yield
        finally:
            with self._count_lock:
                self._account_connections[account] -= 1
                self._open_connections.discard(connection)

    def server_close(self) -> None:
        """Close all connections."""
        self.is_closing.set()
        super().server_close()
        with self._count_lock:
            for connection in self._open_connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseRequestHandler):
    server: DataServer
    request: ssl.SSLSocket

    def handle(self) -> None:
        """Answer requests, one after the other."""
        connection, server = self.request, self.server
        with contextlib.suppress(*_CONNECTION_ERRORS):
            try:
                peer = server.identify(connection)
                server.pending.remove(read_endpoint(self.client_address))
                server.pending.note_accepted(str(self.client_address[0]))
                with server.register_connection(connection, peer.account):
                    self._answer_requests(peer)
            except NebulaError as error:
                pem = ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"")
                with contextlib.suppress(NebulaError):
                    found = files.read_peer(files.parse_certificate(pem, "who reads"))
                    server.guard.refuse(Reader(found.account, found.identity.uri), "", error)
                _send_refusal(connection, error)

    def _answer_requests(self, peer: Peer) -> None:
        connection, nonce, number = self.request, token_hex(16), 0
        connection.settimeout(_IDLE_SECONDS)
        hello = {"version": VERSION, "nonce": nonce, "account": peer.account, "cluster": self.server.identity.cluster}
        write_frame(connection, HELLO, hello)
        while True:
            frame = read_frame(connection)
            number += 1
            if frame.kind != ASK or frame.message.get("nonce") != nonce or frame.message.get("request") != number:
                why = "it does not have the nonce of this connection and the number of its next request"
                raise AccessError("this request was replayed, or is for another connection", why=why)
            check_live(self.server.trust, peer)
            try:
                self._answer(peer, frame.message)
            except NebulaError as error:
                _send_refusal(connection, error)

    def _answer(self, peer: Peer, message: dict[str, Any]) -> None:
        with self._log_refusals(peer, message):
            if message.get("ask") == "report":
                write_frame(self.request, ANSWER, {}, [memoryview(self._make_report(peer, message))])
                return
            if peer.identity.role != WORKER:
                what = f"the certificate of {peer.identity.worker} is valid only for the audit report"
                raise NotAllowedError(what, mend=f"whale-nebula login --cluster {peer.identity.cluster} --account NAME")
            if message.get("ask") != "read":
                write_frame(self.request, ANSWER, self._answer_query(peer, message))
                return
            reader, selection = _parse_reader(peer, message), _parse_selection(message)
        self._send_dataset(peer, reader, selection)

    @contextlib.contextmanager
    def _log_refusals(self, peer: Peer, message: dict[str, Any]) -> Iterator[None]:
        """Log refusals before those of the guard, which logs its own."""
        try:
            yield
        except NebulaError as error:
            name = _REPORT if message.get("ask") == "report" else escape_foreign_text(message.get("dataset", ""), 64)
            self.server.guard.refuse(Reader(peer.account, peer.identity.uri), name, error)
            raise

    def _answer_query(self, peer: Peer, message: dict[str, Any]) -> dict[str, Any]:
        grants = self.server.guard.grants
        if message.get("ask") == "list":
            self._check_request_rate(self.server.lists, peer)
            now = files.format_time(files.now())
            known = [each for each in grants.list_datasets() if each.state == PUBLISHED and each.expires > now]
            return {"datasets": [_describe_dataset(each) for each in known]}
        if message.get("ask") != "request":
            raise _unknown_request_error()
        dataset, purpose = (_read_text(message, part) for part in ("dataset", "purpose"))
        self._check_request_rate(self.server.requests, peer)
        permission = grants.ask(peer.account, dataset, purpose)
        return {"number": permission.number, "state": permission.state}

    def _check_request_rate(self, buckets: Buckets, peer: Peer) -> None:
        if not buckets.take(peer.account)[1]:
            raise AccessError(f"account {peer.account!r} sends too many requests", mend="try again in a minute")

    def _make_report(self, peer: Peer, message: dict[str, Any]) -> bytes:
        """The access report of a period for an auditor, which is recorded first."""
        server = self.server
        self._check_auditor(peer)
        since, until = (parse_moment(_read_text(message, part), part) for part in ("since", "until"))
        if not server.reports.take(peer.account)[1] or not server.report_lock.acquire(blocking=False):
            raise AccessError("too many reports are requested", mend="try again in a minute")
        try:
            registry, period = server.issuer.registry, Period(since, until)
            asked = {"since": format_time(since), "until": format_time(until)}
            record_position(registry, server.guard.log, "report", peer.account, "allow", **asked)
            report, logs = report_accesses(server.issuer.folder, registry, period, (), server.approvals)
        finally:
            server.report_lock.release()
        named_logs = [each._replace(path=Path(each.path).name) for each in logs]  # without the owner's folders
        data = json.dumps(encode_report(report, named_logs)).encode()
        if len(data) > MOST_REPORT_BYTES:
            why = f"it has {len(data)} bytes, and the limit is {MOST_REPORT_BYTES}"
            mend = "choose a shorter period: --since, --until"
            raise AccessError("the report of this period is too large", why=why, mend=mend)
        return data

    def _check_auditor(self, peer: Peer) -> None:
        """Refuse readers that are not auditors according to the certificate and the current registry."""
        registry, why = self.server.issuer.registry, explain_refusal(peer.identity, Call.REPORT, self.server.identity)
        with registry.read_transaction():
            account = registry.look_up(peer.account)
        if not why and (account is None or account.state != ENABLED or account.role != AUDITOR):
            why = "the account does not exist, is not an auditor's, or is disabled"
        if why:
            mend = "ask the owner: whale-nebula accounts add NAME --role auditor"
            raise NotAllowedError(f"{peer.account} may not read the audit report", why=why, mend=mend)

    def _send_dataset(self, peer: Peer, reader: Reader, selection: _RowsRequest) -> None:
        """Send batches until the last one; access is decided again for each."""
        guard = self.server.guard
        opened = guard.open(reader, selection.dataset)
        about = {"schema": write_schema(opened.interface.schema), "count": opened.count, "edition": opened.edition}
        write_frame(self.request, ANSWER, about)
        if selection.first == selection.last:
            write_frame(self.request, END, {})
            return
        ended = False
        try:
            ended = self._send_batches(peer, reader, selection, opened.interface.schema)
        finally:
            head = guard.log.sign_head()  # the records of a pass are signed at its end
        if ended:  # the reader keeps it: so the reader can detect a truncated or rewritten log
            write_frame(self.request, END, {} if head is None else {"head": head._asdict()})

    def _send_batches(self, peer: Peer, reader: Reader, selection: _RowsRequest, schema: Schema) -> bool:
        """Send the batches; returns whether all were sent."""
        last_check, first, guard, connection = time.monotonic(), selection.first, self.server.guard, self.request
        while first < selection.last:
            last = min(first + selection.batch, selection.last)
            request = ReadRequest(selection.dataset, selection.seed, selection.number, first, last, selection.edition)
            batch = guard.read(reader, request)
            if not self._wait_for_rate(peer, reader, selection.dataset, batch.pause):
                return False
            parts = encode_columns(schema, batch.columns)
            write_frame(connection, BATCH, {"first": first, "rows": batch.rows}, parts)
            first = last
            if time.monotonic() - last_check > _LIVE_SECONDS:
                last_check = time.monotonic()
                self._check_live(peer, reader, selection.dataset)
        return True

    def _check_live(self, peer: Peer, reader: Reader, dataset: str) -> None:
        """Check that the certificate of a reader is still valid while rows are sent."""
        try:
            check_live(self.server.trust, peer)
        except NebulaError as error:
            self.server.guard.refuse(reader, dataset, error)
            raise

    def _wait_for_rate(self, peer: Peer, reader: Reader, dataset: str, pause: float) -> bool:
        """Wait before a batch is sent, and check meanwhile that its reader may still have it; returns whether the
        service is still open.
        """
        end = time.monotonic() + pause
        while (left := end - time.monotonic()) > 0:
            if self.server.is_closing.wait(min(left, _LIVE_SECONDS)):
                return False
            self._check_live(peer, reader, dataset)
            self.server.guard.confirm(reader, dataset)
        return not self.server.is_closing.is_set()


class _RowsRequest(NamedTuple):
    """A request for the rows of a pass from `first` to before `last`, in batches of `batch` rows, of an edition."""

    dataset: str
    seed: int | None
    number: int
    first: int
    last: int
    batch: int
    edition: str


def _parse_selection(message: dict[str, Any]) -> _RowsRequest:
    number, first, last, batch = (_read_number(message, part) for part in ("number", "first", "last", "batch"))
    seed = None if message.get("seed") is None else _read_number(message, "seed")
    selection = _RowsRequest(
        _read_text(message, "dataset"), seed, number, first, last, batch, _read_text(message, "edition")
    )
    if not 0 < selection.batch <= MOST_ROWS:
        raise _unknown_request_error()
    return selection


def _unknown_request_error() -> AccessError:
    return AccessError("this is not a request for data", mend="run the same version of this library at both ends")


def _parse_reader(peer: Peer, message: dict[str, Any]) -> Reader:
    purpose = None if message.get("purpose") is None else _read_text(message, "purpose")
    run, program, versions = (_read_text(message, part) for part in ("run", "program", "versions"))
    return Reader(peer.account, peer.identity.uri, run, program, purpose, versions)


def _read_text(message: dict[str, Any], part: str) -> str:
    value = message.get(part)
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise _unknown_request_error()
    return value


def _read_number(message: dict[str, Any], part: str) -> int:
    value = message.get(part)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise _unknown_request_error()
    return value


def _describe_dataset(dataset: Dataset) -> dict[str, Any]:
    interface = dataset.parse()
    about, until = interface.about, interface.expires
    return {"name": interface.name, "about": about, "schema": write_schema(interface.schema), "until": until}


def _send_refusal(connection: ssl.SSLSocket, error: NebulaError) -> None:
    with contextlib.suppress(*_CONNECTION_ERRORS):
        message = {part: str(getattr(error, part))[:1000] for part in ("code", "what", "why", "mend")}
        write_frame(connection, REFUSED, message)


@contextlib.contextmanager
def serve(
    issuer: LoginIssuer,
    guard: Guard,
    cluster: str,
    host: str,
    port: int,
    services: Path | None = None,
    approvals: Path | None = None,
) -> Iterator[int]:
    """Serve data while the context is open; yields the port. A gateway with the folder `services` hands over
    connections. Reports name the approvers of programs by the folder `approvals`.
    """
    identity = Identity(issuer.authority.run, cluster, OPERATOR)

    def make(address: tuple[str, int]) -> DataServer:
        return DataServer(address, issuer, identity, guard, approvals)

    with run_server(make, host, port, "nebula-data", services) as bound:
        yield bound


@contextlib.contextmanager
def open_service(
    folder: Path,
    signer: Authority,
    cluster: str,
    host: str,
    port: int,
    services: Path | None = None,
    approvals: Path | None = None,
) -> Iterator[int]:
    """Serve data with the registry, the counts and the log in a folder."""
    identity = Identity(signer.run, cluster, OPERATOR)
    with contextlib.closing(Registry(folder, signer)) as registry, contextlib.closing(Usage(folder)) as usage:
        issuer = LoginIssuer(registry, signer, folder)
        log_signer = CurrentCredentials(Credentials.load(certify_service(issuer, identity)))
        log = AuditLog(folder / AUDIT / f"data-{cluster}.jsonl", identity, log_signer)
        guard = Guard(Grants(registry), usage, log)
        with contextlib.closing(log):
            record_position(registry, log, "serve data")
            try:
                with serve(issuer, guard, cluster, host, port, services, approvals) as bound:
                    yield bound
            finally:
                record_position(registry, log, "end data service")
