"""What networks are made of: ops that leave the leading axis alone, and those that work on the innermost
axes.
"""

from __future__ import annotations

from whale_nebula.passes.reduce.algebra import matched, mixed
from whale_nebula.passes.reduce.registry import Result, Site, rule
from whale_nebula.passes.reduce.state import ROWS, WHOLE, Fold, whole

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
def bound(site: Site) -> Result:
    """Sorted numbers [rows, n] and values to find among them [rows, m]; of one row they may be the same everywhere."""
    numbers, values = site.folds
    if ROWS not in (numbers.kind, values.kind):
        return site.nonlinear(site.folds)
    if numbers.kind == WHOLE and values.axis == 1:
        return values.bare
    if numbers.kind == values.kind == ROWS and numbers.axis == values.axis == 0:
        return matched(site, numbers, values).bare
    return mixed(site, site.folds) or site.coupled("values are looked for among the numbers of other rows")


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
    wrong = mixed(site, site.folds)
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
