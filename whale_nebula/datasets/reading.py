"""Read an owner's dataset: over a network from the owner's service, or on the owner's machine, with the same rows."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from whale_nebula.accounts.server import dial, make_client_context
from whale_nebula.config.place import split_address
from whale_nebula.datasets.guard import MOST_BYTES, Guard, Reader, ReadRequest
from whale_nebula.datasets.report import MOST_REPORT_BYTES, Log, Period, Report, decode_report
from whale_nebula.datasets.schema import (
    ANSWER,
    ASK,
    BATCH,
    END,
    HELLO,
    MOST_JSON,
    REFUSED,
    Frame,
    Schema,
    decode_columns,
    find_max_bytes,
    read_frame,
    read_schema,
    write_frame,
)
from whale_nebula.errors import AccessError, AccountError, AuditError, IdentityError, NebulaWarning
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import OPERATOR, WORKER, Files, Identity, files
from whale_nebula.security.audit import Head, KeptHeads
from whale_nebula.security.trust import Trust
from whale_nebula.transport import handover

_ANONYMOUS = Reader("", "")
_PAUSE, _LONGEST_PAUSE = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """Description of a dataset before it is read: its schema, number of rows, and edition."""

    schema: Schema
    count: int
    edition: str


class RowSelection(NamedTuple):
    """The rows to be read: those at the positions from `first` to before `last` of a pass, in batches."""

    dataset: str
    seed: int | None
    number: int
    first: int
    last: int
    batch: int


class DatasetClient(Protocol):
    """Reads datasets of one owner."""

    def describe(self, name: str) -> DatasetInfo:
        """The description of a readable dataset."""

    def read(self, selection: RowSelection, info: DatasetInfo) -> Iterator[dict[str, Any]]:
        """The batches, one after the other."""


@dataclass(frozen=True)
class LocalClient:
    """Reads on the owner's machine: no row is sent over a network; checks and records are the same."""

    guard: Guard
    reader: Reader
    sleep: Callable[[float], None] = field(default=time.sleep)

    def describe(self, name: str) -> DatasetInfo:
        """The description of a readable dataset."""
        opened = self.guard.open(self.reader, name)
        return DatasetInfo(opened.interface.schema, opened.count, opened.edition)

    def read(self, selection: RowSelection, info: DatasetInfo) -> Iterator[dict[str, Any]]:
        """The batches, one after the other."""
        for first in range(selection.first, selection.last, selection.batch):
            last = min(first + selection.batch, selection.last)
            request = ReadRequest(selection.dataset, selection.seed, selection.number, first, last, info.edition)
            batch = self.guard.read(self.reader, request)
            if batch.pause > 0:
                self.sleep(batch.pause)
                self.guard.confirm(self.reader, selection.dataset)
            yield batch.columns


@dataclass(frozen=True)
class RemoteClient:
    """Reads from an owner's service, with the certificate of an account. After a broken connection it reconnects and
    resumes after the last received batch, within `patience` seconds.
    """

    host: str
    port: int
    paths: Files
    identity: Identity
    reader: Reader
    patience: float = 120.0
    sleep: Callable[[float], None] = field(default=time.sleep)

    def describe(self, name: str) -> DatasetInfo:
        """The description of a readable dataset."""
        with self._open() as connection:
            return self._start_read(connection, RowSelection(name, None, 0, 0, 0, 1), "")

    def list_datasets(self) -> list[dict[str, Any]]:
        """The datasets to which access may be requested."""
        with self._open() as connection:
            found = connection.ask({"ask": "list"}).message.get("datasets")
            return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []

    def request(self, name: str, purpose: str) -> str:
        """Request access to a dataset; returns the number of the request."""
        with self._open() as connection:
            answer = connection.ask({"ask": "request", "dataset": name, "purpose": purpose})
            return escape_foreign_text(answer.message.get("number"), 64)

    def fetch_report(self, period: Period) -> tuple[Report, list[Log]]:
        """Request the report of the reads of the owner's data in a period: for auditors."""
        request = {"ask": "report", "since": period.since.isoformat(), "until": period.until.isoformat()}
        with self._open() as connection:
            data = connection.ask(request, MOST_REPORT_BYTES).data
        try:
            return decode_report(json.loads(bytes(data)))
        except (ValueError, RecursionError):
            raise AccessError("the service sent an invalid answer", where=self._where) from None

    def read(self, selection: RowSelection, info: DatasetInfo) -> Iterator[dict[str, Any]]:
        """The batches, one after the other."""
        failures, failing_since = 0, 0.0
        while selection.first < selection.last:
            try:
                for columns, last in self._stream(selection, info):
                    failures, selection = 0, selection._replace(first=last)
                    yield columns
            except (OSError, EOFError, _UnreachableError) as error:
                now = time.monotonic()
                failing_since = now if not failures else failing_since
                failures += 1
                if now - failing_since > self.patience:
                    why = f"there was no connection for longer than patience, {self.patience:g} s: {error}"
                    raise AccessError(
                        f"dataset {selection.dataset!r} cannot be read", where=self._where, why=why
                    ) from None
                self.sleep(min(_LONGEST_PAUSE, _PAUSE * 2.0**failures))

    def _stream(self, selection: RowSelection, info: DatasetInfo) -> Iterator[tuple[dict[str, Any], int]]:
        with self._open(is_retry=True) as connection:
            found = self._start_read(connection, selection, info.edition)
            if found != info:
                what = f"dataset {selection.dataset!r} has changed since the run began to read"
                raise AccessError(what, mend="start the run again")
            for first in range(selection.first, selection.last, selection.batch):
                rows = min(selection.batch, selection.last - first)
                frame = connection.take(BATCH, min(find_max_bytes(info.schema, rows), MOST_BYTES))
                if (frame.message.get("first"), frame.message.get("rows")) != (first, rows):
                    raise AccessError("the service sent different rows than requested", where=self._where)
                try:
                    yield decode_columns(info.schema, rows, frame.data), first + rows
                except ValueError as error:
                    why = str(error)[:200]
                    raise AccessError(
                        "the service sent rows that do not match the schema", where=self._where, why=why
                    ) from None
            self._keep_head(connection.take(END).message.get("head"))

    def _keep_head(self, message: object) -> None:
        """Store the signed head of the service's log next to the certificate, and report a log that was rolled back."""
        path = self.paths.cert.parent / f"data-{self.identity.cluster}.heads.jsonl"
        if not isinstance(message, dict):
            return
        try:
            pem = files.read(self.paths.ca, "the authority's certificate")
            trust = Trust(files.parse_certificates(pem, str(self.paths.ca)))
            KeptHeads(path, trust).keep(Head.from_dict(message), self._service_identity)
        except AuditError as error:
            warning = NebulaWarning(error.what, where=self._where, why=error.why, mend=error.mend)
            warnings.warn_explicit(warning, NebulaWarning, str(path), 0)

    def _start_read(self, connection: _Connection, selection: RowSelection, edition: str) -> DatasetInfo:
        reader = self.reader
        message = connection.ask({
            "ask": "read", **selection._asdict(), "edition": edition, "run": reader.run, "program": reader.program,
            "purpose": reader.purpose, "versions": reader.versions,
        }).message  # fmt: skip
        try:
            count, found = message["count"], str(message["edition"])[:64]
            if type(count) is not int or not 0 <= count < 1 << 63:
                raise ValueError("a count")
            return DatasetInfo(read_schema(message["schema"]), count, found)
        except (ValueError, TypeError, KeyError):
            raise AccessError("the service sent an invalid answer", where=self._where) from None

    @property
    def _service_identity(self) -> Identity:
        """The identity of the service, by its certificate."""
        return Identity(self.identity.run, self.identity.cluster, OPERATOR)

    @property
    def _where(self) -> str:
        return f"{self.host}:{self.port}"

    @contextlib.contextmanager
    def _open(self, is_retry: bool = False) -> Iterator[_Connection]:
        """Connect to the service. TLS errors about our own certificate are translated."""
        context, authorities = make_client_context(
            files.read(self.paths.ca, "the authority's certificate"), handover.DATA
        )
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        files.read(self.paths.key, "the key of this account's certificate", secret=True)
        try:
            context.load_cert_chain(self.paths.cert, self.paths.key)
        except (OSError, ssl.SSLError) as error:
            raise AccessError("cannot use this certificate", where=str(self.paths.cert), why=str(error)) from None
        try:
            with dial(self.host, self.port, context, authorities, self._service_identity, handover.DATA) as secured:
                try:
                    yield _Connection.begin(secured)
                except ssl.SSLError as error:
                    raise _describe_alert(error, self.paths) from None
        except AccountError as error:
            if is_retry:
                raise _UnreachableError(f"{error.what}: {error.why}") from None
            raise
        except (OSError, EOFError) as error:
            if is_retry:
                raise
            raise AccessError("the connection to the data service broke", where=self._where, why=str(error)) from None


class _UnreachableError(Exception):
    """The service cannot be reached at the moment."""


def _describe_alert(error: ssl.SSLError, paths: Files) -> Exception:
    reason = (error.reason or "").lower()
    if "alert" not in reason and "certificate" not in reason:
        return EOFError(str(error))
    mend = "log in at the owner of the data: whale-nebula login"
    return AccessError("the service refused this certificate", where=str(paths.cert), why=str(error), mend=mend)


class _Connection:
    """An open connection: numbered requests, each with the random number of the connection."""

    def __init__(self, secured: ssl.SSLSocket, nonce: str) -> None:
        self._secured, self._nonce, self._number = secured, nonce, 0

    @classmethod
    def begin(cls, secured: ssl.SSLSocket) -> _Connection:
        connection = cls(secured, "")
        connection._nonce = str(connection.take(HELLO).message.get("nonce"))
        secured.settimeout(600.0)
        return connection

    def ask(self, message: dict[str, Any], most_data: int = 0) -> Frame:
        self._number += 1
        write_frame(self._secured, ASK, {**message, "nonce": self._nonce, "request": self._number})
        return self.take(ANSWER, most_data)

    def take(self, kind: int, most_data: int = 0) -> Frame:
        frame = read_frame(self._secured, most_data, MOST_JSON << 4)
        if frame.kind == REFUSED:
            parts = ("what", "why", "mend")
            what, why, mend = (escape_foreign_text(frame.message.get(part, ""), 1000, lines=True) for part in parts)
            raise AccessError(what or "the service refused the request", why=why, mend=mend or None)
        if frame.kind != kind:
            raise AccessError(f"the service sent a frame of kind {frame.kind} instead of {kind}")
        return frame


def find_account(folder: Path, run: str | None, cluster: str, role: str = WORKER) -> tuple[Identity, Files]:
    """The identity and the files of the newest certificate in a folder for a role in a cluster: of those that were
    issued to accounts, if there are any.
    """
    candidates = []
    for path in sorted(folder.glob(f"{cluster}-{role}-*.pem")):
        with contextlib.suppress(IdentityError):
            peer = files.read_peer(files.parse_certificate(path.read_bytes(), str(path)))
            if (
                peer.identity.cluster == cluster
                and path.with_suffix(".key").exists()
                and run in (None, peer.identity.run)
            ):
                candidates.append((bool(peer.account), peer.not_after, peer.identity))
    if not candidates:
        of_role = f" --role {role}" * (role != WORKER)
        mend = f"whale-nebula login --cluster {cluster}{of_role} --at HOST:PORT --account NAME --folder {folder}"
        raise AccessError(f"missing certificate of an account of {cluster}", where=str(folder), mend=mend)
    identity = max(candidates)[2]
    return identity, Files.in_folder(folder, identity)


def open_remote(
    at: str, folder: Path, run: str | None, cluster: str, reader: Reader = _ANONYMOUS, role: str = WORKER
) -> RemoteClient:
    """Open an owner's service at an address, for the account whose certificate is in a folder."""
    host, port = split_address(at)
    identity, paths = find_account(folder, run, cluster, role)
    if port <= 0 or not host:
        raise AccessError(f"{at!r} is not an address", mend="use HOST:PORT, such as gpu.example.org:7100")
    return RemoteClient(host, port, paths, identity, reader)
