"""The interval between savings that minimises the expected loss of time.

A failure loses half of the interval on average, and each saving slows steps down. The sum of both is minimal at
`interval = sqrt(2 * cost * time between failures)` (Young), and a bound on the share of time spent on saving may
require a longer one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

OVERHEAD = 0.035
"""The share of a run's time that saving may take."""
BETWEEN_FAILURES = 3600.0
"""The assumed seconds between two failures, before any is observed."""
_FIRST = 30.0
_WEIGHT = 0.5


def choose_interval(cost: float, between_failures: float = BETWEEN_FAILURES, overhead: float = OVERHEAD) -> float:
    """Seconds between two savings of this cost: Young's optimum, or more if savings would exceed the `overhead`.

    >>> round(choose_interval(0.2)), round(choose_interval(20.0, 24 * 3600.0)), round(choose_interval(20.0))
    (38, 1859, 571)
    """
    return max(math.sqrt(2 * cost * between_failures), cost / overhead)


def guess_between_failures(seconds: float, failures: int) -> float:
    """Estimate of the seconds between two failures of a run; the prior is one failure after an hour.

    >>> guess_between_failures(0.0, 0), guess_between_failures(23 * 3600.0, 0), guess_between_failures(7200.0, 2)
    (3600.0, 86400.0, 3600.0)
    """
    return (BETWEEN_FAILURES + seconds) / (1 + failures)


@dataclass
class Pace:
    """Schedule of savings: every so many `steps` or `seconds`, or by their cost, after `first` seconds."""

    steps: int | None = None
    seconds: float | None = None
    overhead: float = OVERHEAD
    cost: float | None = None
    first: float = _FIRST
    between_failures: float = BETWEEN_FAILURES
    saved_step: int = 0
    saved_time: float = 0.0

    def is_due(self, step: int, now: float) -> bool:
        """Whether a saving is due after this number of steps.

        >>> pace = Pace(steps=10)
        >>> pace.is_due(9, 0.0), pace.is_due(10, 0.0)
        (False, True)
        """
        if step <= self.saved_step:
            return False
        if self.steps is not None:
            return step - self.saved_step >= self.steps
        return now - self.saved_time >= self.interval

    @property
    def interval(self) -> float:
        """Seconds between two savings."""
        if self.seconds is not None:
            return self.seconds
        return self.first if self.cost is None else choose_interval(self.cost, self.between_failures, self.overhead)

    def note_saving(self, step: int, now: float) -> None:
        """Record that a saving begins."""
        self.saved_step, self.saved_time = step, now

    def note_cost(self, seconds: float) -> None:
        """Record the cost of a saving in a moving average, in which the newest has half of the weight."""
        self.cost = seconds if self.cost is None else _WEIGHT * seconds + (1 - _WEIGHT) * self.cost
