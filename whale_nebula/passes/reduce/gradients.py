"""Ops that differentiation makes: they are part of a forward where the user differentiates inside it."""

from __future__ import annotations

from whale_nebula.passes.reduce.algebra import broadcast, mixed, multiplied, nonlinear, structured
from whale_nebula.passes.reduce.registry import Result, Site, rule
from whale_nebula.passes.reduce.state import ROWS, SUM, WHOLE, Fold, whole

_FUNCTIONS = """
    TanhGrad SigmoidGrad ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad SoftplusGrad SoftsignGrad
    RsqrtGrad SqrtGrad InvGrad ReciprocalGrad
"""
_SAMPLES = """
    MaxPoolGrad MaxPoolGradV2 MaxPoolGradGrad MaxPool3DGrad AvgPoolGrad AvgPool3DGrad LRNGrad
    ResizeBilinearGrad ResizeNearestNeighborGrad ResizeBicubicGrad
"""


@rule(_FUNCTIONS)
def slope(site: Site) -> Result:
    """Entry by entry."""
    return broadcast(site, range(len(site.folds)), nonlinear)


@rule(_SAMPLES)
def of_samples(site: Site) -> Result:
    """Samples along axis 0; a shape among the operands says only what they say."""
    if not any(fold.kind == ROWS for fold in site.folds):
        return site.nonlinear(site.folds)
    tensors = [fold for place, fold in enumerate(site.folds) if site.parts(place) is None]
    wrong = mixed(site, tensors)
    if wrong is not None or all(fold.kind == ROWS and fold.axis == 0 for fold in tensors):
        return wrong or tensors[0].bare
    return site.coupled(f"{site.op.type} along the batch axis")


@rule("BiasAddGrad")
def of_bias(site: Site) -> Result:
    """All axes but the channels are summed."""
    data, rank = site.folds[0], site.rank(0)
    if data.kind != ROWS:
        return structured(site, site.folds)
    channel = 1 if site.attribute("data_format", "NHWC") == "NCHW" else None if rank is None else rank - 1
    return Fold(SUM) if data.axis != channel else site.coupled("a bias lies along the batch axis")


@rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")
def of_filters(site: Site) -> Result:
    """What each sample adds to the filters' gradient is summed."""
    data, _, gradient = site.folds
    if ROWS not in (data.kind, gradient.kind):
        return multiplied(site, (data, gradient))
    if data.kind == gradient.kind == ROWS and data.axis == gradient.axis == 0 and data.order == gradient.order:
        return Fold(SUM)
    return mixed(site, (data, gradient)) or site.coupled("samples and their gradients are not one a row")


@rule("BroadcastGradientArgs", literal=True)
def summed_axes(site: Site) -> Result:
    """The axes along which either operand of two was repeated."""
    left, right = site.parts(0), site.parts(1)
    if left is None or right is None:
        return site.nonlinear(site.folds)
    rank = max(len(left), len(right))
    pairs = list(zip(_padded(left, rank), _padded(right, rank), strict=True))
    return _axes(pairs), _axes([(other, one) for one, other in pairs])


def _padded(parts: tuple[Fold, ...], rank: int) -> tuple[Fold, ...]:
    return (whole(1),) * (rank - len(parts)) + parts


def _axes(pairs: list[tuple[Fold, Fold]]) -> Fold:
    """Where the first of a pair is 1 and the second is not; a size that is not known may be 1."""
    found: list[int] = []
    for axis, (one, other) in enumerate(pairs):
        if one.kind == WHOLE and one.literal is None and other.literal != (1,) and one != other:
            return whole()
        if one.literal == (1,) and other.literal != (1,):
            found.append(axis)
    return Fold(WHOLE, literal=tuple(found))
