"""Graceful shutdown on SIGTERM, SIGINT or SIGHUP: all workers leave together between two steps.

Who was asked says so with its next step. When that step is over all know, and each leaves before it begins another: so
all have taken the same steps. A process that takes no steps yet leaves at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

EXIT_LEFT = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong, start it again."""
_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Leaving(SystemExit):
    """The end of a worker that was asked to leave, or that leaves with another.

    >>> str(Leaving("SIGTERM")), Leaving("SIGTERM").code
    ('SIGTERM', 75)
    """

    def __init__(self, why: str) -> None:
        super().__init__(EXIT_LEFT)
        self.why = why

    def __str__(self) -> str:
        return self.why


class Departure:
    """What this process knows of leaving: whether it was asked to, and whether all have agreed to.

    >>> departure = Departure()
    >>> departure.begin()  # a step
    >>> departure.ask("SIGTERM")
    >>> departure.settle({"gpu/0": departure.asked, "npu/0": None})
    >>> departure.begin()  # the next one
    Traceback (most recent call last):
    ...
    whale_nebula.launch.leaving.Leaving: gpu/0 was asked to end: SIGTERM
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self._stepping = False
        self._settled = ""

    @property
    def agreed(self) -> bool:
        """Whether all leave."""
        return bool(self._settled)

    def ask(self, why: str) -> None:
        """Leave after the next step that all take; at once if no step was taken yet. A signal handler may call it."""
        self.asked = why
        if not self._stepping:
            raise Leaving(f"it was asked to end before its first step: {why}")

    def begin(self) -> None:
        """A step is about to begin, which is where one leaves."""
        if self._settled:
            raise Leaving(self._settled)
        self._stepping = True

    def settle(self, asked: Mapping[str, object]) -> None:
        """A step is over in which each worker said whether it was asked to leave (and why): all now know the same."""
        names = [number.name for number in _HEARD]  # a peer's word ends up on a terminal: it can only be one of these
        given = {worker: why if why in names else "a signal" for worker, why in sorted(asked.items()) if why}
        reasons = [f"{worker} was asked to end: {why}" for worker, why in given.items()]
        self._settled = self._settled or "; ".join(reasons)


departure = Departure()
"""That of this process."""


def leave_on_signals() -> None:
    """Let SIGTERM and SIGINT, and SIGHUP unless it is ignored (nohup), ask this process to leave; more say nothing new.

    Some platforms signal the launcher and the workers alike, and the launcher passes on what it gets. Who is in a
    hurry tells the launcher twice: it kills. A process that this one forks, such as one that reads data, ends by a
    signal like any other.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    heard = [number for number in _HEARD if number != signal.SIGHUP or not ignored]

    def ask_to_leave(number: int, frame: FrameType | None) -> None:
        if departure.asked is None:
            departure.ask(signal.Signals(number).name)

    forks = _Forks({number: signal.signal(number, ask_to_leave) for number in heard})
    os.register_at_fork(before=forks.hold, after_in_parent=forks.free, after_in_child=forks.restore)


class _Forks:
    """Gives forked processes the handlers that were there before ours. No signal is lost meanwhile: they are held."""

    def __init__(self, handlers: Mapping[signal.Signals, Any]) -> None:
        self._handlers = handlers
        self._thread = threading.local()

    def hold(self) -> None:
        self._thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)

    def free(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._thread.mask)

    def restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.free()
