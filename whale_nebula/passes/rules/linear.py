"""Rules for products of tensors: a free batch axis is kept, a contracted one becomes a sum."""

from __future__ import annotations

from collections.abc import Sequence

from whale_nebula.passes.rules.algebra import add_folds, broadcast, find_mixed_rows, match_rows, multiply_folds
from whale_nebula.passes.rules.registry import ROWS, SUM, WHOLE, Fold, Result, Site, rule, whole

Labels = Sequence[str]


def contraction(site: Site, labels: Sequence[Labels], out: Labels) -> Fold:
    """An einsum of the first inputs, each axis by its label."""
    folds = site.folds[: len(labels)]
    if not any(fold.kind == ROWS for fold in folds):
        return multiply_folds(site, folds)
    wrong = find_mixed_rows(site, folds)
    if wrong is not None:
        return wrong
    held = [(fold, names[fold.axis]) for fold, names in zip(folds, labels, strict=True) if fold.kind == ROWS]
    first, batch = held[0]
    if any(label != batch for _, label in held):
        return site.coupled("every row meets every other row: the batch lies along two axes (in-batch negatives)")
    if any((fold.order, fold.per, fold.ragged) != (first.order, first.per, first.ragged) for fold, _ in held):
        return site.coupled("the rows of two tensors do not lie in the same order")
    for place, names in enumerate(labels):
        if folds[place].kind == WHOLE and batch in names and site.size(place, list(names).index(batch)) != 1:
            return site.coupled("a tensor that is no part of the batch lies along the batch axis")
    return first._replace(axis=list(out).index(batch)).bare if batch in out else Fold(SUM)


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "SparseMatMul")
def matmul(site: Site) -> Result:
    """`[..., m, k] × [..., k, n]`, either transposed."""
    ranks = site.rank(0), site.rank(1)
    if ranks[0] is None or ranks[1] is None:
        if any(fold.kind == ROWS for fold in site.folds):
            return site.coupled("a product of rows with an unknown number of axes")
        return multiply_folds(site, site.folds)
    left = _matrix(site, "mk", ranks[0], ("transpose_a", "adj_x"))
    right = _matrix(site, "kn", ranks[1], ("transpose_b", "adj_y"))
    outer = max(left[:-2], right[:-2], key=len)
    return contraction(site, (left, right), [*outer, "m", "n"])


def _matrix(site: Site, names: str, rank: int, flags: tuple[str, str]) -> list[str]:
    turned = any(site.flag(flag) for flag in flags)
    return [*(str(axis) for axis in range(rank, 2, -1)), *(names[::-1] if turned else names)]


@rule("Einsum")
def einsum(site: Site) -> Result:
    """The equation says which axes are free."""
    equation = str(site.attribute("equation", "")).replace(" ", "")
    terms, arrow, out = equation.partition("->")
    ranks = [site.rank(place) for place in range(len(site.folds))]
    inputs = [_labels(term, rank) for term, rank in zip(terms.split(","), ranks, strict=False)]
    if not arrow or len(inputs) != len(ranks) or any(labels is None for labels in inputs):
        return site.coupled("an einsum that cannot be read") if ROWS in {f.kind for f in site.folds} else _plain(site)
    known = [labels for labels in inputs if labels is not None]
    dots = max((labels for labels in known), key=lambda labels: sum(label.isdigit() for label in labels))
    ellipsis = [label for label in dots if label.isdigit()]
    result = [*out.partition("...")[0], *(ellipsis if "..." in out else []), *out.partition("...")[2]]
    if any(len(set(labels)) < len(labels) for labels in known) and ROWS in {fold.kind for fold in site.folds}:
        return site.coupled("an einsum that takes a diagonal")
    return contraction(site, known, result)


def _plain(site: Site) -> Fold:
    return multiply_folds(site, site.folds)


def _labels(term: str, rank: int | None) -> list[str] | None:
    head, dots, tail = term.partition("...")
    if not dots:
        return list(head) if rank is None or rank == len(head) else None
    if rank is None or rank < len(head) + len(tail):
        return None
    return [*head, *(str(axis) for axis in range(rank - len(head) - len(tail), 0, -1)), *tail]


@rule("""
    Conv2D Conv3D Conv DepthwiseConv2dNative Conv2DBackpropInput Conv3DBackpropInputV2
    DepthwiseConv2dNativeBackpropInput
""")
def convolution(site: Site) -> Result:
    """Samples along axis 0, filters that belong to no sample; the transposed kind gets a shape first."""
    data, filters = site.folds[2 if "Backprop" in site.op.type else 0], site.folds[1]
    if ROWS not in (data.kind, filters.kind):
        return multiply_folds(site, (data, filters))
    if data.kind != ROWS or data.axis != 0 or filters.kind != WHOLE:
        return site.coupled(f"{site.op.type} along the batch axis, or with filters made of the batch")
    return data.bare


@rule("Cross")
def cross(site: Site) -> Result:
    """The vectors along the last axis are multiplied, a pair at each place."""
    found = broadcast(site, (0, 1), multiply_folds)
    rank = site.rank(0)
    if found.kind == ROWS and (rank is None or found.axis == rank - 1):
        return site.coupled("the cross product is along the batch axis")
    return found


@rule("BiasAdd", "BiasAddV1")
def bias(site: Site) -> Result:
    """A vector that is added along the last axis, or the second with channels first."""
    data, vector = site.folds
    rank = site.rank(0)
    first = site.attribute("data_format", "NHWC") == "NCHW"
    channel = 1 if first else None if rank is None else rank - 1
    if data.kind == ROWS and vector.kind == WHOLE:
        return data.bare if data.axis != channel else site.coupled("a bias lies along the batch axis")
    if ROWS in (data.kind, vector.kind):
        return find_mixed_rows(site, site.folds) or site.coupled("a bias is made of single rows")
    return add_folds(site, site.folds)


_LEADING = """
    AvgPool AvgPool3D MaxPool MaxPoolV2 MaxPool3D MaxPoolWithArgmax LRN Dilation2D ResizeBilinear
    ResizeNearestNeighbor ResizeBicubic ResizeArea ScaleAndTranslate SpaceToDepth DepthToSpace
    ExtractImagePatches
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


@rule(_LEADING)
def leading(site: Site) -> Result:
    """Samples along axis 0, each on its own."""
    data = site.folds[0]
    if data.kind != ROWS and all(fold.kind != ROWS for fold in site.folds):
        return site.nonlinear(site.folds)
    if data.kind != ROWS or data.axis != 0 or any(fold.kind != WHOLE for fold in site.folds[1:]):
        return site.coupled(f"{site.op.type} along the batch axis, or with operands made of the batch")
    if site.attribute("include_batch_in_index", False):
        return data.bare, site.coupled("it counts the places of the whole batch")
    return data.bare


@rule("FractionalAvgPool", "FractionalMaxPool")
def fractional(site: Site) -> Result:
    """Samples along axis 0, and where all of them were cut: by a seed that stays, everywhere alike."""
    samples = leading(site)
    if not isinstance(samples, Fold) or samples.kind != ROWS:
        return samples
    alike = bool(site.attribute("deterministic", False))
    cuts = whole() if alike else site.coupled("where samples are cut is drawn for each micro-batch anew: give a seed")
    return samples, cuts, cuts


@rule(*_DEPTH)
def inner(site: Site) -> Result:
    """The innermost axes are mixed, the others are left alone."""
    data, rank, deep = site.folds[0], site.rank(0), _DEPTH[site.op.type]
    if all(fold.kind != ROWS for fold in site.folds):
        return site.nonlinear(site.folds)
    if data.kind != ROWS or rank is None or data.axis >= rank - deep:
        return site.coupled(f"{site.op.type} over the batch axis")
    others = [fold for fold in site.folds[1:] if fold.kind != WHOLE]
    if others and (not site.op.type.startswith("MatrixSetDiag") or others[0].axis != data.axis):
        return site.coupled(f"{site.op.type} with operands made of the batch")
    return data.bare


@rule("LowerBound", "UpperBound")
def search_sorted(site: Site) -> Result:
    """Sorted numbers [rows, n] and values to find among them [rows, m]; of one row they may be the same everywhere."""
    numbers, values = site.folds
    if ROWS not in (numbers.kind, values.kind):
        return site.nonlinear(site.folds)
    if numbers.kind == WHOLE and values.axis == 1:
        return values.bare
    if numbers.kind == values.kind == ROWS and numbers.axis == values.axis == 0:
        return match_rows(site, numbers, values).bare
    return find_mixed_rows(site, site.folds) or site.coupled("values are looked for among the numbers of other rows")


@rule("MatrixSolve", "MatrixTriangularSolve", "MatrixSolveLs")
def solve(site: Site) -> Result:
    """Matrices and right sides, a pair a row."""
    left, right = site.folds[:2]
    if ROWS not in (left.kind, right.kind):
        return site.nonlinear(site.folds)
    if any(fold.kind != WHOLE for fold in site.folds[2:]):
        return site.coupled("how equations are solved depends on the batch")
    ranks = site.rank(0), site.rank(1)
    paired = left.kind == right.kind == ROWS and left.axis == right.axis and left.order == right.order
    if paired and ranks[0] == ranks[1] is not None and left.axis < (ranks[0] or 0) - 2:
        return left.bare
    return site.coupled("equations that are not one a row are solved")


@rule("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
def cross_entropy(site: Site) -> Result:
    """Scores [rows, classes] and labels: the loss of each row, and its gradient."""
    scores, labels = site.folds
    if ROWS not in (scores.kind, labels.kind):
        return site.nonlinear(site.folds)
    wrong = find_mixed_rows(site, site.folds)
    if wrong is not None:
        return wrong
    if scores.kind != labels.kind or scores.axis or labels.axis or scores.order != labels.order:
        return site.coupled("scores and labels are not one a row")
    return scores.bare


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "_FusedBatchNormEx")
def batch_norm(site: Site) -> Result:
    """In training the statistics are the batch's own; else they are given."""
    data = site.folds[0]
    if data.kind != ROWS or any(fold.kind == ROWS for fold in site.folds[1:]):
        return site.coupled("statistics are made of the batch") if _rows(site) else site.nonlinear(site.folds)
    if bool(site.attribute("is_training", True)):
        return site.coupled("batch normalisation in training: every row is measured by the mean of its batch")
    if data.axis != 0 or any(fold.kind != WHOLE for fold in site.folds[1:]):
        return site.coupled("batch normalisation along the batch axis")
    return (data.bare, *(whole() for _ in site.op.outputs[1:]))


def _rows(site: Site) -> bool:
    return any(fold.kind == ROWS for fold in site.folds)


@rule("SpaceToBatchND", "BatchToSpaceND")
def blocks(site: Site) -> Result:
    """Dilated convolutions cut samples into blocks, laid above the batch, and put them together again."""
    data, sizes = site.folds[0], site.ints(1)
    if data.kind != ROWS:
        return site.nonlinear(site.folds)
    if sizes is None or data.axis != 0 or any(fold.kind != WHOLE for fold in site.folds[1:]):
        return site.coupled("how samples are cut into blocks is not known")
    order: Fold = data._replace(per=0, order=(-1, data.per, *sizes))
    if site.op.type == "SpaceToBatchND":
        return order.bare if not data.order and data.per > 0 else site.coupled("blocks of blocks")
    own = data.order[:1] == (-1,) and data.order[2:] == sizes
    return data._replace(per=data.order[1], order=()).bare if own else site.coupled("blocks of other samples")
