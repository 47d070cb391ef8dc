"""A tensor of the user's batch of which only the rows are here that this process trains on."""

from __future__ import annotations

from typing import Any, NoReturn

import tensorflow as tf

from whale_nebula.errors import AbsentInputError
from whale_nebula.feed.feed import Rows
from whale_nebula.site import script_site
from whale_nebula.tf import private as tf_private


class _PartialReadError(AbsentInputError, TypeError):
    """A TypeError too: that is how TensorFlow is told to look for who can do it."""


class Partial:
    """Stands for such a tensor outside a step: whatever reads it raises, so that nothing is computed with rows that are
    not here. Steps know which rows they read, and take the tensor out of it.

    >>> import numpy as np
    >>> from whale_nebula.feed.feed import Feed
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
        """The shape of the tensor, in which all rows count."""
        return self.tensor.shape

    def __len__(self) -> int:
        """How many rows the batch has."""
        return int(self.tensor.shape[0])

    def refuse(self, *args: object, **kwargs: object) -> NoReturn:
        """What every read of it does."""
        raise _PartialReadError(
            f"{self!r} is read outside a step",
            where=str(script_site()),
            why="nb.shard gives a process the rows that its micro-batches are made of; the others are not here",
            mend="do it in dataset.map(...) before nb.shard, or inside the step\n"
            "or iterate over the dataset itself, without nb.shard, where all rows are needed",
        )

    def __repr__(self) -> str:
        here = int(self._nebula_rows.here.sum())
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


def _shape(input: Any, out_type: Any = None, name: str | None = None) -> Any:  # noqa: A002
    return tf.shape(input.tensor, out_type or tf.int32)


tf_private.dispatch_to(tf.shape, Partial, _shape)
