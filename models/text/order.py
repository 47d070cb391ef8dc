"""Which rows make which batch: pure data, so that clusters which share no text go through it in step.

An order is made from the number of rows and a seed, and then is the same wherever it is made. Made from lengths, too,
it puts sentences of about the same length together, so that little of a batch is filling. Who does not have those
lengths is given the order as a file: it holds numbers of rows and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from whale_nebula.errors import DataError, OptionError

MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Order:
    """The rows of every batch, epoch after epoch; each epoch has each of the `rows` once.

    >>> order = make_order(5, batch=2, seed=1, epochs=2)
    >>> len(order), order.steps_per_epoch, sorted(row for batch in order.batches[:3] for row in batch)
    (6, 3, [0, 1, 2, 3, 4])
    """

    rows: int
    epochs: int
    batches: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def steps_per_epoch(self) -> int:
        """How many batches an epoch has; `fit` asks for it when an order has several."""
        return len(self.batches) // self.epochs

    def epoch(self, number: int) -> Order:
        """One epoch alone."""
        start = number * self.steps_per_epoch
        return Order(self.rows, 1, self.batches[start : start + self.steps_per_epoch])

    def restored(self, results: Sequence[Any]) -> list[Any]:
        """What was made of each row, batch after batch, in the order of the rows: for one epoch.

        >>> order = make_order(3, batch=2, lengths=[[20, 9, 1]], shuffle=False)
        >>> order.batches, order.restored(["of row 2", "of row 1", "of row 0"])
        (((2, 1), (0,)), ['of row 0', 'of row 1', 'of row 2'])
        """
        numbers = [row for batch in self.batches for row in batch]
        if len(numbers) != len(results) or self.epochs != 1:
            raise OptionError(
                f"{len(results)} results of an order of {len(numbers)} rows in {self.epochs} epochs",
                mend="give one result for each row of one epoch: order.epoch(0)",
            )
        back = dict(zip(numbers, results, strict=True))
        return [back[row] for row in range(self.rows)]

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for a cluster that cannot make it."""
        Path(path).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: str | Path) -> Order:
        """Read what `save` wrote; every row must be there once in each epoch.

        >>> make_order(3, batch=2).save("order.json")
        >>> Order.load("order.json") == make_order(3, batch=2)
        True
        """
        try:
            told = json.loads(Path(path).read_text())
            batches = tuple(tuple(map(int, each)) for each in told["batches"])
            found = cls(int(told["rows"]), int(told["epochs"]), batches)
            found._check()
        except OSError as error:
            raise DataError(f"there is no order at {str(path)!r}", why=str(error), mend="order.save(path)") from None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError("this is no order of rows", where=str(path), why=str(error), mend=_AGAIN) from None
        return found

    def _check(self) -> None:
        if self.epochs < 1 or len(self) % self.epochs:
            raise ValueError(f"{len(self)} batches do not part into {self.epochs} epochs")
        for number in range(self.epochs):
            rows = sorted(row for batch in self.epoch(number).batches for row in batch)
            if rows != list(range(self.rows)):
                raise ValueError(f"epoch {number} does not have each of {self.rows} rows once")


_AGAIN = "write it again: make_order(...).save(path)"


def make_order(
    rows: int,
    *,
    batch: int,
    seed: int = 0,
    epochs: int = 1,
    lengths: Sequence[npt.ArrayLike] = (),
    multiple: int = MULTIPLE,
    shuffle: bool = True,
) -> Order:
    """Deal the rows to batches, anew in each epoch.

    `lengths` has an array for each side that is known: rows whose lengths round up to the same multiples are put
    together. Only the last batch of an epoch, of the longest sentences, may be smaller. Without `shuffle` rows come
    in their order, the shortest first if lengths are given.

    >>> make_order(4, batch=2, lengths=[[9, 3, 12, 5]], shuffle=False).batches
    ((1, 3), (0, 2))
    """
    for name, value in (("rows", rows), ("batch", batch), ("epochs", epochs), ("multiple", multiple)):
        if value < 1:
            raise OptionError(f"{name}={value!r} makes no batches", mend=f"{name}=1, or more")
    buckets = [-(-np.asarray(each) // multiple) for each in lengths]
    for each in buckets:
        if each.shape != (rows,):
            raise OptionError(f"{each.size} lengths of {rows} rows", mend="lengths=encoded.lengths")
    dealt = [_dealt(rows, batch, buckets, (seed, number) if shuffle else None) for number in range(epochs)]
    return Order(rows, epochs, tuple(each for epoch in dealt for each in epoch))


def _dealt(rows: int, batch: int, buckets: list[Any], seed: tuple[int, int] | None) -> list[tuple[int, ...]]:
    """One epoch: a random order, in it alike ones together, cut into batches, and these in a random order."""
    random = None if seed is None else np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    chance = np.arange(rows) if random is None else random.permutation(rows)
    turn = np.lexsort((chance, *reversed(buckets)))
    cut = [tuple(turn[start : start + batch].tolist()) for start in range(0, rows, batch)]
    return cut if random is None else [cut[place] for place in random.permutation(len(cut))]
