"""Which rows of a batch a process reads: those of the micro-batches that its stages take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from whale_nebula.feed.sizes import sizes
from whale_nebula.ir.routing import Routing

Mask: TypeAlias = npt.NDArray[np.bool_]
"""For each row of a batch, whether it is one of them."""


class Reads(Protocol):
    """What tells which rows of a batch are read. Two that are equal tell the same."""

    def of(self, count: int) -> Mask:
        """Which rows of a batch of `count` these are."""
        ...


@dataclass(frozen=True)
class AllRows:
    """Every row."""

    def of(self, count: int) -> Mask:
        """All of `count` rows."""
        return np.ones(count, np.bool_)


@dataclass(frozen=True)
class Within:
    """The rows that are read of a part of each batch, which a `name` has: `span` gives from which row to which.

    >>> halves = lambda name, count: (0, count // 2) if name == "gpu" else (count // 2, count)
    >>> Within(AllRows(), halves, "npu").of(4)
    array([False, False,  True,  True])
    """

    inner: Reads
    span: Callable[[str, int], tuple[int, int]]
    name: str

    def of(self, count: int) -> Mask:
        """Which rows of a batch of `count` these are."""
        begin, end = self.span(self.name, count)
        found = np.zeros(count, np.bool_)
        found[begin:end] = self.inner.of(end - begin)
        return found


@dataclass(frozen=True)
class RowsRead:
    """The rows of an input that a worker reads in a step: those of its micro-batches for some stages, or `all_rows`.

    >>> routing = Routing((("gpu/0", "gpu/1"),))
    >>> RowsRead(4, routing, "gpu/1", frozenset({0})).of(6)  # micro-batches of 2, 2, 1 and 1 rows
    array([False, False,  True,  True, False,  True])
    >>> int(RowsRead(4, routing, "gpu/1", all_rows=True).of(6).sum())
    6
    """

    micro_batch: int
    routing: Routing
    worker: str
    stages: frozenset[int] = frozenset()
    all_rows: bool = False

    def of(self, count: int) -> Mask:
        """Which rows of a batch of `count` these are."""
        counts = sizes(count, self.micro_batch)
        own = {m for stage in self.stages for m in self.routing.turns(stage, self.worker, len(counts))}
        return np.repeat([self.all_rows or m in own for m in range(len(counts))], counts)


def own_rows(reads: Iterable[Reads], count: int) -> Mask:
    """These rows of a batch of `count` rows are this process's, by all that it is known to read; all of them where
    nothing is known.
    """
    masks = [each.of(count) for each in reads]
    found: Mask = np.any(masks, axis=0) if masks else np.ones(count, np.bool_)
    return found
