"""Steps a second: from the end of one step to the end of the next, with the input and the callbacks between them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from whale_nebula.report.report import Report

_RECENT = 32


@dataclass
class Rate:
    """The rate of each program over its last steps.

    A program's first step, which is traced, does not count, nor does what lies between two steps when another program
    ran there: a validation is no part of training.
    """

    _taken: dict[str, deque[float]] = field(default_factory=dict)
    _before: Report | None = None

    def add(self, report: Report) -> float | None:
        """Take in a step; gives the rate, or None where no two steps of its program came one after the other yet.

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
    """A rate in words: a step's own seconds would let a reader expect a higher one.

    >>> per_second(1.904)
    '1.9 steps/s with what lies between'
    """
    return f"{rate:.3g} steps/s with what lies between"
