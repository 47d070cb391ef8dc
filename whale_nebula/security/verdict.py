"""Verify an audit log from its first record, against its own signed heads and those kept by peers.

It detects a modified, inserted, moved or missing record by the digest in the next one; a forged newline by the
canonical form of records; a rewritten log by the heads in it, which only the key of its owner can sign; and a truncated
log, a log of another owner, and a log that its owner rewrote, by heads that a peer has kept. It does not detect an
owner and a peer that collude.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from cryptography.hazmat.primitives.hashes import SHA256

from whale_nebula.errors import AuditError, IdentityError, NebulaError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import chain
from whale_nebula.security.audit import HEAD_EVERY, Head, list_log_files
from whale_nebula.security.chain import START, BrokenChainError, Record
from whale_nebula.security.files import format_serial, parse_certificate
from whale_nebula.security.identity import Identity
from whale_nebula.security.trust import Revocation, Revocations, Trust

_FIRST_ACTIONS = (chain.GENESIS, chain.RECOVERED)
_EXTRA_RECORDS = 20  # records that a start, a rotation or a renewal may add before the next head


@dataclass(frozen=True)
class Verdict:
    """The result of a verification. `bad` is the number of the first record that is wrong or missing, or None.

    `signed` is the last record that a head in the log covers, `kept` the last that a peer's head covers; `closed` is
    true if the log was closed regularly. `torn` counts the crashes that left a partial line, `torn_bytes` the bytes of
    these lines. `is_unrelated` is true if the log does not belong to the heads or the authority that it was compared
    with; either may be the wrong one.
    """

    path: str
    files: tuple[str, ...] = ()
    site: str = ""
    run: str = ""
    records: int = 0
    bad: int | None = None
    why: str = ""
    heads: int = 0
    signed: int | None = None
    kept: int | None = None
    torn: int = 0
    torn_bytes: int = 0
    closed: bool = False
    is_unrelated: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.bad is None


def verify(
    path: str | os.PathLike[str],
    heads: Iterable[Head] = (),
    trust: Trust | None = None,
    revoked: Revocations = MappingProxyType({}),
) -> Verdict:
    """Verify a log from its first record. `heads` are those that peers have kept; `trust` decides which signers of
    heads are valid, and `revoked` contains those that were revoked.
    """
    files = list_log_files(Path(path))
    verification = _Verification(list(heads), trust, revoked)
    bad: int | None = None
    why, is_unrelated = "", False
    try:
        for line in _read_lines(files):
            verification.verify_next(line)
        verification.verify_end()
    except _InvalidLogError as error:
        bad, why, is_unrelated = error.seq, str(error), error.is_unrelated
    except BrokenChainError as error:
        bad, why = verification.link.seq + 1, str(error)
    return Verdict(
        path=os.fspath(path),
        files=tuple(each.name for each in files),
        site=str(verification.first.get("site", "")),
        run=str(verification.first.get("run", "")),
        records=verification.link.seq + 1,
        bad=bad,
        why=why,
        heads=verification.heads,
        signed=verification.signed,
        kept=verification.kept,
        torn=verification.torn,
        torn_bytes=verification.torn_bytes,
        closed=bad is None and verification.closed,
        is_unrelated=is_unrelated,
    )


class _InvalidLogError(Exception):
    """A fault that is not in the current line: `seq` is the first record that it concerns.

    `is_unrelated`: the log does not belong to the heads or the authority that it is compared with.
    """

    def __init__(self, seq: int, why: str, *, is_unrelated: bool = False) -> None:
        super().__init__(why)
        self.seq, self.is_unrelated = seq, is_unrelated


def _read_lines(files: Iterable[Path]) -> Iterator[bytes]:
    """All lines; bytes after the last newline of a file are a line, too, but not a record."""
    for path in files:
        try:
            with open(path, "rb") as file:
                for line in file:
                    yield line[:-1] if line.endswith(b"\n") else line + b"\0"
        except OSError as error:
            raise AuditError("cannot read the audit log", where=str(path), why=error.strerror) from None


class _Verification:
    """One pass over a log, from its first line to its last."""

    def __init__(self, peer_heads: list[Head], trust: Trust | None, revoked: Revocations) -> None:
        self.link = START
        self.torn = self.torn_bytes = 0
        self.first: Record = {}
        self.heads = 0
        self.signed: int | None = None
        self.kept: int | None = None
        self.last_actions = ("", "")
        self._peer_heads = peer_heads
        self._heads_by_seq: dict[int, list[Head]] = {}
        for each in peer_heads:
            self._heads_by_seq.setdefault(each.seq, []).append(each)
        self._trust = trust
        self._revoked = revoked
        self._revoked_head: tuple[int, Revocation] | None = None  # the last head, if its certificate was revoked
        self._previous_digest = ""  # the digest of the previous record

    def verify_next(self, line: bytes) -> None:
        """Verify the next line."""
        record, self.link = chain.verify_line(line, self.link)
        seq, digest = self.link
        if record.get("action") == chain.RECOVERED:
            byte_count = record.get("bytes")
            self.torn, self.torn_bytes = self.torn + 1, self.torn_bytes + (byte_count if type(byte_count) is int else 0)
        if not self.first:
            self._check_first(record)
            self.first = record
        if record.get("site") != self.first.get("site"):
            site = escape_foreign_text(str(record.get("site")), 200)
            raise _InvalidLogError(seq, f"the record belongs to {site}, but the log belongs to {self.first['site']}")
        is_head = record.get("action") == chain.HEAD
        if is_head:
            self._check_head(record, seq)
        for peer_head in self._heads_by_seq.get(seq, ()):
            if self._is_own(peer_head):
                if peer_head.digest != digest:
                    raise self._rewritten_error(f"a peer has a different digest of record {seq}")
                self.kept = seq
        self._previous_digest = digest
        self.last_actions = self.last_actions[1] if is_head else "", str(record.get("action"))

    def verify_end(self) -> None:
        """Check after the last line that the log contains all records for which its peers have heads."""
        last = self.link.seq
        if not self.first:
            raise _InvalidLogError(0, "the log is empty")
        own_heads = [head for head in self._peer_heads if self._is_own(head)]
        if self._peer_heads and not own_heads:
            owners = sorted({head.check().uri for head in self._peer_heads})
            raise _InvalidLogError(
                0,
                f"the heads belong to the log of {', '.join(owners)[:200]}, but the log is of {self.first['site']}; "
                "the gateway of the other cluster keeps the heads of a log",
                is_unrelated=True,
            )
        longest = max((head.seq for head in own_heads), default=-1)
        if longest > last:
            raise _InvalidLogError(
                last + 1, f"the log ends at record {last}, but a peer has a head of record {longest}"
            )
        if self._revoked_head is not None and self._revoked_head[0] > self._last_covered:
            raise self._revoked_error(self._revoked_head[1])
        if self._trust is not None:
            self._check_coverage(last)

    @property
    def closed(self) -> bool:
        """Whether the log was closed regularly: its end is signed, if its owner has a key."""
        unsigned = self.first.get("insecure") is True and self.last_actions == ("", chain.END)
        return unsigned or self.last_actions == (chain.END, chain.HEAD)

    def _check_coverage(self, last: int) -> None:
        """Check that the log has a head every 100 records and at its end, as a gateway writes them; a forger without
        the key would omit them.
        """
        unsigned = last - self._last_covered - (self._last_covered >= 0)  # the head's own record is not counted
        if unsigned > HEAD_EVERY + _EXTRA_RECORDS:
            raise self._rewritten_error(
                f"{unsigned} records follow the last head, but a log has one every {HEAD_EVERY} records"
            )
        if self.last_actions[1] == chain.END:
            raise self._rewritten_error("the end of the log is not signed by a head")

    def _check_first(self, record: Record) -> None:
        if record.get("action") not in _FIRST_ACTIONS:
            raise _InvalidLogError(0, "the log does not begin with a genesis record")
        try:
            site = Identity.parse(str(record.get("site")))
        except IdentityError:
            raise _InvalidLogError(0, "the first record does not name the owner of the log") from None
        if record.get("run") != site.run:
            raise _InvalidLogError(0, f"the first record of the log of {site.uri} does not name run {site.run}")

    def _check_head(self, record: Record, seq: int) -> None:
        """Check that a head in the log matches the record before it, and is signed by the log's owner."""
        fields = record.get("head")
        try:
            head = Head.from_dict(fields if isinstance(fields, dict) else {})
            identity = head.check(self._trust)
        except NebulaError as error:
            logged_authorities = self.first.get("authorities")
            trusted = [each.fingerprint(SHA256()).hex() for each in self._trust.authorities] if self._trust else []
            is_other_authority = (
                isinstance(logged_authorities, list)
                and bool(trusted)
                and not set(trusted) & set(map(str, logged_authorities))
            )
            if self.signed is None and is_other_authority:
                raise _InvalidLogError(
                    0,
                    "the log names a different authority from --ca, which also signed its heads: ca.pem belongs to "
                    "another run, or the log is not the one that its gateway wrote",
                    is_unrelated=True,
                ) from None
            raise self._rewritten_error(f"the head at record {seq} is invalid: {error.what}") from None
        if identity.uri != self.first["site"]:
            raise self._rewritten_error(f"the head at record {seq} is signed by {identity.uri}")
        if head.seq != seq - 1 or head.digest != self._previous_digest:
            raise self._rewritten_error(f"the head at record {seq} does not match record {head.seq}")
        self.heads += 1
        revocation = self._revoked.get(format_serial(parse_certificate(head.certificate, "the head of an audit log")))
        self._revoked_head = revocation and (head.seq, revocation)
        if revocation is None:
            self.signed = head.seq

    def _rewritten_error(self, why: str) -> _InvalidLogError:
        """The error for a correct chain with a wrong head: the records after the last valid head were rewritten."""
        return _InvalidLogError(
            self._last_covered + 1, f"{why}; the log was rewritten from record {self._last_covered + 1} on"
        )

    @property
    def _last_covered(self) -> int:
        """The last record that a valid head or a peer's head covers; -1 if there is none."""
        return max((seq for seq in (self.signed, self.kept) if seq is not None), default=-1)

    def _revoked_error(self, by: Revocation) -> _InvalidLogError:
        """The error for a signature with a revoked certificate, whose key may have been stolen. Peers store no heads of
        a revoked certificate, so their heads are earlier.
        """
        when, why = escape_foreign_text(by.when, 40), escape_foreign_text(by.why, 200)
        return _InvalidLogError(
            self._last_covered + 1,
            f"from record {self._last_covered + 1} on, the heads are signed with a certificate revoked {when}: {why}; "
            "only a peer's heads can show whether the owner wrote these records",
        )

    def _is_own(self, head: Head) -> bool:
        """Whether a head that a peer has kept belongs to this log."""
        try:
            return head.check(self._trust).uri == self.first["site"]
        except NebulaError as error:
            raise AuditError(f"head {head.seq} of the peer is invalid", why=error.what) from None
