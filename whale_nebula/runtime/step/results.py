"""The results of a step: their names, numbers that are awaited when they are read, and substitutes of tensors that stay
in other processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from whale_nebula.errors import CollectiveReadError
from whale_nebula.report.records import Scalars
from whale_nebula.site import script_site
from whale_nebula.spec import Spec
from whale_nebula.tf import private as tf_private


@dataclass(frozen=True)
class ScalarResults:
    """The places of scalars among the tensors that a step returns, each with its name.

    A name is the key in a dict, the index in a tuple, and `result` if the step returns nothing else.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]

    def from_results(self, tensors: Sequence[Any]) -> Scalars:
        """The numbers of one step; each is fetched from its device when it is read."""
        return Scalars(self.names, [tensors[place] for place in self.places])


def find_scalar_results(structure: Any) -> ScalarResults:
    """The places and names of the scalar results of a traced step.

    >>> with tf.Graph().as_default():
    ...     found = find_scalar_results({"loss": tf.constant(1.0), "logits": tf.zeros([2, 2]), "rows": tf.constant(3)})
    >>> found.names
    ('loss', 'rows')
    """
    leaves = list(_name_leaves(structure))
    numbers = [place for place, (_, whole, each) in enumerate(leaves) if whole and _is_number(each)]
    return ScalarResults(tuple(leaves[place][0] or "result" for place in numbers), tuple(numbers))


def list_returned_names(structure: Any) -> tuple[str, ...]:
    """The name of each tensor that the traced step returns: its key, its index, or "" for a single one.

    >>> with tf.Graph().as_default():
    ...     list_returned_names({"rec": tf.constant(1.0), "more": (tf.constant(2.0), tf.constant(3))})
    ('more/0', 'more/1', 'rec')
    """
    return tuple(name for name, _, _ in _name_leaves(structure))


def _name_leaves(structure: Any) -> Iterator[tuple[str, bool, Any]]:
    """The name of each tensor, whether it is not part of a composite one, and the tensor."""
    for path, leaf in tf_private.list_leaf_paths(structure):
        for part in tf.nest.flatten(leaf, expand_composites=True):
            if isinstance(part, tf.Tensor):
                yield "/".join(map(str, path)), part is leaf, part


def _is_number(tensor: Any) -> bool:
    return tensor.shape.rank == 0 and (tensor.dtype.is_floating or tensor.dtype.is_integer)


class _Result:
    """A substitute of a result, with its planned element type and shape."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    @property
    def dtype(self) -> Any:
        """The element type."""
        return tf.as_dtype(self._spec.dtype)

    @property
    def shape(self) -> Any:
        """The shape."""
        return tf.TensorShape(self._spec.shape)


_OPERATORS = (
    "__float__", "__int__", "__bool__", "__index__", "__len__", "__iter__", "__getitem__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__abs__", "__matmul__", "__rmatmul__",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
    "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__",
)  # fmt: skip


class PendingResult(_Result):
    """A scalar tensor that another process computes: each use of its value waits for it first.

    >>> promise = Future()
    >>> promise.set_result([tf.constant(2.0)])
    >>> loss = PendingResult(promise, 0, Spec("float32", ()))
    >>> float(loss), f"{loss:.2f}", (loss + 1.0).numpy(), bool(loss > 1), tf.sqrt(2.0 * loss).numpy()
    (2.0, '2.00', np.float32(3.0), True, np.float32(2.0))
    """

    def __init__(self, promise: Future[Sequence[Any]], place: int, spec: Spec) -> None:
        super().__init__(spec)
        self._future = promise
        self._index = place

    def _wait_for_value(self) -> Any:
        return self._future.result()[self._index]

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
    def call(self: PendingResult, *given: Any) -> Any:
        return getattr(self._wait_for_value(), name)(*given)

    return call


for _name in (*_OPERATORS, "__repr__", "__str__", "__reduce__"):
    setattr(PendingResult, _name, _delegate(_name))


class _AbsentReadError(CollectiveReadError, TypeError):
    """Also a TypeError, which makes TensorFlow try its dispatch."""


class AbsentResult(_Result):
    """A substitute of a tensor in a process that does not receive it. Keras may collect it over batches.

    >>> AbsentResult("npu/0", Spec("float32", (None, 10)))
    <float32[?,10] on npu/0>
    """

    def __init__(self, owner: str, spec: Spec) -> None:
        super().__init__(spec)
        self.owner = owner

    def numpy(self) -> AbsentResult:
        """Called by Keras on every result; reads nothing."""
        return self

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise _AbsentReadError(
            f"this result is on {self.owner}, not in this process",
            where=str(script_site()),
            why=f"with 'results: owner' in the config, tensors that a step returns, like this {self._spec}, stay in "
            "the cluster that computes them",
            mend=f"if nb.here().worker == {self.owner!r}: ..., or results: everywhere",
        )

    def __repr__(self) -> str:
        return f"<{self._spec} on {self.owner}>"


for _name in (*_OPERATORS, "__array__", "__tf_tensor__"):
    setattr(AbsentResult, _name, AbsentResult._refuse)
AbsentResult.__hash__ = object.__hash__  # type: ignore[method-assign]


def _shape_absent(input: Any, out_type: Any = None, name: str | None = None) -> Any:  # noqa: A002
    return tf.zeros([max(1, len(input._spec.shape or ()))], out_type or tf.int32)


def _concat_absent(values: Sequence[AbsentResult], axis: Any, name: str = "concat") -> AbsentResult:
    return values[0]


# `Model.predict` concatenates the results of its batches.
tf_private.dispatch_to(tf.shape, AbsentResult, _shape_absent)
tf_private.dispatch_to(tf.concat, AbsentResult, _concat_absent)
