"""A table of rows by 64-bit ids, in the memory of the host; a row takes memory once it is trained."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from whale_nebula.errors import CheckpointError, DataError, OptionError, StateError
from whale_nebula.runtime.checkpoint.objects import SavedState
from whale_nebula.runtime.run import find_open_run
from whale_nebula.runtime.variables.attached_memory import ExpectedMemory

from .hashing import IdIndex, draw_uniform
from .row_optimizers import RowOptimizer
from .row_states import PendingPush, check_state, join_states, pack_pending, read_share, unpack_pending
from .segments import Segments
from .shares import BUCKETS, WHOLE, Share, covers

_BLOCK = 1 << 16
"""The number of new rows that are written at once, to limit temporary memory."""


@dataclass(frozen=True)
class LookAhead:
    """The result of a look-up ahead, after this number of updates: the row of each id, -1 if it has none, and its
    values. It is not valid after an eviction, which begins another `generation`.
    """

    updates: int
    generation: int
    rows: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class _SavedParts:
    """The saved state from which a run resumes: the loaded share, the parts of all workers, this worker's name, and
    whether all parts are available.
    """

    loaded: Share | None
    parts: Mapping[str, SavedState]
    worker: str
    complete: bool


class RowTable:
    """A table of rows of `width` numbers, with optimizer slots and the number of uses of each row.

    An id without a row has the initial values of a row. A table that is sharded over workers has only the rows of its
    `share` in each: other ids are looked up as zeros, and their gradients are ignored.

    Args:
        width: numbers in a row.
        optimizer: the update rule.
        scale: initial values are uniform between -scale and scale, and depend only on id and seed.
        seed: seed of the initial values.
        most_rows: maximum number of rows; the least used ones are evicted for new ones.
        staleness: number of the last updates that look-ups in training may miss.
        expected_rows: number of rows for which a planner counts memory.
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
        expected_rows: int | None = None,
    ) -> None:
        if not isinstance(staleness, int) or staleness < 0:
            raise OptionError(f"staleness={staleness!r} is not a valid number of steps", mend="staleness=0, or more")
        sizes = [each for each in (width, most_rows, expected_rows) if each is not None]
        if not all(isinstance(each, int) and each > 0 for each in sizes):
            raise OptionError(
                f"width={width!r}, most_rows={most_rows!r}, expected_rows={expected_rows!r}: sizes must be positive",
                mend="width=16, most_rows=1_000_000",
            )
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale < float("inf"):
            raise OptionError(f"scale={scale!r} is not a valid scale", mend="scale=0.05")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
            raise OptionError(f"seed={seed!r} is not a valid seed", mend="use an integer of 64 bits, such as seed=0")
        self.width, self.optimizer, self.scale, self.seed, self.most_rows = width, optimizer, scale, seed, most_rows
        self.staleness, self.expected_rows = staleness, expected_rows
        self.share: Share | None = None
        self._saved: _SavedParts | None = None
        self.left_out = self.fetched_again = 0
        self._generation = 0
        self._lock, self._holding = threading.Lock(), threading.Lock()
        self._clear()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def steps(self) -> int:
        """The number of updates."""
        return self._steps

    @property
    def pushes(self) -> int:
        """The number of updates, pending ones included."""
        return self._steps + len(self._pending)

    @property
    def reserved_bytes(self) -> int:
        """The bytes that are reserved for rows; pages without a written row take no memory."""
        return sum(each.reserved_bytes for each in (self._values, self._ids, self._counts, self._stamps))

    def expect_bytes(self) -> ExpectedMemory:
        """The bytes of the rows that the table is expected to have, on all workers together: `expected_rows`, otherwise
        `most_rows`, otherwise the current number.
        """
        count, reason = len(self), "that it has now: pass expected_rows= to its layer for the expected number"
        if self.expected_rows is not None:
            count, reason = self.expected_rows, "from expected_rows="
        elif self.most_rows is not None:
            count, reason = self.most_rows, "from most_rows="
        row_bytes = sum(each.row_bytes for each in (self._values, self._ids, self._counts, self._stamps))
        return ExpectedMemory(count * row_bytes + IdIndex.bytes_of(count), f"{count:,} rows {reason}")

    def pull(self, ids: np.ndarray, seen: np.ndarray | None = None, ahead: LookAhead | None = None) -> np.ndarray:
        """The values of distinct ids. With `seen`, the count of each in the batch, ids get rows and are counted.

        A look-up `ahead` is used; rows that were updated since are read again, and `fetched_again` counts them.
        """
        own = self._find_own(ids)
        if own is None:
            return self._pull(ids, seen, ahead)
        values = np.zeros((len(ids), self.width), np.float32)
        values[own] = self._pull(ids[own], None if seen is None else seen[own], ahead)
        return values

    def _pull(self, ids: np.ndarray, seen: np.ndarray | None, ahead: LookAhead | None) -> np.ndarray:
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

    def look_ahead(self, ids: np.ndarray) -> LookAhead:
        """A look-up for a later `pull`; changes nothing, and creates no rows."""
        own = self._find_own(ids)
        ids = ids if own is None else ids[own]
        with self._lock:
            rows = self._index.find(ids)
            return LookAhead(self._steps, self._generation, rows, self._read(ids, rows))

    def push(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        """Update the rows of distinct ids, `staleness` pushes later. If any gradient is not finite, nothing is updated,
        and `left_out` counts the push.
        """
        if not np.isfinite(gradients).all():
            self.left_out += 1
            return
        own = self._find_own(ids)
        if own is not None:
            ids, gradients = ids[own], gradients[own]
        with self._lock:
            self._pending.append((ids, gradients))
            if not self.staleness:
                self._update_due()

    def update(self, pushes: int | None = None) -> None:
        """Apply the updates of the first `pushes` since the table was created, or all, as at the end of a training with
        `staleness`.
        """
        with self._lock:
            self._update(self.pushes if pushes is None else pushes)

    def _update_due(self) -> None:
        self._update(self.pushes - self.staleness)

    def _update(self, pushes: int) -> None:
        while self._steps < pushes:
            ids, gradients = self._pending.popleft()
            rows = self._find_or_add(ids)
            self._steps += 1
            parts = np.split(self._values.read(rows), 1 + len(self.optimizer.slots), axis=1)
            self.optimizer.update(parts[0], gradients, parts[1:], self._steps)
            self._values.write(rows, np.concatenate(parts, axis=1))
            self._stamps.write(rows, np.full((len(rows), 1), self._steps, np.int64))

    def evict(self, *, fewer_than: int) -> int:
        """Drop the rows that were used in training fewer times than this; returns their number. If their ids recur,
        they get new rows.
        """
        if not isinstance(fewer_than, int | np.integer):
            raise OptionError(f"fewer_than={fewer_than!r} is not an integer", mend="evict(fewer_than=3)")
        with self._lock:
            self._update_due()
            rows, _, counts, _ = self._read_all(values=False)
            return self._drop(rows[counts < fewer_than])

    def state_dict(self) -> dict[str, Any]:
        """All rows, slots and counts in the order of ids, for `nb.state` and for files."""
        with self._lock:
            self._update_due()
            _, ids, counts, values = self._read_all()
            order = np.argsort(ids)
            arrays = {"ids": ids[order], "counts": counts[order], "values": values[order]}
            plain = {"steps": self._steps, "optimizer": self.optimizer.name, "width": self.width}
            found = self.share or (None if self._saved is None else self._saved.loaded)
            share = {} if found is None else {"share": list(found)}
            return {**arrays, **plain, **share, **pack_pending(self._pending)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace all contents by those of another table of this width and optimizer."""
        check_state(state, self.width, self.optimizer.name)
        ids = np.asarray(state["ids"], np.int64)
        with self._lock:
            self._clear()
            rows = self._add(ids) if len(ids) else ids
            self._values.write(rows, np.asarray(state["values"], np.float32))
            self._counts.write(rows, np.asarray(state["counts"], np.int64)[:, None])
            self._steps = int(state["steps"])
            self._pending.extend(unpack_pending(state))

    # ------------------------------------------------------------------ shares of several workers
    def hold(self, share: Share) -> None:
        """Restrict the table to the rows of these buckets, permanently. Rows of a saved run are loaded from all workers
        that had some of them.
        """
        with self._holding:
            if share == self.share:
                return
            if self.share is not None:
                raise StateError(
                    f"an embedding table has {self.share}, but {share} is requested",
                    why="two programs divide the table in different ways",
                    mend="use the same nb.split(axis=0) around its layer in all programs",
                )
            if self._saved is not None:
                self._take_share(share, self._saved)
            self.share, self._saved = share, None

    def _take_share(self, share: Share, saved: _SavedParts) -> None:
        """Load the rows of a share from the workers' saved parts that have all updates."""
        plain_states = {name: part.read_plain() for name, part in saved.parts.items()}
        newest = max((each["steps"] for each in plain_states.values()), default=0)
        new = ((name, read_share(each)) for name, each in plain_states.items() if each["steps"] == newest)
        shares = {name: found for name, found in new if found is not None}
        if shares.get(saved.worker) == share:
            return  # all rows of this worker are loaded
        if not covers(list(shares.values()), share) and (shares or not saved.complete):
            raise CheckpointError(
                "some rows of a table are not in the checkpoint's files on this host",
                why="other hosts wrote them to their own folders, and the table is divided differently now",
                mend="use a folder that all hosts share, or the number of workers that saved it",
            )
        states = [saved.parts[name].read() for name, each in shares.items() if each.overlaps(share)]
        for each in states:
            check_state(each, self.width, self.optimizer.name)
        if states:
            self.load_state_dict(join_states(states, share))

    def load_parts(self, parts: Mapping[str, SavedState], worker: str, complete: bool) -> None:
        """Restore the parts that workers have saved; `complete` unless some of them were not found. This worker's own
        part is loaded at once, those of others when the shares are known.
        """
        loaded = None
        if worker in parts:
            own = parts[worker].read()
            self.load_state_dict(own)
            loaded = read_share(own)
        self._saved = _SavedParts(loaded, parts, worker, complete)
        run = find_open_run()
        known = self.share or (WHOLE if run is None or run.alone else None)
        if known is not None:
            self.share = None
            self.hold(known)

    # ------------------------------------------------------------------ rows
    def _clear(self) -> None:
        self._index, self._free, self._end, self._steps = IdIndex(), np.zeros(0, np.int64), 0, 0
        self._values: Segments = Segments(self.width * (1 + len(self.optimizer.slots)), np.float32)
        self._ids: Segments = Segments(1, np.int64)
        self._counts: Segments = Segments(1, np.int64)
        self._stamps: Segments = Segments(1, np.int64)  # the update that wrote each row
        self._pending: deque[PendingPush] = deque()
        self._generation += 1

    def _find_own(self, ids: np.ndarray) -> np.ndarray | None:
        """Which ids belong to this worker's share; None if all do."""
        return None if self.share is None or self.share == WHOLE else self.share.owns(ids)

    @property
    def _limit(self) -> int | None:
        """The maximum number of rows of this share."""
        return None if self.most_rows is None else (self.share or WHOLE).limit_rows(self.most_rows)

    def _has_room(self, rows: np.ndarray) -> bool:
        """Whether all ids without a row (-1) get one without eviction."""
        return self._limit is None or len(self) + int((rows < 0).sum()) <= self._limit

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
        """The row of each id; ids without one get one."""
        rows = self._index.find(ids)
        absent = rows < 0
        count = int(absent.sum())
        if self._limit is not None and len(self) + count > self._limit:
            self._make_room(count, len(ids), rows[~absent])
        if count:
            rows[absent] = self._add(ids[absent])
        return rows

    def _add(self, ids: np.ndarray) -> np.ndarray:
        """Create rows for ids that have none."""
        reused, self._free = self._free[: len(ids)], self._free[len(ids) :]
        fresh = len(ids) - len(reused)
        rows = np.concatenate([reused, np.arange(self._end, self._end + fresh)])
        self._end += fresh
        for segments in (self._values, self._ids, self._counts, self._stamps):
            segments.reserve(self._end)
        for at in range(0, len(ids), _BLOCK):
            self._write_new(ids[at : at + _BLOCK], rows[at : at + _BLOCK])
        self._index.add(ids, rows)
        return rows

    def _write_new(self, ids: np.ndarray, rows: np.ndarray) -> None:
        slots = [np.full((len(ids), self.width), each, np.float32) for each in self.optimizer.slots]
        self._values.write(rows, np.concatenate([self._draw(ids), *slots], axis=1))
        self._ids.write(rows, ids[:, None])
        for segments in (self._counts, self._stamps):
            segments.write(rows, np.zeros((len(ids), 1), np.int64))

    # ------------------------------------------------------------------ eviction
    def _make_room(self, count: int, wanted: int, held_rows: np.ndarray) -> None:
        """Evict the least used rows, except those of this batch, until `count` more fit; at least a tenth of all at
        once, so that it is rare. Then halve all counts.
        """
        most = self._limit or 0
        if wanted > most:
            size = (self.share or WHOLE).size
            raise DataError(
                f"a batch has {wanted} distinct ids, but the table is limited to {most} rows",
                mend=f"most_rows={-(-wanted * BUCKETS // size)}, or more",
            )
        rows, ids, counts, _ = self._read_all(values=False)
        others = ~np.isin(rows, held_rows)
        rows, ids, counts = rows[others], ids[others], counts[others]
        least = max(len(self) + count - most, most // 10)
        # equal counts are ordered by id, as the places of rows change when a table is loaded
        self._drop(rows[np.lexsort((ids, counts))[:least]])
        rows, _, counts, _ = self._read_all(values=False)
        self._counts.write(rows, counts[:, None] // 2)  # decay, so that formerly frequent ids can be evicted

    def _drop(self, dropped_rows: np.ndarray) -> int:
        rows, ids, _, _ = self._read_all(values=False)
        is_kept = ~np.isin(rows, dropped_rows)
        self._index = IdIndex()
        self._index.add(ids[is_kept], rows[is_kept])
        self._free = np.concatenate([self._free, dropped_rows])
        self._generation += 1
        return len(dropped_rows)

    def _read_all(self, *, values: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Numbers of rows, ids, counts, and on request values."""
        rows = np.setdiff1d(np.arange(self._end), self._free)
        read = self._values.read(rows if values else rows[:0])
        return rows, self._ids.read(rows)[:, 0], self._counts.read(rows)[:, 0], read
