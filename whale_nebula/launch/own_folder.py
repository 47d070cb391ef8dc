"""A folder that is one run's alone: its keys and logs are gone when it ends, or at the latest when the next one starts.

Whoever is killed removes nothing. But the system lets go of his lock, and so the next run sees that nobody is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "whale-nebula-"
_LOCK = "in-use"


@contextlib.contextmanager
def own_folder(home: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A fresh folder that only this user can enter, removed at the end; `home` is where it is made.

    What runs that were killed have left there is removed first.

    >>> with own_folder() as folder:
    ...     sorted(path.name for path in folder.iterdir())
    ['in-use']
    >>> folder.exists()
    False
    """
    place = Path(tempfile.gettempdir() if home is None else home)
    remove_abandoned(place)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    lock = os.open(folder / f".{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / f".{_LOCK}", folder / _LOCK)  # under this name it was never unlocked while we lived
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(home: Path) -> None:
    """Remove the folders of this user's runs that are no more."""
    for folder in home.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
