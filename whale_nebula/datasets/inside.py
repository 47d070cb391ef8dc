"""Access to files within a folder: files that match a pattern of an interface are opened inside it, or refused.

A pattern cannot name a parent folder, and a file is checked once it is open: one outside, by a symbolic link or because
it was replaced meanwhile, is refused.
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
    """Why a pattern is not allowed in an interface; "" if it is.

    >>> [bool(check_pattern(each)) for each in ("a/*.txt", "../a", "/etc/passwd", "~/a", "a/../../b", "")]
    [False, True, True, True, True, True]
    """
    path = PurePosixPath(pattern)
    if not _PLAIN.fullmatch(pattern) or path.is_absolute() or ".." in path.parts or "**" in path.parts:
        return "a pattern names files in the folder of the interface: no '..', no '~', no '**', no absolute path"
    return ""


def find_files(folder: Path, pattern: str) -> list[Path]:
    """The files that match a pattern, in order; links and other non-files are refused."""
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
    """Open a file of a folder for reading."""
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
