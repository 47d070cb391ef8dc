"""The audit log of a process: decisions with time and subject, in a hash chain that others can verify.

Each line contains `seq`, `time` (UTC), `mono_ns`, `site` (the log's owner), `actor`, `action`, `object`, `decision`,
`reason` and `prev`. The first names the run and the certificates. Records are never removed: a large log continues in a
new file, with the same chain.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives import hashes, serialization

from whale_nebula.errors import AuditError, IdentityError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import chain, files
from whale_nebula.security.chain import START, Link, encode_canonical
from whale_nebula.security.credentials import Credentials, CurrentCredentials
from whale_nebula.security.files import sync_folder
from whale_nebula.security.identity import Identity
from whale_nebula.security.trust import Trust

HEAD_EVERY = 100
LOG_IN_USE = "the audit log is in use"
"""The text of the error for a log that another process writes."""
MOST_BYTES = 64 << 20
_LONGEST_TEXT = 1000
_HEAD_START = b'{"action":"head",'
_MOST_REMEMBERED = 1024  # heads of one sender, to detect duplicates
_RESERVED_FIELDS = frozenset(
    {"seq", "prev", "time", "mono_ns", "site", "actor", "action", "object", "decision", "reason"}
)

Signer = Credentials | CurrentCredentials
_RESTART_FIX = "repair the disk, then restart this process: it continues after the last record on the disk"


class AuditLog:
    """An audit log open for writing: by one process at a time, from any of its threads.

    A record with a decision is on disk when `record` returns. After a disk error the log is closed permanently, as
    records might be missing. `on_head` receives each signed head, in order, to be sent to a peer that keeps it; it is
    called outside the lock, by a thread that wrote a record.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        identity: Identity,
        signer: Signer | None,
        *,
        on_head: Callable[[Head], None] | None = None,
        head_every: int = HEAD_EVERY,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.path = Path(path)
        self.identity = identity
        self._signer, self._on_head = signer, on_head
        self._head_every, self._most_bytes = head_every, most_bytes
        self._lock = threading.Lock()
        self._pass_lock = threading.RLock()
        self._unsynced_heads: list[Head] = []  # not on disk yet
        self._synced_heads: deque[Head] = deque()  # on disk, but not passed to `on_head` yet
        self._failure: str | None = None
        self._unsigned_records = 0
        self._fingerprint = ""
        self._first_number = 0
        self._file, self._size = _open(self.path)
        try:
            self._link = self._continue_chain()
        except BaseException:
            self._close_file()
            raise

    def record(
        self,
        action: str,
        *,
        actor: Identity | str = "",
        target: str = "",
        decision: str = "",
        reason: str = "",
        durable: bool | None = None,
        **more: Any,
    ) -> int:
        """Write a record; returns its number. `decision` is "allow", "deny" or ""; `more` is plain JSON.

        `target` is the line's `object`: the subject of the action.
        """
        if not _RESERVED_FIELDS.isdisjoint(more):
            raise AuditError(f"{sorted(_RESERVED_FIELDS & set(more))} are reserved fields", mend="choose other names")
        fields = {"actor": str(actor), "object": target, "decision": decision, "reason": reason, **more}
        with self._lock:
            if self._size >= self._most_bytes:
                self._rotate()
            self._write(action, fields)
            seq = self._link.seq
            full = self._unsigned_records >= self._head_every
            if full:
                self._write_head()
            if full or durable or (durable is None and decision):
                self._sync()
        self._pass_heads()
        return seq

    def sign_head(self) -> Head | None:
        """Sign the current position of the log, write the head, and return it; None without a key."""
        with self._lock:
            head = self._write_head()
            self._sync()
        self._pass_heads()
        return head

    def close(self, reason: str = "") -> None:
        """Write and sign the end of the log, in one write: an unsigned end would look forged. Closing twice does
        nothing.
        """
        with self._lock:
            if self._file < 0:
                return
            end = {"reason": reason}
            if self._current_credentials() is None:
                self._write(chain.END, end)
            else:
                self._write_head(end=end)
            self._sync()
            self._close_file()
        self._pass_heads()

    # ------------------------------------------------------------------ inside the lock
    def _continue_chain(self) -> Link:
        """Continue at the end of the file or of the previous file, or begin a new chain."""
        with open(os.dup(self._file), "rb") as file:
            file.seek(0)
            data = file.read(self._size)
        before = _find_start(self.path, data)
        lines, tail = chain.split_lines(data)
        try:
            self._link = chain.verify_lines(lines, before)
        except chain.BrokenChainError as error:
            raise _broken_error(self.path, str(error)) from None
        self._first_number = before.seq + 1
        since = (number for number, line in enumerate(reversed(lines)) if line.startswith(_HEAD_START))
        # a file without a head needs one: the last head is in the previous file
        self._unsigned_records = next(since, len(lines) if before == START else self._head_every)
        if tail and _is_next_record(tail, self._link):  # only its newline is missing
            self._append(b"\n")
            self._link, tail = Link(self._link.seq + 1, chain.digest(tail)), b""
        if tail:
            self._write(chain.RECOVERED, {**self._set_aside(tail), **self._describe_run()})
        else:
            self._write(chain.GENESIS if self._link == START else "start", self._describe_run())
        if self._unsigned_records >= self._head_every:
            self._write_head()
        self._sync()
        self._sync_folder()
        return self._link

    def _set_aside(self, tail: bytes) -> dict[str, Any]:
        """Move the remains of a record after a crash to a separate file; returns the fields that describe it."""
        if not chain.is_torn_record(tail):
            raise _broken_error(self.path, f"the bytes at its end are not the beginning of record {self._link.seq + 1}")
        digest = chain.digest(tail)
        files.write(self.path.with_name(f"{self.path.name}.torn-{digest[:16]}"), tail, files.SECRET)
        self._size -= len(tail)
        os.ftruncate(self._file, self._size)
        return {"torn": digest, "bytes": len(tail)}

    def _describe_run(self) -> dict[str, Any]:
        """The run and the fingerprints of the certificates."""
        credentials = self._current_credentials()
        if credentials is None:
            return {"run": self.identity.run, "insecure": True}
        self._fingerprint = credentials.peer.fingerprint
        authorities = [each.fingerprint(hashes.SHA256()).hex() for each in credentials.trust.authorities]
        return {"run": self.identity.run, "certificate": self._fingerprint, "authorities": authorities}

    def _current_credentials(self) -> Credentials | None:
        return self._signer() if isinstance(self._signer, CurrentCredentials) else self._signer

    def _write(self, action: str, fields: dict[str, Any]) -> None:
        line, link = self._make_line(self._link, action, fields)
        self._append(line)
        self._link = link
        self._unsigned_records += 1

    def _make_line(self, before: Link, action: str, fields: dict[str, Any]) -> tuple[bytes, Link]:
        """The line of the next record, and the link after it."""
        if self._file < 0:
            raise AuditError(
                "the audit log is closed",
                where=str(self.path),
                why=self._failure,
                mend="open a new AuditLog" if self._failure is None else _RESTART_FIX,
            )
        record = {
            "time": datetime.now(UTC).isoformat(timespec="microseconds"),
            "mono_ns": time.monotonic_ns(),
            "site": self.identity.uri,
            "action": action,
            **{key: value[:_LONGEST_TEXT] if isinstance(value, str) else value for key, value in fields.items()},
        }
        try:
            line, link = chain.make_line(before, record)
        except (TypeError, ValueError) as error:
            raise AuditError(
                "the record is not plain JSON", why=str(error), mend="use text, whole numbers and lists"
            ) from None
        return line + b"\n", link

    def _append(self, data: bytes) -> None:
        """Append lines, completely or not at all: a partial write is rolled back."""
        try:
            if os.write(self._file, data) != len(data):
                raise OSError(28, "the disk is full")
        except OSError as error:
            try:
                os.ftruncate(self._file, self._size)
            except OSError as worse:
                raise self._fail("cannot remove an incomplete record from the audit log", worse) from None
            mend = f"df {self.path.parent}; ls -ld {self.path.parent}"
            raise AuditError(
                "cannot write the audit log", where=str(self.path), why=error.strerror, mend=mend
            ) from None
        self._size += len(data)

    def _write_head(self, *, end: dict[str, Any] | None = None) -> Head | None:
        """Sign the current position of the log, or an `end` record written with the head; None without a key."""
        credentials = self._current_credentials()
        if credentials is None:
            self._unsigned_records = 0
            return None
        if credentials.peer.fingerprint != self._fingerprint:
            self._write("renewed", self._describe_run())
        ended, link = (b"", self._link) if end is None else self._make_line(self._link, chain.END, end)
        head = Head.sign(credentials, *link)
        line, link = self._make_line(link, chain.HEAD, {"head": head._asdict()})
        self._append(ended + line)
        self._link = link
        self._unsynced_heads.append(head)
        self._unsigned_records = 0
        return head

    def _sync(self) -> None:
        try:
            os.fsync(self._file)
        except OSError as error:
            raise self._fail("cannot sync the audit log to disk", error) from None
        self._synced_heads.extend(self._unsynced_heads)
        self._unsynced_heads.clear()

    def _sync_folder(self) -> None:
        try:
            sync_folder(self.path.parent)
        except OSError as error:
            raise self._fail("cannot sync the folder of the audit log to disk", error) from None

    def _fail(self, what: str, error: OSError) -> AuditError:
        """Close the log permanently: after a failed fsync, a later one may succeed without the pages that were lost."""
        self._failure = f"{what}: {error.strerror}"
        self._unsynced_heads.clear()
        self._close_file()
        return AuditError(what, where=str(self.path), why=error.strerror, mend=_RESTART_FIX)

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _rotate(self) -> None:
        """Rename the full file, and continue in a new one. The file's lock remains with it."""
        self._sync()
        rotated = name_rotated_file(self.path, self._first_number)
        try:
            if self.path.exists():  # from an earlier attempt that was interrupted
                os.rename(self.path, rotated)
        except OSError as error:
            raise AuditError(f"cannot create {rotated}", why=error.strerror) from None
        old, (self._file, self._size) = self._file, _open(self.path)
        os.close(old)
        self._first_number = self._link.seq + 1
        self._write("rotated", {"object": rotated.name})
        self._sync()
        self._sync_folder()

    # ------------------------------------------------------------------ outside the lock
    def _pass_heads(self) -> None:
        """Pass heads to `on_head` in order, whichever thread signed them."""
        with self._pass_lock:
            while self._synced_heads:
                head = self._synced_heads.popleft()
                if self._on_head is not None:
                    self._on_head(head)


def _is_next_record(line: bytes, before: Link) -> bool:
    try:
        chain.verify_line(line, before)
    except chain.BrokenChainError:
        return False
    return True


def _open(path: Path) -> tuple[int, int]:
    """Open the file for appending, locked; returns its size too."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        mend = f"use a writable, persistent folder: whale-nebula gateway ... --audit /var/lib/nebula/{path.name}"
        raise AuditError("cannot open the audit log", where=str(path), why=error.strerror, mend=mend) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        why = "another process writes to it"
        raise AuditError(
            LOG_IN_USE, where=str(path), why=why, mend="stop the other process, or use another file"
        ) from None
    return file, os.fstat(file).st_size


def _broken_error(path: Path, why: str) -> AuditError:
    return AuditError(
        "the audit log was modified after it was written",
        where=str(path),
        why=why,
        mend=f"run whale-nebula audit verify {path}, then keep the file under another name: mv {path} {path}.broken",
    )


# ---------------------------------------------------------------------- several files, one chain
def name_rotated_file(path: Path, first: int) -> Path:
    """The name of a full file, by the number of its first record.

    >>> name_rotated_file(Path("audit.jsonl"), 4100).name
    'audit.000000004100.jsonl'
    """
    return path.with_name(f"{path.stem}.{first:012d}{path.suffix}")


def list_log_files(path: Path) -> list[Path]:
    """All files of a log up to this one, in the order of its chain."""
    match = re.fullmatch(r"(.+)\.\d{12}", path.stem)
    stem = match[1] if match else path.stem
    full = sorted(path.parent.glob(f"{_escape_glob(stem)}.{'[0-9]' * 12}{_escape_glob(path.suffix)}"))
    return [each for each in full if not match or each.name <= path.name] + [path] * (match is None)


def _escape_glob(text: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", text)


def _find_start(path: Path, data: bytes) -> Link:
    """The link before the first record of this file: the chain's start, or the end of the previous file."""
    older = list_log_files(path)[:-1]
    if not older:
        return START
    first = chain.parse_line(data.split(b"\n", 1)[0])
    if first is not None and isinstance(first.get("seq"), int):
        return Link(first["seq"] - 1, str(first.get("prev")))
    lines, tail = chain.split_lines(older[-1].read_bytes())
    begin = chain.parse_line(lines[0]) if lines else None
    if begin is None or tail:
        raise _broken_error(older[-1], "it does not begin and end with a record")
    try:
        return chain.verify_lines(lines, Link(int(begin["seq"]) - 1, str(begin["prev"])))
    except chain.BrokenChainError as error:
        raise _broken_error(older[-1], str(error)) from None


_SIGNATURE_PREFIX = b"whale_nebula audit head 1\0"


class Head(NamedTuple):
    """A signed statement of a log's owner: the number and the digest of its last record."""

    seq: int
    digest: str
    signature: str
    certificate: str

    @classmethod
    def sign(cls, credentials: Credentials, seq: int, digest: str) -> Head:
        """Sign a head of this process's log."""
        signature = credentials.sign(_message(credentials.identity, seq, digest))
        return cls(seq, digest, base64.b64encode(signature).decode("ascii"), credentials.cert_pem.decode("ascii"))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Head:
        """Parse a head from a peer or from a file."""
        match dict(fields):
            case {
                "seq": int(seq),
                "digest": str(digest),
                "signature": str(signature),
                "certificate": str(certificate),
            } if type(seq) is int and 0 <= seq < 1 << 63 and len(digest) == 64:
                return cls(seq, digest, signature, certificate)
        keys = escape_foreign_text(", ".join(sorted(map(str, fields))), 200)
        raise AuditError("not a head of an audit log", why=f"its keys are: {keys}")

    def trim(self) -> Head:
        """The head without a peer's text around the certificate."""
        certificate = files.parse_certificate(self.certificate, "the head of an audit log")
        return self._replace(certificate=certificate.public_bytes(serialization.Encoding.PEM).decode("ascii"))

    def check(self, trust: Trust | None = None) -> Identity:
        """The identity of the log's owner, if the signature is valid and, with `trust`, one of its authorities issued
        the signer's certificate.

        Dates are not checked: a log may be verified long after its certificates have expired.
        """
        certificate = files.parse_certificate(self.certificate, "the head of an audit log")
        identity = files.read_peer(certificate).identity
        if trust is not None and not any(files.is_signed_by(certificate, each) for each in trust.authorities):
            raise AuditError(f"head {self.seq} is signed with a certificate of another authority")
        try:
            signature = base64.b64decode(self.signature, validate=True)
        except ValueError:  # not base64, or not ASCII
            signature = b""
        if not files.verify_signature(certificate, signature, _message(identity, self.seq, self.digest)):
            raise AuditError(f"the signature of head {self.seq} is invalid", where=identity.worker)
        return identity


def _message(identity: Identity, seq: int, digest: str) -> bytes:
    return _SIGNATURE_PREFIX + encode_canonical({"who": identity.uri, "seq": seq, "digest": digest})


class KeptHeads:
    """The latest signed heads of other processes' logs, in an append-only file. Thread-safe.

    `trust` is the authority for heads or, for a process that outlives its authority's certificate, a function that
    returns the current one.
    """

    def __init__(self, path: str | os.PathLike[str], trust: Trust | Callable[[], Trust]) -> None:
        self.path = Path(path)
        self._trust = trust
        self._lock = threading.Lock()
        self._digests: dict[Identity, dict[int, str]] = {}  # by record number, of the last heads of each sender
        latest: dict[str, deque[Head]] = {}  # only these signatures are checked: a file may be long
        for head in read_heads(self.path) if self.path.exists() else ():
            latest.setdefault(head.certificate, deque(maxlen=_MOST_REMEMBERED)).append(head)
        for heads in latest.values():
            for head in heads:
                _remember_head(self._digests.setdefault(head.check(), {}), head)

    def keep(self, head: Head, sender: Identity) -> bool:
        """Store a head of the sender's log; False if it is already stored. Raises `AuditError` if that log was rolled
        back.
        """
        trust = self._trust if isinstance(self._trust, Trust) else self._trust()
        trust.check(head.certificate, sender, subject="the sender of a head")
        head.check(trust)
        with self._lock:
            digests = self._digests.setdefault(sender, {})
            if digests.get(head.seq) == head.digest:
                return False
            if digests and head.seq <= max(digests):
                raise self._rollback_error(head, max(digests.items()), sender)
            self._write(head.trim())
            _remember_head(digests, head)
        return True

    def _rollback_error(self, head: Head, last: tuple[int, str], sender: Identity) -> AuditError:
        return AuditError(
            f"the audit log of {sender.worker} was rewritten or rolled back",
            why=f"its last known head is record {last[0]} with digest {last[1][:16]}; the new head is record "
            f"{head.seq} with digest {head.digest[:16]}",
            mend=f"run whale-nebula audit verify FILE --heads {self.path} on the log of {sender.worker}",
        )

    def _write(self, head: Head) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
                file.write(b"\n" * self._is_torn() + encode_canonical(head._asdict()) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise AuditError(f"cannot write {self.path}", why=error.strerror) from None

    def _is_torn(self) -> bool:
        """Whether a crash left a partial line, so that the next one must begin on a new line."""
        with open(self.path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            if not end:
                return False
            file.seek(end - 1)
            return file.read(1) != b"\n"


def _remember_head(digests: dict[int, str], head: Head) -> None:
    digests[head.seq] = head.digest
    if len(digests) > _MOST_REMEMBERED:
        del digests[min(digests)]


def read_heads(path: str | os.PathLike[str]) -> Iterator[Head]:
    """The heads in a file; partial lines of a crash are skipped."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise AuditError("cannot read the heads", where=str(path), why=error.strerror) from None
    for number, line in enumerate(lines, start=1):
        fields = _parse_json(line)
        if fields is None:
            continue
        try:
            yield Head.from_dict(fields)
        except (AuditError, IdentityError) as error:
            raise AuditError(error.what, where=f"{path}:{number}", why=error.why) from None


def _parse_json(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None
