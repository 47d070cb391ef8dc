"""Error messages for inputs that a cluster reads and was not given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import tensorflow as tf

from whale_nebula.errors import AbsentInputError
from whale_nebula.ir.program import Leaf


def absent_error(name: str, reader: str, where: str) -> AbsentInputError:
    """The error for a read of an input that is not here; `reader` names the stage and the cluster."""
    return AbsentInputError(
        f"input {name!r} is None in this process, and {reader or 'something'} here reads it",
        where=where or name,
        why="the config's 'inputs' gives its form, so that clusters that do not read it need not have it",
        mend=f"yield {name!r} in this cluster as well\nor move what reads it into a stage of the cluster that has it",
    )


def no_rows(leaves: Sequence[Leaf]) -> AbsentInputError:
    """The error for a step none of whose inputs is here."""
    names = ", ".join(repr(leaf.name) for leaf in leaves)
    return AbsentInputError(
        f"all inputs of this step are None in this process: {names}",
        where=leaves[0].name,
        why="how many rows the step has is taken from those that are here",
        mend="yield at least one of them in every cluster: ids of the rows, say, which nb.init(ids=...) then compares",
    )


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
