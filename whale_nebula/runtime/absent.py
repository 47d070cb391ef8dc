"""A result that stays where it was made (`results: owner`): it can be passed on, and raises where it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf

from whale_nebula.errors import CollectiveReadError
from whale_nebula.site import script_site
from whale_nebula.spec import Spec
from whale_nebula.tf import private as tf_private


class _AbsentReadError(CollectiveReadError, TypeError):
    """A TypeError too: that is how TensorFlow is told to look for who can do it."""


class Absent:
    """Stands for a tensor in a process that is not given it. Keras may collect it over batches.

    >>> Absent("npu/0", Spec("float32", (None, 10)))
    <float32[?,10] on npu/0>
    """

    def __init__(self, owner: str, spec: Spec) -> None:
        self.owner = owner
        self._spec = spec

    @property
    def dtype(self) -> Any:
        """The element type of the tensor."""
        return tf.as_dtype(self._spec.dtype)

    @property
    def shape(self) -> Any:
        """The shape of the tensor, as far as the plan knows it."""
        return tf.TensorShape(self._spec.shape)

    def numpy(self) -> Absent:
        """What Keras asks of every result; nothing is read by it."""
        return self

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise _AbsentReadError(
            f"this result is on {self.owner}, not in this process",
            where=str(script_site()),
            why=f"the config says 'results: owner': tensors that a step returns, as this {self._spec}, stay in the "
            "cluster that makes them",
            mend=f"if nb.here().worker == {self.owner!r}: ..., or results: everywhere",
        )

    def __repr__(self) -> str:
        return f"<{self._spec} on {self.owner}>"


_READS = (
    "__array__", "__tf_tensor__", "__len__", "__iter__", "__getitem__", "__bool__", "__float__", "__int__", "__index__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__abs__", "__matmul__", "__rmatmul__",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__",
)  # fmt: skip
for _name in _READS:
    setattr(Absent, _name, Absent._refuse)
Absent.__hash__ = object.__hash__  # type: ignore[method-assign]


def _no_rows(input: Any, out_type: Any = None, name: str | None = None) -> Any:  # noqa: A002
    return tf.zeros([max(1, len(input._spec.shape or ()))], out_type or tf.int32)


def _first(values: Sequence[Absent], axis: Any, name: str = "concat") -> Absent:
    return values[0]


# How `Model.predict` joins the results of its batches.
tf_private.dispatch_to(tf.shape, Absent, _no_rows)
tf_private.dispatch_to(tf.concat, Absent, _first)
