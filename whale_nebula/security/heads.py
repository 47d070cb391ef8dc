"""Heads of audit logs: signed words of a process about how long its log is, which another keeps for it.

Whoever cuts the end off a log, or writes it anew with his own digests, would have to change what the peer keeps, too.
"""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from whale_nebula.errors import AuditError, IdentityError
from whale_nebula.security import reading
from whale_nebula.security.chain import canonical
from whale_nebula.security.credentials import Credentials
from whale_nebula.security.identity import Identity
from whale_nebula.security.trust import Trust

_MEANING = b"whale_nebula audit head 1\0"


class Head(NamedTuple):
    """So long was a log, and this was the digest of its last record: signed by whose log it is."""

    seq: int
    digest: str
    signature: str
    certificate: str

    @classmethod
    def sign(cls, credentials: Credentials, seq: int, digest: str) -> Head:
        """The head of one's own log."""
        signature = credentials.sign(_message(credentials.identity, seq, digest))
        return cls(seq, digest, base64.b64encode(signature).decode("ascii"), credentials.cert_pem.decode("ascii"))

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Head:
        """What a peer sent, or what a file holds."""
        match dict(said):
            case {
                "seq": int(seq),
                "digest": str(digest),
                "signature": str(signature),
                "certificate": str(certificate),
            } if type(seq) is int and seq >= 0 and len(digest) == 64:
                return cls(seq, digest, signature, certificate)
        keys = reading.plain(", ".join(sorted(map(str, said))))
        raise AuditError("this is no head of an audit log", why=f"it holds {keys}")

    def as_dict(self) -> dict[str, Any]:
        """To be sent, or kept."""
        return self._asdict()

    def check(self, trust: Trust | None = None) -> Identity:
        """Whose log this is about, if the signature is right and, with `trust`, an authority of it made the signer.

        Dates are not looked at: a log is read long after its certificates have ended.
        """
        shown = reading.certificate(self.certificate, "the head of an audit log")
        identity = reading.peer(shown).identity
        if trust is not None and not any(reading.signed_by(shown, each) for each in trust.authorities):
            raise AuditError(f"head {self.seq} is signed by a certificate of another authority")
        try:
            signature = base64.b64decode(self.signature, validate=True)
        except ValueError:  # no base64, or no ASCII
            signature = b""
        if not reading.verify_signature(shown, signature, _message(identity, self.seq, self.digest)):
            raise AuditError(f"the signature of head {self.seq} is wrong", where=identity.worker)
        return identity


def _message(identity: Identity, seq: int, digest: str) -> bytes:
    return _MEANING + canonical({"who": identity.uri, "seq": seq, "digest": digest})


class KeptHeads:
    """The heads of others, in a file to which lines are only added. Any thread may call it.

    `trust` is whose heads count or, for a process that outlives its authority's certificate, a function that gives
    whose do at present.
    """

    def __init__(self, path: str | os.PathLike[str], trust: Trust | Callable[[], Trust]) -> None:
        self.path = Path(path)
        self._trust = trust
        self._lock = threading.Lock()
        self._kept: dict[Identity, dict[int, Head]] = {}
        for head in read_heads(self.path) if self.path.exists() else ():
            self._kept.setdefault(head.check(), {})[head.seq] = head

    def last(self, who: Identity) -> Head | None:
        """The longest that a log of somebody is known to have been."""
        with self._lock:
            kept = self._kept.get(who)
            return kept[max(kept)] if kept else None

    def keep(self, head: Head, sender: Identity) -> bool:
        """Keep what somebody says of his own log; False if it is known. A log that went back is an `AuditError`."""
        trust = self._trust if isinstance(self._trust, Trust) else self._trust()
        trust.check(head.certificate, sender, whose="the sender of a head")
        head.check(trust)
        with self._lock:
            kept = self._kept.setdefault(sender, {})
            if head.seq in kept and kept[head.seq].digest == head.digest:
                return False
            if kept and head.seq <= max(kept):
                raise self._went_back(head, kept[max(kept)], sender)
            self._write(head)
            kept[head.seq] = head
        return True

    def _went_back(self, head: Head, last: Head, sender: Identity) -> AuditError:
        return AuditError(
            f"the audit log of {sender.worker} is another than it was",
            why=f"it was at record {last.seq} with digest {last.digest[:16]}, and is now said to be at "
            f"{head.seq} with {head.digest[:16]}",
            mend=f"whale-nebula audit verify FILE --heads {self.path}, with the file of {sender.worker}",
        )

    def _write(self, head: Head) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
                file.write(b"\n" * self._torn() + canonical(head.as_dict()) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise AuditError(f"{self.path} cannot be written", why=error.strerror) from None

    def _torn(self) -> bool:
        """Whether a crash left half a line: the next one begins on a line of its own."""
        with open(self.path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            if not end:
                return False
            file.seek(end - 1)
            return file.read(1) != b"\n"


def read_heads(path: str | os.PathLike[str]) -> Iterator[Head]:
    """The heads in a file; a line that a crash tore holds none."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise AuditError("the heads cannot be read", where=str(path), why=error.strerror) from None
    for number, line in enumerate(lines, start=1):
        said = _json(line)
        if said is None:
            continue
        try:
            yield Head.from_dict(said)
        except (AuditError, IdentityError) as error:
            raise AuditError(error.what, where=f"{path}:{number}", why=error.why) from None


def _json(line: bytes) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None
