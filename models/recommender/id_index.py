"""An index of 64-bit ids: which row each has. A hash table in NumPy, whose operations take many ids at once."""

from __future__ import annotations

import numpy as np

from .hashing import mix

_ABSENT = -1
_BLOCK = 1 << 18


class IdIndex:
    """Open addressing with linear probing, at most half full; it doubles when it is."""

    def __init__(self) -> None:
        self._count = 0
        self._ids = np.zeros(64, np.int64)
        self._rows = np.full(64, _ABSENT, np.int32)

    def __len__(self) -> int:
        return self._count

    def find(self, ids: np.ndarray) -> np.ndarray:
        """The row of each id, or -1."""
        found = np.full(len(ids), _ABSENT, np.int64)
        slots, pending = self._first_slots(ids), np.arange(len(ids))
        while len(pending):
            at = slots[pending]
            rows = self._rows[at]
            hit = (rows != _ABSENT) & (self._ids[at] == ids[pending])
            found[pending[hit]] = rows[hit]
            pending = pending[(rows != _ABSENT) & ~hit]
            slots[pending] = (slots[pending] + 1) & (len(self._ids) - 1)
        return found

    def add(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Give rows to ids that have none; ids and rows are distinct."""
        if 2 * (self._count + len(ids)) > len(self._ids):
            size, before = 1 << (2 * (self._count + len(ids))).bit_length(), (self._ids, self._rows)
            self._ids = np.zeros(size, np.int64)
            self._rows = np.full(size, _ABSENT, np.int32 if size <= 1 << 31 else np.int64)
            self._count = 0
            for at in range(0, len(before[0]), _BLOCK):  # so that what is made meanwhile is small
                held_ids, held_rows = (each[at : at + _BLOCK] for each in before)
                held = held_rows != _ABSENT
                self.add(held_ids[held], held_rows[held])
        slots, pending = self._first_slots(ids), np.arange(len(ids))
        while len(pending):
            free = pending[self._rows[slots[pending]] == _ABSENT]
            self._rows[slots[free]] = rows[free]  # of several that want a slot the last one gets it
            got = free[self._rows[slots[free]] == rows[free]]
            self._ids[slots[got]] = ids[got]
            pending = pending[self._rows[slots[pending]] != rows[pending]]
            slots[pending] = (slots[pending] + 1) & (len(self._ids) - 1)
        self._count += len(ids)

    def _first_slots(self, ids: np.ndarray) -> np.ndarray:
        return (mix(ids) & np.uint64(len(self._ids) - 1)).astype(np.int64)
