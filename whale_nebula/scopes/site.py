"""Where the user wrote a scope."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_OURS = str(Path(__file__).resolve().parents[1]) + "/"
_PASSED_THROUGH = ("contextlib.py", "functools.py")


class Site(NamedTuple):
    """A line of the user's code.

    >>> str(Site("train.py", 12))
    'train.py:12'
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def calling_site() -> Site:
    """The innermost line on Python's stack that is neither ours nor contextlib's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return Site("<unknown>", 0)
    return _written(Site(frame.f_code.co_filename, frame.f_lineno), frame)


def script_site() -> Site:
    """The innermost line on Python's stack that is in no installed package: what the script is doing now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (_is_machinery(frame.f_code.co_filename) or _is_installed(frame)):
        frame = frame.f_back
    return Site("<unknown>", 0) if frame is None else Site(frame.f_code.co_filename, frame.f_lineno)


def _is_installed(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return "site-packages" in file or file.startswith("<frozen")


def _is_machinery(file: str) -> bool:
    return file.startswith(_OURS) or file.endswith(_PASSED_THROUGH)


def _written(site: Site, frame: FrameType) -> Site:
    """The line that the user wrote, where tf.function runs a rewritten copy of it.

    AutoGraph puts the copy into a file of its own and hangs a map back to the original onto the new function,
    which the frame that called it holds.
    """
    caller = frame.f_back if "__autograph_generated_file" in site.file else None
    while caller is not None:
        origins = getattr(caller.f_locals.get("converted_f"), "ag_source_map", {})
        if (origin := origins.get((site.file, site.line))) is not None:
            return Site(origin.loc.filename, origin.loc.lineno)
        caller = caller.f_back
    return site
