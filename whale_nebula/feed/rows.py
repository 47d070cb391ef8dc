"""Rows of a batch: their division into micro-batches, and which of them this process reads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from whale_nebula.errors import BatchAxisError
from whale_nebula.ir.routing import Routing


def divide_rows(rows: int, count: int) -> list[int]:
    """Split `rows` into at most `count` micro-batches whose sizes differ by at most one row, the larger first.

    >>> divide_rows(10, 4)
    [3, 3, 2, 2]
    >>> divide_rows(2, 4)
    [1, 1]
    >>> divide_rows(0, 4)
    [0]
    """
    used = max(1, min(count, rows))
    return [rows // used + (number < rows % used) for number in range(used)]


Mask: TypeAlias = npt.NDArray[np.bool_]
"""For each row of a batch, whether it is selected."""


class RowRule(Protocol):
    """A rule for which rows of a batch are read. Equal rules select the same rows."""

    def select(self, count: int) -> Mask:
        """Which rows of a batch of `count` these are."""


@dataclass(frozen=True)
class AllRows:
    """Every row."""

    def select(self, count: int) -> Mask:
        """All of `count` rows."""
        return np.ones(count, np.bool_)


@dataclass(frozen=True)
class Within:
    """The rows that are read from the part of each batch that belongs to `name`: `span` returns its begin and end.

    >>> halves = lambda name, count: (0, count // 2) if name == "gpu" else (count // 2, count)
    >>> Within(AllRows(), halves, "npu").select(4)
    array([False, False,  True,  True])
    """

    inner: RowRule
    span: Callable[[str, int], tuple[int, int]]
    name: str

    def select(self, count: int) -> Mask:
        """Which rows of a batch of `count` these are."""
        begin, end = self.span(self.name, count)
        found = np.zeros(count, np.bool_)
        found[begin:end] = self.inner.select(end - begin)
        return found


@dataclass(frozen=True)
class WorkerRows:
    """The rows of an input that a worker reads in a step: those of its micro-batches for some stages, or `all_rows`.

    >>> routing = Routing((("gpu/0", "gpu/1"),))
    >>> WorkerRows(4, routing, "gpu/1", frozenset({0})).select(6)  # micro-batches of 2, 2, 1 and 1 rows
    array([False, False,  True,  True, False,  True])
    >>> int(WorkerRows(4, routing, "gpu/1", all_rows=True).select(6).sum())
    6
    """

    micro_batch: int
    routing: Routing
    worker: str
    stages: frozenset[int] = frozenset()
    all_rows: bool = False

    def select(self, count: int) -> Mask:
        """Which rows of a batch of `count` these are."""
        counts = divide_rows(count, self.micro_batch)
        own = {m for stage in self.stages for m in self.routing.turns(stage, self.worker, len(counts))}
        return np.repeat([self.all_rows or m in own for m in range(len(counts))], counts)


def select_own_rows(reads: Iterable[RowRule], count: int) -> Mask:
    """Mask of the rows of a batch of `count` rows that this process reads; all if that is unknown."""
    masks = [each.select(count) for each in reads]
    found: Mask = np.any(masks, axis=0) if masks else np.ones(count, np.bool_)
    return found


_SAMPLE_ROWS = 840
"""A number of rows that is divisible by many numbers of micro-batches."""

_LOG = logging.getLogger("whale_nebula.feed")


@dataclass(eq=False)
class Feed:
    """A dataset's record of the rows of its batches that steps read. A step is recorded when it takes a batch. Rows
    that no step reads are omitted from the next requested batch on: by then all steps that took this one are recorded.

    >>> from whale_nebula.feed.rows import WorkerRows
    >>> from whale_nebula.ir.routing import Routing
    >>> feed = Feed()
    >>> feed.record_read(WorkerRows(2, Routing((("gpu/0", "gpu/1"),)), "gpu/0", frozenset({0})))
    >>> feed.select_rows(4).tolist()
    [True, True, True, True]
    >>> feed.conclude_batch()
    >>> feed.select_rows(4).tolist()
    [True, True, False, False]
    """

    reads: frozenset[RowRule] = frozenset()
    new_reads: frozenset[RowRule] = frozenset()

    def record_read(self, read: RowRule, name: str = "") -> None:
        """Record that a step takes a batch, and which rows it reads of its input `name`."""
        if read not in self.new_reads and read.select(_SAMPLE_ROWS).all():
            _LOG.info("nb.shard: a step needs all rows of input %r, so this process reads all of them", name)
        self.new_reads |= {read}

    def conclude_batch(self) -> None:
        """Conclude a batch, as the next one is requested."""
        if not self.new_reads <= self.reads:
            self.reads |= self.new_reads
            _LOG.info(
                "nb.shard: this process reads about %.0f%% of the rows", 100 * self.select_rows(_SAMPLE_ROWS).mean()
            )

    def select_rows(self, count: int) -> Mask:
        """Mask of the rows of a batch of `count` rows that must be in this process; all if the batch cannot be divided,
        which the step reports.
        """
        try:
            return select_own_rows(self.reads, count)
        except BatchAxisError:
            return select_own_rows((), count)


class RowReceiver(Protocol):
    """Receiver of the rows of a batch that a step reads."""

    def record_read(self, read: RowRule, name: str = "") -> None:
        """Record that a step takes a batch, and which rows it reads of its input `name`."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a batch: the feed that they belong to, which of them are `present`, and `marks`, an identifier of
    each row, including absent ones.
    """

    feed: RowReceiver
    present: Mask
    marks: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def is_complete(self) -> bool:
        """Whether all rows are in this process."""
        return bool(self.present.all())


_NAME = "_nebula_rows"


def tag_rows(tensor: Any, rows: Rows) -> Any:
    """Tag a tensor as a part of a batch."""
    setattr(tensor, _NAME, rows)
    return tensor


def rows_of(tensor: Any) -> Rows | None:
    """The tag of a tensor; None if it is not an unchanged tensor from `nb.shard`."""
    return getattr(tensor, _NAME, None)
