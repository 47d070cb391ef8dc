"""Constant folding of small integer tensors without TensorFlow: sizes, axes, permutations.

Keras and TensorFlow compute shapes in the graph itself (a product of sizes, a gather from a shape). Whoever wants to
know how large a tensor is has to follow these few ops; all others give None, which means "not known".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from whale_nebula.ir.graph import Op

Shape = tuple[int, ...]
Numbers = tuple[int, ...]
MOST = 256
"""Tensors with more entries than this are not followed."""


@dataclass(frozen=True, slots=True)
class Site:
    """An op with what is known of its inputs: their shapes, and the numbers in those that are small and whole."""

    op: Op
    shapes: tuple[Shape | None, ...]
    numbers: tuple[Numbers | None, ...]

    def attribute(self, name: str) -> int:
        """An attribute that is a number or a flag; 0 where it is not there."""
        value = self.op.attributes.get(name, 0)
        return int(value) if isinstance(value, bool | int | float) else 0

    def rank(self, place: int) -> int | None:
        """How many axes an input has."""
        shape = self.shapes[place] if place < len(self.shapes) else None
        return None if shape is None else len(shape)


Rule = Callable[[Site], "Sequence[Numbers | None]"]


def integers(site: Site) -> Sequence[Numbers | None]:
    """The numbers in each output of an op, flat; None for what is not known.

    >>> from whale_nebula.spec import Spec
    >>> integers(Site(Op(1, "Shape", outputs=(Spec("int32", (2,)),)), ((8, 64),), (None,)))
    [(8, 64)]
    """
    rule = RULES.get(site.op.type)
    unknown: list[Numbers | None] = [None] * len(site.op.outputs)
    if rule is None:
        return unknown
    try:
        found = list(rule(site))
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return unknown
    return [None if each is None or len(each) > MOST else each for each in found]


# ---------------------------------------------------------------------- rules
def _constant(site: Site) -> Sequence[Numbers | None]:
    values = site.op.constant
    whole = values is not None and not site.op.outputs[0].floating
    return [tuple(map(int, values))] if whole and values is not None else [None]


def _size(site: Site) -> Sequence[Numbers | None]:
    shape = site.shapes[0]
    return [None if shape is None else (math.prod(shape),)]


def _rank(site: Site) -> Sequence[Numbers | None]:
    shape = site.shapes[0]
    return [None if shape is None else (len(shape),)]


def _same(site: Site) -> Sequence[Numbers | None]:
    return [site.numbers[0]]


def _gather(site: Site) -> Sequence[Numbers | None]:
    table, places = site.numbers[:2]
    if table is None or places is None or site.rank(0) != 1:
        return [None]
    return [tuple(table[place] for place in places)]


def _pack(site: Site) -> Sequence[Numbers | None]:
    if any(each is None for each in site.numbers):
        return [None]
    return [tuple(number for each in site.numbers for number in each or ())]


def _concat(site: Site) -> Sequence[Numbers | None]:
    parts = site.numbers[:-1]
    if any(each is None for each in parts) or any(site.rank(place) != 1 for place in range(len(parts))):
        return [None]
    return [tuple(number for each in parts for number in each or ())]


def _strided_slice(site: Site) -> Sequence[Numbers | None]:
    given, begin, end, strides = site.numbers
    if given is None or begin is None or end is None or strides is None or site.rank(0) != 1 or len(begin) != 1:
        return [None]
    if site.attribute("ellipsis_mask") or site.attribute("new_axis_mask"):
        return [None]
    if site.attribute("shrink_axis_mask"):
        return [(given[begin[0]],)]
    start = None if site.attribute("begin_mask") else begin[0]
    stop = None if site.attribute("end_mask") else end[0]
    return [given[start : stop : strides[0]]]


def _slice(site: Site) -> Sequence[Numbers | None]:
    given, begin, size = site.numbers
    if given is None or begin is None or size is None or site.rank(0) != 1:
        return [None]
    stop = len(given) if size[0] < 0 else begin[0] + size[0]
    return [given[begin[0] : stop]]


def _range(site: Site) -> Sequence[Numbers | None]:
    start, limit, delta = site.numbers
    if start is None or limit is None or delta is None or abs(limit[0] - start[0]) > MOST * abs(delta[0]):
        return [None]
    return [tuple(range(start[0], limit[0], delta[0]))]


def _fill(site: Site) -> Sequence[Numbers | None]:
    dims, value = site.numbers
    if dims is None or value is None or math.prod(dims) > MOST:
        return [None]
    return [value * math.prod(dims)]


def _invert_permutation(site: Site) -> Sequence[Numbers | None]:
    given = site.numbers[0]
    return [None if given is None else tuple(given.index(place) for place in range(len(given)))]


def _stitch_numbers(site: Site) -> Sequence[Numbers | None]:
    """DynamicStitch: the first half of the inputs says where the numbers of the second half go."""
    half = len(site.numbers) // 2
    if any(each is None for each in site.numbers):
        return [None]
    pairs = zip(site.numbers[:half], site.numbers[half:], strict=True)
    found = {place: n for places, given in pairs for place, n in zip(places or (), given or (), strict=True)}
    return [tuple(found[place] for place in range(len(found)))]


def _select(site: Site) -> Sequence[Numbers | None]:
    chosen, yes, no = site.numbers
    if chosen is None or yes is None or no is None or not len(chosen) == len(yes) == len(no):
        return [None]
    return [tuple(a if c else b for c, a, b in zip(chosen, yes, no, strict=True))]


def _fold_numbers(fold: Callable[[Numbers], int]) -> Rule:
    def rule(site: Site) -> Sequence[Numbers | None]:
        given = site.numbers[0]
        if given is None or (site.rank(0) or 0) > 1:
            return [None]
        no_axes = site.numbers[1] == ()
        return [given if no_axes else (fold(given),)]

    return rule


def _elementwise(combine: Callable[[int, int], int]) -> Rule:
    def rule(site: Site) -> Sequence[Numbers | None]:
        left, right = site.numbers
        if left is None or right is None:
            return [None]
        if len(left) != len(right):
            left, right = (left * len(right), right) if len(left) == 1 else (left, right * len(left))
        return [tuple(combine(a, b) for a, b in zip(left, right, strict=True))]

    return rule


def _broadcast_shape(site: Site) -> Sequence[Numbers | None]:
    left, right = site.numbers
    return [None if left is None or right is None else broadcast(left, right)]


def _reduced_axes(site: Site) -> Sequence[Numbers | None]:
    """BroadcastGradientArgs: the axes over which the gradient of either side is summed."""
    left, right = site.numbers
    if left is None or right is None:
        return [None, None]
    whole = broadcast(left, right)
    return [_expand_shape(left, whole), _expand_shape(right, whole)]


def _expand_shape(shape: Numbers, whole: Numbers) -> Numbers:
    padded = (1,) * (len(whole) - len(shape)) + shape
    missing = len(whole) - len(shape)
    return tuple(axis for axis, size in enumerate(padded) if axis < missing or (size == 1 and whole[axis] != 1))


def broadcast(left: Shape, right: Shape) -> Shape:
    """The shape that two shapes are brought to before an op joins them element by element.

    >>> broadcast((8, 1, 64), (32, 1))
    (8, 32, 64)
    """
    rank = max(len(left), len(right))
    padded = ((1,) * (rank - len(left)) + left, (1,) * (rank - len(right)) + right)
    return tuple(b if a == 1 else a for a, b in zip(*padded, strict=True))


RULES: Mapping[str, Rule] = {
    "Const": _constant,
    "Shape": lambda site: [site.shapes[0]],
    "ShapeN": lambda site: list(site.shapes),
    "Size": _size,
    "Rank": _rank,
    **dict.fromkeys(("Identity", "Cast", "Reshape", "ExpandDims", "Squeeze", "StopGradient"), _same),
    "GatherV2": _gather,
    "Pack": _pack,
    "ConcatV2": _concat,
    "StridedSlice": _strided_slice,
    "Slice": _slice,
    "Range": _range,
    "Fill": _fill,
    "InvertPermutation": _invert_permutation,
    "DynamicStitch": _stitch_numbers,
    "SelectV2": _select,
    "Prod": _fold_numbers(math.prod),
    "Sum": _fold_numbers(sum),
    "Max": _fold_numbers(max),
    "Min": _fold_numbers(min),
    "All": _fold_numbers(lambda given: int(all(given))),
    "Neg": lambda site: [None if site.numbers[0] is None else tuple(-number for number in site.numbers[0])],
    "AddV2": _elementwise(lambda a, b: a + b),
    "Add": _elementwise(lambda a, b: a + b),
    "Sub": _elementwise(lambda a, b: a - b),
    "Mul": _elementwise(lambda a, b: a * b),
    "FloorDiv": _elementwise(lambda a, b: a // b),
    "FloorMod": _elementwise(lambda a, b: a % b),
    "Maximum": _elementwise(max),
    "Minimum": _elementwise(min),
    "Less": _elementwise(lambda a, b: a < b),
    "LessEqual": _elementwise(lambda a, b: a <= b),
    "Greater": _elementwise(lambda a, b: a > b),
    "GreaterEqual": _elementwise(lambda a, b: a >= b),
    "Equal": _elementwise(lambda a, b: a == b),
    "NotEqual": _elementwise(lambda a, b: a != b),
    "LogicalAnd": _elementwise(lambda a, b: a and b),
    "BroadcastArgs": _broadcast_shape,
    "BroadcastGradientArgs": _reduced_axes,
}
