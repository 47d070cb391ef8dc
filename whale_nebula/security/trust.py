"""Verify certificates: signed by the authority, within their dates, and not revoked.

The rules, in the order in which they are checked:

* it must not be self-signed (`SelfSignedError`);
* it must be signed by an authority in `ca` (`WrongAuthorityError`), which must be within its dates too;
* the present time must be within its dates (`ExpiredError`);
* it must be valid for both TLS clients and servers, and name one identity of the authority's run (`WrongNameError`);
* its serial number must not be on the deny list (`RevokedError`);
* if an identity is expected, it must have that one (`WrongNameError`).
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from whale_nebula.errors import (
    CredentialsError,
    ExpiredError,
    RevokedError,
    SelfSignedError,
    WrongAuthorityError,
    WrongNameError,
)
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.security import files
from whale_nebula.security.chain import encode_canonical
from whale_nebula.security.files import Peer
from whale_nebula.security.identity import Identity

FORMAT = "whale_nebula revoked 2"
_SIGNATURE_PREFIX = b"whale_nebula deny list 2\0"
_RETRY_SECONDS = 1.0
_SERIAL = re.compile("[0-9a-f]{40}")
_LOG = logging.getLogger("whale_nebula.security")

Stamp = tuple[int, ...] | None
"""What `make_stamp` returns."""


class Revocation(NamedTuple):
    """A revoked certificate or approval: its serial number, its identity or name, the date, and the reason."""

    serial: str
    who: str
    when: str
    why: str


Revocations = Mapping[str, Revocation]
"""Revocations by serial number."""


class SignedList(NamedTuple):
    """A deny list with a valid signature: number, digest of the signing key, and revocations."""

    number: int
    signer: str
    revoked: Revocations


def make_stamp(path: Path | None) -> Stamp:
    """Inode, size and time of a file, to detect changes; None if it is missing."""
    try:
        status = os.stat(path) if path is not None else None
    except OSError:
        return None
    return status and (status.st_ino, status.st_size, status.st_mtime_ns)


# ---------------------------------------------------------------------- the file
def load(path: Path, authorities: Iterable[x509.Certificate]) -> SignedList:
    """The deny list in a file; raises unless one of these authorities signed it."""
    if not path.exists():
        raise CredentialsError(
            "the deny list is missing",
            where=str(path),
            why="without it, revoked certificates would be accepted",
            mend=f"copy {files.REVOKED} from the host that issues certificates; if the run has no deny list, set "
            "security: {revoked: none}",
        )
    return parse(files.read(path, "the deny list", most=files.MOST_LIST_BYTES), str(path), authorities)


def parse(data: bytes, where: str, authorities: Iterable[x509.Certificate]) -> SignedList:
    """The deny list in these bytes; raises unless one of these authorities signed it."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise _parse_error(where)
    try:
        signature = base64.b64decode(content.pop("signature", None), validate=True)
    except (ValueError, TypeError):
        signature = b""
    try:
        message = _SIGNATURE_PREFIX + encode_canonical(content)
        deny_list = SignedList(content["number"], "", _parse_revocations(content["revoked"]))
        if type(deny_list.number) is not int or deny_list.number < 1:
            raise ValueError("invalid number of a deny list")
        if content["format"] != FORMAT or content.keys() != {"format", "run", "number", "revoked"}:
            raise ValueError(content["format"])
    except _PARSE_ERRORS:
        raise _parse_error(where) from None
    for authority in authorities:
        is_of_run = files.find_authority_run(authority) == content["run"]
        if is_of_run and files.verify_signature(authority, signature, message):
            return deny_list._replace(signer=files.digest_certificate_key(authority))
    raise CredentialsError(
        "the deny list is not signed by the run's authority",
        where=where,
        why="it was modified, or it belongs to a different run or authority from ca.pem",
        mend=_COPY_FIX,
    )


_PARSE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_COPY_FIX = f"copy {files.REVOKED} again from the host with the authority"


def save(path: Path, run: str, key: ec.EllipticCurvePrivateKey, number: int, revoked: Revocations) -> None:
    """Sign a deny list, and write it atomically."""
    entries = {serial: {"who": each.who, "when": each.when, "why": each.why} for serial, each in revoked.items()}
    content: dict[str, Any] = {"format": FORMAT, "run": run, "number": number, "revoked": entries}
    signature = key.sign(_SIGNATURE_PREFIX + encode_canonical(content), files.SIGNATURE)
    content["signature"] = base64.b64encode(signature).decode("ascii")
    files.write(path, f"{json.dumps(content, indent=1, sort_keys=True)}\n".encode(), files.PUBLIC)


def _parse_error(where: str) -> CredentialsError:
    return CredentialsError("cannot parse the deny list", where=where, mend=_COPY_FIX)


def _parse_revocations(content: Any) -> Revocations:
    for serial in content:
        if _SERIAL.fullmatch(serial) is None:
            raise ValueError("invalid serial number of a certificate")
    return {
        serial: Revocation(serial, str(each["who"]), str(each["when"]), str(each["why"]))
        for serial, each in content.items()
    }


# ---------------------------------------------------------------------- the highest number on this host
_MOST_RECORD_BYTES = 1 << 16


def read_highest_number(path: Path, signer: str) -> int:
    """The number of the newest list of this signer that was read from this path; 0 if none is known."""
    record = _highest_file(path)
    return _read_highest(record, signer, make_stamp(record))


@lru_cache(64)
def _read_highest(record: Path, signer: str, stamped: Stamp) -> int:
    """The highest number in a record, cached by its stamp, as it is read more often than it is written."""
    try:
        lines = record.read_text("ascii", "replace").splitlines()
    except OSError:
        return 0
    numbers = [line.split()[1:] for line in lines if line.startswith(f"{signer} ")]
    return max(
        (int(words[0]) for words in numbers if len(words) == 1 and re.fullmatch("[0-9]{1,18}", words[0])), default=0
    )


def remember_number(path: Path, deny_list: SignedList) -> None:
    """Store the number of a list next to it, for processes that start later, if the folder is writable."""
    remember_highest(path, deny_list.signer, deny_list.number)


def remember_highest(path: Path, signer: str, number: int) -> None:
    """Store the number that a file's signer gave it, next to the file, if it is the highest so far."""
    if number <= max(1, read_highest_number(path, signer)):
        return
    record, line = _highest_file(path), f"{signer} {number}\n".encode()
    with contextlib.suppress(OSError, CredentialsError):
        while not _append_line(record, line):
            pass
        if record.stat().st_size > _MOST_RECORD_BYTES:
            _compact(record)


def _append_line(record: Path, line: bytes) -> bool:
    """Append a line to a record; False if the file was replaced meanwhile."""
    with open(os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, files.PUBLIC), "ab") as file:
        file.write(line)
        file.flush()
        return os.fstat(file.fileno()).st_ino == record.stat().st_ino


def _compact(record: Path) -> None:
    """Replace a record by one with the highest number of each signer. Other processes may append to it meanwhile: what
    is appended to the old file before the new one has its name is copied, and later lines are appended again.
    """
    with open(record, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if another process compacts it
        highest: dict[bytes, bytes] = {}
        for line in file.read().splitlines():
            signer, _, number = line.partition(b" ")
            if number.isdigit():
                highest[signer] = max(highest.get(signer, b"0"), number, key=int)
        files.write(record, b"".join(b"%s %s\n" % each for each in highest.items()), files.PUBLIC)
        for line in file.read().splitlines(keepends=True):
            _append_line(record, line)


def _highest_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.highest")


# ---------------------------------------------------------------------- in a process
class DenyList:
    """The deny lists of a process, read again whenever their files have changed. Thread-safe.

    `path` is the list of the run's authority. If clusters have owners, each with an authority, the lists of the others
    are in the same folder, as `revoked-NAME.json`. The list of an authority that is restricted to clusters revokes only
    certificates that this authority signed.

    If a file becomes unreadable, has a lower number, or is removed, its revocations remain in force, and a warning is
    logged once. Without a path no certificate is revoked.

    >>> DenyList(None).find("00ff", []) is None
    True
    """

    def __init__(
        self,
        path: Path | None,
        authorities: Iterable[x509.Certificate] = (),
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self._now = path, now
        self._lock = threading.Lock()
        self._lists: dict[str, SignedList] = {}
        self._files: dict[Path, _ListFile] = {}
        known = set(authorities)
        for each in self._find_paths():
            self._files[each] = _ListFile(make_stamp(each), known)
            self._use_list(each, load(each, known))
        self._refuse_missing(known)

    def _refuse_missing(self, authorities: Iterable[x509.Certificate]) -> None:
        """Refuse a trusted authority without a deny list, as its revocations would have no effect here."""
        for each in authorities if self.path is not None else ():
            clusters = files.list_authority_clusters(each)
            if clusters and files.digest_certificate_key(each) not in self._lists:
                raise CredentialsError(
                    f"there is no deny list of the authority for {', '.join(clusters)}",
                    where=str((self.path or Path()).parent),
                    why="certificates that its owner revoked would still be accepted",
                    mend=f"ask its owner for ca.pem and {files.REVOKED}, then run: "
                    f"whale-nebula certs trust --ca their-ca.pem --list their-{files.REVOKED}",
                )

    def _find_paths(self) -> list[Path]:
        if self.path is None:
            return []
        return [self.path, *sorted(self.path.parent.glob(f"{self.path.stem}-*{self.path.suffix}"))]

    @property
    def number(self) -> int | None:
        """The number of the list in use, the highest of several; None without a list."""
        with self._lock:
            return max((each.number for each in self._lists.values()), default=None)

    def find(
        self, serial: str, authorities: Iterable[x509.Certificate], signer: x509.Certificate | None = None
    ) -> Revocation | None:
        """The revocation of a certificate or approval signed by one of these authorities; None if it is not revoked. A
        new list is valid if one of the authorities signed it.
        """
        trusted = set(authorities)
        bound_digests = {files.digest_certificate_key(each) for each in trusted if files.list_authority_clusters(each)}
        signer_digest = "" if signer is None or not bound_digests else files.digest_certificate_key(signer)
        with self._lock:
            for path in dict.fromkeys([*self._files, *self._find_paths()]):
                self._refresh(path, trusted)
            others = bound_digests - {signer_digest}
            lists = [each for each in self._lists.values() if each.signer not in others]
            return next((each.revoked[serial] for each in lists if serial in each.revoked), None)

    def _refresh(self, path: Path, authorities: set[x509.Certificate]) -> None:
        """Read a list again if needed. A refused list is retried when the authorities change, as a renewed one may have
        signed it, and once a second, as a read may have failed temporarily; a warning is logged once.
        """
        stamp, file = make_stamp(path), self._files.setdefault(path, _ListFile(None, set()))
        due = file.retry_at is not None and self._now() >= file.retry_at
        if stamp == file.stamp and authorities <= file.tried_authorities and not due:
            return
        is_new = stamp != file.stamp or not authorities <= file.tried_authorities
        if stamp != file.stamp:
            file.tried_authorities.clear()
        file.stamp, file.retry_at = stamp, None
        file.tried_authorities |= authorities
        if stamp is None:
            _LOG.warning("the deny list %s was removed; its revocations remain in force", path)
            return
        try:
            self._use_list(path, load(path, authorities))
        except CredentialsError as error:
            file.retry_at = self._now() + _RETRY_SECONDS
            if is_new:
                _LOG.warning("the new deny list was refused, and the previous one remains in force: %s", error)

    def _use_list(self, path: Path, deny_list: SignedList) -> None:
        """Use a list, unless a newer list of its authority was used before."""
        used = self._lists.get(deny_list.signer)
        highest = max(used.number if used else 0, read_highest_number(path, deny_list.signer))
        if deny_list.number < highest:
            raise CredentialsError(
                "the deny list is outdated",
                where=str(path),
                why=f"its number is {deny_list.number}, but this host has used number {highest}",
                mend=_COPY_FIX,
            )
        self._lists[deny_list.signer] = deny_list
        remember_number(path, deny_list)


@dataclass
class _ListFile:
    """The file of a deny list: its stamp and the authorities when it was read, and the time of the next attempt if it
    was refused.
    """

    stamp: Stamp
    tried_authorities: set[x509.Certificate]
    retry_at: float | None = None

    def __post_init__(self) -> None:
        self.tried_authorities = set(self.tried_authorities)


_USES = {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}


class Trust:
    """The authorities of a run and its deny list."""

    def __init__(self, authorities: Sequence[x509.Certificate], denied: DenyList | None = None) -> None:
        self.authorities = tuple(authorities)
        self.denied = DenyList(None) if denied is None else denied

    def check(
        self,
        certificate: x509.Certificate | bytes | str,
        expected: Identity | None = None,
        *,
        subject: str = "",
        at: datetime | None = None,
    ) -> Peer:
        """Verify a certificate and return it with its identity, or raise an `IdentityError`, which names it by
        `subject`; `at` is the time at which it must be valid, by default now.
        """
        parsed = (
            certificate
            if isinstance(certificate, x509.Certificate)
            else files.parse_certificate(certificate, subject or "a peer")
        )
        # the caller's name for the peer takes precedence over the name in the certificate
        names = [uri for uri in files.list_alternative_names(parsed) if uri.startswith("nebula://")]
        shown_name = escape_foreign_text(names[0] if names else parsed.subject.rfc4514_string(), 200)
        owner = subject or shown_name or "an unnamed peer"
        moment = at or files.now()
        authority = self.check_signed(parsed, owner, moment)
        peer = files.read_peer(parsed)
        _check_names_and_uses(parsed, authority, peer.identity)
        self.check_denied(peer, authority)
        if expected is not None and peer.identity != expected:
            raise wrong_name_error(peer.identity, expected)
        return peer

    def check_denied(self, peer: Peer, signer: x509.Certificate) -> None:
        """Check a certificate for revocation; repeated while a channel is open."""
        revoked = self.denied.find(peer.serial, self.authorities, signer)
        if revoked is not None:
            raise RevokedError(
                f"the certificate of {peer.identity.worker} was revoked",
                where=f"serial {peer.serial[:16]}",
                why=" ".join(part for part in (revoked.when, revoked.why) if part),
            )

    def check_signed(self, certificate: x509.Certificate, owner: str, at: datetime) -> x509.Certificate:
        """The authority that signed a certificate, if both are within their dates; repeated while a channel is open, as
        an authority may be removed from `ca`.
        """
        authority = self._find_authority(certificate, owner)
        check_dates(certificate, at, f"the certificate of {owner}")
        check_dates(authority, at, f"the authority that signed the certificate of {owner}", authority=True)
        return authority

    def _find_authority(self, certificate: x509.Certificate, owner: str) -> x509.Certificate:
        signers = [authority for authority in self.authorities if files.is_signed_by(certificate, authority)]
        if signers:  # two of one key, if a renewed certificate was appended
            return max(signers, key=lambda authority: authority.not_valid_after_utc)
        if files.is_signed_by(certificate, certificate):
            raise SelfSignedError(f"the certificate of {owner} is self-signed")
        trusted_names = ", ".join(each.subject.rfc4514_string() for each in self.authorities)
        signer = escape_foreign_text(certificate.issuer.rfc4514_string(), 200)
        raise WrongAuthorityError(
            f"the certificate of {owner} was issued by another authority",
            why=f"it was signed by {signer}, not with the key of {trusted_names} in ca.pem",
        )


def check_live(trust: Trust, peer: Peer, at: datetime | None = None) -> None:
    """Check that an accepted peer is still valid: TLS does not verify an established connection again."""
    signer = trust.check_signed(peer.certificate, peer.identity.worker, at or files.now())
    trust.check_denied(peer, signer)


def check_dates(certificate: x509.Certificate, at: datetime, subject: str, *, authority: bool = False) -> None:
    """Check that the present time is within the dates of a certificate. A time before both is most likely caused by a
    wrong clock.
    """
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if at < begin:
        why = f"it is valid from {begin:%Y-%m-%d %H:%M} UTC, and the clock of this host is at {at:%Y-%m-%d %H:%M} UTC"
        raise ExpiredError(f"{subject} is not valid yet", why=f"{why}: one of two clocks is wrong", mend=_CLOCK_FIX)
    if at > end:
        why = f"it expired at {end:%Y-%m-%d %H:%M} UTC, and the clock of this host is at {at:%Y-%m-%d %H:%M} UTC"
        raise ExpiredError(f"{subject} has expired", why=why, mend=_RENEW_AUTHORITY_FIX if authority else None)


def expires_soon(begin: datetime, end: datetime, at: datetime) -> bool:
    """Whether a validity period is in its last quarter, or in its last week if that is shorter.

    >>> start = datetime(2026, 1, 1)
    >>> [expires_soon(start, start + timedelta(days=life), start + timedelta(days=6)) for life in (7, 90)]
    [True, False]
    """
    return end - at < min((end - begin) / 4, timedelta(days=7))


_CLOCK_FIX = "set the clock: timedatectl set-ntp true, or chronyc makestep"
_RENEW_AUTHORITY_FIX = (
    "on the host with the authority, run: whale-nebula certs renew --ca; then copy ca.pem to every host"
)


def _check_names_and_uses(certificate: x509.Certificate, authority: x509.Certificate, identity: Identity) -> None:
    run, bound = files.find_authority_run(authority), files.list_authority_clusters(authority)
    if bound and identity.cluster not in bound:
        raise WrongNameError(
            f"{identity.uri} is in a cluster that its authority may not certify",
            why=f"the authority that signed it may certify {', '.join(bound)}",
            mend=f"ask the owner of {identity.cluster} to sign the request: whale-nebula certs sign",
        )
    if run is not None and run != identity.run:
        raise WrongNameError(
            f"{identity.uri} belongs to a different run from its authority", why=f"the authority is for run {run!r}"
        )
    uses = files.find_extension(certificate, x509.ExtendedKeyUsage)
    basic = files.find_extension(certificate, x509.BasicConstraints)
    if uses is None or not set(uses) >= _USES or basic is None or basic.ca:
        raise WrongNameError(
            f"the certificate of {identity.worker} has the wrong purpose",
            why="a process's certificate must be valid for TLS clients and servers, and must not sign certificates",
            mend="whale-nebula certs issue",
        )


def wrong_name_error(found: Identity, expected: Identity) -> WrongNameError:
    """The error for an identity that differs from the expected one."""
    other = f"of run {found.run!r}" if found.run != expected.run else "of the same run"
    return WrongNameError(
        f"expected {expected.worker}, found {found.worker}",
        where=expected.worker,
        why=f"the certificate names {found.uri} ({other}), not {expected.uri}",
    )
