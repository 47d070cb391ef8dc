"""An input that this cluster was not given (None, where the config names it): it has a form, and no values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import tensorflow as tf

from whale_nebula.feed.absence import absent_error


@dataclass(frozen=True, eq=False)
class Missing:
    """Stands for the tensor of such an input. Whatever reads it raises.

    >>> Missing("y", tf.TensorSpec([None, 4], tf.int32)).in_rows(2).shape.as_list()
    [2, 4]
    """

    name: str
    spec: tf.TensorSpec

    @property
    def dtype(self) -> tf.DType:
        """The element type that the config gives it."""
        return self.spec.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape that the config gives it."""
        return self.spec.shape

    def in_rows(self, rows: int) -> Any:
        """Zeros of its form with so many rows: for ops that ask for the number of rows, and for nothing else."""
        shape = [rows, *self.spec.shape[1:]] if self.spec.shape.rank else []
        return tf.zeros([1 if size is None else size for size in shape], self.spec.dtype)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise absent_error(self.name, "", "")

    __array__ = _refuse
    __tf_tensor__ = _refuse


def absent_in(tensors: Sequence[Any]) -> tuple[int, ...]:
    """The numbers of the inputs that are not here."""
    return tuple(number for number, tensor in enumerate(tensors) if isinstance(tensor, Missing))
