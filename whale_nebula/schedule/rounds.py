"""The timetable of local SGD: weights are sent in fragments, spread evenly over the steps.

If all weights were sent at once every `every` steps, they would occupy the line for a while and then leave it idle.
Fragments sent in turn use the line evenly, and each has `delay` steps to arrive while the clusters continue to train.
"""

from __future__ import annotations

from dataclasses import dataclass

GRAIN = 4096
"""Fragments begin at multiples of this many numbers, the size of the rows in which weights are encoded."""
_MIN_FRAGMENT = 1 << 16
MAX_INTERVAL = 500
"""The largest interval that is chosen for `sync_every="auto"`."""


@dataclass(frozen=True)
class Timetable:
    """Which fragments are sent and which are applied after a step; steps count from 1. At most one is sent after a step
    if there are no more fragments than steps in an interval.

    >>> table = Timetable(every=6, fragments=3, delay=1)
    >>> [(step, table.sends(step), table.applies(step)) for step in range(1, 8)]
    [(1, (), ()), (2, (0,), ()), (3, (), (0,)), (4, (1,), ()), (5, (), (1,)), (6, (2,), ()), (7, (), (2,))]
    """

    every: int
    fragments: int
    delay: int

    def sends(self, step: int) -> tuple[int, ...]:
        """The numbers of the fragments that are sent after a step."""
        return tuple(
            f for f in range(self.fragments) if step > 0 and (step - self._find_first_step(f)) % self.every == 0
        )

    def applies(self, step: int) -> tuple[int, ...]:
        """The numbers of the fragments that were sent `delay` steps ago and are applied after this step."""
        return self.sends(step - self.delay)

    def _find_first_step(self, fragment: int) -> int:
        return (fragment + 1) * self.every // self.fragments


def choose_delay(every: int) -> int:
    """The default delay of a fragment, in steps: a tenth of the interval, at least one step if the interval is longer.

    >>> choose_delay(100), choose_delay(4), choose_delay(1)
    (10, 1, 0)
    """
    return min(every - 1, max(1, every // 10))


def choose_fragments(total: int, every: int) -> int:
    """The default number of fragments of `total` numbers: at most eight, at most one for each step of the interval, and
    each of at least 65,536 numbers if there are several.

    >>> choose_fragments(20_000_000, 100), choose_fragments(20_000_000, 5), choose_fragments(1000, 100)
    (8, 5, 1)
    """
    return max(1, min(every, 8, total // _MIN_FRAGMENT))


def list_ranges(total: int, fragments: int) -> tuple[tuple[int, int], ...]:
    """The begin and end of each fragment of `total` numbers: of equal sizes, up to rounding to multiples of `GRAIN`.

    >>> list_ranges(10_000, 2), list_ranges(100, 2)
    (((0, 4096), (4096, 10000)), ((0, 0), (0, 100)))
    """
    ends = [total * (number + 1) // fragments // GRAIN * GRAIN for number in range(fragments - 1)]
    return tuple(zip([0, *ends], [*ends, total], strict=True))


def share_rows(rows: int, speeds: tuple[float, ...]) -> tuple[tuple[int, int], ...]:
    """The begin and end of each cluster's rows of a batch: in proportion to their speeds, at least one row each. `rows`
    is not less than the number of clusters.

    >>> share_rows(9, (1.0, 2.0)), share_rows(4, (1.0, 1.0)), share_rows(3, (1.0, 100.0))
    (((0, 3), (3, 9)), ((0, 2), (2, 4)), ((0, 1), (1, 3)))
    """
    spare, whole = rows - len(speeds), sum(speeds)
    exact = [spare * speed / whole for speed in speeds]
    counts = [int(each) for each in exact]
    by_rest = sorted(range(len(speeds)), key=lambda n: (counts[n] - exact[n], n))
    for number in by_rest[: spare - sum(counts)]:
        counts[number] += 1
    ends = [sum(counts[: n + 1]) + n + 1 for n in range(len(counts))]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))
