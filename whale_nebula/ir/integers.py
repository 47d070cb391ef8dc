"""Constant folding of small integer tensors without TensorFlow: sizes, axes, permutations.

Keras and TensorFlow compute shapes in the graph itself (a product of sizes, a gather from a shape). Inferring the size
of a tensor requires evaluating these few ops; all others give None, which means "unknown". Fractional numbers are only
evaluated as scalars: a size may be a share of another one, rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from whale_nebula.ir.graph import Op
from whale_nebula.spec import Spec

Shape = tuple[int, ...]
Numbers = tuple[int, ...]
"""The entries of a tensor, flat; a scalar that may be fractional is a float."""
Array: TypeAlias = npt.NDArray[Any]
MAX_ENTRIES = 256
"""Tensors with more entries than this are not evaluated."""


@dataclass(frozen=True, slots=True)
class KnownOp:
    """An op with what is known of its inputs: shapes, and entries of small integer tensors and fractional scalars."""

    op: Op
    shapes: tuple[Shape | None, ...]
    numbers: tuple[Numbers | None, ...]

    def attribute(self, name: str) -> int:
        """An attribute that is a number or a flag; 0 if it is missing."""
        return _number(self.op, name)


def compute_integers(node: KnownOp) -> Sequence[Numbers | None]:
    """The entries of each output of an op, flat; None for an output that is not a small integer tensor or a scalar, or
    is unknown.

    >>> from whale_nebula.spec import Spec
    >>> compute_integers(KnownOp(Op(1, "Shape", outputs=(Spec("int32", (2,)),)), ((8, 64),), (None,)))
    [(8, 64)]
    """
    found: list[Numbers | None] = []
    try:
        if node.op.type in RULES:
            found = list(RULES[node.op.type](node))
        elif node.op.type in COMPUTE and None not in node.numbers:
            made = compute_outputs(node.op, _arrays(node))
            pairs = zip(made, node.op.outputs, strict=True)
            found = [
                round_numbers(each.ravel().tolist(), spec) if each.size <= MAX_ENTRIES else None for each, spec in pairs
            ]
    except (ArithmeticError, LookupError, TypeError, ValueError):
        found = []
    return found or [None] * len(node.op.outputs)


def round_numbers(numbers: Iterable[int | float], spec: Spec) -> Numbers | None:
    """Numbers cast to the element type of `spec`; None for a floating tensor that is not a float32 or float64 scalar.

    >>> round_numbers([2.75], Spec("int32", ())), round_numbers([0.1], Spec("float32", ()))
    ((2,), (0.10000000149011612,))
    """
    if not spec.floating:
        return tuple(map(int, numbers))
    cast = _FLOAT_TYPES.get(spec.dtype) if spec.scalar else None
    return None if cast is None else tuple(cast(number).item() for number in numbers)


_FLOAT_TYPES: Mapping[str, Callable[[float], Any]] = {"float32": np.float32, "float64": np.float64}


def compute_outputs(op: Op, inputs: Sequence[Array]) -> list[Array]:
    """The outputs of an op in `COMPUTE` for these inputs; raises numpy's error if it has none."""
    with np.errstate(all="raise"):
        made = COMPUTE[op.type](op, *inputs)
    return [np.asarray(each) for each in (made if isinstance(made, list) else [made])]


def _arrays(node: KnownOp) -> list[Array]:
    """The known inputs as arrays; one whose shape was guessed wrongly becomes a vector."""
    found = []
    for numbers, shape in zip(node.numbers, node.shapes, strict=True):
        array = np.asarray(numbers, dtype=None if numbers and isinstance(numbers[0], float) else np.int64)
        found.append(array.reshape(shape) if shape is not None and math.prod(shape) == array.size else array)
    return found


def _number(op: Op, name: str) -> int:
    value = op.attributes.get(name, 0)
    return int(value) if isinstance(value, bool | int | float) else 0


# ---------------------------------------------------------------------- ops that numpy computes
def index_strided(op: Op, begins: Sequence[Any], ends: Sequence[Any], strides: Sequence[Any]) -> tuple[Any, ...]:
    """The numpy index of a strided slice: slices, numbers, None for a new axis, an ellipsis."""
    masks = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    begin_free, end_free, ellipsis, new, shrunk = (_number(op, f"{name}_mask") for name in masks)
    found: list[Any] = []
    for place, (begin, end, stride) in enumerate(zip(begins, ends, strides, strict=True)):
        bit = 1 << place
        taken = slice(None if begin_free & bit else begin, None if end_free & bit else end, stride)
        found.append(... if ellipsis & bit else None if new & bit else begin if shrunk & bit else taken)
    return tuple(found)


def _stitch(_: Op, *inputs: Array) -> Array:
    """Dynamic stitch: the first half of the inputs are indices of the second half's entries; for equal indices the last
    counts.
    """
    pairs = list(zip(inputs[: len(inputs) // 2], inputs[len(inputs) // 2 :], strict=True))
    found: dict[int, Array] = {}
    for places, array in pairs:
        entries = array.reshape(places.size, *array.shape[places.ndim :])
        found.update(zip(places.ravel().tolist(), entries, strict=True))
    return np.stack([found[place] for place in range(len(found))])


def _gather(op: Op, table: Array, places: Array, axis: Array) -> Array:
    if _number(op, "batch_dims"):
        raise ValueError("batch_dims")
    return np.take(table, places, int(axis))


def _range(_: Op, start: Array, limit: Array, delta: Array) -> Array:
    return np.asarray(range(int(start), int(limit), int(delta))[: MAX_ENTRIES + 1])


def _fill(_: Op, dims: Array, value: Array) -> Array:
    if math.prod(dims.tolist()) > MAX_ENTRIES:
        raise ValueError("too many entries")
    return np.full(dims, value)


def _split(op: Op, axis: Array, array: Array) -> list[Array]:
    return np.split(array, len(op.outputs), int(axis))


def _split_by_sizes(_: Op, array: Array, sizes: Array, axis: Array) -> list[Array]:
    missing = array.shape[int(axis)] - sizes[sizes >= 0].sum()
    return np.split(array, np.cumsum(np.where(sizes < 0, missing, sizes))[:-1], int(axis))


def _unpack(op: Op, array: Array) -> list[Array]:
    return list(np.moveaxis(array, _number(op, "axis"), 0))


def _reduce(fold: Callable[..., Any]) -> Callable[..., Array]:
    return lambda op, array, axes: fold(
        array, axis=tuple(axes.ravel().tolist()), keepdims=bool(_number(op, "keep_dims"))
    )


FOLDS: Mapping[str, Callable[..., Any]] = {
    "Prod": np.prod, "Sum": np.sum, "Max": np.max, "Min": np.min, "All": np.all,
}  # fmt: skip
ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "AddV2": np.add, "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "FloorDiv": np.floor_divide,
    "FloorMod": np.mod, "Maximum": np.maximum, "Minimum": np.minimum, "Neg": np.negative, "Less": np.less,
    "LessEqual": np.less_equal, "Greater": np.greater, "GreaterEqual": np.greater_equal, "Equal": np.equal,
    "NotEqual": np.not_equal, "LogicalAnd": np.logical_and, "SelectV2": np.where,
}  # fmt: skip
COMPUTE: Mapping[str, Callable[..., Any]] = {
    "Ceil": lambda _, array: np.ceil(array),
    "Floor": lambda _, array: np.floor(array),
    "Transpose": lambda _, array, order: np.transpose(array, order),
    "Reshape": lambda _, array, shape: array.reshape(shape),
    "ExpandDims": lambda _, array, axis: np.expand_dims(array, int(axis)),
    "Squeeze": lambda op, array: np.squeeze(array, op.attributes.get("squeeze_dims") or None),
    "GatherV2": _gather,
    "Pack": lambda op, *parts: np.stack(parts, _number(op, "axis")),
    "Unpack": _unpack,
    "ConcatV2": lambda _, *parts: np.concatenate(parts[:-1], int(parts[-1])),
    "Split": _split,
    "SplitV": _split_by_sizes,
    "StridedSlice": lambda op, array, *bounds: array[index_strided(op, *(bound.tolist() for bound in bounds))],
    "Slice": lambda _, array, begin, size: array[
        tuple(slice(b, None if s < 0 else b + s) for b, s in zip(begin, size, strict=True))
    ],
    "Range": _range,
    "Fill": _fill,
    "InvertPermutation": lambda _, order: np.argsort(order),
    "DynamicStitch": _stitch,
    "BroadcastArgs": lambda _, left, right: np.asarray(broadcast_shapes(tuple(left), tuple(right))),
    **{name: _reduce(fold) for name, fold in FOLDS.items()},
    **{name: lambda _, *inputs, combine=combine: combine(*inputs) for name, combine in ELEMENTWISE.items()},
}  # fmt: skip
"""The numpy functions of ops by type; those that move entries work on arrays of any content (see `passes.rules`)."""


# ---------------------------------------------------------------------- ops that need more than their inputs' values
def _constant(node: KnownOp) -> list[Numbers | None]:
    values = node.op.constant
    return [None if values is None else round_numbers(values, node.op.outputs[0])]


def _cast(node: KnownOp) -> list[Numbers | None]:
    (numbers,) = node.numbers
    return [None if numbers is None else round_numbers(numbers, node.op.outputs[0])]


def _find_reduced_axes(node: KnownOp) -> list[Numbers | None]:
    """BroadcastGradientArgs: the axes over which the gradient of either side is summed."""
    left, right = node.numbers
    if left is None or right is None:
        return [None, None]
    if left == right:
        return [(), ()]
    whole = broadcast_shapes(left, right)
    found: list[Numbers | None] = []
    for shape in (left, right):
        missing = len(whole) - len(shape)
        padded = (1,) * missing + shape
        found.append(tuple(n for n, size in enumerate(padded) if n < missing or size == 1))
    return found


def broadcast_shapes(left: Shape, right: Shape) -> Shape:
    """The broadcast shape of two shapes.

    >>> broadcast_shapes((8, 1, 64), (32, 1))
    (8, 32, 64)
    """
    rank = max(len(left), len(right))
    padded = ((1,) * (rank - len(left)) + left, (1,) * (rank - len(right)) + right)
    return tuple(b if a == 1 else a for a, b in zip(*padded, strict=True))


RULES: Mapping[str, Callable[[KnownOp], Sequence[Numbers | None]]] = {
    "Const": _constant,
    "Shape": lambda node: node.shapes,
    "ShapeN": lambda node: node.shapes,
    "Size": lambda node: [None if node.shapes[0] is None else (math.prod(node.shapes[0]),)],
    "Rank": lambda node: [None if node.shapes[0] is None else (len(node.shapes[0]),)],
    **dict.fromkeys(("Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient"), lambda node: node.numbers[:1]),
    "Cast": _cast,
    "BroadcastGradientArgs": _find_reduced_axes,
}
