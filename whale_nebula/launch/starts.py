"""The starts of an account that run on this host: each has a file, which it locks while it lives, with its workers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple


class Others(NamedTuple):
    """The workers of the other starts, and whether one of these began later."""

    workers: frozenset[int] = frozenset()
    later: bool = False


class Starts:
    """One start, among the others in a folder of the account's.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     one, other = Starts(Path(folder)), Starts(Path(folder))
    ...     other.note({7, 8})
    ...     found = one.find_others(), other.find_others()
    ...     other.close()
    ...     left = one.find_others()
    ...     one.close()
    >>> found
    (Others(workers=frozenset({8, 7}), later=True), Others(workers=frozenset(), later=False))
    >>> left
    Others(workers=frozenset(), later=False)
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(0o700, exist_ok=True)
        self._path = folder / f"{time.time_ns():020d}-{os.getpid()}"
        hidden = folder / f".{self._path.name}"
        self._file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        hidden.rename(self._path)  # under this name it was never unlocked while we lived
        self._noted: frozenset[int] = frozenset()

    def note(self, workers: Collection[int]) -> None:
        """Say which processes this start has now."""
        if self._noted != frozenset(workers):
            self._noted = frozenset(workers)
            text = "".join(f"{each}\n" for each in sorted(workers)).encode()
            os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))

    def find_others(self) -> Others:
        """The other starts; files of those that were killed are removed."""
        workers: set[int] = set()
        later = False
        for path in sorted(self._path.parent.glob("[0-9]*")):
            if path != self._path:
                with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        path.unlink()
                    except BlockingIOError:
                        workers.update(map(int, file.read().split()))
                        later = later or path.name > self._path.name
        return Others(frozenset(workers), later)

    def close(self) -> None:
        """The start is over."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)
