"""The batch of a step as the runtime sees it: whole, and cut into micro-batches by rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from whale_nebula.errors import BatchAxisError
from whale_nebula.feed.checks import Missing, no_rows
from whale_nebula.feed.rows import sizes
from whale_nebula.ir.program import Leaf
from whale_nebula.site import script_site


@dataclass(frozen=True)
class Batch:
    """A step's inputs: whole, cut into micro-batches, and each one's share of the rows."""

    whole: Sequence[Any]
    slices: Sequence[Sequence[Any]]
    shares: Sequence[Any]
    grows: Sequence[Any]
    rows: Sequence[int] = ()

    def in_rows(self) -> Batch:
        """Zeros for the inputs that are not here: a plan that reads any of them but for its rows was refused."""
        if not any(isinstance(leaf, Missing) for leaf in self.whole):
            return self

        def fill(tensors: Sequence[Any], rows: int) -> list[Any]:
            return [each.in_rows(rows) if isinstance(each, Missing) else each for each in tensors]

        slices = [fill(each, rows) for each, rows in zip(self.slices, self.rows, strict=True)]
        return replace(self, whole=fill(self.whole, sum(self.rows)), slices=slices)


def rows_of(leaves: Sequence[Leaf], tensors: Sequence[Any]) -> int:
    """The number of rows of a batch; every leaf that is split, and is here, must have as many."""
    found = _rows(leaves, tensors)
    if not found:
        return 1
    first, rows = found[0]
    for leaf, other in found:
        if other != rows:
            raise BatchAxisError(
                f"input {leaf.name!r} has {other} rows, and {first.name!r} has {rows}",
                where=f"{leaf.name}, {script_site()}",
                why="with micro-batches every input of rank 1 or more is split along its first axis",
                mend=f"give them as many rows each\nor say that {leaf.name!r} is not a batch: "
                f"@nb.function(whole=({leaf.name!r},))",
            )
    return rows


def cut(leaves: Sequence[Leaf], tensors: Sequence[Any], counts: Sequence[int]) -> Batch:
    """Cut a batch into micro-batches of `counts` rows; works on tensors of a step and inside a trace."""
    rows, slices = sum(counts), []
    for leaf, tensor in zip(leaves, tensors, strict=True):
        uncut = not leaf.batched or len(counts) == 1 or isinstance(tensor, Missing)
        slices.append([tensor] * len(counts) if uncut else list(tf.split(tensor, list(counts))))
    return Batch(
        whole=tensors,
        slices=[list(column) for column in zip(*slices, strict=True)] if slices else [[] for _ in counts],
        shares=[tf.constant(count / rows if rows else 1.0, tf.float32) for count in counts],
        grows=[tf.constant(rows / count if count else 1.0, tf.float32) for count in counts],
        rows=tuple(counts),
    )


def micro_batches(leaves: Sequence[Leaf], tensors: Sequence[Any], count: int) -> list[int]:
    """The rows of each micro-batch of a step; where there is one, inputs may differ in theirs."""
    if count > 1:
        return sizes(rows_of(leaves, tensors), count)
    found = _rows(leaves, tensors)
    return [found[0][1] if found else 1]


def _rows(leaves: Sequence[Leaf], tensors: Sequence[Any]) -> list[tuple[Leaf, int]]:
    """The leaves that are split and are here, each with its rows."""
    split = [(leaf, tensor) for leaf, tensor in zip(leaves, tensors, strict=True) if leaf.batched]
    found = [(leaf, int(tensor.shape[0])) for leaf, tensor in split if not isinstance(tensor, Missing)]
    if split and not found:
        raise no_rows([leaf for leaf, _ in split])
    return found
