"""A folder in the memory of this host, which lives as long as the launcher: what workers keep there outlives them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PLACE = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it, which nobody else may read
_NAME = re.compile(r"whale-nebula-(\d+)-\w+")


@contextlib.contextmanager
def open_memory(place: Path = PLACE) -> Iterator[str | None]:
    """Make the folder, and remove it in the end; None where this host has no file system in memory. Those of launchers
    that were killed are removed, too.
    """
    if not os.access(place, os.W_OK):
        yield None
        return
    remove_abandoned(place)
    folder = tempfile.mkdtemp(prefix=f"whale-nebula-{os.getpid()}-", dir=place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(place: Path) -> None:
    """Remove the folders of launchers that are no more."""
    for path in place.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None and not Path(f"/proc/{match[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)
