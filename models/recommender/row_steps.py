"""Look-ups and updates of a table within training steps. Gradients of micro-batches are summed before one update. Ids
of later steps are looked up, and deferred updates applied, in parallel with the current step.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from whale_nebula.errors import NebulaWarning, NotYetError
from whale_nebula.runtime.run import find_open_run

from .distinct import Distinct
from .row_table import LookAhead, RowTable

_LOG = logging.getLogger("whale_nebula.runtime.run")
_MOST_ANNOUNCED = 16
LookUp = tuple[Distinct, LookAhead]
"""The distinct ids of a batch, and their rows."""


@dataclass
class _Announced:
    """The ids of a later step, and their look-up."""

    ids: np.ndarray
    look_up: Future[LookUp] | None = None


class RowSteps:
    """The look-ups and updates of one layer; `find` returns the distinct ids of a batch that its table holds."""

    def __init__(self, table: RowTable, find: Callable[[np.ndarray], Distinct]) -> None:
        self.table, self._find = table, find
        self.looked_ahead = 0
        self._save_checked = False
        self._lock = threading.Lock()
        self._step, self._pulls = 0, 0
        self._looks_up = False  # a step has begun to look up rows, and has not started parallel work yet
        self._pushed: list[tuple[np.ndarray, np.ndarray]] = []
        self._whole = True  # an announcement covers an entire batch, and is compared with the ids of a look-up
        self._announced: deque[_Announced] = deque(maxlen=_MOST_ANNOUNCED)
        self._pool: ThreadPoolExecutor | None = None
        self._updates: Future[None] | None = None

    def pull(self, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Look up a micro-batch in training: its distinct ids, the place of each id among them, and their values."""
        step, count = _find_run_step()
        with self._lock:
            if step != self._step or not step:
                self._begin(step, count)
            self._pulls += 1
            last = self._pulls == count
            look_up = self._take_look_up(flat)
        distinct, ahead = (self._find(flat), None) if look_up is None else look_up.result()
        rows = self.table.pull(distinct.ids, distinct.seen, ahead)
        if last:
            self._start_parallel_work()
        return distinct.ids, distinct.places, rows

    def push(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        """Add the gradients of a micro-batch; the last one of a step updates the table."""
        _, count = _find_run_step()
        with self._lock:
            self._pushed.append((ids, gradients))
            if len(self._pushed) < count:
                return
            pushed, self._pushed = self._pushed, []
        self.table.push(*(pushed[0] if count == 1 else _sum_by_id(pushed)))
        if not self._save_checked:
            self._save_checked = True
            _warn_if_unsaved(self.table)

    def announce(self, flat: np.ndarray) -> None:
        """Announce the ids of a later step, which are looked up in parallel with the previous step, if the table is
        local. While that step looks up its own rows, the look-up waits for the updates that follow.
        """
        with self._lock:
            self._announced.append(_Announced(flat))
            if len(self._announced) == 1 and self._pool is not None and not self._looks_up:
                self._look_up_next()

    def _begin(self, step: int, count: int) -> None:
        """Begin a step at its first look-up, and discard the remains of a failed step."""
        run = find_open_run()
        if run is not None and run.current_step.is_local_sgd and step:
            raise NotYetError(
                "an embedding table of which each cluster trains a copy",
                why="local SGD exchanges variables, and the rows of a HashedEmbedding are not variables",
                mend="use keras.layers.Embedding, or remove sync_every= and exchange=",
            )
        if self._pushed and self._pulls == len(self._pushed) and run is not None and not run.alone:
            raise NotYetError(
                "an embedding table in a stage with replicas in several processes",
                why=f"this process had {self._pulls} of {count} micro-batches, so their rows would differ",
                mend="put nb.replica around the other stages only",
            )
        self._step, self._pulls, self._pushed, self._whole = step, 0, [], count == 1
        self._looks_up = True
        if self._updates is not None:
            self._updates.result()
            self._updates = None

    def _take_look_up(self, flat: np.ndarray) -> Future[LookUp] | None:
        """Remove and return the look-up ahead for these ids, if any, and remove earlier announcements, whose batches
        were not trained.
        """
        at = next((at for at, each in enumerate(self._announced) if np.array_equal(each.ids, flat)), None)
        if at is None:
            return None
        look_up = [self._announced.popleft() for _ in range(at + 1)][-1].look_up
        self.looked_ahead += look_up is not None
        return look_up

    def _start_parallel_work(self) -> None:
        """Start work in parallel with the dense part of this step: updates that the next look-up must see, and that
        look-up.
        """
        with self._lock:
            if self.table.staleness:
                due = self.table.pushes - self.table.staleness + 1
                self._updates = self._executor().submit(self.table.update, due)
            self._looks_up = False
            self._look_up_next()

    def _look_up_next(self) -> None:
        if self._whole and self._announced and self._announced[0].look_up is None:
            self._announced[0].look_up = self._executor().submit(self._look_ahead, self._announced[0].ids)

    def _look_ahead(self, flat: np.ndarray) -> LookUp:
        distinct = self._find(flat)
        return distinct, self.table.look_ahead(distinct.ids)

    def _executor(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "table-rows")  # its threads end with this object
        return self._pool


def _find_run_step() -> tuple[int, int]:
    """The number of the run's step, and of its micro-batches; 0 and 1 outside of a step."""
    run = find_open_run()
    if run is None or not run.current_step.micro_batches:
        return 0, 1
    return run.current_step.number, run.current_step.micro_batches


def _warn_if_unsaved(table: RowTable) -> None:
    """Log a warning if a run saves checkpoints that do not contain a trained table."""
    run = find_open_run()
    checkpoints = None if run is None else run.checkpoints
    if checkpoints is None or any(each is table for each in checkpoints.extra_state.objects.values()):
        return
    warning = NebulaWarning(
        "rows of a HashedEmbedding are not saved with the checkpoints of this run",
        where=checkpoints.levels[0].folder.path,
        why="they are not variables, and start afresh when the run resumes",
        mend="call nb.state(rows=layer.table) before the first step",
    )
    _LOG.warning("%s", warning)


def _sum_by_id(pushed: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids of several pushes, and the sum of the gradients of each. Micro-batches arrive in any order and
    are added in the order of their contents, so that the bits of a sum are always the same.
    """
    pushed = sorted(pushed, key=lambda each: (each[0].tobytes(), each[1].tobytes()))
    ids, places = np.unique(np.concatenate([each for each, _ in pushed]), return_inverse=True)
    sums = np.zeros((len(ids), pushed[0][1].shape[1]), np.float32)
    np.add.at(sums, places, np.concatenate([each for _, each in pushed]))
    return ids, sums
