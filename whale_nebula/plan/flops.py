"""Floating-point operations by op type, computed from shapes alone.

A multiplication and an addition are two, as `tf.profiler` counts them: a product of (m, k) and (k, n) is 2·m·n·k. An
elementwise op counts one for each output element, a sum one for each input element, and ops that only move data count
nothing. Functions such as tanh also count one, as their cost differs by device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.ir.integers import KnownOp, Numbers, Shape, compute_integers
from whale_nebula.ir.sizes import Sizes
from whale_nebula.spec import Value

Rule = Callable[[Op, Sequence[Shape]], float]
"""A function from the shapes of an op's inputs, followed by those of its outputs, to its cost."""


def flops(op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Floating-point operations of one run of an op that calls no function.

    >>> from whale_nebula.spec import Spec
    >>> product = Op(2, "MatMul", outputs=(Spec("float32", (8, 16)),))
    >>> flops(product, [(8, 64), (64, 16)], [(8, 16)])
    16384
    """
    rule = RULES.get(op.type, _elements)
    try:
        return max(int(rule(op, [*inputs, *outputs])), 0)
    except (IndexError, ValueError, KeyError):
        return 0


def _elements(op: Op, shapes: Sequence[Shape]) -> float:
    """Cost function: one for each element of each floating-point output."""
    pairs = zip(reversed(op.outputs), reversed(shapes), strict=False)
    return sum(math.prod(shape) for spec, shape in pairs if spec.floating)


def _count_each(times: float, place: int = -1) -> Rule:
    """Cost function: a fixed number for each element of an input, or of the output."""
    return lambda op, shapes: times * math.prod(shapes[place])


def _sum(op: Op, shapes: Sequence[Shape]) -> float:
    return math.prod(shapes[0]) if op.outputs[0].floating else 0


def _matmul(op: Op, shapes: Sequence[Shape]) -> float:
    turned = op.attributes.get("transpose_a", op.attributes.get("adj_x", False))
    return 2 * math.prod(shapes[-1]) * shapes[0][-2 if turned else -1]


def _einsum(op: Op, shapes: Sequence[Shape]) -> float:
    """Cost function: the product of all labels' sizes, doubled for a summation; an ellipsis is the remaining axes."""
    left, _, right = str(op.attributes["equation"]).replace(" ", "").partition("->")
    terms = left.split(",")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes[: len(terms)], strict=True):
        before, dots, after = term.partition("...")
        hidden = len(shape) - len(before) - len(after) if dots else 0
        labels = [*before, *(f".{place}" for place in reversed(range(hidden))), *after]
        for label, size in zip(labels, shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    summed = any(label not in right for label in sizes if not label.startswith("."))
    return math.prod(sizes.values()) * (2 if summed and len(terms) > 1 else 1)


def _convolution(counted_input: int, window: int, axes: int) -> Rule:
    """Cost function: for each element of input `counted_input`, a product over the window and, unless depthwise,
    channels.
    """
    return lambda op, shapes: 2 * math.prod(shapes[counted_input]) * math.prod(shapes[window][:axes])


def _pooling(op: Op, shapes: Sequence[Shape]) -> float:
    """Cost function: the window's size for each output element; for a gradient, for each element of its input."""
    size = op.attributes.get("ksize", ())
    window = math.prod(int(axis) for axis in size if isinstance(axis, int)) if isinstance(size, tuple) else 1
    return math.prod(shapes[-2 if op.type.endswith("Grad") else -1]) * window


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
    **dict.fromkeys(_MOVES, _count_each(0)),
    **dict.fromkeys(_SUMS, _sum),
    "AddN": lambda op, shapes: math.prod(shapes[-1]) * (len(shapes) - 2),
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matmul),
    "Einsum": _einsum,
    **dict.fromkeys(("Conv2D", "Conv3D"), _convolution(-1, 1, -1)),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), _convolution(2, 1, -1)),
    **dict.fromkeys(("Conv2DBackpropFilter", "Conv3DBackpropFilterV2"), _convolution(2, -1, -1)),
    "DepthwiseConv2dNative": _convolution(-1, 1, -2),
    "DepthwiseConv2dNativeBackpropInput": _convolution(2, 1, -2),
    "DepthwiseConv2dNativeBackpropFilter": _convolution(2, -1, -2),
    **dict.fromkeys(("AvgPool", "AvgPool3D", "MaxPool", "MaxPool3D"), _pooling),
    **dict.fromkeys(("AvgPoolGrad", "AvgPool3DGrad", "MaxPoolGrad", "MaxPool3DGrad"), _pooling),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _count_each(5)),
    **dict.fromkeys(("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"), _count_each(7, 0)),
    "FusedBatchNormV3": _count_each(6, 0),
    "FusedBatchNormGradV3": _count_each(11, 0),
    **dict.fromkeys(("Rsqrt", "RsqrtGrad", "SqrtGrad", "TanhGrad", "SigmoidGrad", "SquaredDifference"), _count_each(2)),
}


LOOPS = frozenset({"While", "StatelessWhile"})
MOST_TRIPS = 10_000


def count_trips(op: Op, graph: Graph, numbers: Mapping[Value, Numbers]) -> int | None:
    """The number of a loop's iterations, given known integers outside it: from its limit, or by evaluating its
    condition.
    """
    state = [numbers.get(value) for value in op.inputs]  # the counter, the limit, the loop variables
    limit = state[1] if len(state) > 1 else None
    if limit is not None and len(limit) == 1 and limit[0] > 0:
        return limit[0]
    condition, body = (graph.functions[name] for name in op.functions[:2])
    needed = _find_condition_inputs(condition, body)
    for trip in range(MOST_TRIPS):
        (goes_on,) = _evaluate(condition, condition.returns[:1], state)
        if goes_on is None or not goes_on[0]:
            return None if goes_on is None else trip
        after = dict(zip(needed, _evaluate(body, [body.returns[place] for place in needed], state), strict=True))
        state = [after.get(place, before) for place, before in enumerate(state)]
    return None


def _find_condition_inputs(condition: Graph, body: Graph) -> list[int]:
    """The loop variables that the condition depends on, directly or through the body."""

    def find_read_arguments(graph: Graph, values: Sequence[Value]) -> set[int]:
        above = graph.ascend(value.op for value in values)
        return {place for place, argument in enumerate(graph.arguments) if argument in above}

    found, more = set[int](), find_read_arguments(condition, condition.returns[:1])
    while more != found:
        found, more = more, more | find_read_arguments(body, [body.returns[place] for place in more])
    return sorted(found)


def _evaluate(graph: Graph, values: Sequence[Value], state: Sequence[Numbers | None]) -> list[Numbers | None]:
    """Evaluate integers of a function's body from those of its arguments."""
    given = zip(graph.arguments, state, strict=False)
    known = {Value(argument): numbers for argument, numbers in given if numbers is not None}
    for index in sorted(graph.ascend(value.op for value in values)):
        op = graph.ops[index]
        shapes = tuple(None if v not in known else (len(known[v]),) for v in op.inputs)
        found = compute_integers(KnownOp(op, shapes, tuple(known.get(value) for value in op.inputs)))
        known.update((value, each) for value, each in zip(op.values, found, strict=False) if each is not None)
    return [known.get(value) for value in values]


_BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
_LISTS = {"TensorListPushBack": 1, "TensorListSetItem": 2}
"""Ops that put a tensor into a list, and the index of that input."""


@dataclass
class FlopCounter:
    """Costs of a graph's ops whose sizes are known. `open_loops` are loops counted as one iteration."""

    sizes: Sizes
    trips: dict[int, int] = field(default_factory=dict)
    open_loops: set[str] = field(default_factory=set)
    _counted: dict[int, int] = field(default_factory=dict)

    def flops(self, ops: Iterable[int]) -> int:
        """Floating-point operations of these ops."""
        return sum(self.count_op(self.sizes.graph.ops[index]) for index in ops)

    def count_op(self, op: Op) -> int:
        """Floating-point operations of one op; for a branch those of the most expensive one."""
        if op.index not in self._counted:
            shapes = [self.sizes.shape(value) for value in op.inputs]
            numbers = [self.sizes.numbers.get(value) for value in op.inputs]
            if op.type in LOOPS:
                count = self.count_loop_trips(op) * self._count_body(op.functions[1], shapes, [None] * len(shapes))
            elif op.type in _BRANCHES:
                count = max(self._count_body(name, shapes[1:], numbers[1:]) for name in op.functions)
            elif op.functions:
                count = sum(self._count_body(name, shapes, numbers) for name in op.functions)
            else:
                empty = not op.outputs or op.type in ("Const", "Placeholder")
                count = 0 if empty else flops(op, shapes, [self.sizes.shape(value) for value in op.values])
            self._counted[op.index] = count
        return self._counted[op.index]

    def count_loop_trips(self, op: Op) -> int:
        """The number of a loop's iterations; 1, which is recorded, if unknown."""
        if op.index not in self.trips:
            found = count_trips(op, self.sizes.graph, self.sizes.numbers)
            if found is None:
                self.open_loops.add(op.name)
            else:  # a loop's first output is its counter, the limit of its gradient's loop
                self.sizes.numbers[Value(op.index)] = (found,)
            self.trips[op.index] = 1 if found is None else found
        return self.trips[op.index]

    def nbytes(self, value: Value) -> int:
        """Bytes of a value; a tensor list filled by a loop counts one element for each iteration."""
        op = self.sizes.graph.ops[value.op]
        if self.sizes.graph.spec(value).dtype != "variant" or op.type not in LOOPS:
            return self.sizes.nbytes(value)
        shapes = [self.sizes.shape(given) for given in op.inputs]
        inner = self._body(op.functions[1], shapes, [None] * len(shapes)).sizes
        maker = inner.graph.ops[inner.graph.returns[value.out].op]
        while maker.type == "Identity":
            maker = inner.graph.ops[maker.inputs[0].op]
        item = _LISTS.get(maker.type)
        return 0 if item is None else self.count_loop_trips(op) * inner.nbytes(maker.inputs[item])

    def _count_body(self, name: str, shapes: Sequence[Shape], numbers: Sequence[Numbers | None]) -> int:
        inner = self._body(name, shapes, numbers)
        count = inner.flops(range(len(inner.sizes.graph)))
        self.open_loops |= inner.open_loops
        return count

    def _body(self, name: str, shapes: Sequence[Shape], numbers: Sequence[Numbers | None]) -> FlopCounter:
        """The costs of a function's body for the sizes of its arguments."""
        body: Graph = self.sizes.graph.functions[name]
        given = [Value(argument) for argument in body.arguments]
        known = {v: n for v, n in zip(given, numbers, strict=False) if n is not None}
        sizes = Sizes(body, self.sizes.rows, dict(zip(given, shapes, strict=False)), numbers=known)
        return FlopCounter(sizes.follow(range(len(body))))
