"""Verify an audit log from its first record, against its own signed heads and those kept by peers.

What is found, and by what: a changed, inserted, moved or missing record by the digest in the one after it; a forged
newline by the one way in which records are written; a log written anew by the heads in it, which only the key of its
owner can sign; an end that is cut off, a log of somebody else, and one that its owner wrote anew, by heads that a
peer has kept. An owner and a peer who lie together are not found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.hashes import SHA256

from whale_nebula.errors import AuditError, IdentityError, NebulaError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import chain
from whale_nebula.security.audit import Head, pieces
from whale_nebula.security.chain import BrokenError, Follower, Record
from whale_nebula.security.identity import Identity
from whale_nebula.security.trust import Trust

_FIRST = (chain.GENESIS, chain.RECOVERED)


@dataclass(frozen=True)
class Verdict:
    """What was found. `bad` is the number of the first record that is wrong or missing, None: the log is whole.

    `signed` is the last record that a head in the log covers, `kept` the last that a peer's head does; `closed`
    says that the log was ended on purpose. `torn` counts the crashes that tore a line, and `torn_bytes` what they left
    of it. `apart`: all that is known is that the log and what it was held against, heads or an authority, do not belong
    together, whichever of the two was meant.
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
    apart: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.bad is None


@dataclass
class _Reading:
    """The state of one look at a log."""

    trust: Trust | None
    kept: dict[int, list[Head]]
    follower: Follower = field(default_factory=Follower)
    first: Record = field(default_factory=dict)
    heads: int = 0
    signed: int | None = None
    matched: int | None = None
    before: str = ""
    last_actions: tuple[str, str] = ("", "")


def verify(path: str | os.PathLike[str], heads: Iterable[Head] = (), trust: Trust | None = None) -> Verdict:
    """Follow a log from its first record. `heads` are what a peer has kept; `trust` says whose heads count."""
    files = pieces(Path(path))
    given = list(heads)
    state = _Reading(trust, {})
    bad: int | None = None
    why, apart = "", False
    try:
        _read_heads(state, given)
        for line in _lines(files):
            _take(state, line)
        state.follower.end()
        _check_end(state, given)
    except _MissingError as error:
        bad, why, apart = error.seq, str(error), isinstance(error, _ApartError)
    except BrokenError as error:
        bad, why = state.follower.link.seq + 1, str(error)
    return Verdict(
        path=os.fspath(path),
        files=tuple(each.name for each in files),
        site=str(state.first.get("site", "")),
        run=str(state.first.get("run", "")),
        records=state.follower.link.seq + 1,
        bad=bad,
        why=why,
        heads=state.heads,
        signed=state.signed,
        kept=state.matched,
        torn=state.follower.torn,
        torn_bytes=state.follower.torn_bytes,
        closed=bad is None and state.last_actions in ((chain.END, chain.HEAD), _UNSIGNED_END),
        apart=apart,
    )


_UNSIGNED_END = ("", chain.END)


class _MissingError(Exception):
    """Something is wrong that does not show at the line that is read: `seq` is the first record it is about."""

    def __init__(self, seq: int, why: str) -> None:
        super().__init__(why)
        self.seq = seq


class _ApartError(_MissingError):
    """The log is not that of the heads or of the authority that it is held against."""


def _read_heads(state: _Reading, given: Iterable[Head]) -> None:
    for head in given:
        state.kept.setdefault(head.seq, []).append(head)


def _lines(files: Iterable[Path]) -> Iterator[bytes]:
    """All lines; what stands after the last newline of a file is one, too, and no record."""
    for path in files:
        try:
            with open(path, "rb") as file:
                for line in file:
                    yield line[:-1] if line.endswith(b"\n") else line + _TORN
        except OSError as error:
            raise AuditError("the audit log cannot be read", where=str(path), why=error.strerror) from None


_TORN = b"\0"


def _take(state: _Reading, line: bytes) -> None:
    record = state.follower.next(line)
    if record is None:
        return
    seq, digest = state.follower.link
    if not state.first:
        _check_first(record)
        state.first = record
    if record.get("site") != state.first.get("site"):
        said = escape_foreign_text(str(record.get("site")), 200)
        raise _MissingError(seq, f"the record is of {said}, in the log of {state.first['site']}")
    if record.get("action") == chain.HEAD:
        _check_own(state, record, seq)
    _check_kept(state, seq, digest)
    state.before = digest
    state.last_actions = (_previous(state, record), str(record.get("action")))


def _previous(state: _Reading, record: Record) -> str:
    return state.last_actions[1] if record.get("action") == chain.HEAD else ""


def _check_first(record: Record) -> None:
    if record.get("action") not in _FIRST:
        raise _MissingError(0, "the log does not begin with its genesis")
    try:
        site = Identity.parse(str(record.get("site")))
    except IdentityError:
        raise _MissingError(0, "the log does not say in its first record whose it is") from None
    if record.get("run") != site.run:
        raise _MissingError(0, f"the log of {site.uri} does not say in its first record that it is of run {site.run}")


def _check_own(state: _Reading, record: Record, seq: int) -> None:
    """A head in the log is about the record before it, and signed by whose log it is."""
    try:
        head = Head.from_dict(_mapping(record.get("head")))
        who = head.check(state.trust)
    except NebulaError as error:
        if state.signed is None and _is_of_another_authority(state):
            raise _strange() from None
        raise _anew(state, f"the head at record {seq} is wrong: {error.what}") from None
    if who.uri != state.first["site"]:
        raise _anew(state, f"the head at record {seq} is signed by {who.uri}")
    if head.seq != seq - 1 or head.digest != state.before:
        raise _anew(state, f"the head at record {seq} is signed for another record {head.seq}")
    state.heads += 1
    state.signed = head.seq


def _is_of_another_authority(state: _Reading) -> bool:
    """Whether the log itself names other authorities than the one that is trusted."""
    named = state.first.get("authorities")
    trusted = [each.fingerprint(SHA256()).hex() for each in state.trust.authorities] if state.trust else []
    return isinstance(named, list) and bool(trusted) and not set(trusted) & set(map(str, named))


def _strange() -> _ApartError:
    return _ApartError(
        0,
        "the log names another authority than --ca, and its heads are signed by a certificate of another authority: "
        "ca.pem is of another run, or the whole log is not the one that its gateway wrote",
    )


def _anew(state: _Reading, why: str) -> _MissingError:
    """The chain is right and a head is not: what follows the last good head was written anew."""
    last = max((seq for seq in (state.signed, state.matched) if seq is not None), default=-1)
    return _MissingError(last + 1, f"{why}; from record {last + 1} on the log was written anew")


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _check_kept(state: _Reading, seq: int, digest: str) -> None:
    """Whether the log is still the one that a peer was told of."""
    for head in state.kept.get(seq, ()):
        if not _is_of(state, head):
            continue
        if head.digest != digest:
            raise _anew(state, f"a peer keeps another digest of record {seq}")
        state.matched = seq


def _is_of(state: _Reading, head: Head) -> bool:
    try:
        return head.check(state.trust).uri == state.first["site"]
    except NebulaError as error:
        raise AuditError(f"head {head.seq} of the peer is wrong", why=error.what) from None


def _check_end(state: _Reading, given: list[Head]) -> None:
    """Whether the log is as long as its peers were told."""
    last = state.follower.link.seq
    if not state.first:
        raise _MissingError(0, "the log is empty")
    own = [head for head in given if _is_of(state, head)]
    if given and not own:
        said = sorted({head.check().uri for head in given})
        raise _ApartError(
            0,
            f"these are heads of the log of {', '.join(said)[:200]}, and none of {state.first['site']}, whose log this "
            "is: the heads of a log are kept by the gateway of the other cluster",
        )
    longest = max((head.seq for head in own), default=-1)
    if longest > last:
        raise _MissingError(last + 1, f"the log ends at record {last}, and a peer knows that it had {longest}")
