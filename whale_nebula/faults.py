"""Failpoints: named places in the library where a fault plan injects failures in tests.

They do nothing unless a plan is given, in code (`with apply_plan(FaultPlan.parse("update.begun=kill@3")): ...`) or by
the environment variable WHALE_NEBULA_FAILPOINTS, which each process reads once.

>>> failpoint("step.before")
>>> with apply_plan(FaultPlan()) as plan:
...     failpoint("step.before")
>>> plan.reached
Counter({'step.before': 1})
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, NoReturn, TypeAlias

from whale_nebula.errors import OptionError, RunError
from whale_nebula.errors.text import did_you_mean


class Point(NamedTuple):
    """The description of a failpoint, and whether it has a connection that can be dropped."""

    what: str
    connection: bool = False


POINTS: Mapping[str, Point] = MappingProxyType(
    {
        "hello.before": Point("before nb.init announces this process to the others"),
        "hello.after": Point("all processes have announced themselves"),
        "agree.before": Point("a program is traced, before its digest is sent"),
        "agree.after": Point("all processes have traced the same program"),
        "step.before": Point("before a step (its rows, its fingerprints) is announced to the others"),
        "step.announced": Point("a step is announced, before its stages compute"),
        "step.checked": Point("all other processes have announced the same step"),
        "forward.before": Point("before a stage receives and computes a micro-batch"),
        "backward.before": Point("before a stage runs the backward of a micro-batch"),
        "update.before": Point("the micro-batches of a phase are done, and all have agreed to the update"),
        "update.begun": Point("an update has begun: a failure from here on leaves a torn model"),
        "update.after": Point("the update is applied, and its scalars have crossed"),
        "step.after": Point("the step is counted as applied"),
        "meet.before": Point("before a collective read of the whole model"),
        "meet.after": Point("all processes have reached the collective read"),
        "chunk.first.before": Point("before the first chunk of a tensor is sent", connection=True),
        "chunk.first.after": Point("the first chunk of a tensor was passed to the connection", connection=True),
        "chunk.middle.before": Point("before a chunk that is neither first nor last is sent", connection=True),
        "chunk.middle.after": Point("a chunk in the middle was passed to the connection", connection=True),
        "chunk.last.before": Point("before the last chunk of a tensor is sent", connection=True),
        "chunk.last.after": Point("the last chunk of a tensor was passed to the connection", connection=True),
        "tensor.received": Point("a tensor is complete, before its receiver is notified", connection=True),
        "message.received": Point("a control message has arrived, before its receiver is notified", connection=True),
        "connection.up": Point("a connection is established, before the greeting is sent", connection=True),
        "connection.opened": Point("both sides of a connection have identified each other", connection=True),
        "connection.down": Point("a connection is lost, before a new one is established"),
        "frames.again": Point("before the frames that a broken connection has lost are sent again", connection=True),
        "failure.telling": Point("this process has failed, before it notifies another one"),
        "link.parting": Point("before a link sends its farewell"),
        "link.draining": Point("the farewell is sent, before the wait for unacknowledged frames", connection=True),
        "link.closed": Point("a link is closed"),
        "checkpoint.before": Point("before a worker writes its part of a checkpoint"),
        "checkpoint.written": Point("the tensors of a part are on disk"),
        "checkpoint.said": Point("all workers have reported that their parts are written"),
        "checkpoint.joined": Point("the parts of a host are joined, before the manifest is written"),
        "checkpoint.committed": Point("the manifest is written: the checkpoint is complete"),
        "checkpoint.restored": Point("the variables of a program have their saved values"),
        "certificate.changed": Point("the files of this process's certificate have changed"),
        "certificate.renewed": Point("a renewed certificate was read"),
    }
)


Drop: TypeAlias = Callable[[str], None]
"""Breaks a connection, for a reason."""


class Action(StrEnum):
    """The effect of a fault on the process that reaches it."""

    KILL = "kill"  # SIGKILL
    RAISE = "raise"  # a RunError
    FREEZE = "freeze"  # SIGSTOP
    DROP = "drop"  # breaks the connection, which is re-established
    DELAY = "delay"  # waits for so many seconds


@dataclass(frozen=True, slots=True)
class Fault:
    """An action at a failpoint when it is reached the `hit`-th time; with `again` every time from then on.

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
            why, mend = "whale_nebula.faults.names() lists all failpoints", did_you_mean(self.point, POINTS)
            raise OptionError(f"there is no failpoint {self.point!r}", where=str(self), why=why, mend=mend)
        if self.action is Action.DROP and not POINTS[self.point].connection:
            what = f"at failpoint {self.point!r} there is no connection that could be dropped"
            mend = f"{next(name for name, point in POINTS.items() if point.connection)}=drop"
            raise OptionError(what, where=str(self), mend=mend)

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse a fault: `[WORKER:]POINT=ACTION[:SECONDS][@HIT[+]]`."""
        parts = _FAULT.fullmatch(text.strip())
        if parts is None:
            raise OptionError(
                f"{text!r} is not a fault", why="its form is [WORKER:]POINT=ACTION[:SECONDS][@HIT[+]]", mend=_EXAMPLE
            )
        worker, point, action, seconds, hit, again = parts.groups()
        if action not in list(Action):
            known = [each.value for each in Action]
            raise OptionError(f"there is no action {action!r}", where=text, mend=did_you_mean(action, known))
        return cls(point, Action(action), float(seconds or 0), int(hit or 1), bool(again), worker)

    def applies_at(self, number: int) -> bool:
        """Whether the fault occurs at hit `number` (from 1)."""
        return number == self.hit or (self.again and number > self.hit)

    def __str__(self) -> str:
        worker = f"{self.worker}:" if self.worker else ""
        seconds = f":{self.seconds:g}" if self.seconds else ""
        return f"{worker}{self.point}={self.action}{seconds}@{self.hit}{'+' * self.again}"


_FAULT = re.compile(r"(?:([\w.-]+/\d+):)?([\w.-]+)=(\w+)(?::(\d+(?:\.\d*)?))?(?:@([1-9]\d*)(\+)?)?")
_EXAMPLE = "update.begun=kill@3"

Act: TypeAlias = Callable[[Fault, Drop | None], None]


def apply_fault(fault: Fault, drop: Drop | None) -> None:
    """Apply a fault to this process; `drop` breaks the connection at its failpoint."""
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
            raise_fault(fault)


def raise_fault(fault: Fault) -> NoReturn:
    """Raise the fault's error."""
    why, mend = "the fault plan raises an error here", "remove the fault from the plan"
    raise RunError(f"failpoint {fault} was reached", why=why, mend=mend)


class FaultPlan:
    """Faults by failpoint, and the hits of each failpoint so far (`reached`).

    Faults of workers other than `worker`, this process, are left out. `act` applies a fault.

    >>> plan = FaultPlan.parse("step.before=raise@2")
    >>> plan.reach("step.before")
    >>> plan.reach("step.before")
    Traceback (most recent call last):
    ...
    whale_nebula.errors.RunError: NB-300 failpoint step.before=raise@2 was reached
      why: the fault plan raises an error here
      mend: remove the fault from the plan
    """

    def __init__(self, faults: Iterable[Fault] = (), *, worker: str | None = None, act: Act = apply_fault) -> None:
        self.faults = tuple(fault for fault in faults if fault.worker in (None, worker))
        self.reached: Counter[str] = Counter()
        self._points = {fault.point for fault in self.faults}
        self._act = act
        self._lock = threading.Lock()

    @classmethod
    def parse(cls, text: str, *, worker: str | None = None) -> FaultPlan:
        """Parse faults, separated by commas."""
        return cls(map(Fault.parse, filter(None, map(str.strip, text.split(",")))), worker=worker)

    def reach(self, point: str, drop: Drop | None = None) -> None:
        """Count a hit of a failpoint, and apply its faults."""
        with self._lock:
            self.reached[point] += 1
            number = self.reached[point]
        if point in self._points:
            for fault in self.faults:
                if fault.point == point and fault.applies_at(number):
                    self._act(fault, drop)


VARIABLE = "WHALE_NEBULA_FAILPOINTS"
_LOG = logging.getLogger("whale_nebula.faults")

_plan: FaultPlan | None = None


def failpoint(name: str, drop: Drop | None = None) -> None:
    """Mark a place as a failpoint; `drop` breaks the connection there, if there is one."""
    if _plan is not None:
        _plan.reach(name, drop)


def chunk_failpoint(when: str, first: bool, last: bool, drop: Drop) -> None:
    """Mark the failpoints "before" or "after" a chunk is sent; the only chunk of a tensor is first and last."""
    if _plan is not None:
        for name, applies in (("first", first), ("last", last), ("middle", not first and not last)):
            if applies:
                _plan.reach(f"chunk.{name}.{when}", drop)


def names() -> Mapping[str, str]:
    """All failpoints with their descriptions.

    >>> names()["update.after"]
    'the update is applied, and its scalars have crossed'
    """
    return {name: point.what for name, point in POINTS.items()}


@contextlib.contextmanager
def apply_plan(plan: FaultPlan) -> Iterator[FaultPlan]:
    """Apply a plan to the whole process while the context is open."""
    global _plan
    before, _plan = _plan, plan
    try:
        yield plan
    finally:
        _plan = before


def _read_environment(environment: Mapping[str, str]) -> FaultPlan | None:
    text = environment.get(VARIABLE)
    if not text:
        return None
    identity = environment.get("WHALE_NEBULA_WORKER")
    plan = FaultPlan.parse(text, worker=json.loads(identity).get("worker") if identity else None)
    _LOG.warning("faults are planned in this process: %s", ", ".join(map(str, plan.faults)) or "none")
    return plan


_plan = _read_environment(os.environ)
