"""A part of a batch, for a cluster that trains on it alone: which rows are read of it is told in rows of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from whale_nebula.feed.feed import Rows, Takes, rows_of, tagged
from whale_nebula.feed.partial import Partial
from whale_nebula.feed.rows_read import Reads, Within

Span = Callable[[str, int], tuple[int, int]]


@dataclass(frozen=True, eq=False)
class _Part:
    """The feed of a part: what is read of that is read of the whole, somewhere else."""

    feed: Takes
    span: Span
    name: str

    def take(self, read: Reads, name: str = "") -> None:
        """A step takes a part, and this is what it reads of it."""
        self.feed.take(Within(read, self.span, self.name), name)


def sliced(tensor: Any, span: Span, name: str) -> Any:
    """The rows of a tensor that a `name` has of it, as `span` says (name and number of rows to first and last)."""
    begin, end = span(name, len(tensor))
    rows = rows_of(tensor)
    if rows is None:
        return tensor[begin:end]
    part = Rows(_Part(rows.feed, span, name), rows.here[begin:end], rows.marks[begin:end])
    whole = tensor.tensor if isinstance(tensor, Partial) else tensor
    return tagged(whole[begin:end], part) if part.whole else Partial(whole[begin:end], part)
