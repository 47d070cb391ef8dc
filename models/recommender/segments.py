"""Rows in memory that grow without being copied."""

from __future__ import annotations

from typing import Any

import numpy as np

_FIRST = 4096


class Segments:
    """Rows of `columns` numbers, in arrays each twice as long as the one before.

    An array is allocated with its first row; the system provides memory for its pages when they are first written.
    """

    def __init__(self, columns: int, dtype: type[np.generic]) -> None:
        self._columns, self._dtype = columns, dtype
        self._arrays: list[np.ndarray] = []
        self._starts = np.zeros(1, np.int64)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self._columns * np.dtype(self._dtype).itemsize

    def reserve(self, count: int) -> None:
        """Allocate rows 0 to `count` - 1."""
        while self._starts[-1] < count:
            self._arrays.append(np.empty((_FIRST << len(self._arrays), self._columns), self._dtype))
            self._starts = np.append(self._starts, self._starts[-1] + len(self._arrays[-1]))

    def read(self, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows, with repetitions allowed."""
        read = np.empty((len(rows), self._columns), self._dtype)
        for segment, places in self._find_segment(rows):
            read[places] = self._arrays[segment][rows[places] - self._starts[segment]]
        return read

    def write(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Set these rows, which are distinct."""
        for segment, places in self._find_segment(rows):
            self._arrays[segment][rows[places] - self._starts[segment]] = values[places]

    @property
    def reserved_bytes(self) -> int:
        """The allocated bytes, written or not."""
        return sum(each.nbytes for each in self._arrays)

    def _find_segment(self, rows: np.ndarray) -> list[tuple[int, Any]]:
        """For each array, the places in `rows` of its rows."""
        segments = np.searchsorted(self._starts, rows, side="right") - 1
        found = np.flatnonzero(np.bincount(segments))
        if len(found) == 1:
            return [(int(found[0]), slice(None))]
        return [(int(each), np.flatnonzero(segments == each)) for each in found]
