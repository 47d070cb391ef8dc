"""What is to happen at which failpoint, written as a line: `npu/0:update.begun=kill@3, chunk.first.after=delay:0.5`."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn, TypeAlias

from whale_nebula.errors import OptionError, RunError
from whale_nebula.suggest import did_you_mean
from whale_nebula.testing.points import POINTS

Drop: TypeAlias = Callable[[str], None]


class Action(StrEnum):
    """What a fault does to the process that reaches it."""

    KILL = "kill"  # SIGKILL
    RAISE = "raise"  # a RunError
    FREEZE = "freeze"  # SIGSTOP
    DROP = "drop"  # the connection, which is made again
    DELAY = "delay"  # for so many seconds


@dataclass(frozen=True, slots=True)
class Fault:
    """An action at a failpoint, the `hit`-th time that it is reached; with `again` every time from then on.

    `worker` limits it to one worker's process.

    >>> Fault.parse("npu/0:update.begun=kill@3")
    Fault(point='update.begun', action=<Action.KILL: 'kill'>, seconds=0.0, hit=3, again=False, worker='npu/0')
    >>> print(Fault.parse("chunk.first.after=delay:0.5@2+"))
    chunk.first.after=delay:0.5@2+
    """

    point: str
    action: Action
    seconds: float = 0.0
    hit: int = 1
    again: bool = False
    worker: str | None = None

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise OptionError(
                f"there is no failpoint {self.point!r}",
                where=str(self),
                why="all there are: whale_nebula.faults.names()",
                mend=did_you_mean(self.point, POINTS),
            )
        if self.action is Action.DROP and not POINTS[self.point].connection:
            raise OptionError(
                f"at failpoint {self.point!r} there is no connection that could be dropped",
                where=str(self),
                mend=f"{next(name for name, point in POINTS.items() if point.connection)}=drop",
            )

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read one fault: `[WORKER:]POINT=ACTION[:SECONDS][@HIT[+]]`."""
        found = _FAULT.fullmatch(text.strip())
        if found is None:
            raise OptionError(
                f"{text!r} is no fault", why="it reads [WORKER:]POINT=ACTION[:SECONDS][@HIT[+]]", mend=_EXAMPLE
            )
        worker, point, action, seconds, hit, again = found.groups()
        if action not in list(Action):
            known = [each.value for each in Action]
            raise OptionError(f"there is no action {action!r}", where=text, mend=did_you_mean(action, known))
        return cls(point, Action(action), float(seconds or 0), int(hit or 1), bool(again), worker)

    def strikes(self, number: int) -> bool:
        """Whether it happens the `number`-th time (from 1)."""
        return number == self.hit or (self.again and number > self.hit)

    def __str__(self) -> str:
        worker = f"{self.worker}:" if self.worker else ""
        seconds = f":{self.seconds:g}" if self.seconds else ""
        return f"{worker}{self.point}={self.action}{seconds}@{self.hit}{'+' * self.again}"


_FAULT = re.compile(r"(?:([\w.-]+/\d+):)?([\w.-]+)=(\w+)(?::(\d+(?:\.\d*)?))?(?:@([1-9]\d*)(\+)?)?")
_EXAMPLE = "update.begun=kill@3"

Act: TypeAlias = Callable[[Fault, Drop | None], None]


def happen(fault: Fault, drop: Drop | None) -> None:
    """Do it to this process."""
    match fault.action:
        case Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Action.FREEZE:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Action.DELAY:
            time.sleep(fault.seconds)
        case Action.DROP if drop is not None:
            drop(f"failpoint {fault}")
        case Action.RAISE:
            fail(fault)


def fail(fault: Fault) -> NoReturn:
    """Raise as the fault wants it."""
    raise RunError(f"failpoint {fault} was reached", why="a plan of faults wants an error here", mend="take it out")


class FaultPlan:
    """Faults by failpoint, and how often each failpoint was reached so far (`reached`).

    `worker` is whose process this is; `act` does what a fault says.

    >>> plan = FaultPlan.parse("step.before=raise@2")
    >>> plan.reach("step.before")
    >>> plan.reach("step.before")
    Traceback (most recent call last):
    ...
    whale_nebula.errors.RunError: NB-300 failpoint step.before=raise@2 was reached
      why: a plan of faults wants an error here
      mend: take it out
    """

    def __init__(self, faults: Iterable[Fault] = (), *, worker: str | None = None, act: Act = happen) -> None:
        self.faults = tuple(fault for fault in faults if fault.worker in (None, worker))
        self.reached: Counter[str] = Counter()
        self._points = {fault.point for fault in self.faults}
        self._act = act
        self._lock = threading.Lock()

    @classmethod
    def parse(cls, text: str, *, worker: str | None = None) -> FaultPlan:
        """Read faults, parted by commas."""
        return cls(map(Fault.parse, filter(None, map(str.strip, text.split(",")))), worker=worker)

    def reach(self, point: str, drop: Drop | None = None) -> None:
        """A failpoint is reached: what has to happen there happens."""
        with self._lock:
            self.reached[point] += 1
            number = self.reached[point]
        if point in self._points:
            for fault in self.faults:
                if fault.point == point and fault.strikes(number):
                    self._act(fault, drop)
