"""Which worker of a table's stage holds an id: ids are in buckets by hash, and each worker has some buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .hashing import mix

BUCKETS = 1024


class Share(NamedTuple):
    """Neighbouring buckets, of which there are `BUCKETS` in all: those of a table that is in one process.

    >>> Share(0, 512).owns(np.arange(8)).sum() + Share(512, 512).owns(np.arange(8)).sum()
    np.int64(8)
    """

    start: int = 0
    size: int = BUCKETS

    def owns(self, ids: np.ndarray) -> np.ndarray:
        """Whether each id is in one of these buckets."""
        if self.size == BUCKETS:
            return np.ones(len(ids), bool)
        buckets = ((mix(ids) >> np.uint64(30)) % np.uint64(BUCKETS)).astype(np.int64)  # bits that nothing else uses
        return np.asarray((buckets >= self.start) & (buckets < self.start + self.size))

    def meets(self, other: Share) -> bool:
        """Whether some bucket is in both."""
        return self.start < other.start + other.size and other.start < self.start + self.size

    def count_of(self, rows: int) -> int:
        """Its part of so many rows, rounded up."""
        return -(-rows * self.size // BUCKETS)


WHOLE = Share()


def covers(shares: Sequence[Share], share: Share) -> bool:
    """Whether each bucket of a share is in one of others.

    >>> covers([Share(0, 512), Share(512, 512)], Share(256, 512)), covers([Share(0, 512)], WHOLE)
    (True, False)
    """
    held = np.zeros(BUCKETS, bool)
    for each in shares:
        held[each.start : each.start + each.size] = True
    return bool(held[share.start : share.start + share.size].all())
