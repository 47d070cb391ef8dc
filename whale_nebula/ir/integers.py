"""Constant folding of small integer tensors without TensorFlow: sizes, axes, permutations.

Keras and TensorFlow compute shapes in the graph itself (a product of sizes, a gather from a shape). Whoever wants to
know how large a tensor is has to follow these few ops; all others give None, which means "not known".
"""

from __future__ import annotations

import math
import operator
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


Rule = Callable[[Site], Numbers | None]


def integers(site: Site) -> Sequence[Numbers | None]:
    """The numbers in each output of an op, flat; None for what is not known.

    >>> from whale_nebula.spec import Spec
    >>> integers(Site(Op(1, "Shape", outputs=(Spec("int32", (2,)),)), ((8, 64),), (None,)))
    [(8, 64)]
    """
    rule, several = RULES.get(site.op.type), SEVERAL.get(site.op.type)
    try:
        found = [rule(site)] if rule is not None else list(several(site)) if several is not None else []
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
        found = []
    kept = [None if each is None or len(each) > MOST else each for each in found]
    return kept or [None] * len(site.op.outputs)


# ---------------------------------------------------------------------- rules
def _of_known(compute: Callable[..., Numbers], *, vectors: int = 0) -> Rule:
    """A rule for ops whose inputs are all known; the first so many must have one axis."""

    def rule(site: Site) -> Numbers | None:
        unknown = None in site.numbers or any(site.rank(place) != 1 for place in range(vectors))
        return None if unknown else compute(*site.numbers)

    return rule


def _constant(site: Site) -> Numbers | None:
    values = site.op.constant
    return None if values is None or site.op.outputs[0].floating else tuple(map(int, values))


def _concat(site: Site) -> Numbers | None:
    parts = site.numbers[:-1]
    known = [each for place, each in enumerate(parts) if each is not None and site.rank(place) == 1]
    return tuple(number for each in known for number in each) if len(known) == len(parts) else None


def _strided_slice(site: Site) -> Numbers | None:
    given, begin, end, strides = site.numbers
    if given is None or begin is None or end is None or strides is None or site.rank(0) != 1 or len(begin) != 1:
        return None
    if site.attribute("ellipsis_mask") or site.attribute("new_axis_mask"):
        return None
    if site.attribute("shrink_axis_mask"):
        return (given[begin[0]],)
    start = None if site.attribute("begin_mask") else begin[0]
    stop = None if site.attribute("end_mask") else end[0]
    return given[start : stop : strides[0]]


def _slice(given: Numbers, begin: Numbers, size: Numbers) -> Numbers:
    return given[begin[0] : len(given) if size[0] < 0 else begin[0] + size[0]]


def _range(start: Numbers, limit: Numbers, delta: Numbers) -> Numbers:
    return tuple(range(start[0], limit[0], delta[0])[: MOST + 1])


def _fill(dims: Numbers, value: Numbers) -> Numbers:
    return value * min(math.prod(dims), MOST + 1)


def _stitch_numbers(*inputs: Numbers) -> Numbers:
    """DynamicStitch: the first half of the inputs says where the numbers of the second half go."""
    half = len(inputs) // 2
    pairs = zip(inputs[:half], inputs[half:], strict=True)
    found = {place: n for places, given in pairs for place, n in zip(places, given, strict=True)}
    return tuple(found[place] for place in range(len(found)))


def _select(chosen: Numbers, yes: Numbers, no: Numbers) -> Numbers:
    return tuple(a if c else b for c, a, b in zip(chosen, yes, no, strict=True))


def _fold(fold: Callable[[Numbers], int]) -> Rule:
    """A reduction of all numbers of a vector; over no axes, none."""

    def rule(site: Site) -> Numbers | None:
        given = site.numbers[0]
        if given is None or (site.rank(0) or 0) > 1:
            return None
        return given if site.numbers[1] == () else (fold(given),)

    return rule


def _elementwise(combine: Callable[[int, int], int]) -> Rule:
    def compute(left: Numbers, right: Numbers) -> Numbers:
        if len(left) != len(right):
            left, right = (left * len(right), right) if len(left) == 1 else (left, right * len(left))
        return tuple(combine(a, b) for a, b in zip(left, right, strict=True))

    return _of_known(compute)


def _find_reduced_axes(site: Site) -> Sequence[Numbers | None]:
    """BroadcastGradientArgs: the axes over which the gradient of either side is summed."""
    left, right = site.numbers
    if left is None or right is None:
        return [None, None]
    whole, found = broadcast(left, right), []
    for shape in (left, right):
        missing = len(whole) - len(shape)
        padded = (1,) * missing + shape
        found.append(tuple(n for n, size in enumerate(padded) if n < missing or (size == 1 and whole[n] != 1)))
    return found


def broadcast(left: Shape, right: Shape) -> Shape:
    """The shape that two shapes are brought to before an op joins them element by element.

    >>> broadcast((8, 1, 64), (32, 1))
    (8, 32, 64)
    """
    rank = max(len(left), len(right))
    padded = ((1,) * (rank - len(left)) + left, (1,) * (rank - len(right)) + right)
    return tuple(b if a == 1 else a for a, b in zip(*padded, strict=True))


_BINARY: Mapping[str, Callable[[int, int], int]] = {
    "AddV2": operator.add, "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul,
    "FloorDiv": operator.floordiv, "FloorMod": operator.mod, "Maximum": max, "Minimum": min,
    "Less": operator.lt, "LessEqual": operator.le, "Greater": operator.gt, "GreaterEqual": operator.ge,
    "Equal": operator.eq, "NotEqual": operator.ne, "LogicalAnd": operator.and_,
}  # fmt: skip
_FOLDS: Mapping[str, Callable[[Numbers], int]] = {"Prod": math.prod, "Sum": sum, "Max": max, "Min": min, "All": all}

RULES: Mapping[str, Rule] = {
    "Const": _constant,
    "Shape": lambda site: site.shapes[0],
    "Size": lambda site: None if site.shapes[0] is None else (math.prod(site.shapes[0]),),
    "Rank": lambda site: None if site.shapes[0] is None else (len(site.shapes[0]),),
    **dict.fromkeys(
        ("Identity", "Cast", "Reshape", "ExpandDims", "Squeeze", "StopGradient"), lambda site: site.numbers[0]
    ),
    "GatherV2": _of_known(lambda table, places, *_: tuple(table[place] for place in places), vectors=1),
    "Pack": _of_known(lambda *parts: tuple(number for each in parts for number in each)),
    "ConcatV2": _concat,
    "StridedSlice": _strided_slice,
    "Slice": _of_known(_slice, vectors=1),
    "Range": _of_known(_range),
    "Fill": _of_known(_fill),
    "InvertPermutation": _of_known(lambda given: tuple(given.index(place) for place in range(len(given)))),
    "DynamicStitch": _of_known(_stitch_numbers),
    "SelectV2": _of_known(_select),
    "Neg": _of_known(lambda given: tuple(-number for number in given)),
    "BroadcastArgs": _of_known(broadcast),
    **{name: _fold(fold) for name, fold in _FOLDS.items()},
    **{name: _elementwise(combine) for name, combine in _BINARY.items()},
}
SEVERAL: Mapping[str, Callable[[Site], Sequence[Numbers | None]]] = {
    "ShapeN": lambda site: site.shapes,
    "BroadcastGradientArgs": _find_reduced_axes,
}
"""Ops with several outputs."""
