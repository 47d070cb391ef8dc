"""The deny list: serial numbers of certificates that were taken back, in a file that every process reads.

The run's authority signs it, so that nobody else can take a name off it, and numbers it, so that an older copy is known
for what it is: each revocation makes a list with the next number. A list is read again whenever its file changes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from whale_nebula.errors import CredentialsError
from whale_nebula.security import files, reading
from whale_nebula.security.chain import canonical

FORMAT = "whale_nebula revoked 2"
_UNSIGNED_FORMAT = "whale_nebula revoked 1"
_MEANING = b"whale_nebula deny list 2\0"
_SERIAL = re.compile("[0-9a-f]{40}")
_LOG = logging.getLogger("whale_nebula.security")

Stamp = tuple[int, ...] | None


class Revocation(NamedTuple):
    """One certificate that was taken back: whose it is, when, and why."""

    serial: str
    who: str
    when: str
    why: str


Revocations = Mapping[str, Revocation]
"""By serial number."""


class SignedList(NamedTuple):
    """A deny list whose signature is right: its number, the digest of the key that signed it, what it holds."""

    number: int
    signer: str
    revoked: Revocations


def stamp(path: Path | None) -> Stamp:
    """What changes when a file does; None: there is none."""
    try:
        found = os.stat(path) if path is not None else None
    except OSError:
        return None
    return found and (found.st_ino, found.st_size, found.st_mtime_ns)


# ---------------------------------------------------------------------- the file
def load(path: Path, authorities: Iterable[x509.Certificate]) -> SignedList:
    """The deny list in a file, if one of these authorities signed it."""
    said = _document(path)
    if said.get("format") == _UNSIGNED_FORMAT:
        raise CredentialsError(
            "the deny list is not signed", where=str(path), why="it is of an older version", mend=_SIGN
        )
    signature = _signature(said.pop("signature", None))
    try:
        message = _MEANING + canonical(said)
        found = SignedList(_number(said["number"]), "", _revocations(said["revoked"]))
        if said["format"] != FORMAT or said.keys() != {"format", "run", "number", "revoked"}:
            raise ValueError(said["format"])
    except _GARBLED:
        raise _unreadable(path) from None
    for authority in authorities:
        if reading.authority_run(authority) == said["run"] and reading.verify_signature(authority, signature, message):
            return found._replace(signer=reading.public_key_digest(authority))
    raise CredentialsError(
        "the deny list is not signed by the run's authority",
        where=str(path),
        why="it was changed, or it is that of another run or authority than ca.pem",
        mend=_COPY,
    )


_GARBLED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_COPY = f"copy {files.REVOKED} again from where the authority is"
_SIGN = f"whale-nebula certs renew --revoked, where the authority is; then copy {files.REVOKED} to every host"


def load_unsigned(path: Path) -> Revocations:
    """What a deny list of an older version holds, which nobody signed; only its authority may take its word."""
    said = _document(path)
    try:
        if said["format"] != _UNSIGNED_FORMAT:
            raise ValueError(said["format"])
        return _revocations(said["revoked"])
    except _GARBLED:
        raise _unreadable(path) from None


def is_unsigned(path: Path) -> bool:
    """Whether a file is a deny list of an older version."""
    return path.exists() and _document(path).get("format") == _UNSIGNED_FORMAT


def save(path: Path, run: str, key: ec.EllipticCurvePrivateKey, number: int, revoked: Revocations) -> None:
    """Sign a deny list, and write it whole."""
    entries = {serial: {"who": each.who, "when": each.when, "why": each.why} for serial, each in revoked.items()}
    said: dict[str, Any] = {"format": FORMAT, "run": run, "number": number, "revoked": entries}
    signature = key.sign(_MEANING + canonical(said), reading.SIGNATURE)
    said["signature"] = base64.b64encode(signature).decode("ascii")
    files.write(path, f"{json.dumps(said, indent=1, sort_keys=True)}\n".encode(), files.PUBLIC)


def _document(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CredentialsError(
            "there is no deny list",
            where=str(path),
            why="without it nobody is denied, not even who was revoked",
            mend=f"copy {files.REVOKED} from where certificates are issued; if this run has none: "
            "security: {revoked: none}",
        )
    try:
        said = json.loads(files.read(path, "the deny list"))
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise _unreadable(path)
    return said


def _unreadable(path: Path) -> CredentialsError:
    return CredentialsError("the deny list does not read", where=str(path), mend=_COPY)


def _signature(said: Any) -> bytes:
    try:
        return base64.b64decode(said, validate=True)
    except (ValueError, TypeError):
        return b""


def _number(said: Any) -> int:
    if type(said) is not int or said < 1:
        raise ValueError("the number of a list")
    return said


def _revocations(said: Any) -> Revocations:
    return {serial: _revocation(serial, each) for serial, each in said.items()}


def _revocation(serial: str, said: Any) -> Revocation:
    if _SERIAL.fullmatch(serial) is None:
        raise ValueError("the serial number of a certificate")
    return Revocation(serial, str(said["who"]), str(said["when"]), str(said["why"]))


# ---------------------------------------------------------------------- the newest number that this host has had
def highest_number(path: Path, signer: str) -> int:
    """The number of the newest list of this signer that was read from this path; 0 if none is known."""
    try:
        lines = _record(path).read_text("ascii", "replace").splitlines()
    except OSError:
        return 0
    numbers = [line.split()[1:] for line in lines if line.startswith(f"{signer} ")]
    return max(
        (int(words[0]) for words in numbers if len(words) == 1 and re.fullmatch("[0-9]{1,18}", words[0])), default=0
    )


def remember_number(path: Path, found: SignedList) -> None:
    """Keep the number of a list beside it, for processes that start later, unless nothing may be written there."""
    if found.number <= max(1, highest_number(path, found.signer)):
        return
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with open(os.open(_record(path), flags, files.PUBLIC), "ab") as file:
            file.write(f"{found.signer} {found.number}\n".encode())


def _record(path: Path) -> Path:
    return path.with_name(f"{path.name}.highest")


# ---------------------------------------------------------------------- in a process
class DenyList:
    """The deny list of a process, read again whenever its file has changed. Any thread may ask.

    A file that stops to read, goes back to an older number, or vanishes, takes nothing off the list: what was denied
    stays denied, and the log says so once. Without a path nobody is denied.

    >>> DenyList(None).find("00ff", []) is None
    True
    """

    def __init__(self, path: Path | None, authorities: Iterable[x509.Certificate] = ()) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._lists: dict[str, SignedList] = {}
        self._tried = set(authorities)
        self._stamp = stamp(path)
        if path is not None:
            self._take(load(path, self._tried))

    @property
    def number(self) -> int | None:
        """The number of the list that holds; None without a list."""
        with self._lock:
            return max((each.number for each in self._lists.values()), default=None)

    def find(self, serial: str, authorities: Iterable[x509.Certificate]) -> Revocation | None:
        """Why a certificate is denied, if it is. A new list counts if one of these authorities signed it."""
        with self._lock:
            self._read_again(set(authorities))
            return next((each.revoked[serial] for each in self._lists.values() if serial in each.revoked), None)

    def _read_again(self, authorities: set[x509.Certificate]) -> None:
        """A list that was refused is tried again once there are other authorities: a renewed one may have signed it."""
        found = stamp(self.path)
        if self.path is None or (found == self._stamp and authorities <= self._tried):
            return
        if found != self._stamp:
            self._tried.clear()
        self._stamp = found
        self._tried |= authorities
        if found is None:
            _LOG.warning("the deny list %s is gone; what it held stays denied", self.path)
            return
        try:
            self._take(load(self.path, authorities))
        except CredentialsError as error:
            _LOG.warning("the deny list stays as it was: %s", error)

    def _take(self, found: SignedList) -> None:
        """Use a list, unless it is an older one of the same authority than was used before."""
        path = self.path or Path()
        before = self._lists.get(found.signer)
        highest = max(before.number if before else 0, highest_number(path, found.signer))
        if found.number < highest:
            raise CredentialsError(
                "the deny list is an older one",
                where=str(path),
                why=f"its number is {found.number}, and this host has had number {highest}",
                mend=_COPY,
            )
        self._lists[found.signer] = found
        remember_number(path, found)
