"""The deny list: serial numbers of certificates that were taken back, in a file that every process reads."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from whale_nebula.errors import CredentialsError
from whale_nebula.security import files

FORMAT = "whale_nebula revoked 1"
_LOG = logging.getLogger("whale_nebula.security")

Stamp = tuple[int, ...] | None


class Revocation(NamedTuple):
    """One certificate that was taken back: whose it is, when, and why."""

    serial: str
    who: str
    when: str
    why: str


def stamp(path: Path | None) -> Stamp:
    """What changes when a file does; None: there is none."""
    try:
        found = os.stat(path) if path is not None else None
    except OSError:
        return None
    return found and (found.st_ino, found.st_size, found.st_mtime_ns)


def load(path: Path) -> dict[str, Revocation]:
    """What a deny list holds; no file is an empty one, and a file that does not read is an error."""
    if not path.exists():
        return {}
    try:
        said = json.loads(files.read(path, "the deny list"))
        entries = said["revoked"]
        if said["format"] != FORMAT:
            raise ValueError(said["format"])
        return {serial: _entry(serial, each) for serial, each in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        mend = f"copy {files.REVOKED} again from where the authority is"
        raise CredentialsError("the deny list does not read", where=str(path), mend=mend) from None


def _entry(serial: str, said: Any) -> Revocation:
    int(serial, 16)
    return Revocation(serial, str(said["who"]), str(said["when"]), str(said["why"]))


def save(path: Path, run: str, revoked: Mapping[str, Revocation]) -> None:
    """Write a deny list, whole."""
    entries = {serial: {"who": each.who, "when": each.when, "why": each.why} for serial, each in revoked.items()}
    text = json.dumps({"format": FORMAT, "run": run, "revoked": entries}, indent=1, sort_keys=True)
    files.write(path, f"{text}\n".encode(), files.PUBLIC)


class DenyList:
    """A deny list that is read again whenever its file has changed. Any thread may ask.

    A file that stops to read, or vanishes, takes nothing off the list: what was denied stays denied, and the log
    says so once.

    >>> DenyList(None).find("00ff") is None
    True
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._stamp = stamp(path)
        self.missing = path is not None and self._stamp is None  # when it was first looked for
        self._revoked = {} if path is None else load(path)

    def find(self, serial: str) -> Revocation | None:
        """Why a certificate is denied, if it is."""
        with self._lock:
            self._read_again()
            return self._revoked.get(serial)

    def _read_again(self) -> None:
        found = stamp(self.path)
        if self.path is None or found == self._stamp:
            return
        self._stamp = found
        if found is None:
            _LOG.warning("the deny list %s is gone; what it held stays denied", self.path)
            return
        try:
            self._revoked = load(self.path)
        except CredentialsError as error:
            _LOG.warning("the deny list stays as it was: %s", error)
