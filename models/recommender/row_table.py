"""A table of rows by 64-bit ids, in the memory of the host; a row takes memory from when it is first trained."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from whale_nebula.errors import DataError, OptionError, WeightsError

from .hashing import draw_uniform
from .id_index import IdIndex
from .row_optimizers import RowOptimizer
from .segments import Segments


@dataclass(frozen=True)
class Ahead:
    """What a look-up ahead found: rows and values of ids as they were after so many updates."""

    updates: int
    generation: int
    rows: np.ndarray
    values: np.ndarray


class RowTable:
    """Rows of `width` numbers with an optimizer's slots beside them, and how often each was seen.

    An id without a row has the values of a new one, which are drawn by id and seed: uniform, up to `scale`. With
    `most_rows`, rows that were seen least make room for new ones. With `staleness`, look-ups of training see all
    updates but so many of the last ones.
    """

    def __init__(
        self,
        width: int,
        optimizer: RowOptimizer,
        *,
        scale: float = 0.05,
        seed: int = 0,
        most_rows: int | None = None,
        staleness: int = 0,
    ) -> None:
        if not isinstance(staleness, int) or staleness < 0:
            raise OptionError(f"staleness={staleness!r} is no number of steps", mend="staleness=0, or more")
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
        self.staleness = staleness
        self.left_out = self.fetched_again = 0
        self._generation = 0
        self._lock = threading.Lock()
        self._clear()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def steps(self) -> int:
        """How many updates there were."""
        return self._steps

    @property
    def pushes(self) -> int:
        """How many updates there were, and how many wait."""
        return self._steps + len(self._waiting)

    @property
    def reserved_bytes(self) -> int:
        """What was asked of the system for rows; pages that no row was written to take no memory."""
        return sum(each.reserved_bytes for each in (self._values, self._ids, self._counts, self._stamps))

    def pull(self, ids: np.ndarray, seen: np.ndarray | None = None, ahead: Ahead | None = None) -> np.ndarray:
        """The values of distinct ids. With `seen`, how often each comes in the batch, ids get rows and are counted.

        What was looked up `ahead` is used; rows that were updated since are read again, and `fetched_again` counts
        them.
        """
        with self._lock:
            self._update_due()
            if seen is None:
                return self._read(ids, self._index.find(ids))
            if ahead is None or ahead.generation != self._generation or not self._has_room(ahead.rows):
                rows = self._find_or_add(ids)
                values = self._values.read(rows)[:, : self.width]
            else:
                rows, values = ahead.rows.copy(), ahead.values
                absent = rows < 0
                if absent.any():
                    rows[absent] = self._find_or_add(ids[absent])
                old = self._stamps.read(rows)[:, 0] > ahead.updates
                values[old] = self._values.read(rows[old])[:, : self.width]
                self.fetched_again += int(old.sum())
            self._counts.write(rows, self._counts.read(rows) + seen[:, None])
            return values

    def look_ahead(self, ids: np.ndarray) -> Ahead:
        """What `pull` can use later; nothing is changed, and no id gets a row."""
        with self._lock:
            rows = self._index.find(ids)
            return Ahead(self._steps, self._generation, rows, self._read(ids, rows))

    def push(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        """Update the rows of distinct ids, with `staleness` so many pushes later; if a number is not finite, nothing is
        changed, and `left_out` counts it.
        """
        if not np.isfinite(gradients).all():
            self.left_out += 1
            return
        with self._lock:
            self._waiting.append((ids, gradients))
            if not self.staleness:
                self._update_due()

    def update(self, pushes: int | None = None) -> None:
        """Make the updates of the first so many pushes, or of all: at the end of a training with `staleness`."""
        with self._lock:
            self._update(self.pushes if pushes is None else pushes)

    def _update_due(self) -> None:
        self._update(self.pushes - self.staleness)

    def _update(self, pushes: int) -> None:
        while self._steps < pushes:
            ids, gradients = self._waiting.popleft()
            rows = self._find_or_add(ids)
            self._steps += 1
            parts = np.split(self._values.read(rows), 1 + len(self.optimizer.slots), axis=1)
            self.optimizer.update(parts[0], gradients, parts[1:], self._steps)
            self._values.write(rows, np.concatenate(parts, axis=1))
            self._stamps.write(rows, np.full((len(rows), 1), self._steps, np.int64))

    def evict(self, *, fewer_than: int) -> int:
        """Drop rows that were seen fewer times than this; gives their number. Their ids begin anew when they come."""
        if not isinstance(fewer_than, int | np.integer):
            raise OptionError(f"fewer_than={fewer_than!r} is no whole number", mend="evict(fewer_than=3)")
        with self._lock:
            self._update_due()
            rows, _, counts, _ = self._read_all(values=False)
            return self._drop(rows[counts < fewer_than])

    def state_dict(self) -> dict[str, Any]:
        """All rows, slots and counts, for `nb.state` and for files; in the order of ids."""
        with self._lock:
            self._update_due()
            _, ids, counts, values = self._read_all()
            order = np.argsort(ids)
            arrays = {"ids": ids[order], "counts": counts[order], "values": values[order]}
            plain = {"steps": self._steps, "optimizer": self.optimizer.name, "width": self.width}
            return {**arrays, **plain, **self._waiting_state()}

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
            if "waiting" in state:
                ends = np.cumsum(state["waiting"])[:-1]
                waiting = (np.split(np.asarray(state[f"waiting_{name}"]), ends) for name in ("ids", "gradients"))
                self._waiting.extend(zip(*waiting, strict=True))

    def _waiting_state(self) -> dict[str, np.ndarray]:
        """The updates that are still to be made, if there are any."""
        if not self._waiting:
            return {}
        ids, gradients = zip(*self._waiting, strict=True)
        lengths = np.array([len(each) for each in ids])
        joined = {"waiting_ids": np.concatenate(ids), "waiting_gradients": np.concatenate(gradients)}
        return {"waiting": lengths, **joined}

    # ------------------------------------------------------------------ rows
    def _clear(self) -> None:
        self._index, self._free, self._end, self._steps = IdIndex(), np.zeros(0, np.int64), 0, 0
        self._values: Segments = Segments(self.width * (1 + len(self.optimizer.slots)), np.float32)
        self._ids: Segments = Segments(1, np.int64)
        self._counts: Segments = Segments(1, np.int64)
        self._stamps: Segments = Segments(1, np.int64)  # after which update each row was written
        self._waiting: deque[tuple[np.ndarray, np.ndarray]] = deque()
        self._generation += 1

    def _has_room(self, rows: np.ndarray) -> bool:
        """Whether ids that had no row get one without that another is dropped."""
        return self.most_rows is None or len(self) + int((rows < 0).sum()) <= self.most_rows

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
            (self._stamps, np.zeros((len(ids), 1), np.int64)),
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
        self._generation += 1
        return len(gone)

    def _read_all(self, *, values: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Numbers of rows, ids, counts, and values where they are asked for."""
        rows = np.setdiff1d(np.arange(self._end), self._free)
        read = self._values.read(rows if values else rows[:0])
        return rows, self._ids.read(rows)[:, 0], self._counts.read(rows)[:, 0], read
