"""Files inside a folder: what a pattern of an interface finds is opened there, or not at all.

A pattern cannot name a folder above, and a file is looked at once it is open: one that lies elsewhere, by a symbolic
link or because it was swapped meanwhile, is refused.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from whale_nebula.errors import InterfaceError

_PLAIN = re.compile(r"[^\0-\x1f\\~]+")


def check_pattern(pattern: str) -> str:
    """Why a pattern may not stand in an interface; nothing if it may.

    >>> [bool(check_pattern(each)) for each in ("a/*.txt", "../a", "/etc/passwd", "~/a", "a/../../b", "")]
    [False, True, True, True, True, True]
    """
    path = PurePosixPath(pattern)
    if not _PLAIN.fullmatch(pattern) or path.is_absolute() or ".." in path.parts or "**" in path.parts:
        return "a pattern names files in the folder of the interface: no '..', no '~', no '**', no absolute path"
    return ""


def find_files(folder: Path, pattern: str) -> list[Path]:
    """The files that a pattern finds, in their order; links and what is no file are refused."""
    if why := check_pattern(pattern):
        raise _outside(pattern, folder, why)
    found = sorted(folder.glob(pattern))
    if not found:
        why = "no file is called so"
        raise InterfaceError(f"{pattern!r} finds nothing", where=str(folder), why=why, mend=f"ls {folder}")
    for path in found:
        with open_inside(folder, path):
            pass
    return found


def open_inside(folder: Path, path: Path) -> BinaryIO:
    """A file of a folder, open for reading."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        why = "it is a symbolic link" if path.is_symlink() else str(error.strerror)
        if path.is_symlink():
            raise _outside(path.name, folder, why) from None
        raise InterfaceError(f"{path.name} cannot be read", where=str(path), why=why) from None
    file = open(descriptor, "rb")  # noqa: SIM115 - the caller closes it
    root, real = os.path.realpath(folder), os.path.realpath(f"/proc/self/fd/{descriptor}")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise InterfaceError(f"{path.name} is no plain file", where=str(path))
    if os.path.commonpath([root, real]) != root:
        file.close()
        raise _outside(path.name, folder, "by a link in its path it lies elsewhere")
    return file


def _outside(what: str, folder: Path, why: str) -> InterfaceError:
    return InterfaceError(
        f"{what!r} leaves the folder of the interface", where=str(folder), why=why, mend="copy the file into the folder"
    )
