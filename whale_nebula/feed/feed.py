"""Who takes the batches of a dataset, and which of their rows are here."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from whale_nebula.errors import BatchAxisError
from whale_nebula.feed.rows_read import Mask, Reads, own_rows

_MANY = 840
"""A number of rows that many numbers of micro-batches divide."""

_LOG = logging.getLogger("whale_nebula.feed")


@dataclass(eq=False)
class Feed:
    """What the steps read that take a dataset's batches.

    A step is known once it has taken one. What it does not read is left out from the next batch on that is asked for:
    by then all that took this one have said what they read.

    >>> from whale_nebula.feed.rows_read import RowsRead
    >>> from whale_nebula.ir.routing import Routing
    >>> feed = Feed()
    >>> feed.take(RowsRead(2, Routing((("gpu/0", "gpu/1"),)), "gpu/0", frozenset({0})))
    >>> feed.own(4).tolist()
    [True, True, True, True]
    >>> feed.settle()
    >>> feed.own(4).tolist()
    [True, True, False, False]
    """

    reads: frozenset[Reads] = frozenset()
    taking: frozenset[Reads] = frozenset()

    def take(self, read: Reads, name: str = "") -> None:
        """A step takes a batch, and this is what it reads of its input `name`."""
        if read not in self.taking and read.of(_MANY).all():
            _LOG.info("nb.shard: a step reads all rows of input %r, so all of them are read here", name)
        self.taking |= {read}

    def settle(self) -> None:
        """The next batch is asked for."""
        if not self.taking <= self.reads:
            self.reads |= self.taking
            _LOG.info("nb.shard: this process reads about %.0f rows in 100", 100 * self.own(_MANY).mean())

    def own(self, count: int) -> Mask:
        """Which rows of a batch of `count` are to be here; all of one that cannot be shared out: the step says so."""
        try:
            return own_rows(self.reads, count)
        except BatchAxisError:
            return own_rows((), count)


class Takes(Protocol):
    """What is told which rows are read of a batch."""

    def take(self, read: Reads, name: str = "") -> None:
        """A step takes a batch, and this is what it reads of its input `name`."""
        ...


@dataclass(frozen=True, eq=False)
class Rows:
    """What is known of the rows of one batch: whose it is, which of them are `here`, and `marks`, a number that tells
    each from others, whether it is here or not.
    """

    feed: Takes
    here: Mask
    marks: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def whole(self) -> bool:
        """Whether all of them are here."""
        return bool(self.here.all())


_NAME = "_nebula_rows"


def tagged(tensor: Any, rows: Rows) -> Any:
    """The same tensor, of which can be told that it is a part of this batch."""
    setattr(tensor, _NAME, rows)
    return tensor


def rows_of(tensor: Any) -> Rows | None:
    """What is known of the rows of a tensor: nothing, where it did not come out of `nb.shard` as it is."""
    return getattr(tensor, _NAME, None)
