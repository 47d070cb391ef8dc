"""Transformations of rows on their owner's machine, before any of them leaves.

Each step maps columns to columns with the same number of rows; an aggregate computes one table of all rows, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whale_nebula.datasets.schema import Columns
from whale_nebula.datasets.sources import Arrays, Source, load_function, open_inside
from whale_nebula.errors import InterfaceError
from whale_nebula.errors.text import list_names

Apply = Callable[[Columns], dict[str, Any]]
_AT_ONCE = 65536


class Tokenise(NamedTuple):
    """Step from texts to ids of a WordPiece vocabulary: rows of one length, truncated or padded with `[PAD]`."""

    column: str
    to: str
    vocabulary: str
    length: int

    def prepare(self, folder: Path) -> Apply:
        """The step, with its vocabulary."""
        import tensorflow as tf

        from whale_nebula.models.text import Tokenizer, Vocabulary

        with open_inside(folder, folder / self.vocabulary) as file:
            tokens = file.read().decode("utf-8", "replace").split("\n")
        tokenizer = Tokenizer(Vocabulary(tuple(each.removesuffix("\r") for each in tokens if each)))

        def apply(columns: Columns) -> dict[str, Any]:
            texts = _take(columns, self.column)
            with tf.device("CPU"):
                ids = tokenizer.encode(tf.constant(list(texts), tf.string)) if len(texts) else None
            shape = (None, self.length)
            found = (
                np.zeros((0, self.length), np.int32)
                if ids is None
                else ids.to_tensor(tokenizer.pad, shape=shape).numpy()
            )
            return {**{name: each for name, each in columns.items() if name != self.column}, self.to: found}

        return apply


class Select(NamedTuple):
    """Step that keeps only some columns."""

    columns: tuple[str, ...]

    def prepare(self, folder: Path) -> Apply:
        """The step."""
        return lambda columns: {name: _take(columns, name) for name in self.columns}


class Function(NamedTuple):
    """Step that applies the owner's function from columns to columns."""

    name: str

    def prepare(self, folder: Path) -> Apply:
        """The step, with the function that is installed here."""
        function = load_function(self.name)

        def apply(columns: Columns) -> dict[str, Any]:
            found = function(dict(columns))
            if not isinstance(found, dict) or not all(isinstance(each, np.ndarray) for each in found.values()):
                raise InterfaceError(f"{self.name} gives no columns", mend="a dict of NumPy arrays, one a column")
            return found

        return apply


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Means and sums over groups with at least `least` rows, and their number of rows; smaller groups are omitted."""

    by: str
    least: int
    mean: tuple[str, ...] = ()
    sum: tuple[str, ...] = ()
    count: str = ""

    def make_table(self, columns: Columns) -> dict[str, Any]:
        """The table, a row for each group that is large enough, in the order of the grouping columns."""
        keys, where, sizes = np.unique(_take(columns, self.by), return_inverse=True, return_counts=True)
        kept = sizes >= self.least
        found: dict[str, Any] = {self.by: keys[kept]}
        for name in dict.fromkeys((*self.mean, *self.sum)):
            values = _take(columns, name)
            if values.ndim != 1 or not np.issubdtype(values.dtype, np.number):
                raise InterfaceError(f"column {name!r} is not of numbers", mend="aggregate numbers, one a row")
            total = np.bincount(where.reshape(-1), values.astype(np.float64), len(keys))[kept]
            found |= {f"{name}_sum": total} if name in self.sum else {}
            found |= {f"{name}_mean": total / sizes[kept]} if name in self.mean else {}
        return found | ({self.count: sizes[kept].astype(np.int64)} if self.count else {})


Step = Tokenise | Select | Function | Aggregate


def _take(columns: Columns, name: str) -> Any:
    if name not in columns:
        what = f"a step takes column {name!r}, and there is none"
        raise InterfaceError(what, why=f"the columns are {list_names(sorted(columns))}")
    return columns[name]


def prepare_rows(folder: Path, source: Source, steps: Sequence[Step]) -> tuple[Source, list[Apply]]:
    """Apply the steps up to the last aggregate, whose table is computed now; returns the rows, and the steps to apply
    when they are read.
    """
    left: list[Apply] = []
    for step in steps:
        if isinstance(step, Aggregate):
            source, left = Arrays(step.make_table(read_all(source, left))), []
        else:
            left.append(step.prepare(folder))
    return source, left


def read_all(source: Source, steps: Sequence[Apply]) -> dict[str, Any]:
    """All rows, after some steps."""
    parts = [
        apply_steps(source.read(np.arange(first, min(first + _AT_ONCE, source.count))), steps)
        for first in range(0, max(1, source.count), _AT_ONCE)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def apply_steps(columns: dict[str, Any], steps: Sequence[Apply]) -> dict[str, Any]:
    """Apply steps to columns, each of which keeps the number of rows."""
    for step in steps:
        before = {len(each) for each in columns.values()}
        columns = step(columns)
        after = {len(each) for each in columns.values()}
        if after != before:
            raise InterfaceError(
                "a step gives another number of rows than it was given",
                why=f"{sorted(after)} for {sorted(before)}",
                mend="a row for each row; to leave rows out, do it in the source",
            )
    return columns
