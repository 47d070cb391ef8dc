"""The size of every tensor of a program, given the number of rows of the batch.

TensorFlow leaves sizes unknown that depend on the batch. The rules here infer them through the graph: exactly for ops
with a rule, and for others by similarity (an axis that is also unknown in an input). So the sizes are for estimates of
bytes and time, never for computing results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from whale_nebula.ir.cut import Cut, Exchange
from whale_nebula.ir.graph import Graph, Op
from whale_nebula.ir.integers import (
    MAX_ENTRIES,
    KnownOp,
    Numbers,
    Shape,
    broadcast_shapes,
    compute_integers,
    index_strided,
)
from whale_nebula.ir.program import GradientPart, Leaf, PartKey, Variable
from whale_nebula.spec import Spec, Value

Rule = Callable[[KnownOp], Shape | list[Shape] | None]
"""The shape of an op's output, or those of all its outputs; None if unknown."""

_COUNTING_TYPES = frozenset({"int32", "int64", "bool"})


@dataclass
class Sizes:
    """Shape inference over a graph; `rows` replaces every size that cannot be inferred.

    `shapes` may hold shapes known from elsewhere; `like` maps a placeholder op to a value of the same shape.
    """

    graph: Graph
    rows: int
    shapes: dict[Value, Shape] = field(default_factory=dict)
    like: Mapping[int, Value] = field(default_factory=dict)
    numbers: dict[Value, Numbers] = field(default_factory=dict)

    def follow(self, ops: Iterable[int]) -> Sizes:
        """Infer the shapes of these ops, which must be in topological order.

        >>> from whale_nebula.ir.graph import Op
        >>> ops = [Op(0, "Placeholder", outputs=(Spec("float32", (None, 64)),))]
        >>> ops += [Op(1, "Shape", (Value(0),), (Spec("int32", (2,)),))]
        >>> ops += [Op(2, "Reshape", (Value(0), Value(1)), (Spec("float32", (None, None)),))]
        >>> Sizes(Graph(tuple(ops)), rows=8).follow(range(3)).shape(Value(2))
        (8, 64)
        """
        for index in ops:
            self._visit(self.graph.ops[index])
        return self

    def shape(self, value: Value) -> Shape:
        """The shape of a value, with `rows` for open sizes if it was not inferred."""
        found = self.shapes.get(value)
        return self.graph.spec(value).fill_shape(self.rows) if found is None else found

    def nbytes(self, value: Value) -> int:
        """The bytes of a value, with `rows` for open sizes; 0 for one that is not a plain tensor (a handle, a list)."""
        spec = self.graph.spec(value)
        return 0 if spec.dtype in ("resource", "variant") else Spec(spec.dtype, self.shape(value)).nbytes()

    def node(self, op: Op) -> KnownOp:
        """An op with known properties of its inputs."""
        return KnownOp(op, tuple(map(self.shape, op.inputs)), tuple(self.numbers.get(value) for value in op.inputs))

    def _visit(self, op: Op) -> None:
        if op.index in self.like:
            self.shapes[Value(op.index)] = self.shape(self.like[op.index])
        if _is_settled(op):
            return
        node = self.node(op)
        for value, spec, shape in zip(
            op.values, op.outputs, _infer_shapes(node, self._find_open_size(op), self.rows), strict=True
        ):
            self.shapes.setdefault(value, shape if _fits(spec, shape) else spec.fill_shape(self.rows))
        if not any(map(_is_followed, op.outputs)):
            return
        for value, spec, numbers in zip(op.values, op.outputs, compute_integers(node), strict=False):
            if numbers is not None and _is_followed(spec):
                self.numbers[value] = numbers
                if spec.rank == 1:
                    self.shapes[value] = (len(numbers),)

    def _find_open_size(self, op: Op) -> int | None:
        """The size of the first axis that is open in an input: usually the rows of the batch."""
        for value in op.inputs:
            static = self.graph.spec(value).shape
            for axis, size in enumerate(static or ()):
                if size is None:
                    return self.shape(value)[axis]
        return None


def _is_followed(spec: Spec) -> bool:
    """Whether a size may be computed from tensors of this form."""
    return spec.dtype in _COUNTING_TYPES or (spec.scalar and spec.floating)


def _is_settled(op: Op) -> bool:
    """Whether nothing has to be inferred: all sizes are static, and no size may be computed from the outputs."""
    for spec in op.outputs:
        if (
            spec.shape is None
            or None in spec.shape
            or (_is_followed(spec) and math.prod(spec.fill_shape(0)) <= MAX_ENTRIES)
        ):
            return False
    return True


def _fits(spec: Spec, shape: Shape) -> bool:
    if spec.shape is None:
        return True
    return len(shape) == len(spec.shape) and all(s in (None, d) for s, d in zip(spec.shape, shape, strict=True))


# ---------------------------------------------------------------------- shapes
def _infer_shapes(node: KnownOp, open_size: int | None, rows: int) -> Sequence[Shape]:
    """The shapes of an op's outputs: by its rule, else by likeness."""
    rule = RULES.get(node.op.type)
    if rule is not None:
        try:
            found = rule(node)
        except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
            found = None
        if found is not None:
            return found if isinstance(found, list) else [found]
    return [_match_input(node, spec, rows if open_size is None else open_size) for spec in node.op.outputs]


def _match_input(node: KnownOp, spec: Spec, open_size: int) -> Shape:
    """The shape of the first input that fits the spec, else the spec with `open_size` for its open axes; if its rank is
    unknown, the shape of the largest input.
    """
    known = [shape for shape in node.shapes if shape is not None]
    if spec.shape is None:
        return max(known, key=math.prod, default=())
    same = [shape for shape in known if len(shape) == len(spec.shape) and _fits(spec, shape)]
    if same:
        return same[0]
    return tuple(open_size if axis is None else axis for axis in spec.shape)


def _require_known(compute: Callable[..., Shape | list[Shape]], shapes: int, *numbers: int) -> Rule:
    """Wrap a rule that takes the op, its first shapes and the values of these inputs, all of which must be
    known.
    """

    def rule(node: KnownOp) -> Shape | list[Shape] | None:
        arguments = [*node.shapes[:shapes], *(node.numbers[place] for place in numbers)]
        return None if None in arguments else compute(node, *arguments)

    return rule


def _shape_from_input(place: int) -> Rule:
    """Rule of ops whose shape is given by the entries of an input."""
    return lambda node: node.numbers[place]


def _reshape(node: KnownOp, shape: Shape, target: Numbers) -> Shape:
    rest = math.prod(size for size in target if size >= 0)
    return tuple(math.prod(shape) // rest if size < 0 else size for size in target)


def _tile(node: KnownOp, shape: Shape, times: Numbers) -> Shape:
    return tuple(a * b for a, b in zip(shape, times, strict=True))


def _reduce(node: KnownOp, shape: Shape, axes: Numbers) -> Shape:
    gone = {axis % len(shape) for axis in axes} if shape else set()
    if node.attribute("keep_dims"):
        return tuple(1 if axis in gone else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in gone)


def _product(node: KnownOp, left: Shape, right: Shape) -> Shape:
    turned = ("transpose_a", "transpose_b") if node.op.type == "MatMul" else ("adj_x", "adj_y")
    rows = left[-1] if node.attribute(turned[0]) else left[-2]
    columns = right[-2] if node.attribute(turned[1]) else right[-1]
    return (*broadcast_shapes(left[:-2], right[:-2]), rows, columns)


def _gather(node: KnownOp) -> Shape | None:
    table, places = node.shapes[:2]
    axis = node.numbers[2] if len(node.numbers) > 2 else (0,)
    if table is None or places is None or axis is None:
        return None
    at, alike = axis[0] % len(table), node.attribute("batch_dims")
    return (*table[:at], *places[alike % max(len(places), 1) :], *table[at + 1 :])


def _lookup(node: KnownOp) -> Shape | None:
    places, rows = node.shapes[1], node.op.outputs[0].shape
    if places is None or rows is None or None in rows[len(places) :]:
        return None
    return (*places, *(size for size in rows[len(places) :] if size is not None))


def _concat(node: KnownOp) -> Shape | None:
    parts, axis = node.shapes[:-1], node.numbers[-1]
    if axis is None or parts[0] is None:
        return None
    at = axis[0] % len(parts[0])
    length = sum(part[at] for part in parts if part is not None)
    return (*parts[0][:at], length, *parts[0][at + 1 :])


def _one_hot(node: KnownOp, shape: Shape, depth: Numbers) -> Shape:
    at = len(shape) if node.attribute("axis") < 0 else node.attribute("axis")
    return (*shape[:at], depth[0], *shape[at:])


def _range(_: KnownOp, start: Numbers, limit: Numbers, delta: Numbers) -> Shape:
    return (max(0, math.ceil((limit[0] - start[0]) / delta[0])),)


def _einsum(node: KnownOp) -> Shape:
    """The shape of an einsum: each label's size in an operand; an axis of one entry is broadcast."""
    left, _, right = str(node.op.attributes["equation"]).replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for term, shape in zip(left.split(","), node.shapes, strict=True):
        before, dots, after = term.partition("...")
        hidden = len(shape or ()) - len(before) - len(after) if dots else 0
        labels = [*before, *(f".{place}" for place in reversed(range(hidden))), *after]
        sizes |= {label: max(size, sizes.get(label, 1)) for label, size in zip(labels, shape or (), strict=True)}
    before, _, after = right.partition("...")
    hidden_labels = sorted((label for label in sizes if label[0] == "."), key=lambda label: -int(label[1:]))
    return tuple(sizes[label] for label in (*before, *hidden_labels, *after))


def _keep_shapes(node: KnownOp) -> list[Shape] | None:
    known = [shape for shape in node.shapes if shape is not None]
    return known if len(known) == len(node.op.outputs) else None


def _top_k(_: KnownOp, shape: Shape, count: Numbers) -> list[Shape]:
    return [(*shape[:-1], count[0])] * 2


def _expand(_: KnownOp, shape: Shape, axis: Numbers) -> Shape:
    at = axis[0] % (len(shape) + 1)
    return (*shape[:at], 1, *shape[at:])


def _squeeze(node: KnownOp, shape: Shape) -> Shape:
    named = node.op.attributes.get("squeeze_dims")
    gone = {axis % len(shape) for axis in named if isinstance(axis, int)} if isinstance(named, tuple) else set()
    return tuple(size for axis, size in enumerate(shape) if (axis not in gone if gone else size != 1))


def _stack(node: KnownOp) -> Shape | None:
    first = node.shapes[0]
    if first is None:
        return None
    at = node.attribute("axis") % (len(first) + 1)
    return (*first[:at], len(node.shapes), *first[at:])


def _slice(_: KnownOp, shape: Shape, begins: Numbers, sizes: Numbers) -> Shape:
    triples = zip(shape, begins, sizes, strict=True)
    return tuple(whole - begin if size < 0 else size for whole, begin, size in triples)


def _take_strided(node: KnownOp, shape: Shape, *bounds: Numbers) -> Shape:
    taken = np.broadcast_to(0, shape)[index_strided(node.op, *bounds)]
    return tuple(taken.shape)


def _pad(_: KnownOp, shape: Shape, around: Numbers) -> Shape:
    pairs = zip(around[::2], around[1::2], strict=True)
    return tuple(size + before + after for size, (before, after) in zip(shape, pairs, strict=True))


_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any")
_BINARY_OPS = (
    "Add", "AddV2", "Sub", "Mul", "RealDiv", "Div", "DivNoNan", "Maximum", "Minimum", "Pow", "SquaredDifference",
    "FloorDiv", "FloorMod", "Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "LogicalAnd",
    "LogicalOr",
)  # fmt: skip
_RANDOM_OPS = (
    "RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomUniformInt", "StatelessRandomUniformV2",
    "StatelessRandomNormalV2", "StatelessTruncatedNormalV2", "StatelessRandomUniform", "StatelessRandomNormal",
)  # fmt: skip

RULES: Mapping[str, Rule] = {
    "Reshape": _require_known(_reshape, 1, 1),
    "BroadcastTo": _shape_from_input(1),
    "Fill": _shape_from_input(0),
    "Tile": _require_known(_tile, 1, 1),
    **dict.fromkeys(_RANDOM_OPS, _shape_from_input(0)),
    **dict.fromkeys(_REDUCTIONS, _require_known(_reduce, 1, 1)),
    **dict.fromkeys(_BINARY_OPS, _require_known(lambda _, left, right: broadcast_shapes(left, right), 2)),
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _require_known(_product, 2)),
    "Transpose": _require_known(lambda _, shape, order: tuple(shape[axis] for axis in order), 1, 1),
    "GatherV2": _gather,
    "ResourceGather": _lookup,
    "ConcatV2": _concat,
    "Conv2DBackpropInput": _shape_from_input(0),
    "StridedSliceGrad": _shape_from_input(0),
    "OneHot": _require_known(_one_hot, 1, 1),
    "Range": _require_known(_range, 0, 0, 1, 2),
    "Einsum": _einsum,
    "TopKV2": _require_known(_top_k, 1, 1),
    "ExpandDims": _require_known(_expand, 1, 1),
    "Squeeze": _require_known(_squeeze, 1),
    "Pack": _stack,
    "Slice": _require_known(_slice, 1, 1, 2),
    "StridedSlice": _require_known(_take_strided, 1, 1, 2, 3),
    **dict.fromkeys(("Pad", "PadV2"), _require_known(_pad, 1, 1)),
    **dict.fromkeys(
        ("SelectV2", "Select"), _require_known(lambda _, *all_of: functools.reduce(broadcast_shapes, all_of), 3)
    ),
    **dict.fromkeys(("Identity", "IdentityN", "StopGradient", "Cast"), _keep_shapes),
}


def has_known_crossings(cut: Cut) -> bool:
    """Whether the sizes of all boundaries and of their gradients are known, given the rows."""
    return not _open_crossings(cut)


def fill_cut_sizes(cut: Cut, shapes: Sequence[Shape], rows: int) -> Cut:
    """The cut in which boundaries and their gradients have all sizes but that of the batch axis, inferred for inputs of
    these shapes and rows.
    """
    program = cut.program
    leaves = {
        Value(leaf.op): (rows, *shape[1:]) if leaf.batched else tuple(shape)
        for leaf, shape in zip(program.leaves, shapes, strict=True)
    }
    crossing = _open_crossings(cut)
    above = program.graph.ascend([of.op for of in crossing.values()])
    sizes = Sizes(program.graph, rows, leaves).follow(sorted(above))
    ops = list(program.graph.ops)
    for value, of in crossing.items():
        outputs, shape = list(ops[value.op].outputs), sizes.shape(of)
        known = outputs[value.out].shape
        first = (None,) if known and known[0] is None else shape[:1]  # the first axis stays open if it is the batch's
        outputs[value.out] = Spec(outputs[value.out].dtype, (*first, *shape[1:]))
        ops[value.op] = replace(ops[value.op], outputs=tuple(outputs))
    return replace(cut, program=replace(program, graph=replace(program.graph, ops=tuple(ops))))


def _open_crossings(cut: Cut) -> dict[Value, Value]:
    """The boundaries and their gradients with open axes other than rows, each with the value that has its shape: a
    gradient with its boundary.
    """
    back = {flow.gradient: flow.boundary for request in cut.program.requests for flow in request.flows}
    crossing = {**{boundary.value: boundary.value for boundary in cut.boundaries}, **back}
    shapes = {value: cut.program.graph.spec(value).shape for value in crossing}
    return {value: of for value, of in crossing.items() if (shape := shapes[value]) is None or None in shape[1:]}


_SELECTIONS = frozenset({
    "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "Where", "DynamicPartition", "ListDiff",
    "StringSplitV2", "SparseFillEmptyRows",
})  # fmt: skip
"""Ops whose number of rows depends on their input's values, and is at most that of the input."""


@dataclass
class ExchangeSizes:
    """Bytes of a Cut's exchanges; `shapes` are those of a batch's leaves, if known."""

    cut: Cut
    shapes: Sequence[tuple[int, ...]] = ()
    _rows: dict[tuple[Value, int], int | None] = field(default_factory=dict)

    def nbytes(self, each: Exchange, counts: Sequence[int]) -> int | None:
        """Bytes of an exchange in a step whose micro-batches have `counts` rows; None if known only at run time."""
        if each.part is None:
            shape = each.spec.shape
            return None if shape is None or None in shape[1:] else each.spec.nbytes(unknown=sum(counts))
        part, variable = self._part(each.part)
        shape = each.spec.shape if variable is None or each.piece else variable.spec.shape
        if not part.sparse:  # a gradient has the form of its variable
            return None if shape is None or None in shape else Spec(each.spec.dtype, shape).nbytes()
        rows = self._count_slices(part, counts)
        row = None if not shape or None in shape[1:] else Spec(each.spec.dtype, shape[1:]).nbytes()
        return None if rows is None or row is None else rows * row

    def is_upper_bound(self, each: Exchange) -> bool:
        """Whether `nbytes` is only an upper bound, as the values of a tensor determine its number of rows."""
        if each.part is None:
            return False
        part, _ = self._part(each.part)
        graph = self.cut.program.graph
        return part.sparse and any(graph.ops[op].type in _SELECTIONS for op in graph.ascend([part.values[1].op]))

    def _part(self, key: PartKey) -> tuple[GradientPart, Variable | None]:
        program, (request, source, *_) = self.cut.program, key
        return program.gradient_parts[key], program.variable_ops.get(program.requests[request].origins[source])

    def _count_slices(self, part: GradientPart, counts: Sequence[int]) -> int | None:
        """The number of slices of a sparse part in a step: those of micro-batches are concatenated, or added if their
        indices are equal; None if unknown.
        """
        found = [self._count_indices(part.values[1], rows) for rows in (counts if part.concatenated else counts[:1])]
        known = [rows for rows in found if rows is not None]
        return sum(known) if len(known) == len(found) else None

    def _count_indices(self, indices: Value, rows: int) -> int | None:
        """The number of indices in a micro-batch of `rows` rows; None if unknown."""
        if (indices, rows) in self._rows:
            return self._rows[indices, rows]
        graph, program = self.cut.program.graph, self.cut.program
        static = graph.spec(indices).shape
        found = static[0] if static else None
        if found is None:
            above = graph.ascend([indices.op])
            leaves = {
                leaf.op: self._leaf_shape(n, leaf, rows) for n, leaf in enumerate(program.leaves) if leaf.op in above
            }
            known = {Value(op): shape for op, shape in leaves.items() if shape is not None}
            if len(known) == len(leaves):
                like = {feed: arrival.boundary for feed, (_, arrival) in program.arrivals.items()}
                found = math.prod(Sizes(graph, rows, known, like=like).follow(sorted(above)).shape(indices))
        self._rows[indices, rows] = found
        return found

    def _leaf_shape(self, number: int, leaf: Leaf, rows: int) -> Shape | None:
        """The shape of leaf number `number` in a micro-batch of `rows` rows; None if an axis is unknown."""
        shape = self.shapes[number] if self.shapes else leaf.spec.shape
        if shape is None:
            return None
        whole = (rows, *shape[1:]) if leaf.batched else tuple(shape)
        known = tuple(axis for axis in whole if axis is not None)
        return known if len(known) == len(whole) else None
