"""Draw parts of initial values without the rest: of constants, or of draws by a counter-based generator.

Philox, TensorFlow's generator on CPUs, computes numbers in groups from a counter, so a part can be drawn alone. Each
function has a contract test in tests/contract.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.tf import require_supported

require_supported()
from tensorflow.python.eager import lift_to_graph  # noqa: E402

_MAX_NUMBERS = 1 << 22
"""The maximum number of values drawn in one op."""
_GROUP_SIZE = 4
_PHILOX = (1, 3)
"""The numbers of the Philox algorithm: by name, and as the automatic choice on CPUs."""
_COUNTER_STEPS = {"StatelessRandomUniformV2": 1, "StatelessRandomNormalV2": 1, "StatelessTruncatedNormalV2": 256}
"""The increment of the counter for a group of four float32, by op type: a truncated normal may draw many times."""

_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "AddV2": lambda op, x, y: tf.raw_ops.AddV2(x=x, y=y),
    "Sub": lambda op, x, y: tf.raw_ops.Sub(x=x, y=y),
    "Mul": lambda op, x, y: tf.raw_ops.Mul(x=x, y=y),
    "RealDiv": lambda op, x, y: tf.raw_ops.RealDiv(x=x, y=y),
    "Neg": lambda op, x: tf.raw_ops.Neg(x=x),
    "Identity": lambda op, x: x,
    "Cast": lambda op, x: tf.cast(x, op.get_attr("DstT")),
}


def draw_part(value: Any, axis: int, start: int, size: int, most: int = _MAX_NUMBERS) -> Any:
    """Some entries of an initial value along an axis, as a tensor that is bit-identical to the same entries of the
    whole value; `value` is a tensor of a traced graph, and at most `most` numbers are drawn at once. None if they
    cannot be drawn alone.
    """
    formula = _Formula.from_tensor(value)
    if formula is None:
        return None
    shape = value.shape.as_list()
    rows, inner = int(np.prod(shape[:axis])), int(np.prod(shape[axis + 1 :]))
    length, part = shape[axis] * inner, size * inner
    with tf.init_scope():
        made, memory = allocate_tensor([*shape[:axis], size, *shape[axis + 1 :]], value.dtype)
        found = memory.reshape(rows, part)
        if 0 < length <= most:
            several = most // length
            for row in range(0, rows, several):
                drawn = formula.draw(row * length, min(row + several, rows) * length).numpy()
                found[row : row + several] = drawn.reshape(-1, length)[:, start * inner : start * inner + part]
        else:
            for row in range(rows):
                first = row * length + start * inner
                for done in range(0, part, most):
                    until = min(done + most, part)
                    found[row, done:until] = formula.draw(first + done, first + until).numpy()
    return made


def copy_array(array: Any) -> Any:
    """A tensor with the numbers of an array, with one copy; TensorFlow's own conversion makes two."""
    if array.dtype.kind not in "biufc":
        return tf.constant(array)
    tensor, memory = allocate_tensor(array.shape, array.dtype)
    memory[...] = array
    return tensor


def allocate_tensor(shape: Sequence[int], dtype: Any) -> tuple[Any, Any]:
    """A tensor without values, and an array in its memory, to be filled before the tensor is used elsewhere. The tensor
    must outlive the array.
    """
    with tf.device("CPU"):
        tensor = tf.raw_ops.Empty(shape=shape, dtype=dtype)
    seen = np.asarray(memoryview(tensor))
    memory = (ctypes.c_byte * seen.nbytes).from_address(seen.ctypes.data)
    return tensor, np.ndarray(seen.shape, seen.dtype, memoryview(memory))


def can_draw_parts(value: Any) -> bool:
    """Whether `draw_part` can draw parts of an initial value, which is a tensor of a traced graph."""
    return _Formula.from_tensor(value) is not None


@dataclass(frozen=True)
class _Formula:
    """The element-wise computation of a tensor; `shared_values` are the values that all entries share, by tensor."""

    value: Any
    shared_values: Mapping[str, Any]

    @classmethod
    def from_tensor(cls, value: Any) -> _Formula | None:
        """The formula of a tensor of a graph; None if its entries are not computed independently."""
        shared: dict[str, Any] = {}
        if not value.shape.is_fully_defined() or value.shape.rank == 0 or tf.config.list_physical_devices("GPU"):
            return None
        if not (_list_shared(value, value.shape, shared) and all(map(_is_constant, shared.values()))):
            return None
        tensors = list(shared.values())

        def lift() -> list[Any]:
            made = lift_to_graph.lift_to_graph(tensors, tf.compat.v1.get_default_graph())
            return [tf.identity(made[tensor]) for tensor in tensors]

        with tf.init_scope():
            found = dict(zip(shared, tf.function(lift, autograph=False).get_concrete_function()(), strict=True))
        formula = cls(value, found)
        return formula if all(formula.uses_philox(name) for name in shared) else None

    def uses_philox(self, name: str) -> bool:
        """Whether a shared value is not a number of an algorithm, or that of Philox."""
        return not name.startswith("alg ") or int(self.shared_values[name]) in _PHILOX

    def draw(self, first: int, until: int) -> Any:
        """Some entries of the flattened tensor."""
        return self._draw_tensor(self.value, first, until)

    def _draw_tensor(self, tensor: Any, first: int, until: int) -> Any:
        op = tensor.op
        if (name := _shared_name(tensor)) in self.shared_values:
            return self.shared_values[name]
        if op.type == "Fill":
            return tf.fill([until - first], self.shared_values[_shared_name(op.inputs[1])])
        if op.type in _COUNTER_STEPS:
            return self._draw_random(op, first, until)
        return _ELEMENTWISE[op.type](op, *(self._draw_tensor(each, first, until) for each in op.inputs))

    def _draw_random(self, op: Any, first: int, until: int) -> Any:
        """Some of the numbers of a random op: the counter is advanced to the group of the first one."""
        key, counter, algorithm = (
            self.shared_values[_shared_name(each, what)]
            for each, what in zip(op.inputs[1:], _RANDOM_INPUTS, strict=True)
        )
        low, high = (int(word) for word in counter.numpy())
        moved = (low + (high << 64) + first // _GROUP_SIZE * _COUNTER_STEPS[op.type]) % (1 << 128)
        counter = tf.constant([moved % (1 << 64), moved >> 64], tf.uint64)
        skipped = first % _GROUP_SIZE
        make = getattr(tf.raw_ops, op.type)
        numbers = make(shape=[until - first + skipped], key=key, counter=counter, alg=algorithm, dtype=tf.float32)
        return numbers[skipped:]


_RANDOM_INPUTS = ("", "", "alg ")


def _shared_name(tensor: Any, what: str = "") -> str:
    return f"{what}{tensor.name}"


def _list_shared(tensor: Any, shape: Any, shared: dict[str, Any]) -> bool:
    """Add the values that all entries of a tensor share; False if an entry depends on more than its position."""
    op = tensor.op
    if tensor.shape.rank == 0:
        shared[_shared_name(tensor)] = tensor
        return True
    if tensor.shape != shape:
        return False
    if op.type == "Fill":
        shared[_shared_name(op.inputs[1])] = op.inputs[1]
        return True
    if op.type in _COUNTER_STEPS:
        shared.update(
            {_shared_name(each, what): each for each, what in zip(op.inputs[1:], _RANDOM_INPUTS, strict=True)}
        )
        return bool(tensor.dtype == tf.float32)
    return op.type in _ELEMENTWISE and all(_list_shared(each, shape, shared) for each in op.inputs)


def _is_constant(tensor: Any) -> bool:
    """Whether a tensor is computed from constants, and is the same each time."""
    waiting, seen = [tensor.op], set()
    while waiting:
        op = waiting.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type.startswith("Placeholder") or op.op_def.is_stateful:
            return False
        waiting += [each.op for each in op.inputs]
    return True
