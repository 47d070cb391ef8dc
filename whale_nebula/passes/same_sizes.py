"""Which sizes that only a step knows are the same: those that are made of the same size.

A residual `x + f(x)` is differentiated for shapes that may be unlike, by sums over the axes along which either operand
was repeated. Where `f` ends in a reshape to the sizes of `x`, there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import zip_longest

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.passes.rules.registry import Axes
from whale_nebula.spec import Spec, Value

Size = int | tuple[str, Value, int]
"""A number, or a name for one that only a step knows: equal names are equal sizes."""
REPEATED = "BroadcastGradientArgs"
"""The op that tells along which axes either of two shapes was repeated."""
_SAME = frozenset({"Identity", "StopGradient", "Cast", "Snapshot"})


@dataclass(frozen=True)
class SameSizes:
    """The sizes of values along their axes, by names. They are followed through the ops that are `followed`, in their
    order; `spec` and `describe` say what is known of these.
    """

    graph: Graph
    followed: Collection[int]
    spec: Callable[[Value], Spec]
    describe: Callable[[Op], Axes | str]
    _found: dict[tuple[Value, int], Size] = field(default_factory=dict)

    def follow(self, op: Op) -> None:
        """Name the sizes of what an op makes, after those of what it reads."""
        for value, spec in zip(op.values, op.outputs, strict=True):
            for axis, size in enumerate(spec.shape or ()):
                if size is None:
                    self.size(value, axis)

    def find_repeated(self, value: Value) -> tuple[int, ...] | None:
        """The numbers in an output of `REPEATED`; None where they are not known."""
        op = self.graph.ops[value.op]
        left, right = (self._list_entries(shape) for shape in op.inputs)
        if left is None or right is None:
            return None
        own, other = (left, right) if value.out == 0 else (right, left)
        rank, found = max(len(own), len(other)), []
        for back, (one, another) in enumerate(zip_longest(reversed(own), reversed(other), fillvalue=1), 1):
            if one != another and not (isinstance(one, int) and one > 1) and another != 1:
                if one != 1 or not isinstance(another, int):
                    return None
                found.append(rank - back)
        return tuple(reversed(found))

    def size(self, value: Value, axis: int) -> Size:
        """The size of a value along an axis."""
        if (value, axis) not in self._found:
            self._found[value, axis] = ("axis", value, axis)  # what is made of itself, in a loop, is its own
            self._found[value, axis] = self._find_size(value, axis)
        return self._found[value, axis]

    def _find_size(self, value: Value, axis: int) -> Size:
        op, shape = self.graph.ops[value.op], self.spec(value).shape
        own = ("axis", value, axis)
        if shape is None or axis >= len(shape):
            return own
        known = shape[axis]
        if known is not None or op.index not in self.followed:
            return own if known is None else known
        if op.type == "Reshape":
            asked = self._entry(op.inputs[1], axis)
            return own if asked == -1 else asked
        axes = self.describe(op)
        if isinstance(axes, str) or (side := axes.outputs[value.out]) is None or side[axis] in axes.mixed:
            return own
        sizes = {
            self.size(given, place)
            for given, labels in zip(op.inputs, axes.inputs, strict=False)
            for place, label in enumerate(labels or ())
            if label == side[axis]
        } - {1}
        return sizes.pop() if len(sizes) == 1 else own

    def _list_entries(self, shape: Value) -> list[Size] | None:
        length = (self.spec(shape).shape or (None,))[0]
        return None if length is None else [self._entry(shape, place) for place in range(length)]

    def _entry(self, vector: Value, place: int) -> Size:
        """A number in a vector of sizes."""
        op = self.graph.ops[vector.op]
        if op.constant is not None:
            return int(op.constant[place])
        if op.type == "Shape":
            return self.size(op.inputs[0], place)
        if op.type == "Pack" and all(self.spec(value).scalar for value in op.inputs):
            return self._number(op.inputs[place])
        return self._entry(op.inputs[0], place) if op.type in _SAME else ("entry", vector, place)

    def _number(self, value: Value) -> Size:
        """A single number."""
        op = self.graph.ops[value.op]
        if op.constant is not None:
            return int(op.constant[0])
        if op.type in _SAME:
            return self._number(op.inputs[0])
        begin = self.graph.ops[op.inputs[1].op].constant if op.type == "StridedSlice" else None
        if begin is not None and len(begin) == 1 and op.attributes.get("shrink_axis_mask") == 1 and begin[0] >= 0:
            return self._entry(op.inputs[0], begin[0])
        return ("number", value, 0)
