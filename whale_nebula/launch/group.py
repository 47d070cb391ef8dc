"""Process groups: a worker has one of its own, so that what it starts can be ended with it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

LINGER_SECONDS = 1.0
_DEAD = "ZX"


def send(group: int, number: int) -> None:
    """Send a signal to all of a group, if there is anybody."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def members(group: int) -> list[int]:
    """The processes of a group that are alive.

    >>> os.getpid() in members(os.getpgrp())
    True
    """
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal() and _within(each, group)]


def _within(process: Path, group: int) -> bool:
    with contextlib.suppress(OSError):
        state, _, found = (process / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:3]
        return int(found) == group and state not in _DEAD
    return False


def end(group: int, linger: float = LINGER_SECONDS) -> None:
    """End what is left of a group: with SIGTERM, and whoever lingers with SIGKILL.

    Its leader must still be there, dead but not waited for: until then nobody else can get the group's number.
    """
    if not members(group):
        return
    send(group, signal.SIGTERM)
    limit = time.monotonic() + linger
    while members(group) and time.monotonic() < limit:
        time.sleep(0.02)
    send(group, signal.SIGKILL)
