"""Time calls, and fit a line through the times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

RUNS, _FEWEST = 10, 3
WARM_UP = 2
_MOST_SECONDS = 2.0
_LEAST_SECONDS = 2e-3
"""The least duration of a run of calls, so that clock resolution and interruptions matter little."""


class Timed(NamedTuple):
    """The median seconds of a call over some runs, and their interquartile range as a share of it."""

    seconds: float
    spread: float


def time_calls(call: Callable[[], Any], runs: int = RUNS, most: float = _MOST_SECONDS) -> Timed:
    """Time a call after a warm-up, in `runs` runs; in fewer, but at least three, if they exceed `most` seconds."""
    call()
    started = time.perf_counter()
    call()
    once = max(time.perf_counter() - started, 1e-9)
    count = max(1, round(_LEAST_SECONDS / once))
    found = []
    for _ in range(max(min(runs, int(most / once)), _FEWEST)):
        started = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - started) / count)
    return summarise(found)


def summarise(seconds: Sequence[float]) -> Timed:
    """The median of some runs, and their spread.

    >>> summarise([1.0, 2.0, 2.0, 2.0, 9.0])
    Timed(seconds=2.0, spread=0.0)
    """
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timed(median, (high - low) / median if median else 0.0)


class Fitted(NamedTuple):
    """Seconds as a line over an amount of work: `alpha` for each call, and `beta` for each unit of work."""

    alpha: float
    beta: float


def fit_line(points: Sequence[tuple[float, float]]) -> Fitted:
    """Least-squares line through (work, seconds) by relative errors, with coefficients of at least 0.

    >>> fit_line([(0.0, 2.0), (10.0, 7.0), (20.0, 12.0)])
    Fitted(alpha=2.0, beta=0.5)
    >>> fit_line([(1.0, 1.0), (10.0, 100.0)]).alpha
    0.0
    """
    # relative errors: weights are 1/t
    rows = [(1 / seconds, work / seconds) for work, seconds in points]
    one = sum(a * a for a, _ in rows)
    both = sum(a * b for a, b in rows)
    two = sum(b * b for _, b in rows)
    left, right = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = one * two - both * both
    if determinant > 1e-12 * one * two:
        alpha, beta = (left * two - right * both) / determinant, (right * one - left * both) / determinant
        if alpha >= 0 and beta >= 0:
            return Fitted(alpha, beta)
        if beta < 0:  # no measurable effect of the work
            return Fitted(left / one, 0.0)
    return Fitted(0.0, right / two)
