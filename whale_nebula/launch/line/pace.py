"""How many tensors to send, and what their arrivals say: the arithmetic of a measurement."""

from __future__ import annotations

from collections.abc import Sequence

FIRST_BYTES = 256 << 10
MOST_BYTES = 1 << 30  # of one burst: enough for a second of a line that no site has
LEAST_TENSORS = 4
_GROWTH = 4
_WORTH = 1 / 8  # of the time that was asked for: a burst that took so long says how fast the line is
_WARM_UP = 4  # the first of so many parts is left out: connections start slowly


def rate(arrivals: Sequence[float], size: int) -> float:
    """Bytes a second, by the times at which tensors of one size arrived; their first quarter is not counted.

    >>> rate([0.0, 5.0, 6.0, 7.0, 8.0], 1000)
    1000.0
    """
    first = (len(arrivals) - 1) // _WARM_UP
    seconds = arrivals[-1] - arrivals[first]
    return (len(arrivals) - 1 - first) * size / max(seconds, 1e-9)


def first_count(size: int) -> int:
    """How many tensors to begin with, on a line of which nothing is known.

    >>> first_count(64 << 10), first_count(1 << 20)
    (4, 2)
    """
    return max(2, FIRST_BYTES // size)


def next_count(count: int, size: int, took: float, seconds: float) -> int | None:
    """How many to send next, to come to know the line; None once the burst that took so long is enough.

    >>> next_count(4, 64 << 10, took=0.05, seconds=4.0), next_count(64, 64 << 10, took=0.7, seconds=4.0)
    (16, None)
    """
    if took >= _WORTH * seconds or _GROWTH * count * size > MOST_BYTES:
        return None
    return _GROWTH * count


def full_count(found: float, size: int, seconds: float) -> int:
    """How many take about so many seconds at a rate that was found, in bytes a second.

    >>> full_count(7.5e6, 1 << 20, seconds=4.0), full_count(100e3, 1 << 20, seconds=4.0)
    (28, 4)
    """
    return max(LEAST_TENSORS, min(int(found * seconds), MOST_BYTES) // size)
