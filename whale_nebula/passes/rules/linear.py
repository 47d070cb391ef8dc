"""Rules for products of tensors, convolutions, and ops that mix some axes and keep the others."""

from __future__ import annotations

from whale_nebula.passes.rules.algebra import add_folds, move_by_wholes, multiply_folds
from whale_nebula.passes.rules.axes import axes, describe_entries, fold_axes, number_axes
from whale_nebula.passes.rules.registry import ROWS, WHOLE, Axes, Fold, Node, Result, Undecided, rule, whole


@axes("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 SparseMatMul", rest=multiply_folds)
def matmul(node: Node) -> Axes:
    """`[..., m, k] x [..., k, n]`, either transposed."""
    ranks = [node.need_rank(place, "a product of rows with an unknown number of axes") for place in (0, 1)]
    left = _matrix(node, "mk", ranks[0], ("transpose_a", "adj_x"))
    right = _matrix(node, "kn", ranks[1], ("transpose_b", "adj_y"))
    outer = max(left[:-2], right[:-2], key=len)
    return Axes((left, right), ([*outer, "m", "n"],))


def _matrix(node: Node, names: str, rank: int, flags: tuple[str, str]) -> list[str]:
    turned = any(node.flag(flag) for flag in flags)
    return [*number_axes(rank - 2, skip=2), *(names[::-1] if turned else names)]


@axes("Einsum", rest=multiply_folds)
def einsum(node: Node) -> Axes:
    """The axes by the equation."""
    equation = str(node.attribute("equation", "")).replace(" ", "")
    terms, arrow, out = equation.partition("->")
    ranks = [node.rank(place) for place in range(len(node.folds))]
    inputs = [_labels(term, rank) for term, rank in zip(terms.split(","), ranks, strict=False)]
    known = [labels for labels in inputs if labels is not None]
    if not arrow or len(known) != len(ranks):
        raise Undecided("an einsum that cannot be read")
    if any(len(set(labels)) < len(labels) for labels in known):
        raise Undecided("an einsum that takes a diagonal")
    dots = max(known, key=lambda labels: sum(label.isdigit() for label in labels))
    ellipsis = [label for label in dots if label.isdigit()]
    result = [*out.partition("...")[0], *(ellipsis if "..." in out else []), *out.partition("...")[2]]
    return Axes(tuple(known), (result,))


def _labels(term: str, rank: int | None) -> list[str] | None:
    head, dots, tail = term.partition("...")
    if not dots:
        return list(head) if rank is None or rank == len(head) else None
    if rank is None or rank < len(head) + len(tail):
        return None
    return [*head, *number_axes(rank - len(head) - len(tail)), *tail]


def _describe_images(node: Node, place: int, channel: str) -> list[str]:
    """Labels of samples, positions and channels of one input or, at -1, of the output; channels are second or last."""
    rank = node.op.outputs[0].rank if place < 0 else node.rank(place)
    places = [f"x{number}" for number in range((rank or 4) - 2)]
    first = str(node.attribute("data_format", "NHWC")).startswith("NC")
    return ["n", channel, *places] if first else ["n", *places, channel]


def _mix_places(node: Node, *others: str) -> dict[str, str]:
    """The image positions, and other axes, which cannot be cut."""
    return dict.fromkeys(["x0", "x1", "x2", *others], f"{node.op.type} along the batch axis")


def _describe_convolution(node: Node, image: int, filters: int, result: int) -> Axes:
    """`n x i, k i o -> n x o`, the operands at these places of (inputs, output -1). In a depthwise one `o` consists of
    `i` and a factor; with groups of channels none of these is cut.
    """
    depthwise = "Depthwise" in node.op.type
    spec = node.op.outputs[0].shape if filters < 0 else node.spec(filters).shape
    channel = _describe_images(node, image, "i").index("i")
    size = node.op.outputs[0].shape if image < 0 else node.spec(image).shape
    grouped = spec is None or size is None or (not depthwise and spec[-2] != size[channel])
    kernel = [f"k{number}" for number in range(len(spec or ()) - 2)] if spec is not None else ["k0", "k1"]
    found = {
        image: _describe_images(node, image, "i"),
        filters: [*kernel, "i", "f" if depthwise else "o"],
        result: _describe_images(node, result, "i" if depthwise else "o"),
    }
    inputs = tuple(found.get(place) for place in range(len(node.folds)))
    return Axes(inputs, (found[-1],), mixed=_mix_places(node, *kernel, "f", *(["i", "o"] if grouped else [])))


@axes("Conv2D Conv3D Conv DepthwiseConv2dNative", rest=multiply_folds)
def convolution(node: Node) -> Axes:
    """Samples along axis 0, with filters common to all samples."""
    return _describe_convolution(node, 0, 1, -1)


@axes("Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput", rest=multiply_folds)
def transposed_convolution(node: Node) -> Axes:
    """A transposed convolution, whose first operand is the output's shape."""
    return _describe_convolution(node, -1, 1, 2)


@axes("Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter", rest=multiply_folds)
def filters_gradient(node: Node) -> Axes:
    """The gradient of filters, a sum over samples."""
    return _describe_convolution(node, 0, -1, 2)


@axes("Cross", rest=multiply_folds)
def cross(node: Node) -> Axes:
    """Cross products of vectors along the last axis."""
    return describe_entries(node)._replace(mixed={"1": "the cross product is along the batch axis"})


@axes("BiasAdd BiasAddV1", rest=add_folds)
def bias(node: Node) -> Axes:
    """A vector that is added along the last axis, or the second with channels first."""
    labels = number_axes(node.need_rank(0))
    channel = labels[1 if node.attribute("data_format", "NHWC") == "NCHW" else -1]
    return Axes((labels, [channel]), (labels,))


@axes("BiasAddGrad", rest=move_by_wholes)
def bias_gradient(node: Node) -> Axes:
    """All axes but the channels are summed."""
    labels = number_axes(node.need_rank(0))
    return Axes((labels,), ([labels[1 if node.attribute("data_format", "NHWC") == "NCHW" else -1]],))


_POOLS = "AvgPool AvgPool3D MaxPool MaxPoolV2 MaxPool3D MaxPoolWithArgmax Dilation2D"
_IMAGES = """
    LRN ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea ScaleAndTranslate SpaceToDepth DepthToSpace
    ExtractImagePatches FractionalAvgPool FractionalMaxPool
"""
_IMAGE_GRADIENTS = """
    MaxPoolGrad MaxPoolGradV2 MaxPoolGradGrad MaxPool3DGrad AvgPoolGrad AvgPool3DGrad LRNGrad
    ResizeBilinearGrad ResizeNearestNeighborGrad ResizeBicubicGrad
"""


_INNERMOST = {
    1: """
    Softmax LogSoftmax TopKV2 TopK FFT IFFT RFFT IRFFT MatrixDiag MatrixDiagV2 MatrixDiagV3 AdjustHue
    AdjustSaturation RGBToHSV HSVToRGB
    """,
    2: """
    FFT2D IFFT2D RFFT2D IRFFT2D MatrixBandPart MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3
    MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 MatrixInverse MatrixDeterminant LogMatrixDeterminant
    Cholesky Qr Svd SelfAdjointEigV2
    """,
    3: "AdjustContrastv2",
}
_DEPTH = {name: depth for depth, names in _INNERMOST.items() for name in names.split()}


def _describe_samples(node: Node) -> Axes:
    """Independent samples along axis 0; pooling keeps channels, too."""
    channel = "c" if node.op.type in _POOLS.split() else "x2"
    labels = _describe_images(node, 0, channel)
    return Axes((labels,), (labels,) * len(node.op.outputs), mixed=_mix_places(node))


@rule(_POOLS, _IMAGES, axes=_describe_samples)
def pool(node: Node) -> Result:
    """Samples along axis 0; a pool may also return positions, and its regions, which are whole for a fixed seed."""
    found = fold_axes(node, _describe_samples, Node.nonlinear)
    if isinstance(found, Fold) or found[0].kind != ROWS:
        return found
    if node.attribute("include_batch_in_index", False):
        return found[0], node.couple("it counts positions over the entire batch")
    if not node.op.type.startswith("Fractional"):
        return found
    alike = bool(node.attribute("deterministic", False))
    cuts = whole() if alike else node.couple("crop positions are drawn separately for each micro-batch: pass a seed")
    return found[0], cuts, cuts


@axes(_IMAGE_GRADIENTS)
def image_gradients(node: Node) -> Axes:
    """Samples along axis 0; a shape operand adds no information."""
    tensors = [node.parts(place) is None for place in range(len(node.folds))]
    labels = [_describe_images(node, place, "x2") if tensor else None for place, tensor in enumerate(tensors)]
    return Axes(tuple(labels), (_describe_images(node, -1, "x2"),), mixed=_mix_places(node))


@axes("ImageProjectiveTransformV2 ImageProjectiveTransformV3")
def transform_images(node: Node) -> Axes:
    """Images along axis 0, each with its own transform, or all with a single one."""
    shape = node.spec(1).shape
    transforms = ["one" if shape is not None and shape[0] == 1 else "n", "t"]
    images, made = (_describe_images(node, place, "x2") for place in (0, -1))
    return Axes((images, transforms, None, None), (made,), mixed=_mix_places(node, "one", "t"))


@axes(*_DEPTH)
def innermost_axes(node: Node) -> Axes:
    """The innermost axes are mixed, the others are kept; so is the axis of an inserted diagonal."""
    rank, deep = node.need_rank(0, f"{node.op.type} of rows with an unknown number of axes"), _DEPTH[node.op.type]
    outer, mixed = number_axes(rank)[:-deep], number_axes(rank)[-deep:]
    inputs = [[*outer, *mixed]]
    if node.op.type.startswith("MatrixSetDiag"):
        inputs.append([*outer, *mixed[: (node.rank(1) or rank) - len(outer)]])
    kept = {"Softmax": mixed, "LogSoftmax": mixed, "TopK": ["best"], "TopKV2": ["best"]}
    made = kept.get(node.op.type, number_axes(rank + 2))
    outputs = [[*outer, *made[: (each.rank or rank) - len(outer)]] for each in node.op.outputs]
    return Axes(tuple(inputs), tuple(outputs), mixed=dict.fromkeys(mixed, f"{node.op.type} over the batch axis"))


@axes("LowerBound UpperBound")
def search_sorted(node: Node) -> Axes:
    """Sorted numbers [rows, n] and values to find among them [rows, m]."""
    return Axes(("rn", "rm"), ("rm",), mixed={"n": "values are searched in the numbers of other rows"})


@axes("MatrixSolve MatrixTriangularSolve MatrixSolveLs")
def solve(node: Node) -> Axes:
    """Matrices and right-hand sides, one pair per row."""
    wrong = "the equations to solve do not correspond to rows"
    rank = node.need_rank(0, wrong)
    if rank != node.rank(1):
        raise Undecided(wrong)
    outer, mixed = number_axes(rank - 2), dict.fromkeys("mn", wrong)
    return Axes(([*outer, "m", "n"], [*outer, "m", "k"]), ([*outer, "n", "k"],), mixed=mixed)


@axes("SparseSoftmaxCrossEntropyWithLogits SoftmaxCrossEntropyWithLogits")
def cross_entropy(node: Node) -> Axes:
    """Scores [rows, classes] and labels: the loss of each row, and its gradient."""
    sparse = node.op.type.startswith("Sparse")
    classes = {"c": "scores and labels do not correspond to rows"}
    return Axes(("nc", "n" if sparse else "nc"), ("n", "nc"), mixed=classes)


def _describe_batch_norm(node: Node) -> Axes:
    """A scale, an offset, a mean and a variance for each channel; in training the last two depend on the rest."""
    data = _describe_images(node, 0, "c")
    training = bool(node.attribute("is_training", True))
    mixed = _mix_places(node, "n") if training else _mix_places(node)
    return Axes((data, "c", "c", "c", "c"), (data, *(None for _ in node.op.outputs[1:])), mixed=mixed)


@rule("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 _FusedBatchNormEx", axes=_describe_batch_norm)
def batch_norm(node: Node) -> Result:
    """Batch normalization: in training with the batch's own statistics, otherwise with given ones."""
    data = node.folds[0]
    if data.kind != ROWS or any(fold.kind == ROWS for fold in node.folds[1:]):
        return node.couple("statistics are computed over the batch") if _rows(node) else node.nonlinear(node.folds)
    if bool(node.attribute("is_training", True)):
        return node.couple("batch normalization in training: every row is normalized by the mean of its batch")
    if data.axis != 0 or any(fold.kind != WHOLE for fold in node.folds[1:]):
        return node.couple("batch normalization along the batch axis")
    return (data.without_numbers, *(whole() for _ in node.op.outputs[1:]))


def _rows(node: Node) -> bool:
    return any(fold.kind == ROWS for fold in node.folds)


@rule("SpaceToBatchND", "BatchToSpaceND")
def space_to_batch(node: Node) -> Result:
    """The ops of dilated convolutions that move blocks of samples to the batch axis, and back."""
    data, sizes = node.folds[0], node.ints(1)
    if data.kind != ROWS:
        return node.nonlinear(node.folds)
    if sizes is None or data.axis != 0 or any(fold.kind != WHOLE for fold in node.folds[1:]):
        return node.couple("the division of samples into blocks is not known")
    order: Fold = data._replace(per=0, order=(-1, data.per, *sizes))
    if node.op.type == "SpaceToBatchND":
        return (
            order.without_numbers if not data.order and data.per > 0 else node.couple("blocks are divided into blocks")
        )
    own = data.order[:1] == (-1,) and data.order[2:] == sizes
    return (
        data._replace(per=data.order[1], order=()).without_numbers
        if own
        else node.couple("blocks of different samples are combined")
    )
