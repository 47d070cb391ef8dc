"""Heartbeats from a worker to its launcher: a process that is frozen is found within seconds.

A worker's thread writes a byte each second into a pipe. A launcher that hears none for a while looks at the process
before it judges: one that computes, or waits for a core, is busy and not frozen.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

EVERY_SECONDS = 1.0
SILENCE_SECONDS = 5.0
STOPPED = "T"
RUNNABLE = "R"


# ---------------------------------------------------------------------- the worker's side
def start_beating(fd: int, every: float = EVERY_SECONDS) -> threading.Thread:
    """Beat into a pipe from now on, until nobody reads it any more."""
    os.set_inheritable(fd, False)
    os.set_blocking(fd, False)
    thread = threading.Thread(target=_beat, args=(fd, every), name="nebula-pulse", daemon=True)
    thread.start()
    return thread


def _beat(fd: int, every: float) -> None:
    with suppress(BrokenPipeError):
        while True:
            with suppress(BlockingIOError):  # a launcher that is stopped reads nothing; it is told enough
                os.write(fd, b".")
            time.sleep(every)


# ---------------------------------------------------------------------- the rule
class Vitals(NamedTuple):
    """How a process looks from outside: its state, and the CPU time that it has used, in ticks."""

    state: str
    cpu: int


class Heard(NamedTuple):
    """What is known of a worker's heart: for how long it has been silent, and its CPU time when that was last so."""

    silent: float
    cpu: int


def listen(before: Heard | None, passed: float, beat: bool, now: Vitals) -> Heard | None:
    """What is known after some more time; None as long as no beat was ever heard: it has not begun to beat.

    CPU time that moves counts like a beat, unless the process is stopped.

    >>> heard = listen(None, 0.5, True, Vitals("S", 10))
    >>> listen(heard, 0.5, False, Vitals("S", 10)), listen(heard, 0.5, False, Vitals("S", 12))
    (Heard(silent=0.5, cpu=10), Heard(silent=0.0, cpu=12))
    """
    if beat:
        return Heard(0.0, now.cpu)
    if before is None:
        return None
    if now.cpu != before.cpu and now.state != STOPPED:
        return Heard(0.0, now.cpu)
    return Heard(before.silent + passed, now.cpu)


def frozen(heard: Heard | None, runnable: Callable[[], bool], silence: float = SILENCE_SECONDS) -> bool:
    """Whether a worker is frozen: silent for so long, and no thread of it only waits for a core.

    >>> frozen(Heard(6.0, 10), lambda: False), frozen(Heard(6.0, 10), lambda: True)
    (True, False)
    """
    return heard is not None and heard.silent >= silence and not runnable()


# ---------------------------------------------------------------------- the launcher's side
def vitals(pid: int) -> Vitals | None:
    """How a process looks now; None for one that is gone."""
    with suppress(OSError):
        parts = _stat(Path(f"/proc/{pid}/stat"))
        return Vitals(parts[0], int(parts[11]) + int(parts[12]))
    return None


def runnable(pid: int) -> bool:
    """Whether some thread of a process runs, or would if it had a core."""
    with suppress(OSError):
        return any(_state(task) == RUNNABLE for task in Path(f"/proc/{pid}/task").iterdir())
    return False


def _state(task: Path) -> str:
    with suppress(OSError):
        return _stat(task / "stat")[0]
    return ""


def _stat(path: Path) -> list[str]:
    """The fields of a `stat` file after the name, which may hold anything."""
    return path.read_text("utf-8", "replace").rpartition(")")[2].split()


class Ward:
    """A thread that listens to all workers' hearts, and calls `tell` with the name of each that is frozen, once.

    `pulses` are the ends of the pipes to read from, which it closes; `pids` the processes. It ends by `close`.
    """

    def __init__(
        self,
        pulses: Mapping[str, int],
        pids: Mapping[str, int],
        tell: Callable[[str], None],
        silence: float = SILENCE_SECONDS,
    ) -> None:
        self._pulses = dict(pulses)
        for fd in pulses.values():
            os.set_blocking(fd, False)
        self._pids = dict(pids)
        self._tell = tell
        self._silence = silence
        self._heard: dict[str, Heard | None] = dict.fromkeys(pulses)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="nebula-ward", daemon=True)
        if pulses:
            self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        for fd in self._pulses.values():
            os.close(fd)
        self._pulses.clear()

    def _listen(self) -> None:
        tick = self._silence / 20
        last, watched = time.monotonic(), set(self._pulses)
        while not self._ended.wait(tick):
            now = time.monotonic()
            passed, last = min(now - last, 2 * tick), now  # time in which we were frozen ourselves is no silence
            for worker in sorted(watched):
                if self._look(worker, passed):
                    watched.discard(worker)
                    self._tell(worker)

    def _look(self, worker: str, passed: float) -> bool:
        pid = self._pids[worker]
        now = vitals(pid)
        if now is None:
            return False
        self._heard[worker] = heard = listen(self._heard[worker], passed, _drained(self._pulses[worker]), now)
        return frozen(heard, partial(runnable, pid), self._silence)


def _drained(fd: int) -> bool:
    """Whether beats have come; they are taken out. The end of a process is none."""
    beat = False
    with suppress(BlockingIOError):
        while os.read(fd, 4096):
            beat = True
    return beat
