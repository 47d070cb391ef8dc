"""Log lines of steps: the first of each program, one every ten seconds, and the last."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whale_nebula.report.records import duration, size
from whale_nebula.report.text import coded_boundaries, describe_crossing, scalars_text

if TYPE_CHECKING:
    from whale_nebula.report.report import Report

_RECENT = 32


@dataclass
class Rate:
    """The rate of each program over its last steps.

    A program's first step, which is traced, does not count, nor does the time between two steps in which another
    program ran: a validation is not part of training.
    """

    _taken: dict[str, deque[float]] = field(default_factory=dict)
    _before: Report | None = None

    def add(self, report: Report) -> float | None:
        """Add a step; returns the rate, or None before two consecutive steps of its program.

        >>> from whale_nebula.report.report import Report
        >>> rate, steps = Rate(), [("fit", 5.0), ("fit", 5.5), ("test", 9.0), ("fit", 20.0), ("fit", 20.5)]
        >>> [rate.add(Report(name, 1, 0.1, 1, {}, {}, time=time)) for name, time in steps]
        [None, 2.0, None, 2.0, 2.0]
        """
        taken = self._taken.setdefault(report.program, deque(maxlen=_RECENT))
        passed, self._before = gap(self._before, report), report
        if passed is not None:
            taken.append(passed)
        return len(taken) / sum(taken) if taken else None


def gap(before: Report | None, report: Report) -> float | None:
    """Seconds from the end of the step before to the end of this one, if both are of one program."""
    if before is None or before.program != report.program or report.time <= before.time:
        return None
    return report.time - before.time


def per_second(rate: float) -> str:
    """A rate in words; it includes the time between steps.

    >>> per_second(1.904)
    '1.9 steps/s with what lies between'
    """
    return f"{rate:.3g} steps/s with what lies between"


EVERY_SECONDS = 10.0

log = logging.getLogger("whale_nebula.steps")


class Lines:
    """Logs the progress at suitable intervals, if `here` selects this process."""

    def __init__(
        self,
        here: Callable[[], bool] = lambda: True,
        every: float = EVERY_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._here, self._every, self._now = here, every, now
        self._rate = Rate()
        self._begun: set[str] = set()
        self._last = float("-inf")
        self._unsaid: dict[str, tuple[Report, float | None]] = {}
        self._undo = _audible(log)

    def step(self, report: Report) -> None:
        """Print the step if it is a program's first, or if a line is due; otherwise keep it for the end."""
        rate = self._rate.add(report)
        first = report.program not in self._begun
        self._begun.add(report.program)
        if first or self._now() - self._last >= self._every:
            self._say(report, rate)
        else:
            self._unsaid[report.program] = report, rate

    def _say(self, report: Report, rate: float | None) -> None:
        self._last = self._now()
        self._unsaid.pop(report.program, None)
        if self._here():
            log.info("%s", step_line(report, rate))

    def tick(self) -> None:
        """Do nothing: lines are printed after steps."""

    def close(self) -> None:
        """Print the last step of each program."""
        for report, rate in list(self._unsaid.values()):
            self._say(report, rate)
        self._undo()

    def __str__(self) -> str:
        return "the log of steps"


def step_line(report: Report, rate: float | None) -> str:
    """A step on one line, with the reports of other processes; `rate` is None before two consecutive steps of the
    program.

    >>> from whale_nebula.report.report import Report
    >>> from whale_nebula.report.records import LinkReport, StageReport
    >>> links = {"gpu->npu": LinkReport(2048, 2176, 2048, 1)}
    >>> step_line(Report("fit", 9, 0.5, 4, {"a": StageReport(0.2, 0.3, in_flight=3)}, links), 1.9)
    'step 9 of fit: 0.500 s, 1.9 steps/s with what lies between; a computes 0.200 s, waits 0.300 s, 3 in flight; ...'
    """
    head = [f"step {report.step} of {report.program}: {duration(report.step_seconds)}"]
    head += [] if rate is None else [per_second(rate)]
    parts = [", ".join([*head, *([scalars_text(report)] if report.scalars else [])])]
    for name, stage in {**report.stages, **report.elsewhere.stages}.items():
        if stage.compute_seconds is not None and stage.wait_seconds is not None:
            computes, waits = duration(stage.compute_seconds), duration(stage.wait_seconds)
            parts.append(f"{name} computes {computes}, waits {waits}, {stage.in_flight} in flight")
    links = {**report.links, **report.elsewhere.links}
    parts += [f"{name} {size(link.bytes)}" for name, link in links.items()]
    return "; ".join(
        [*parts, *(describe_crossing(name, each) for name, each in coded_boundaries(report.boundaries).items())]
    )


def _audible(logger: logging.Logger) -> Callable[[], None]:
    """Make requested lines visible: on standard error if no log handler is configured. Returns the function that undoes
    it.
    """
    level = logger.level
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    handler = None if logger.hasHandlers() else logging.StreamHandler()
    if handler is not None:
        handler.setFormatter(logging.Formatter("whale_nebula: %(message)s"))
        logger.addHandler(handler)

    def undo() -> None:
        logger.setLevel(level)
        if handler is not None:
            logger.removeHandler(handler)

    return undo
