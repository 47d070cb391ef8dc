"""Floating-point operations, op by op, from shapes alone: a pure table.

A multiplication and an addition are two, as `tf.profiler` counts them: a product of (m, k) and (k, n) is 2·m·n·k. An
op that works element by element counts one for each element that it gives, a sum one for each that it reads, and
what only moves data counts nothing. Functions such as tanh count one, too: what they cost differs by device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from whale_nebula.ir.graph import Op
from whale_nebula.ir.integers import Shape

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
