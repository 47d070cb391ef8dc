"""What a step is given: tensors, and of those that came out of `nb.shard` which of their rows are here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
import numpy as np

from whale_nebula.errors import AbsentInputError
from whale_nebula.feed.feed import Rows, rows_of
from whale_nebula.feed.partial import Partial
from whale_nebula.feed.rows_read import AllRows, Mask, Reads
from whale_nebula.ir.program import Leaf
from whale_nebula.site import script_site


@dataclass(frozen=True)
class Given:
    """The tensors of a step as they are, and by the number of an input what is known of its rows."""

    tensors: Sequence[Any]
    rows: Mapping[int, Rows] = field(default_factory=dict)

    def here(self, number: int) -> Mask | None:
        """Which rows of an input are here; None where it did not come out of `nb.shard`."""
        return self.rows[number].here if number in self.rows else None

    @property
    def mark(self) -> int:
        """A checksum of which rows these are, whether they are here or not: the same in every process that reads the
        same dataset in the same order.
        """
        batches = {id(rows): rows for rows in self.rows.values()}
        return int(google_crc32c.value(b"".join(rows.marks.tobytes() for rows in batches.values())))


def given(leaves: Sequence[Leaf], tensors: Sequence[Any], reads: Sequence[Reads]) -> Given:
    """Take the tensors of a step, and tell the datasets that they come from which rows it reads. One that is not here
    is refused: nothing is ever computed with it.
    """
    known = {number: rows for number, tensor in enumerate(tensors) if (rows := rows_of(tensor)) is not None}
    for number, rows in known.items():
        rows.feed.take(reads[number], leaves[number].name)
    for number, rows in known.items():
        wanted = reads[number].of(len(rows.here))
        if not rows.whole and bool((wanted & ~rows.here).any()):
            raise _not_here(leaves[number].name, wanted, rows.here)
    return Given([each.tensor if isinstance(each, Partial) else each for each in tensors], known)


def whole(leaves: Sequence[Leaf], tensors: Sequence[Any]) -> Sequence[Any]:
    """The tensors of a step that reads all rows."""
    return given(leaves, tensors, [AllRows()] * len(leaves)).tensors


def _not_here(name: str, wanted: Mask, here: Mask) -> AbsentInputError:
    missing = np.flatnonzero(wanted & ~here)
    return AbsentInputError(
        f"this step reads {len(missing)} rows of input {name!r} that are not here, row {missing[0]} first",
        where=f"{name}, {script_site()}",
        why="nb.shard gave this process the rows that other steps read, which took batches of the same dataset before",
        mend="give this step a dataset of its own: nb.shard(dataset) once more\n"
        "or let it take the first batch too, as the others do: from the next one on its rows are read",
    )
