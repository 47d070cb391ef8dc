"""How many rows each micro-batch gets."""

from __future__ import annotations


def sizes(rows: int, count: int) -> list[int]:
    """Split `rows` into at most `count` micro-batches whose sizes differ by at most one row, the larger first.

    >>> sizes(10, 4)
    [3, 3, 2, 2]
    >>> sizes(2, 4)
    [1, 1]
    >>> sizes(0, 4)
    [0]
    """
    used = max(1, min(count, rows))
    return [rows // used + (number < rows % used) for number in range(used)]
