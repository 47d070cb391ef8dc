"""The order of rows in batches: pure data, so that clusters without common text use the same batches.

An order depends only on the number of rows, a seed and, optionally, the lengths of the sentences, which put similar
ones together to save padding. A cluster without those lengths loads the order from a file, which contains only row
numbers.
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
    """The rows of every batch of all epochs; each epoch has each of the `rows` once.

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
        """The number of batches of an epoch, for `fit` with an order of several."""
        return len(self.batches) // self.epochs

    def epoch(self, number: int) -> Order:
        """The order of one epoch."""
        start = number * self.steps_per_epoch
        return Order(self.rows, 1, self.batches[start : start + self.steps_per_epoch])

    def restored(self, results: Sequence[Any]) -> list[Any]:
        """Reorder results, which are in the order of the batches of one epoch, to the order of rows.

        >>> order = make_order(3, batch=2, lengths=[[20, 9, 1]], shuffle=False)
        >>> order.batches, order.restored(["of row 2", "of row 1", "of row 0"])
        (((2, 1), (0,)), ['of row 0', 'of row 1', 'of row 2'])
        """
        numbers = [row for batch in self.batches for row in batch]
        if len(numbers) != len(results) or self.epochs != 1:
            raise OptionError(
                f"{len(results)} results do not match an order of {len(numbers)} rows in {self.epochs} epochs",
                mend="pass one result for each row of one epoch: order.epoch(0)",
            )
        back = dict(zip(numbers, results, strict=True))
        return [back[row] for row in range(self.rows)]

    def save(self, path: str | Path) -> None:
        """Write the order as JSON, for a cluster that cannot compute it."""
        Path(path).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: str | Path) -> Order:
        """Read a file of `save`; every row must occur once in each epoch.

        >>> make_order(3, batch=2).save("order.json")
        >>> Order.load("order.json") == make_order(3, batch=2)
        True
        """
        try:
            saved = json.loads(Path(path).read_text())
            batches = tuple(tuple(map(int, each)) for each in saved["batches"])
            found = cls(int(saved["rows"]), int(saved["epochs"]), batches)
            found._check()
        except OSError as error:
            raise DataError(f"there is no order at {str(path)!r}", why=str(error), mend="order.save(path)") from None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                "the file does not contain an order of rows", where=str(path), why=str(error), mend=_AGAIN
            ) from None
        return found

    def _check(self) -> None:
        if self.epochs < 1 or len(self) % self.epochs:
            raise ValueError(f"{len(self)} batches cannot be divided into {self.epochs} epochs")
        for number in range(self.epochs):
            rows = sorted(row for batch in self.epoch(number).batches for row in batch)
            if rows != list(range(self.rows)):
                raise ValueError(f"epoch {number} does not contain each of {self.rows} rows exactly once")


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
    """Distribute rows over batches, differently in each epoch.

    At most one batch of an epoch is smaller than `batch`: with `lengths`, one of the longest sentences.

    Args:
        rows: number of rows.
        batch: rows in a batch.
        seed: seed of the order.
        epochs: number of epochs.
        lengths: an array for each local side; rows are sorted by their lengths, rounded up to multiples of `multiple`.
        multiple: multiple to which lengths are rounded up.
        shuffle: whether rows of equal length, and the batches, are in random order; False keeps the order of the rows.

    >>> make_order(4, batch=2, lengths=[[9, 3, 12, 5]], shuffle=False).batches
    ((1, 3), (0, 2))
    """
    for name, value in (("rows", rows), ("batch", batch), ("epochs", epochs), ("multiple", multiple)):
        if value < 1:
            raise OptionError(f"{name}={value!r} is less than 1", mend=f"{name}=1, or more")
    buckets = [-(-np.asarray(each) // multiple) for each in lengths]
    for each in buckets:
        if each.shape != (rows,):
            raise OptionError(f"{each.size} lengths do not match {rows} rows", mend="lengths=encoded.lengths")
    batches = [_make_batches(rows, batch, buckets, (seed, number) if shuffle else None) for number in range(epochs)]
    return Order(rows, epochs, tuple(each for epoch in batches for each in epoch))


def _make_batches(rows: int, batch: int, buckets: list[Any], seed: tuple[int, int] | None) -> list[tuple[int, ...]]:
    """The batches of an epoch: rows sorted by bucket, and cut into batches. With a seed, rows of equal buckets and the
    batches are in random order.
    """
    random = None if seed is None else np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    ties = np.arange(rows) if random is None else random.permutation(rows)
    order = np.lexsort((ties, *reversed(buckets)))
    batches = [tuple(order[start : start + batch].tolist()) for start in range(0, rows, batch)]
    return batches if random is None else [batches[place] for place in random.permutation(len(batches))]
