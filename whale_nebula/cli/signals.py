"""Signals to `whale-nebula run`: the first lets the workers leave, the second ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from whale_nebula.cli.exits import SIGNALLED
from whale_nebula.launch import Job

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class Asking:
    """What was asked of the workers so far; before they are started there is nobody to ask, and the command ends."""

    patience: float
    job: Job | None = None
    first: int | None = None
    second: int | None = None

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. It may come in the middle of a print, so it writes by itself."""
        name = signal.Signals(number).name
        if self.job is None:
            sys.exit(SIGNALLED + number)
        if self.first is None:
            self.first = number
            _say(f"{name}: the workers leave after their next step, within {self.patience:g} s; again ends them now")
            self.job.ask(number, self.patience)
        else:
            self.second = number
            _say(f"{name}, again: the workers are killed")
            self.job.kill_now()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"whale-nebula: {text}\n".encode())


@contextlib.contextmanager
def attended(asking: Asking) -> Iterator[None]:
    """Handle signals for a while, but not those that whoever started us wants to be ignored (nohup)."""
    before = {number: signal.getsignal(number) for number in HEARD}
    heard = [number for number in HEARD if before[number] is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, asking.hear)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])
