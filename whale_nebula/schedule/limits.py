"""In-flight limits: how many micro-batches of a stage may be between their forward and their backward.

This number is the whole difference between the schedules. It is also what a step costs in memory, because a
stage keeps the activations of every micro-batch that is in flight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from whale_nebula.errors import OptionError

_ROUNDING = 1e-9  # (0.1 + 0.2)/0.1 is 3.0000000000000004 in floats: that must not cost a micro-batch


@dataclass(frozen=True, slots=True)
class Pace:
    """What was measured (or is promised) of one micro-batch; eager-1F1B sets its limits by it.

    `compute`: seconds in the slowest stage, forward and backward. `trips`: for each stage but the last, the
    seconds that its messages spend on the way to the next stage and back. `held`: seconds that the busiest
    line is held.
    """

    compute: float
    trips: tuple[float, ...]
    held: float = 0.0

    @property
    def period(self) -> float:
        """Seconds from one micro-batch to the next, when nothing waits but for the slowest of all."""
        return max(self.compute, self.held)

    @property
    def cautious(self) -> Pace:
        """The same, but no trip is shorter than what a micro-batch computes, as none is before it was measured.

        Where each process measures for itself, and machines are busy now and then, too few in flight cost time; one too
        many costs the memory that it costs without a measurement.
        """
        return replace(self, trips=tuple(max(trip, self.compute) for trip in self.trips))

    def covers(self, trip: float) -> int:
        """How many micro-batches leave while one is computed a stage further and its gradient comes back."""
        return max(1, math.ceil((self.compute + trip) / self.period - _ROUNDING))


def gpipe_limit(stage: int, stages: int, micro_batches: int, pace: Pace | None = None) -> int:
    """All of them: nothing goes backward before everything went forward, whatever the pace.

    >>> gpipe_limit(0, 2, 8)
    8
    """
    return micro_batches


def one_f_one_b_limit(stage: int, stages: int, micro_batches: int, pace: Pace | None = None) -> int:
    """As many as there are stages from this one to the last: what fills a pipeline whose links take no time.

    >>> [one_f_one_b_limit(stage, 4, 8) for stage in range(4)]
    [4, 3, 2, 1]
    """
    return min(stages - stage, micro_batches)


def eager_limit(stage: int, stages: int, micro_batches: int, pace: Pace | None = None) -> int:
    """One, and for each hop from here to the last stage as many as its way there and back covers.

    With all hops alike and lines faster than the stages: w = p − s + (p − 1 − s)·⌈2·t_c / c⌉. It is rounded
    up hop by hop, not once for all of them: each stage runs its list in order, so each needs a whole
    micro-batch more. Before anything is measured, a hop there and back is taken to fit into one c, which
    makes 2·(p − s) − 1.

    >>> pace = Pace(compute=3.0, trips=(12.0, 12.0, 12.0))
    >>> [eager_limit(stage, 4, 20, pace) for stage in range(4)]
    [16, 11, 6, 1]
    >>> [eager_limit(stage, 4, 20) for stage in range(4)]
    [7, 5, 3, 1]
    """
    if pace is None:
        return min(2 * (stages - stage) - 1, micro_batches)
    if pace.period <= 0.0:
        return micro_batches
    return min(1 + sum(map(pace.covers, pace.trips[stage:])), micro_batches)


def descending(values: Iterable[int]) -> Iterator[int]:
    """Let no stage have more in flight than a stage before it.

    It could not use more: what it waits for is still held back there. And a list that counts on more would
    wait for ever. With descending limits w no list can: order forwards by (m, stage) and backwards by (m + w
    − ½, −stage), and every instruction comes after all it needs, in its own list and in the others'.

    >>> list(descending([3, 5, 2]))
    [3, 3, 2]
    """
    least: int | None = None
    for value in values:
        least = value if least is None else min(least, value)
        yield least


def check_count(option: str, value: int) -> None:
    """Refuse what is not a whole number, or is below one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(
            f"{option}={value!r} is not a count of micro-batches",
            why="at least one micro-batch has to be on its way for anything to run",
            mend=f"{option}=1, or more",
        )
