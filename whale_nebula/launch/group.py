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
        state, _, found = _stat(process)
        return int(found) == group and state not in _DEAD
    return False


def _stat(process: Path) -> list[str]:
    """The state of a process, its parent and its group."""
    return (process / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:3]


def descendants(process: int) -> list[int]:
    """The processes that a process has started, and those that they have, in whatever group or session they are.

    >>> descendants(os.getpid())
    []
    """
    children: dict[int, list[int]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            with contextlib.suppress(OSError):
                state, parent = _stat(each)[:2]
                if state not in _DEAD:
                    children.setdefault(int(parent), []).append(int(each.name))
    found = list(children.get(process, ()))
    for one in found:  # grows meanwhile
        found += children.get(one, ())
    return found


def end_descendants(process: int) -> None:
    """Kill all that a process has started, also what is in a session of its own. A daemon whose parent has ended is not
    found.
    """
    limit = time.monotonic() + LINGER_SECONDS
    while (found := descendants(process)) and time.monotonic() < limit:
        for one in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        time.sleep(0.01)  # they may have started others meanwhile


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
