"""Rules for element-wise ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from whale_nebula.ir.integers import ELEMENTWISE
from whale_nebula.passes.rules.algebra import (
    add_folds,
    divide_folds,
    fold_extremum,
    join_folds,
    multiply_folds,
    pack_entries,
)
from whale_nebula.passes.rules.axes import describe_entries, fold_axes, select_first
from whale_nebula.passes.rules.registry import (
    COUNT,
    ROWS,
    UNKNOWN_POSITION,
    WHOLE,
    Axes,
    Fold,
    Node,
    Result,
    blocks_of,
    count,
    find_bad_input,
    rule,
    whole,
)

Join = Callable[[Node, Sequence[Fold]], Fold]

_UNARY = """
    Abs Acos Acosh Asin Asinh Atan Atanh BesselI0e BesselI1e Bitcast Bucketize Ceil ComplexAbs Cos Cosh
    DecodeRaw Digamma Elu Erf Erfc Erfinv Exp Expm1 Floor Inv Invert IsFinite IsInf IsNan LeakyRelu
    Lgamma Log Log1p LogicalNot Ndtri Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh
    Softplus Softsign Sqrt Square StaticRegexFullMatch StaticRegexReplace StringLength StringLower StringStrip
    StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper AsString Tan Tanh
"""
_BINARY = """
    ApproximateEqual Atan2 BitwiseAnd BitwiseOr BitwiseXor Complex Equal Greater GreaterEqual LeftShift
    Less LessEqual LogicalAnd LogicalOr Mod NextAfter NotEqual Polygamma Pow RightShift SquaredDifference
    TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta Igamma Igammac StringJoin
"""
_GRADIENTS = """
    TanhGrad SigmoidGrad ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad SoftplusGrad SoftsignGrad
    RsqrtGrad SqrtGrad InvGrad ReciprocalGrad
"""
_OTHERS = "Betainc ClipByValue FakeQuantWithMinMaxVars FakeQuantWithMinMaxArgs"


@rule(_UNARY, _BINARY, _GRADIENTS, _OTHERS, axes=describe_entries)
def any_function(node: Node) -> Result:
    """A nonlinear function of entries."""
    return fold_axes(node, describe_entries, Node.nonlinear)


def _difference(node: Node, folds: Sequence[Fold]) -> Fold:
    left, right = folds
    if left.kind == right.kind == COUNT:
        if left.per == right.per > 0:
            return whole(0)
        return count(left.per - right.per) if left.per > right.per > 0 else node.nonlinear(folds)
    return add_folds(node, folds)


@rule("Mul", "MulNoNan", axes=describe_entries, literal=True, positions=True)
def multiplication(node: Node) -> Result:
    """The product, linear in each factor; positions may be multiplied by a whole."""
    found = _lift_entries(node, multiply_folds)
    if not found.position:
        return found
    by = [node.int_at(place) for place, fold in enumerate(node.folds) if not fold.position]
    known = len(by) == 1 and node.folds[0].kind != node.folds[1].kind
    if known and by[0] and found.position > 0:
        return found._replace(position=found.position * by[0])
    once = known and by[0] is None and found.position == 1 and not found.offset
    return found._replace(position=_count_blocks(node) if once else UNKNOWN_POSITION)


def _count_blocks(node: Node) -> int:
    """The product of positions with the unknown size of a tensor's second axis: positions count its blocks."""
    factor = next(value for value, fold in zip(node.op.inputs, node.folds, strict=True) if not fold.position)
    while node.graph.ops[factor.op].type in ("Cast", "Identity"):
        factor = node.graph.ops[factor.op].inputs[0]
    op = node.graph.ops[factor.op]
    shape = node.graph.ops[op.inputs[0].op] if op.type == "StridedSlice" else op
    begins = node.graph.ops[op.inputs[1].op].constant if op.type == "StridedSlice" else None
    whole_graph = node.owner == node.op.index  # in a body its numbers would refer to other tensors
    return blocks_of(shape.inputs[0]) if whole_graph and shape.type == "Shape" and begins == (1,) else UNKNOWN_POSITION


def _quotient(node: Node, folds: Sequence[Fold]) -> Fold:
    """The fold of a quotient: linear in the dividend, unless a remainder is dropped."""
    exact = node.spec(0).floating and node.op.type != "FloorDiv"
    return divide_folds(node, folds) if exact else _divide_exactly(node, folds)


def _divide_exactly(node: Node, folds: Sequence[Fold]) -> Fold:
    above, below = folds
    by = below.literal[0] if below.literal is not None and below.kind == WHOLE else 0
    if above.kind == COUNT and isinstance(by, int) and by > 0 and above.per > 0 and above.per % by == 0:
        return count(above.per // by)
    if above.kind == below.kind == COUNT and above.per > 0 and below.per > 0 and above.per % below.per == 0:
        return whole(above.per // below.per)
    return node.nonlinear(folds)


_JOINS: Mapping[str, Join] = {
    "FloorMod": Node.nonlinear,
    **dict.fromkeys(("Neg", "Conj", "Real", "Imag"), lambda node, folds: folds[0].without_numbers),
    **dict.fromkeys(("RealDiv", "Div", "DivNoNan", "FloorDiv"), _quotient),
}
_SHIFTS: Mapping[str, Join] = {
    **dict.fromkeys(("Add", "AddV2", "AddN", "AccumulateNV2"), add_folds),
    "Sub": _difference,
}


@rule(*_JOINS, axes=describe_entries, literal=True)
def join_entries(node: Node) -> Result:
    """The fold of values without rows, entry by entry for sizes of the batch."""
    return _lift_entries(node, _JOINS[node.op.type])


@rule(*_SHIFTS, axes=describe_entries, literal=True, positions=True)
def shift_entries(node: Node) -> Result:
    """As `join_entries`; a value without positions that is added to positions is an offset."""
    found = _lift_entries(node, _SHIFTS[node.op.type])
    marked = [fold for fold in node.folds if fold.position]
    if not found.position or len(marked) == len(node.folds) == 1:
        return found
    return found._replace(offset=True) if len(marked) == 1 else found._replace(position=UNKNOWN_POSITION)


@rule("Maximum", "Minimum", axes=describe_entries, literal=True, raw=True)
def compare_entries(node: Node) -> Result:
    """The larger or the smaller of two; a number that is limited to one value from both sides is that value."""
    limit = _find_only_value(node)
    if limit is not None:
        return whole(limit)
    return find_bad_input(node) or _lift_entries(node, fold_extremum)


def _find_only_value(node: Node) -> int | None:
    """The m of min(max(x, n), m), as `tf.math.bincount` limits its length, where n is no less; or the other way
    around. None if there is none.
    """
    smaller = node.op.type == "Minimum"
    for place, limit in enumerate(map(node.int_at, range(2))):
        inner = node.graph.ops[node.op.inputs[1 - place].op]
        if limit is None or not node.spec(place).dtype.startswith("int") or node.rank(1 - place) != 0:
            continue
        if inner.type == ("Maximum" if smaller else "Minimum"):
            others = [node.graph.ops[value.op].constant for value in inner.inputs]
            if any(len(n) == 1 and (n[0] >= limit if smaller else n[0] <= limit) for n in others if n):
                return limit
    return None


@rule("Cast", axes=describe_entries, literal=True, positions=True)
def cast(node: Node) -> Result:
    """A cast: linear, unless it rounds or compares with zero."""
    fold = node.folds[0]
    rounds = (node.spec(0).floating and not node.op.outputs[0].floating) or node.op.outputs[0].dtype == "bool"
    if fold.kind in (WHOLE, ROWS) or not rounds:
        return fold
    return node.nonlinear([fold])


_SAME = """
    Identity StopGradient PreventGradient CheckNumerics CheckNumericsV2 EnsureShape Snapshot
    PlaceholderWithDefault DebugIdentityV2
"""


@rule(_SAME, axes=describe_entries, literal=True, raw=True, positions=True)
def identity(node: Node) -> Result:
    """The fold of the input."""
    return node.folds[0]


def _describe_each(node: Node) -> Axes:
    ranks = [node.need_rank(place) for place in range(len(node.folds))]
    labels = tuple([f"{place}:{axis}" for axis in range(rank)] for place, rank in enumerate(ranks))
    return Axes(labels, labels)


@rule("IdentityN", axes=_describe_each, literal=True, raw=True, positions=True)
def identity_n(node: Node) -> Result:
    """The folds of the inputs."""
    return node.folds


def _describe_choice(node: Node) -> Axes:
    """The axes of a select; the old Select takes a vector condition along the first axis."""
    found = describe_entries(node)
    if node.op.type == "SelectV2" or node.rank(0) != 1 or node.rank(1) == 1:
        return found
    labels = found.outputs[0] or ()
    return found._replace(inputs=(labels[:1], *found.inputs[1:]))


@rule("Select", "SelectV2", axes=_describe_choice)
def select(node: Node) -> Result:
    """A select; with a whole condition, sums are combined as by an addition."""
    same = node.folds[0].kind == WHOLE
    return fold_axes(
        node, _describe_choice, lambda node, folds: join_folds(node, *folds[1:]) if same else node.nonlinear(folds)
    )


def _lift_entries(node: Node, rest: Join) -> Fold:
    """The fold of vectors of counts and known numbers, entry by entry."""
    lanes = _lanes(node)
    if lanes is None:
        return select_first(fold_axes(node, describe_entries, rest))
    if any(fold == whole() for fold in node.folds) and all(fold.kind == WHOLE for fold in node.folds):
        return whole()  # no entry of the result is known
    length = max(len(lane) for lane in lanes)
    columns = [[lane[at if len(lane) > 1 else 0] for lane in lanes] for at in range(length)]
    found = tuple(_compute_entry(node, column, rest) for column in columns)
    return found[0] if all(node.rank(place) == 0 for place in range(len(lanes))) else pack_entries(node, found)


def _lanes(node: Node) -> list[tuple[Fold, ...]] | None:
    """For each operand the folds of its entries; None if no operand has known numbers or counts, or one has rows."""
    if all(fold.literal is None and fold.parts is None and fold.kind != COUNT for fold in node.folds):
        return None
    lanes = []
    for place, fold in enumerate(node.folds):
        lane = (fold,) if node.rank(place) == 0 else node.parts(place)
        if fold.kind == ROWS or not lane:
            return None
        lanes.append(lane)
    return lanes


def _compute_entry(node: Node, folds: Sequence[Fold], rest: Join) -> Fold:
    known = [fold.literal[0] for fold in folds if fold.literal is not None and len(fold.literal) == 1]
    work = ELEMENTWISE.get(node.op.type)
    if work is None or len(known) < len(folds) or not all(fold.kind == WHOLE for fold in folds):
        return whole() if all(fold.kind == WHOLE for fold in folds) else rest(node, folds)
    if node.op.type.startswith("Floor") and known[1] == 0:
        return whole()
    try:
        with np.errstate(all="ignore"):
            return whole(work(*known).item())
    except OverflowError:  # an unsigned 64-bit number combined with a signed one
        return whole()
