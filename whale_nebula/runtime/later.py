"""A number that another worker makes and sends: it is waited for where it is read, not where the step ends.

So the clusters of a one-way program (a generator, then a discriminator) run side by side, and who logs every tenth
loss waits for every tenth.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.spec import Spec


class Later:
    """Stands for a scalar tensor that is on its way. Whatever is done with its value waits for it first.

    >>> promise = Future()
    >>> promise.set_result([tf.constant(2.0)])
    >>> loss = Later(promise, 0, Spec("float32", ()))
    >>> float(loss), f"{loss:.2f}", (loss + 1.0).numpy(), bool(loss > 1), tf.sqrt(2.0 * loss).numpy()
    (2.0, '2.00', np.float32(3.0), True, np.float32(2.0))
    """

    def __init__(self, promise: Future[Sequence[Any]], place: int, spec: Spec) -> None:
        self._promise = promise
        self._place = place
        self._spec = spec

    def _come(self) -> Any:
        return self._promise.result()[self._place]

    @property
    def dtype(self) -> Any:
        """The element type; known without waiting."""
        return tf.as_dtype(self._spec.dtype)

    @property
    def shape(self) -> Any:
        """The shape; known without waiting."""
        return tf.TensorShape(self._spec.shape)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        tensor = self._come()
        return tensor if dtype in (None, tensor.dtype) else tf.convert_to_tensor(tensor.numpy(), dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found = np.asarray(self._come().numpy())
        return found if dtype is None else found.astype(dtype)

    def __format__(self, spec: str) -> str:
        return format(self._come().numpy(), spec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._come(), name)

    __hash__ = object.__hash__


def _delegated(name: str) -> Any:
    def call(self: Later, *given: Any) -> Any:
        return getattr(self._come(), name)(*given)

    return call


_OPERATORS = (
    "__float__", "__int__", "__bool__", "__index__", "__repr__", "__str__", "__len__", "__iter__", "__getitem__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__abs__",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
    "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__",
)  # fmt: skip
for _name in _OPERATORS:
    setattr(Later, _name, _delegated(_name))
