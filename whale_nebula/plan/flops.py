"""Floating-point operations by op type, computed from shapes alone.

A multiplication and an addition are two, as `tf.profiler` counts them: a product of (m, k) and (k, n) is 2·m·n·k. An
op that works element by element counts one for each element that it gives, a sum one for each that it reads, and
what only moves data counts nothing. Functions such as tanh count one, too: what they cost differs by device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.ir.integers import Numbers, Shape, Site, integers
from whale_nebula.ir.sizes import Sizes
from whale_nebula.spec import Spec, Value

Rule = Callable[[Op, Sequence[Shape], Sequence[Shape]], float]


def flops(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Floating-point operations of one run of an op that calls no function.

    >>> from whale_nebula.spec import Spec
    >>> product = Op(2, "MatMul", outputs=(Spec("float32", (8, 16)),))
    >>> flops(product, [(8, 64), (64, 16)], [(8, 16)])
    16384
    """
    rule = RULES.get(op.type, _elements)
    try:
        return max(int(rule(op, inputs, outputs)), 0)
    except (IndexError, ValueError, KeyError):
        return 0


# ---------------------------------------------------------------------- rules
def _elements(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    """One for each element of each output that is a number with a fraction."""
    pairs = zip(op.outputs, outputs, strict=True)
    return sum(math.prod(shape) for spec, shape in pairs if spec.floating)


def _free(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    return 0


def _each_input(times: float, place: int = 0) -> Rule:
    """So many for each element of an input."""
    return lambda op, inputs, outputs: times * math.prod(inputs[place])


def _each_output(times: float) -> Rule:
    return lambda op, inputs, outputs: times * math.prod(outputs[0])


def _sum(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    return math.prod(inputs[0]) if op.outputs[0].floating else 0


def _matmul(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    turned = op.attributes.get("transpose_a", op.attributes.get("adj_x", False))
    return 2 * math.prod(outputs[0]) * inputs[0][-2 if turned else -1]


def _einsum(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    """All indices together, twice where something is summed; a dot-dot-dot stands for the axes that are left."""
    left, _, right = str(op.attributes["equation"]).replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for term, shape in zip(left.split(","), inputs, strict=True):
        for label, size in zip(_labels(term, len(shape)), shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    summed = any(label not in right for label in sizes if not label.startswith("."))
    return math.prod(sizes.values()) * (2 if summed and len(inputs) > 1 else 1)


def _labels(term: str, rank: int) -> list[str]:
    """A name for each axis: its letter, or its place from the right within the dots."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return [*before, *(f".{place}" for place in reversed(range(hidden))), *after]


def _convolution(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    """Each output is a product of the filter's window and channels in."""
    return 2 * math.prod(outputs[0]) * math.prod(inputs[1][:-1])


def _depthwise(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    return 2 * math.prod(outputs[0]) * math.prod(inputs[1][:-2])


def _to_input(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    """The gradient of a convolution for its input: inputs are (sizes, filter, gradient)."""
    return 2 * math.prod(inputs[2]) * math.prod(inputs[1][:-1])


def _to_filter(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    """The gradient of a convolution for its filter: inputs are (input, sizes, gradient)."""
    return 2 * math.prod(inputs[2]) * math.prod(outputs[0][:-1])


def _to_depthwise_input(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    return 2 * math.prod(inputs[2]) * math.prod(inputs[1][:-2])


def _to_depthwise_filter(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    return 2 * math.prod(inputs[2]) * math.prod(outputs[0][:-2])


def _pooling(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    return math.prod(outputs[0]) * _window(op)


def _to_pooled(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    return math.prod(inputs[-1]) * _window(op)


def _window(op: Op) -> int:
    size = op.attributes.get("ksize", ())
    return math.prod(int(axis) for axis in size if isinstance(axis, int)) if isinstance(size, tuple) else 1


def _sum_of_many(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    return math.prod(outputs[0]) * (len(inputs) - 1)


_MOVES = (
    "Identity", "IdentityN", "Const", "Placeholder", "PlaceholderWithDefault", "ReadVariableOp", "ResourceGather",
    "ResourceGatherNd", "Gather", "GatherV2", "GatherNd", "ScatterNd", "Reshape", "Transpose", "Shape", "ConcatV2",
    "Pack", "Unpack", "Split", "SplitV", "Slice", "StridedSlice", "StridedSliceGrad", "Pad", "PadV2", "MirrorPad",
    "Tile", "ExpandDims", "Squeeze", "BroadcastTo", "Fill", "ZerosLike", "OnesLike", "OneHot", "StopGradient",
    "PreventGradient", "Cast", "Bitcast", "ReverseV2", "ReverseSequence", "Roll", "MatrixBandPart", "SpaceToBatchND",
    "BatchToSpaceND",
    "TensorListStack", "TensorListFromTensor", "TensorListGetItem", "TensorListPopBack", "Where", "DynamicPartition",
    "DynamicStitch", "MatrixDiagV3", "MatrixDiagPartV3", "Range", "VariableShape", "CheckNumericsV2", "CheckNumerics",
    "PyFunc", "EagerPyFunc", "OptionalGetValue", "DepthToSpace", "SpaceToDepth", "InvertPermutation", "NoOp", "Assert",
)  # fmt: skip
_SUMS = (
    "Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm", "BiasAddGrad", "Cumsum", "Cumprod", "L2Loss",
    "SegmentSum", "UnsortedSegmentSum", "SegmentMean", "UnsortedSegmentMax", "UnsortedSegmentMin",
)  # fmt: skip

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_MOVES, _free),
    **dict.fromkeys(_SUMS, _sum),
    "AddN": _sum_of_many,
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matmul),
    "Einsum": _einsum,
    **dict.fromkeys(("Conv2D", "Conv3D"), _convolution),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), _to_input),
    **dict.fromkeys(("Conv2DBackpropFilter", "Conv3DBackpropFilterV2"), _to_filter),
    "DepthwiseConv2dNative": _depthwise,
    "DepthwiseConv2dNativeBackpropInput": _to_depthwise_input,
    "DepthwiseConv2dNativeBackpropFilter": _to_depthwise_filter,
    **dict.fromkeys(("AvgPool", "AvgPool3D", "MaxPool", "MaxPool3D"), _pooling),
    **dict.fromkeys(("AvgPoolGrad", "AvgPool3DGrad", "MaxPoolGrad", "MaxPool3DGrad"), _to_pooled),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _each_output(5)),
    **dict.fromkeys(("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"), _each_input(7)),
    "FusedBatchNormV3": _each_input(6),
    "FusedBatchNormGradV3": _each_input(11),
    **dict.fromkeys(("Rsqrt", "RsqrtGrad", "SqrtGrad", "TanhGrad", "SigmoidGrad"), _each_output(2)),
    "SquaredDifference": _each_output(2),
}


LOOPS = frozenset({"While", "StatelessWhile"})
MOST = 10_000
_LIMIT, _BODY = 1, 1  # inputs of a loop: its counter, its limit, what it carries; functions: its condition, its body


def turns(op: Op, graph: Graph, numbers: Mapping[Value, Numbers]) -> int | None:
    """How often a loop turns, given the integers that are known outside it."""
    limit = numbers.get(op.inputs[_LIMIT]) if len(op.inputs) > _LIMIT else None
    if limit is not None and len(limit) == 1 and limit[0] > 0:
        return limit[0]
    return _count_turns(op, graph, [numbers.get(value) for value in op.inputs])


def _count_turns(op: Op, graph: Graph, state: list[Numbers | None]) -> int | None:
    """Turn the loop with nothing but the integers that its condition asks for."""
    condition, body = graph.functions[op.functions[0]], graph.functions[op.functions[_BODY]]
    asked = _carried_places(condition, body)
    for turn in range(MOST):
        (goes_on,) = _evaluate_integers(condition, condition.returns[:1], state)
        if goes_on is None:
            return None
        if not goes_on[0]:
            return turn
        after = dict(zip(asked, _evaluate_integers(body, [body.returns[place] for place in asked], state), strict=True))
        state = [after.get(place, before) for place, before in enumerate(state)]
    return None


def _carried_places(condition: Graph, body: Graph) -> list[int]:
    """The places of what the condition reads, and of what the body makes these from."""
    found = _read(condition, condition.returns[:1])
    while True:
        more = found | _read(body, [body.returns[place] for place in found])
        if more == found:
            return sorted(found)
        found = more


def _read(graph: Graph, values: Sequence[Value]) -> set[int]:
    above = graph.ascend(value.op for value in values)
    return {place for place, argument in enumerate(graph.arguments) if argument in above}


def _evaluate_integers(graph: Graph, values: Sequence[Value], state: Sequence[Numbers | None]) -> list[Numbers | None]:
    known: dict[Value, Numbers] = {}
    given = zip(graph.arguments, state, strict=False)
    known.update({Value(argument): numbers for argument, numbers in given if numbers is not None})
    for index in sorted(graph.ascend(value.op for value in values)):
        op = graph.ops[index]
        shapes = tuple(None if v not in known else (len(known[v]),) for v in op.inputs)
        found = integers(Site(op, shapes, tuple(known.get(value) for value in op.inputs)))
        known.update((value, each) for value, each in zip(op.values, found, strict=False) if each is not None)
    return [known.get(value) for value in values]


_BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
_LISTS = {"TensorListPushBack": 1, "TensorListSetItem": 2}
"""Ops that put a tensor into a list, and which of their inputs it is."""


@dataclass
class Effort:
    """Counts for the ops of a graph whose sizes were followed. `open_loops` are loops counted as one turn."""

    sizes: Sizes
    turned: dict[int, int] = field(default_factory=dict)
    open_loops: set[str] = field(default_factory=set)
    counted: dict[int, int] = field(default_factory=dict)

    def flops(self, ops: Iterable[int]) -> int:
        """Floating-point operations of these ops."""
        return sum(self.of(self.sizes.graph.ops[index]) for index in ops)

    def of(self, op: Op) -> int:
        """Floating-point operations of one op."""
        if op.index not in self.counted:
            self.counted[op.index] = self._count_call(op) if op.functions else self._plain(op)
        return self.counted[op.index]

    def _plain(self, op: Op) -> int:
        if not op.outputs or op.type in ("Const", "Placeholder"):
            return 0
        shapes = [self.sizes.shape(value) for value in op.inputs]
        return flops(op, shapes, [self.sizes.shape(value) for value in op.values])

    def nbytes(self, value: Value) -> int:
        """Bytes of a value; a list that a loop fills has what it puts in at each turn."""
        op = self.sizes.graph.ops[value.op]
        if self.sizes.graph.spec(value).dtype == "variant" and op.type in LOOPS:
            return self.turns(op) * self._count_pushed(op, value.out)
        return self.sizes.nbytes(value)

    def turns(self, op: Op) -> int:
        """How often a loop turns; 1 where nothing tells, which is noted."""
        if op.index not in self.turned:
            found = turns(op, self.sizes.graph, self.sizes.numbers)
            if found is None:
                self.open_loops.add(op.name)
            else:  # a loop's first output is its counter, by which its gradient counts
                self.sizes.numbers[Value(op.index)] = (found,)
            self.turned[op.index] = 1 if found is None else found
        return self.turned[op.index]

    def _count_call(self, op: Op) -> int:
        shapes = [self.sizes.shape(value) for value in op.inputs]
        numbers = [self.sizes.numbers.get(value) for value in op.inputs]
        if op.type in LOOPS:
            return self.turns(op) * self._inside(op.functions[1], shapes, [None] * len(shapes))
        if op.type in _BRANCHES:
            return max(self._inside(name, shapes[1:], numbers[1:]) for name in op.functions)
        return sum(self._inside(name, shapes, numbers) for name in op.functions)

    def _inside(self, name: str, shapes: Sequence[Shape], numbers: Sequence[Numbers | None]) -> int:
        inner = self._body(name, shapes, numbers)
        count = inner.flops(range(len(inner.sizes.graph)))
        self.open_loops |= inner.open_loops
        return count

    def _body(self, name: str, shapes: Sequence[Shape], numbers: Sequence[Numbers | None]) -> Effort:
        """A function's body, followed with the sizes of what it is given."""
        body: Graph = self.sizes.graph.functions[name]
        given = [Value(argument) for argument in body.arguments]
        known = {v: n for v, n in zip(given, numbers, strict=False) if n is not None}
        sizes = Sizes(body, self.sizes.rows, dict(zip(given, shapes, strict=False)), numbers=known)
        return Effort(sizes.follow(range(len(body))))

    def _count_pushed(self, op: Op, place: int) -> int:
        """The bytes that a loop's body puts into one of its lists."""
        shapes = [self.sizes.shape(value) for value in op.inputs]
        inner = self._body(op.functions[1], shapes, [None] * len(shapes))
        maker = _behind(inner.sizes.graph, inner.sizes.graph.returns[place])
        item = _LISTS.get(maker.type)
        if item is None:
            return 0
        value = maker.inputs[item]
        return Spec(inner.sizes.graph.spec(value).dtype, inner.sizes.shape(value)).nbytes()


def _behind(graph: Graph, value: Value) -> Op:
    """The op that makes a value, whatever only hands it on."""
    while graph.ops[value.op].type == "Identity":
        value = graph.ops[value.op].inputs[0]
    return graph.ops[value.op]
