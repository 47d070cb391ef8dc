"""Facts on a stage's ops that hold in all visits: axes, specs and sizes of values, readers; and which variables and
materialized values could be sharded in addition.

Sizes known only at run time are equal if they derive from the same size (`SymbolicSizes`). The gradient of a residual
`x + f(x)` allows for different shapes, by sums over the axes along which either operand was broadcast. If `f` ends in a
reshape to the sizes of `x`, there are none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, zip_longest
from typing import NamedTuple

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.ir.layout import SLICE, SPLIT, Layout, Reshard
from whale_nebula.ir.sizes import Sizes
from whale_nebula.passes.rules.interpret import Bodies
from whale_nebula.passes.rules.layout import read_target
from whale_nebula.passes.rules.registry import RULES, WHOLE, Axes, Fold, Node, whole
from whale_nebula.spec import Spec, Value

Size = int | tuple[str, Value, int]
"""A number, or a name for one known only at run time: equal names are equal sizes."""
BROADCAST_AXES_OP = "BroadcastGradientArgs"
"""The op that returns the axes along which either of two shapes was broadcast."""
_IDENTITIES = frozenset({"Identity", "StopGradient", "Cast", "Snapshot"})


@dataclass(frozen=True)
class SymbolicSizes:
    """Symbolic sizes of values' axes, propagated through the `followed` ops in order; `spec` and `describe` return
    their known specs and axes.
    """

    graph: Graph
    followed: Collection[int]
    spec: Callable[[Value], Spec]
    describe: Callable[[Op], Axes | str]
    _found: dict[tuple[Value, int], Size] = field(default_factory=dict)

    def follow(self, op: Op) -> None:
        """Derive the names of the sizes of an op's outputs from those of its inputs."""
        for value, spec in zip(op.values, op.outputs, strict=True):
            for axis, size in enumerate(spec.shape or ()):
                if size is None:
                    self.size(value, axis)

    def find_broadcast_axes(self, value: Value) -> tuple[int, ...] | None:
        """The axes in an output of `BROADCAST_AXES_OP`; None if unknown."""
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
            self._found[value, axis] = ("axis", value, axis)  # ends the recursion in a loop
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
        """An entry of a vector of sizes."""
        op = self.graph.ops[vector.op]
        if op.constant is not None:
            return int(op.constant[place])
        if op.type == "Shape":
            return self.size(op.inputs[0], place)
        if op.type == "Pack" and all(self.spec(value).scalar for value in op.inputs):
            return self._number(op.inputs[place])
        return self._entry(op.inputs[0], place) if op.type in _IDENTITIES else ("entry", vector, place)

    def _number(self, value: Value) -> Size:
        """The size held by a scalar."""
        op = self.graph.ops[value.op]
        if op.constant is not None:
            return int(op.constant[0])
        if op.type in _IDENTITIES:
            return self._number(op.inputs[0])
        begin = self.graph.ops[op.inputs[1].op].constant if op.type == "StridedSlice" else None
        if begin is not None and len(begin) == 1 and op.attributes.get("shrink_axis_mask") == 1 and begin[0] >= 0:
            return self._entry(op.inputs[0], begin[0])
        return ("number", value, 0)


ASSIGNS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
SCATTERS = frozenset(f"ResourceScatter{what}" for what in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Update"))
"""Ops that change some rows of a variable, by index."""
COOPERATIVE = frozenset({
    "Softmax", "LogSoftmax", "SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits", "ArgMax", "ArgMin",
    "InTopK", "InTopKV2", "TopKV2", "Max", "Min",
})  # fmt: skip
"""Ops that devices compute together along an axis that cannot be cut: by sums and maxima over them."""
_RESIZING_OP = "DepthwiseConv2dNative"
"""The op that gives an axis another size than it has in its operands."""
_NO_RULE = "no rule describes its effect on axes"
ASSUMED_ROWS = 32
"""The assumed number of rows of a batch for comparing bytes."""


@dataclass(frozen=True)
class Facts:
    """Facts on ops, computed on demand and cached. `folds` holds known numbers, `parts` the value whose partial
    gradient a placeholder sums.
    """

    graph: Graph
    ops: Sequence[int]
    folds: Mapping[Value, Fold]
    parts: Mapping[Value, Value]
    _described: dict[int, Axes | str] = field(default_factory=dict)
    _sizes: dict[Value, float] = field(default_factory=dict)
    _broadcast_axes: dict[Value, Fold] = field(default_factory=dict)

    @cached_property
    def places(self) -> Mapping[int, int]:
        """The position of each op in the order of visits."""
        return {op: place for place, op in enumerate(self.ops)}

    @cached_property
    def values(self) -> Sequence[Value]:
        """All inputs and outputs of ops."""
        ops = map(self.graph.ops.__getitem__, self.ops)
        return list(dict.fromkeys(chain.from_iterable((*op.inputs, *op.values) for op in ops)))

    @cached_property
    def _readers(self) -> Mapping[Value, Sequence[int]]:
        found: dict[Value, list[int]] = {}
        for place, op in enumerate(self.ops):
            for value in dict.fromkeys(self.graph.ops[op].inputs):
                found.setdefault(value, []).append(place)
        for holder, part in self.parts.items():
            while part in self.parts:
                part = self.parts[part]
            found.setdefault(part, []).extend(found.get(holder, ()))
        return found

    def readers(self, value: Value) -> Sequence[int]:
        """The places of the ops that read a value, or the placeholder of the sum to which it belongs."""
        return self._readers.get(value, ())

    def spec(self, value: Value) -> Spec:
        """The spec of a value, as far as known."""
        return self.specs.get(value) or self.graph.spec(value)

    def describe(self, op: Op) -> Axes | str:
        """The axis description of an op, or the reason why it has none."""
        if op.index not in self._described:
            self._described[op.index] = self._describe(op, self.specs)
        return self._described[op.index]

    def size(self, value: Value) -> float:
        """Bytes of a value in a batch of `ASSUMED_ROWS` rows; infinite for a variable's handle, so that a sharded
        variable is never gathered.
        """
        if value not in self._sizes:
            self._sizes[value] = self._count_size(value)
        return self._sizes[value]

    def _describe(self, op: Op, specs: Mapping[Value, Spec]) -> Axes | str:
        entry = RULES.get(op.type)
        if entry is None or entry.axes is None:
            return _NO_RULE
        return entry.axes(self._node(op, specs))

    def _node(self, op: Op, specs: Mapping[Value, Spec]) -> Node:
        folds = tuple(self._broadcast_axes.get(value) or self.folds.get(value, whole()) for value in op.inputs)
        return Node(self.graph, op, folds, Bodies(), op.index, specs)

    def _count_size(self, value: Value) -> float:
        spec, shape = self.spec(value), self._assumed_sizes.shape(value)
        if spec.dtype == "resource":
            return math.inf
        if spec.rank == len(shape):
            shape = tuple(given if own is None else own for own, given in zip(spec.shape or (), shape, strict=True))
        return Spec(spec.dtype, shape).nbytes()

    @cached_property
    def _assumed_sizes(self) -> Sizes:
        """The sizes of values in a batch of `ASSUMED_ROWS` rows."""
        return Sizes(self.graph, ASSUMED_ROWS).follow(sorted(self.graph.ascend(self.ops)))

    @cached_property
    def specs(self) -> Mapping[Value, Spec]:
        """Refined specs of values: sizes that were unknown in the trace but follow from an operand."""
        found: dict[Value, Spec] = {}
        ops = [self.graph.ops[op] for op in self.ops]
        asked = {value for op in ops if op.type == BROADCAST_AXES_OP for value in op.values}
        asked = {value for value in asked if self.folds.get(value, whole()).literal is None}
        same = SymbolicSizes(
            self.graph,
            self.places,
            lambda value: found.get(value) or self.graph.spec(value),
            lambda op: _NO_RULE if op.type == _RESIZING_OP else self._describe(op, found),
        )
        for op in ops:
            self._refine(op, found)
            if asked:
                same.follow(op)
            for value in asked.intersection(op.values):
                numbers = same.find_broadcast_axes(value)
                self._broadcast_axes.update({} if numbers is None else {value: Fold(WHOLE, literal=numbers)})
        return found

    def _refine(self, op: Op, found: dict[Value, Spec]) -> None:
        """Refine the sizes of an op's outputs by those of its operands."""
        if op.type == _RESIZING_OP or all(spec.shape is None or None not in spec.shape[1:] for spec in op.outputs):
            return
        if op.type == "Reshape":
            target = read_target(self._node(op, found))
            found[Value(op.index)] = op.outputs[0]._replace(shape=target)
            return
        axes = self._describe(op, found)
        if isinstance(axes, str):
            return
        sizes: dict[str, int | None] = {}
        for value, side in zip(op.inputs, axes.inputs, strict=False):
            pairs = zip(side or (), (found.get(value) or self.graph.spec(value)).shape or (), strict=False)
            sizes |= {label: size for label, size in pairs if size is not None and size > 1}
        if op.type in ("Sum", "Mean", "Max", "Min"):  # a reduced axis has one entry, if it is kept
            read = {label for side in axes.inputs for label in side or ()}
            sizes |= {label: 1 for label in axes.outputs[0] or () if label not in read}
        for value, spec, side in zip(op.values, op.outputs, axes.outputs, strict=True):
            if side is not None and spec.shape is not None and len(side) == len(spec.shape):
                kept = [label not in axes.mixed or op.type in COOPERATIVE for label in side]
                triples = zip(side, kept, spec.shape, strict=True)
                shape = (sizes.get(label) if size is None and same else size for label, same, size in triples)
                found[value] = spec._replace(shape=tuple(shape))


SEGMENT_SUM = "UnsortedSegmentSum"
"""The op that adds up rows by index: from whole rows, a device can compute its own piece of the sums."""


class LayoutChange(NamedTuple):
    """Variables, by their ops, and materialized values that could be sharded in addition, with their layouts."""

    variables: Mapping[int, Layout]
    requested_layouts: Mapping[Value, Layout]

    @classmethod
    def join(cls, changes: Iterable[LayoutChange]) -> LayoutChange:
        """The union of changes."""
        variables, requested_layouts = dict[int, Layout](), dict[Value, Layout]()
        for change in changes:
            variables |= change.variables
            requested_layouts |= change.requested_layouts
        return cls(variables, requested_layouts)


def find_pieces(graph: Graph, needed: Mapping[int, Sequence[Reshard]]) -> dict[int, Layout]:
    """Variables that are read or written in pieces, if all their sharded uses agree on the pieces."""
    pieces: dict[int, set[Layout]] = {}
    for op, reshards in needed.items():
        for each in reshards if op >= 0 else ():
            source, reader = graph.ops[each.value.op], graph.ops[op]
            if source.type == "ReadVariableOp" and each.target.kind == SPLIT:
                pieces.setdefault(source.inputs[0].op, set()).add(each.target)
            elif reader.type in ASSIGNS and each.source.kind == SPLIT:
                pieces.setdefault(reader.inputs[0].op, set()).add(each.source)
    return {variable: layouts.pop() for variable, layouts in pieces.items() if len(layouts) == 1}


def find_requestable_pieces(
    facts: Facts, needed: Mapping[int, Sequence[Reshard]], known: Collection[int], is_whole: Callable[[Value], bool]
) -> Iterator[LayoutChange]:
    """For each value that is made whole and then cut: itself and the values that it is computed from elementwise, if
    these begin with a variable that is not `known` or with rows that are added up by index. Then none of them is needed
    whole.
    """
    graph = facts.graph
    for each in (each for reshards in needed.values() for each in reshards if each.kind == SLICE):
        variables, wanted, left = dict[int, Layout](), dict[Value, Layout](), [(each.value, each.target)]
        while left:
            value, layout = left.pop()
            op = graph.ops[value.op]
            if value in wanted or op.index not in facts.places or not op.inputs or not is_whole(value):
                continue
            if op.type == "ReadVariableOp":
                variables |= {} if op.inputs[0].op in known else {op.inputs[0].op: layout}
                continue
            axes = facts.describe(op)
            if not isinstance(axes, str) and (op.type == SEGMENT_SUM or _is_by_entry(axes, value.out)):
                wanted[value] = layout
                left += _list_sources(graph, op, axes, value.out, layout)
        if variables or any(graph.ops[value.op].type == SEGMENT_SUM for value in wanted):
            yield LayoutChange(variables, wanted)


def _is_by_entry(axes: Axes, out: int) -> bool:
    """Whether an op computes each entry of this output from one entry of each operand."""
    made = set(axes.outputs[out] or ())
    return not axes.mixed and all(set(side or ()) <= made for side in axes.inputs)


def _list_sources(graph: Graph, op: Op, axes: Axes, out: int, layout: Layout) -> Iterator[tuple[Value, Layout]]:
    """The operands of which a device needs only its piece, if the output is in these pieces."""
    label = list(axes.outputs[out] or ())[layout.axis]
    for value, side in zip(op.inputs, axes.inputs, strict=False):
        shape = graph.spec(value).shape
        if side is not None and label in side and shape is not None and shape[list(side).index(label)] != 1:
            yield value, Layout(SPLIT, list(side).index(label), layout.units)
