"""A worker that was asked to end (SIGTERM, SIGINT) leaves between two steps, and all others leave with it.

Who was asked says so with its next step. When that step is over all know, and each leaves before it begins another: so
all have taken the same steps. A process that takes no steps yet leaves at once.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from types import FrameType

EXIT_LEFT = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong, start it again."""


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
        reasons = [f"{worker} was asked to end: {_signal(why)}" for worker, why in sorted(asked.items()) if why]
        self._settled = self._settled or "; ".join(reasons)


def _signal(why: object) -> str:
    """A peer's word, which ends up on a terminal: it can only be a signal's name."""
    return str(why) if why in ("SIGTERM", "SIGINT") else "a signal"


departure = Departure()
"""That of this process."""


def leave_on_signals() -> None:
    """Let SIGTERM and SIGINT ask this process to leave; a signal more says nothing new.

    Some platforms signal the launcher and the workers alike, and the launcher passes on what it gets. Who is in a
    hurry tells the launcher twice: it kills.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _asked)


def _asked(number: int, frame: FrameType | None) -> None:
    if departure.asked is None:
        departure.ask(signal.Signals(number).name)
