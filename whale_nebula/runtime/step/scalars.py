"""Scalar results of a step, and their names in the user's code: its loss and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.report.records import Scalars
from whale_nebula.spec import Spec
from whale_nebula.tf import private as tf_private


@dataclass(frozen=True)
class ScalarResults:
    """The places of single numbers among the tensors that a step returns, each with its name.

    A name is the key in a dict, the place in a tuple, and `result` where the step returns nothing else.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]

    def of(self, tensors: Sequence[Any]) -> Scalars:
        """The numbers of one step; none is fetched from its device before it is read."""
        return Scalars(self.names, [tensors[place] for place in self.places])


def scalar_results(structure: Any) -> ScalarResults:
    """Look through what the traced step returns.

    >>> with tf.Graph().as_default():
    ...     found = scalar_results({"loss": tf.constant(1.0), "logits": tf.zeros([2, 2]), "rows": tf.constant(3)})
    >>> found.names
    ('loss', 'rows')
    """
    names, places, place = [], [], 0
    for path, leaf in tf_private.leaf_paths(structure):
        tensors = [part for part in tf.nest.flatten(leaf, expand_composites=True) if isinstance(part, tf.Tensor)]
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank == 0 and (leaf.dtype.is_floating or leaf.dtype.is_integer):
            names.append("/".join(map(str, path)) or "result")
            places.append(place)
        place += len(tensors)
    return ScalarResults(tuple(names), tuple(places))


def returned_names(structure: Any) -> tuple[str, ...]:
    """The name of each tensor that the traced step returns: its key, its place, or nothing where it is the only one.

    >>> with tf.Graph().as_default():
    ...     returned_names({"rec": tf.constant(1.0), "more": (tf.constant(2.0), tf.constant(3))})
    ('more/0', 'more/1', 'rec')
    """
    names: list[str] = []
    for path, leaf in tf_private.leaf_paths(structure):
        parts = [part for part in tf.nest.flatten(leaf, expand_composites=True) if isinstance(part, tf.Tensor)]
        names += ["/".join(map(str, path))] * len(parts)
    return tuple(names)


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

    def _wait_for_value(self) -> Any:
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
        tensor = self._wait_for_value()
        return tensor if dtype in (None, tensor.dtype) else tf.convert_to_tensor(tensor.numpy(), dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found = np.asarray(self._wait_for_value().numpy())
        return found if dtype is None else found.astype(dtype)

    def __format__(self, spec: str) -> str:
        return format(self._wait_for_value().numpy(), spec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wait_for_value(), name)

    __hash__ = object.__hash__


def _delegate(name: str) -> Any:
    def call(self: Later, *given: Any) -> Any:
        return getattr(self._wait_for_value(), name)(*given)

    return call


_OPERATORS = (
    "__float__", "__int__", "__bool__", "__index__", "__repr__", "__str__", "__len__", "__iter__", "__getitem__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__abs__",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
    "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__",
)  # fmt: skip
for _name in _OPERATORS:
    setattr(Later, _name, _delegate(_name))
