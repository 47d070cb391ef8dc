"""The inputs of a step: tensors, the rows of `nb.shard` tensors that this process holds, and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import google_crc32c
import numpy as np
import tensorflow as tf

from whale_nebula.errors import AbsentInputError, BatchAxisError
from whale_nebula.feed.checks import MissingInput, no_rows_error
from whale_nebula.feed.rows import AllRows, Mask, RowReceiver, RowRule, Rows, Within, divide_rows, rows_of, tag_rows
from whale_nebula.ir.program import Leaf
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private


class _PartialReadError(AbsentInputError, TypeError):
    """An AbsentInputError that TensorFlow's dispatch handles as an unsupported type."""


class Partial:
    """A tensor some of whose rows this process does not hold. Outside a step every read of it raises, so that nothing
    is computed with missing rows. Steps unwrap it, and read only certain rows.

    >>> import numpy as np
    >>> from whale_nebula.feed.rows import Feed
    >>> Partial(tf.zeros([4, 2]), Rows(Feed(), np.array([True, True, False, False])))
    <2 of 4 rows of float32[4, 2]>
    """

    def __init__(self, tensor: tf.Tensor, rows: Rows) -> None:
        self.tensor = tensor
        self._nebula_rows = rows

    @property
    def dtype(self) -> Any:
        """The element type of the tensor."""
        return self.tensor.dtype

    @property
    def shape(self) -> Any:
        """The shape of the tensor with all rows."""
        return self.tensor.shape

    def __len__(self) -> int:
        """The number of rows of the batch."""
        return int(self.tensor.shape[0])

    def refuse(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise the error for a read outside a step."""
        raise _PartialReadError(
            f"{self!r} is read outside a step",
            where=str(script_site()),
            why="nb.shard gives a process only the rows of its own micro-batches",
            mend="do it in dataset.map(...) before nb.shard, or inside the step\n"
            "or iterate over the dataset without nb.shard if all rows are needed",
        )

    def __repr__(self) -> str:
        here = int(self._nebula_rows.present.sum())
        return f"<{here} of {len(self)} rows of {self.dtype.name}{self.shape.as_list()}>"


_READS = (
    "__array__", "__tf_tensor__", "numpy", "__iter__", "__getitem__", "__bool__", "__float__", "__int__", "__index__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__abs__", "__matmul__", "__rmatmul__",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__",
    "__mod__", "__floordiv__", "__and__", "__or__", "__invert__",
)  # fmt: skip
for _name in _READS:
    setattr(Partial, _name, Partial.refuse)
Partial.__hash__ = object.__hash__  # type: ignore[method-assign]


def _shape(input: Any, out_type: Any = None, name: str | None = None) -> Any:  # noqa: A002 - the name in tf.shape
    return tf.shape(input.tensor, out_type or tf.int32)


tf_private.dispatch_to(tf.shape, Partial, _shape)


@dataclass(frozen=True)
class StepInputs:
    """The tensors of a step, and the known rows of some inputs by number."""

    tensors: Sequence[Any]
    rows: Mapping[int, Rows] = field(default_factory=dict)

    def present_rows(self, number: int) -> Mask | None:
        """Which rows of an input are in this process; None if it is not from `nb.shard`."""
        return self.rows[number].present if number in self.rows else None

    @property
    def mark(self) -> int:
        """A checksum of the identities of all rows, present or not: equal in every process that reads the same dataset
        in the same order.
        """
        batches = {id(rows): rows for rows in self.rows.values()}
        return int(google_crc32c.value(b"".join(rows.marks.tobytes() for rows in batches.values())))


def unwrap_inputs(leaves: Sequence[Leaf], tensors: Sequence[Any], reads: Sequence[RowRule]) -> StepInputs:
    """Unwrap the tensors of a step, and notify their datasets of the rows that it reads. A row that is read must be in
    this process.
    """
    known = {number: rows for number, tensor in enumerate(tensors) if (rows := rows_of(tensor)) is not None}
    for number, rows in known.items():
        rows.feed.record_read(reads[number], leaves[number].name)
    for number, rows in known.items():
        requested_rows = reads[number].select(len(rows.present))
        if not rows.is_complete and bool((requested_rows & ~rows.present).any()):
            raise _absent_rows_error(leaves[number].name, requested_rows, rows.present)
    return StepInputs([each.tensor if isinstance(each, Partial) else each for each in tensors], known)


def unwrap_whole(leaves: Sequence[Leaf], tensors: Sequence[Any]) -> Sequence[Any]:
    """The tensors of a step that reads all rows."""
    return unwrap_inputs(leaves, tensors, [AllRows()] * len(leaves)).tensors


def _absent_rows_error(name: str, requested_rows: Mask, here: Mask) -> AbsentInputError:
    missing = np.flatnonzero(requested_rows & ~here)
    return AbsentInputError(
        f"this step reads {len(missing)} rows of input {name!r} that this process lacks, first row {missing[0]}",
        where=f"{name}, {script_site()}",
        why="nb.shard selected the rows that earlier steps on the same dataset read in this process",
        mend="use a separate dataset for this step: call nb.shard(dataset) again\n"
        "or run this step on the first batch as well, like the others: its rows are read from the next batch on",
    )


Span = Callable[[str, int], tuple[int, int]]


@dataclass(frozen=True, eq=False)
class _Part:
    """The feed of a batch's part: reads of the part count as reads of the whole batch at an offset."""

    feed: RowReceiver
    span: Span
    name: str

    def record_read(self, read: RowRule, name: str = "") -> None:
        """Record that a step takes a part, and which rows it reads."""
        self.feed.record_read(Within(read, self.span, self.name), name)


def slice_rows(tensor: Any, span: Span, name: str) -> Any:
    """The rows of a tensor that belong to `name`; `span` maps a name and a number of rows to the begin and the end."""
    begin, end = span(name, len(tensor))
    rows = rows_of(tensor)
    if rows is None:
        return tensor[begin:end]
    part = Rows(_Part(rows.feed, span, name), rows.present[begin:end], rows.marks[begin:end])
    whole = tensor.tensor if isinstance(tensor, Partial) else tensor
    return tag_rows(whole[begin:end], part) if part.is_complete else Partial(whole[begin:end], part)


@dataclass(frozen=True)
class Batch:
    """A step's inputs: `whole`, and in `slices` those of each micro-batch. `rows` has the number of rows of each
    micro-batch, `shares` its share of all rows, and `grows` the inverse of that.
    """

    whole: Sequence[Any]
    slices: Sequence[Sequence[Any]]
    shares: Sequence[Any]
    grows: Sequence[Any]
    rows: Sequence[int] = ()

    def fill_rows(self) -> Batch:
        """The batch with zeros for inputs that are not in this process; the plan reads only their number of rows."""
        if not any(isinstance(leaf, MissingInput) for leaf in self.whole):
            return self

        def fill(tensors: Sequence[Any], rows: int) -> list[Any]:
            return [each.fill_rows(rows) if isinstance(each, MissingInput) else each for each in tensors]

        slices = [fill(each, rows) for each, rows in zip(self.slices, self.rows, strict=True)]
        return replace(self, whole=fill(self.whole, sum(self.rows)), slices=slices)


def count_rows(leaves: Sequence[Leaf], tensors: Sequence[Any]) -> int:
    """The number of rows of a batch, which all batched leaves in this process must share."""
    found = _rows(leaves, tensors)
    if not found:
        return 1
    first, rows = found[0]
    for leaf, other in found:
        if other != rows:
            raise BatchAxisError(
                f"input {leaf.name!r} has {other} rows, and {first.name!r} has {rows}",
                where=f"{leaf.name}, {script_site()}",
                why="with micro-batches, every input of rank 1 or more is split along its first axis",
                mend=f"use the same number of rows in both\nor, if {leaf.name!r} is not a batch: "
                f"@nb.function(whole=({leaf.name!r},))",
            )
    return rows


def divide_batch(leaves: Sequence[Leaf], tensors: Sequence[Any], counts: Sequence[int]) -> Batch:
    """Divide a batch into micro-batches of `counts` rows; works on tensors of a step and inside a trace."""
    rows, slices = sum(counts), []
    for leaf, tensor in zip(leaves, tensors, strict=True):
        uncut = not leaf.batched or len(counts) == 1 or isinstance(tensor, MissingInput)
        slices.append([tensor] * len(counts) if uncut else list(tf.split(tensor, list(counts))))
    return Batch(
        whole=tensors,
        slices=[list(column) for column in zip(*slices, strict=True)] if slices else [[] for _ in counts],
        shares=[tf.constant(count / rows if rows else 1.0, tf.float32) for count in counts],
        grows=[tf.constant(rows / count if count else 1.0, tf.float32) for count in counts],
        rows=tuple(counts),
    )


def count_micro_batch_rows(leaves: Sequence[Leaf], tensors: Sequence[Any], count: int) -> list[int]:
    """The number of rows of each micro-batch of a step. With a single micro-batch, inputs may differ in their number of
    rows.
    """
    if count > 1:
        return divide_rows(count_rows(leaves, tensors), count)
    found = _rows(leaves, tensors)
    return [found[0][1] if found else 1]


def _rows(leaves: Sequence[Leaf], tensors: Sequence[Any]) -> list[tuple[Leaf, int]]:
    """The split leaves in this process, each with its number of rows."""
    split = [(leaf, tensor) for leaf, tensor in zip(leaves, tensors, strict=True) if leaf.batched]
    found = [(leaf, int(tensor.shape[0])) for leaf, tensor in split if not isinstance(tensor, MissingInput)]
    if split and not found:
        raise no_rows_error([leaf for leaf, _ in split])
    return found
