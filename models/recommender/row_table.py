"""A table of rows by 64-bit ids, in the memory of the host; a row takes memory from when it is first trained."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from whale_nebula.errors import DataError, OptionError, WeightsError

from .hashing import draw_uniform
from .id_index import IdIndex
from .row_optimizers import RowOptimizer
from .segments import Segments


class RowTable:
    """Rows of `width` numbers with an optimizer's slots beside them, and how often each was seen.

    An id without a row has the values of a new one, which are drawn by id and seed: uniform, up to `scale`. With
    `most_rows`, rows that were seen least make room for new ones.
    """

    def __init__(
        self, width: int, optimizer: RowOptimizer, *, scale: float = 0.05, seed: int = 0, most_rows: int | None = None
    ) -> None:
        sizes = [width] if most_rows is None else [width, most_rows]
        if not all(isinstance(each, int) and each > 0 for each in sizes):
            raise OptionError(
                f"width={width!r}, most_rows={most_rows!r} holds no row", mend="width=16, most_rows=1_000_000"
            )
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale < float("inf"):
            raise OptionError(f"scale={scale!r} draws no rows", mend="scale=0.05: new values are up to it")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
            raise OptionError(f"seed={seed!r} draws no rows", mend="seed=0, a whole number of 64 bits")
        self.width, self.optimizer, self.scale, self.seed, self.most_rows = width, optimizer, scale, seed, most_rows
        self.left_out = 0
        self._lock = threading.Lock()
        self._clear()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def steps(self) -> int:
        """How many updates there were."""
        return self._steps

    @property
    def reserved_bytes(self) -> int:
        """What was asked of the system for rows; pages that no row was written to take no memory."""
        return sum(each.reserved_bytes for each in (self._values, self._ids, self._counts))

    def pull(self, ids: np.ndarray, seen: np.ndarray | None = None) -> np.ndarray:
        """The values of distinct ids. With `seen`, how often each comes in the batch, ids get rows and are counted."""
        with self._lock:
            if seen is None:
                return self._read(ids, self._index.find(ids))
            rows = self._find_or_add(ids)
            self._counts.write(rows, self._counts.read(rows) + seen[:, None])
            return self._values.read(rows)[:, : self.width]

    def push(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        """Update the rows of distinct ids; if a number is not finite, nothing is changed, and `left_out` counts it."""
        if not np.isfinite(gradients).all():
            self.left_out += 1
            return
        with self._lock:
            rows = self._find_or_add(ids)
            self._steps += 1
            parts = np.split(self._values.read(rows), 1 + len(self.optimizer.slots), axis=1)
            self.optimizer.update(parts[0], gradients, parts[1:], self._steps)
            self._values.write(rows, np.concatenate(parts, axis=1))

    def evict(self, *, fewer_than: int) -> int:
        """Drop rows that were seen fewer times than this; gives their number. Their ids begin anew when they come."""
        if not isinstance(fewer_than, int | np.integer):
            raise OptionError(f"fewer_than={fewer_than!r} is no whole number", mend="evict(fewer_than=3)")
        with self._lock:
            rows, _, counts, _ = self._read_all(values=False)
            return self._drop(rows[counts < fewer_than])

    def state_dict(self) -> dict[str, Any]:
        """All rows, slots and counts, for `nb.state` and for files; in the order of ids."""
        with self._lock:
            _, ids, counts, values = self._read_all()
            order = np.argsort(ids)
            arrays = {"ids": ids[order], "counts": counts[order], "values": values[order]}
            return {**arrays, "steps": self._steps, "optimizer": self.optimizer.name, "width": self.width}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what another table of this width and optimizer has held, and nothing else."""
        if missing := [
            each for each in ("ids", "counts", "values", "steps", "optimizer", "width") if each not in state
        ]:
            raise WeightsError(
                f"this is no table of rows: it has no {missing[0]!r}", mend="what state_dict() has given"
            )
        for name, mine in (("width", self.width), ("optimizer", self.optimizer.name)):
            if state[name] != mine:
                raise WeightsError(
                    f"the rows that were saved have {name} {state[name]!r}, and the table has {mine!r}",
                    mend=f"{name}={state[name]!r} where the table is made",
                )
        ids = np.asarray(state["ids"], np.int64)
        with self._lock:
            self._clear()
            rows = self._add(ids) if len(ids) else ids
            self._values.write(rows, np.asarray(state["values"], np.float32))
            self._counts.write(rows, np.asarray(state["counts"], np.int64)[:, None])
            self._steps = int(state["steps"])

    # ------------------------------------------------------------------ rows
    def _clear(self) -> None:
        self._index, self._free, self._end, self._steps = IdIndex(), np.zeros(0, np.int64), 0, 0
        self._values: Segments = Segments(self.width * (1 + len(self.optimizer.slots)), np.float32)
        self._ids: Segments = Segments(1, np.int64)
        self._counts: Segments = Segments(1, np.int64)

    def _read(self, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        values = np.empty((len(ids), self.width), np.float32)
        here = rows >= 0
        values[here] = self._values.read(rows[here])[:, : self.width]
        values[~here] = self._draw(ids[~here])
        return values

    def _draw(self, ids: np.ndarray) -> np.ndarray:
        scale = np.float32(self.scale)
        return np.asarray(2 * scale * draw_uniform(ids, self.width, self.seed) - scale)

    def _find_or_add(self, ids: np.ndarray) -> np.ndarray:
        rows = self._index.find(ids)
        absent = rows < 0
        count = int(absent.sum())
        if self.most_rows is not None and len(self) + count > self.most_rows:
            self._make_room(count, len(ids), rows[~absent])
        if count:
            rows[absent] = self._add(ids[absent])
        return rows

    def _add(self, ids: np.ndarray) -> np.ndarray:
        """New rows for ids that have none."""
        reused, self._free = self._free[: len(ids)], self._free[len(ids) :]
        fresh = len(ids) - len(reused)
        rows = np.concatenate([reused, np.arange(self._end, self._end + fresh)])
        self._end += fresh
        slots = [np.full((len(ids), self.width), each, np.float32) for each in self.optimizer.slots]
        for segments, values in (
            (self._values, np.concatenate([self._draw(ids), *slots], axis=1)),
            (self._ids, ids[:, None]),
            (self._counts, np.zeros((len(ids), 1), np.int64)),
        ):
            segments.reserve(self._end)
            segments.write(rows, values)
        self._index.add(ids, rows)
        return rows

    # ------------------------------------------------------------------ eviction
    def _make_room(self, count: int, wanted: int, held: np.ndarray) -> None:
        """Drop the rows that were seen least, but those of this batch; a tenth of all at once, so that it is rare."""
        most = self.most_rows or 0
        if wanted > most:
            raise DataError(
                f"a batch has {wanted} distinct ids, and the table may have {most} rows",
                mend=f"most_rows={wanted}, or more",
            )
        rows, ids, counts, _ = self._read_all(values=False)
        others = ~np.isin(rows, held)
        rows, ids, counts = rows[others], ids[others], counts[others]
        least = max(len(self) + count - most, most // 10)
        # of equal counts by id: where a row lies is another place after a table was loaded
        self._drop(rows[np.lexsort((ids, counts))[:least]])
        rows, _, counts, _ = self._read_all(values=False)
        self._counts.write(rows, counts[:, None] // 2)  # what was frequent long ago can go

    def _drop(self, gone: np.ndarray) -> int:
        rows, ids, _, _ = self._read_all(values=False)
        stays = ~np.isin(rows, gone)
        self._index = IdIndex()
        self._index.add(ids[stays], rows[stays])
        self._free = np.concatenate([self._free, gone])
        return len(gone)

    def _read_all(self, *, values: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Numbers of rows, ids, counts, and values where they are asked for."""
        rows = np.setdiff1d(np.arange(self._end), self._free)
        read = self._values.read(rows if values else rows[:0])
        return rows, self._ids.read(rows)[:, 0], self._counts.read(rows)[:, 0], read
