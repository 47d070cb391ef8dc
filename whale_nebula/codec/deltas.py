"""The per-sample caches of both ends of a boundary, against which only changes are sent (AQ-SGD).

Each side holds a cache for one direction of a boundary and writes the same to it, in the same order: the arithmetic is
numpy's, in a fixed order of element-wise steps, so both hold the same bits. `version` changes with all that is written
and let go, so that two sides that differ find out.
"""

from __future__ import annotations

from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from whale_nebula.codec.packing import join
from whale_nebula.errors import LocalProtocolError, RemoteProtocolError

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float16]

_OVERHEAD = 160  # of one held row, in memory
_STALE = 16  # as many times as rows are held, unknown samples come without a known one between: none will come again
_LARGEST = float(np.finfo(np.float16).max)


class Cache:
    """For every sample id the float16 row that both sides last knew; all rows have one shape.

    It holds up to `limit_bytes`; beyond that the rows that were not written for longest go. An id may stand several
    times in one call: all of its changes are against what was held before the call, and the last one stays.

    >>> cache = Cache(1 << 20)
    >>> ids, row = np.array([7]), np.array([[1.0, 2.0]], "float16")
    >>> cache.put(ids, row).tolist(), cache.known(np.array([7, 8])).tolist()
    ([[1.0, 2.0]], [True, False])
    >>> cache.add(ids, np.array([[4, -2]], "int8"), np.array([[0.25]], "float32"), block=2).tolist()
    [[2.0, 1.5]]
    """

    def __init__(self, limit_bytes: int) -> None:
        self.version = 0
        self._limit = limit_bytes
        self._rows: dict[int, Rows] = {}  # the one written longest ago is first
        self._missed = 0  # unknown samples that came since a known one did

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return len(self._rows) * self._cost()

    def copy(self) -> Cache:
        """One that holds the same, whatever is then written to either. Rows are shared: what is written is new ones."""
        again = Cache(self._limit)
        again._rows = dict(self._rows)
        again._missed, again.version = self._missed, self.version
        return again

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether rows of this shape can be written: it is that of the first ones."""
        return not self._rows or shape == self._shape()

    def known(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """For each id whether there is a row."""
        return np.fromiter((each in self._rows for each in _numbers(ids)), np.bool_, len(ids))

    def admits(self, ids: Ids, nbytes: int) -> npt.NDArray[np.bool_]:
        """For each unknown id whether there is room for it, for rows of so many bytes; those that come first have it.

        Whoever holds the first that came, and lets the rest go by, knows as many in every epoch. Who let the oldest
        go for the newest would know none, where there are more samples than room.
        """
        room = self._limit // (nbytes + _OVERHEAD) - len(self._rows)
        new = dict.fromkeys(each for each in _numbers(ids) if each not in self._rows)
        taken = {each for each, _ in zip(new, range(room), strict=False)}
        return np.fromiter((each in taken for each in _numbers(ids)), np.bool_, len(ids))

    def saw(self, ids: Ids) -> None:
        """Samples are about to come. Where no known one did for very long, all that is held goes: other data came."""
        if not self._rows or self.known(ids).any():
            self._missed = 0
            return
        self._missed += len(ids)
        if self._missed >= _STALE * len(self._rows):
            self._chain(np.fromiter(self._rows, np.int64, len(self._rows)))
            self._rows.clear()
            self._missed = 0

    def stamp(self, ids: Ids) -> int:
        """A version of what is held and of the samples that are about to come, by which the other side finds out."""
        return int(google_crc32c.extend(self.version, np.asarray(ids, np.int64).tobytes()))

    def get(self, ids: Ids) -> Rows:
        """The rows of known ids."""
        found = [self._rows.get(each) for each in _numbers(ids)]
        rows = [row for row in found if row is not None]
        if len(rows) < len(found):
            raise RemoteProtocolError(
                f"{len(found) - len(rows)} of {len(found)} samples have no row here",
                why="the other side remembers samples that this one does not",
            )
        return np.stack(rows) if rows else np.empty((0, *self._shape()), np.float16)

    def put(self, ids: Ids, rows: npt.NDArray[Any]) -> Rows:
        """Write whole rows; gives them in half precision, as `add` does."""
        return self._write(ids, _half(np.asarray(rows).astype(np.float32)))

    def add(self, ids: Ids, ints: npt.NDArray[Any], scales: npt.NDArray[Any], block: int) -> Rows:
        """Write known rows, changed by integers of which each `block` along the last axis shares a scale.

        Gives the new rows, one for each id as it stands, also where an id stands twice. What is no number is seen in
        them, and held as 0: a row that was once no number would make all its changes so.
        """
        old = self.get(ids) if len(ids) else np.empty((0, *ints.shape[1:]), np.float16)
        if ints.shape != old.shape or not np.issubdtype(ints.dtype, np.integer):
            raise RemoteProtocolError(f"changes {ints.dtype}{list(ints.shape)} of rows {list(old.shape)}")
        return self._write(ids, apply_changes(old, ints, scales, block))

    def as_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All that it holds: ids and rows in the order in which they go, the version and a count."""
        ids = np.fromiter(self._rows, np.int64, len(self._rows))
        return {"ids": ids, "rows": self.get(ids), "version": np.array([self.version, self._missed])}

    def _write(self, ids: Ids, rows: Rows) -> Rows:
        numbers = _check_ids(ids, rows)
        if self._rows and rows.shape[1:] != self._shape():
            raise LocalProtocolError(
                f"rows of sizes {rows.shape[1:]} among rows of sizes {self._shape()}",
                why="a change is between two rows of one shape",
                mend="pad every batch to one length",
            )
        held = np.where(np.isnan(rows), np.float16(0), rows)
        self._chain(np.asarray(ids, np.int64), held)
        self._lay(numbers, held)
        self._evict()
        return rows

    def _lay(self, numbers: list[int], rows: Rows) -> None:
        for number, row in zip(numbers, rows, strict=True):
            self._rows.pop(number, None)
            self._rows[number] = row.copy()  # a view would keep its whole batch

    def _evict(self) -> None:
        beyond = len(self._rows) - self._limit // max(self._cost(), 1)
        if beyond > 0:
            gone = [each for each, _ in zip(self._rows, range(beyond), strict=False)]
            for each in gone:
                del self._rows[each]
            self._chain(np.array(gone, np.int64))

    def _chain(self, *arrays: npt.NDArray[Any]) -> None:
        self.version = google_crc32c.extend(self.version, join(arrays).tobytes())

    def _shape(self) -> tuple[int, ...]:
        return next((row.shape for row in self._rows.values()), ())

    def _cost(self) -> int:
        return next((row.nbytes + _OVERHEAD for row in self._rows.values()), 0)


def apply_changes(old: Rows | None, ints: npt.NDArray[Any], scales: npt.NDArray[Any], block: int) -> Rows:
    """Rows that integers have changed; without any, those that the integers alone are."""
    change = ints.astype(np.float32)
    change *= _spread(scales, ints.shape, block)
    if old is not None:
        change += old.astype(np.float32)
    return _half(change)


def _numbers(ids: Ids) -> list[int]:
    return [int(each) for each in ids]


def _check_ids(ids: Ids, rows: Rows) -> list[int]:
    if ids.ndim != 1 or rows.ndim < 1 or len(ids) != len(rows):
        raise LocalProtocolError(f"ids of sizes {ids.shape} for rows of sizes {rows.shape}")
    return _numbers(ids)


def _half(rows: npt.NDArray[np.float32]) -> Rows:
    """In half precision, with what is too large made as large as can be."""
    return np.clip(rows, -_LARGEST, _LARGEST).astype(np.float16)


def _spread(scales: npt.NDArray[Any], shape: tuple[int, ...], block: int) -> npt.NDArray[np.float32]:
    """A scale for every number."""
    columns = shape[-1]
    due = (*shape[:-1], -(-columns // block))
    if scales.size != int(np.prod(due)):
        raise RemoteProtocolError(f"{scales.size} scales came where {due} were due")
    return np.repeat(scales.astype(np.float32).reshape(due), block, axis=-1)[..., :columns]
