"""The shares of a sharded table: ids are in buckets by hash, and each worker of the stage has some buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .hashing import mix

BUCKETS = 1024


class Share(NamedTuple):
    """A range of the `BUCKETS` buckets; by default all, as of a table in one process.

    >>> Share(0, 512).owns(np.arange(8)).sum() + Share(512, 512).owns(np.arange(8)).sum()
    np.int64(8)
    """

    start: int = 0
    size: int = BUCKETS

    def owns(self, ids: np.ndarray) -> np.ndarray:
        """Whether each id is in one of these buckets."""
        if self.size == BUCKETS:
            return np.ones(len(ids), bool)
        buckets = ((mix(ids) >> np.uint64(30)) % np.uint64(BUCKETS)).astype(np.int64)  # bits without another use
        return np.asarray((buckets >= self.start) & (buckets < self.start + self.size))

    def overlaps(self, other: Share) -> bool:
        """Whether two shares have a bucket in common."""
        return self.start < other.start + other.size and other.start < self.start + self.size

    def limit_rows(self, rows: int) -> int:
        """The share of a maximum number of rows of the whole table, rounded up."""
        return -(-rows * self.size // BUCKETS)


WHOLE = Share()


def covers(shares: Sequence[Share], share: Share) -> bool:
    """Whether shares together contain all buckets of a share.

    >>> covers([Share(0, 512), Share(512, 512)], Share(256, 512)), covers([Share(0, 512)], WHOLE)
    (True, False)
    """
    held = np.zeros(BUCKETS, bool)
    for each in shares:
        held[each.start : each.start + each.size] = True
    return bool(held[share.start : share.start + share.size].all())
