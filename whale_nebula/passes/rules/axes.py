"""Axis descriptions of ops: one for each op type, with labels as in an einsum.

Equal labels are the same axis. A label that no output has is folded; one that no input has is new. An axis in `mixed`
cannot be cut, as results depend on neighbors along it.

    MatMul       mk, kn -> mn            k folded by sum
    Softmax      nc -> nc                c mixed
    Conv2D       nhwi, xyio -> nhwo      i folded by sum; h, w, x, y mixed
    Max          nc -> n                 c folded by max

`RULES` has the description of an op type next to its rule. The folding of micro-batches follows only the batch axis
(`fold_axes`); layouts of split tensors follow all axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from whale_nebula.passes.rules.registry import (
    MEAN,
    NO_RANK,
    ROWS,
    SUM,
    UNKNOWN_POSITION,
    WHOLE,
    Axes,
    Describe,
    Fold,
    Labels,
    Node,
    Rest,
    Result,
    Undecided,
    find_axes,
    rule,
)

TWO_AXES = "every row is combined with every other row: the batch is along two axes"
FOREIGN_ROWS = "a tensor that is not part of the batch has entries along the batch axis"


def axes(
    *types: str, rest: Rest = Node.nonlinear, literal: bool = False, positions: bool = False
) -> Callable[[Describe], Describe]:
    """Register the effect of op types on axes, and fold batches by it; `rest` is the rule for values without rows."""

    def register(describe: Describe) -> Describe:
        @functools.wraps(describe)
        def apply(node: Node) -> Result:
            return fold_axes(node, describe, rest)

        rule(*types, literal=literal, positions=positions, axes=describe)(apply)
        return describe

    return register


def number_axes(rank: int, *, skip: int = 0) -> list[str]:
    """Labels of axes by their number from the right, for broadcasting of shorter operands.

    >>> number_axes(3)
    ['3', '2', '1']
    """
    return [str(axis) for axis in range(rank + skip, skip, -1)]


def add_axis(labels: Sequence[str], place: int) -> list[str]:
    """Labels with an additional axis at a place."""
    return [*labels[:place], "new", *labels[place:]]


def fold_axes(
    node: Node, describe: Describe, rest: Rest, over: Callable[[Node, Fold, Axes], Fold] | None = None
) -> Result:
    """The folds of an op's outputs: the batch stays an axis, is folded away (`over`), or couples the rows."""
    found = find_axes(describe, node)
    inputs: Sequence[Labels | None] = () if isinstance(found, str) else found.inputs
    shapes = {place for place, labels in enumerate(inputs) if labels is None}
    folds = [fold for place, fold in enumerate(node.folds) if place not in shapes]
    if not any(fold.kind == ROWS for fold in folds):
        return rest(node, folds)
    if isinstance(found, str):
        wide = [fold for place, fold in enumerate(node.folds) if node.rank(place) != 0]
        alone = wide[0].without_numbers if found == NO_RANK and len(wide) == 1 else node.couple(found)
        check_mixed(folds)
        return alone
    operands = [(place, labels) for place, labels in enumerate(found.inputs) if labels is not None]
    check_mixed([node.folds[place] for place, _ in operands])
    rows = [(node.folds[place], labels) for place, labels in operands if node.folds[place].kind == ROWS]
    if not rows:
        return node.couple(f"{node.op.type} with operands computed from the batch")
    batch = rows[0][1][rows[0][0].axis]
    if any(labels[fold.axis] != batch for fold, labels in rows):
        return node.couple(_explain_two_axes(node, found, operands))
    met = functools.reduce(lambda one, fold: match_rows(one, fold._replace(axis=one.axis)), [f for f, _ in rows])
    for place, labels in operands:
        if node.folds[place].kind == WHOLE and batch in labels and node.size(place, list(labels).index(batch)) != 1:
            return node.couple(FOREIGN_ROWS)
    if batch in found.mixed:
        return node.couple(found.mixed[batch])
    if any(fold.kind != WHOLE for fold in node.folds[len(found.inputs) :]):
        return node.couple(f"{node.op.type} with operands computed from the batch")
    gone = over or _fold_away
    outputs = [list(labels or ()) for labels in found.outputs]
    return tuple(
        met._replace(axis=labels.index(batch)).without_numbers if batch in labels else gone(node, met, found)
        for labels in outputs
    )


def select_first(result: Result) -> Fold:
    """The fold of an op's one output."""
    return result if isinstance(result, Fold) else result[0]


def _fold_away(node: Node, rows: Fold, found: Axes) -> Fold:
    if found.folded not in (SUM, MEAN):
        return node.couple(f"{node.op.type} over the batch is neither a sum nor a mean")
    return Fold(found.folded)


def check_mixed(folds: Sequence[Fold]) -> None:
    """Refuse to combine rows with a value that is folded over a single micro-batch."""
    for fold in folds:
        if fold.kind not in (ROWS, WHOLE):
            raise Undecided(f"single rows are mixed with {fold.description}")


def _explain_two_axes(node: Node, found: Axes, operands: Sequence[tuple[int, Labels]]) -> str:
    """The message for rows along an axis of equal size in another tensor, whose rows are along another axis: usually
    this is not intended, and the step also fails uncut.
    """
    if any(label not in (found.outputs[0] or ()) for _, labels in operands for label in labels):
        return f"{TWO_AXES} (in-batch negatives)"
    rows = [(place, labels) for place, labels in operands if node.folds[place].kind == ROWS]
    for place, labels in rows:
        batch = labels[node.folds[place].axis]
        for other, others in rows:
            axis = list(others).index(batch) if batch in others else node.folds[other].axis
            size = node.size(other, axis) if axis != node.folds[other].axis else None
            if size is not None and size > 1:
                return (
                    f"{TWO_AXES}, and a tensor has {size} entries along one of them, so without micro-batches shapes "
                    f"do not match unless a batch has {size} rows: micro_batch=1 shows it"
                )
    return TWO_AXES


def match_rows(left: Fold, right: Fold) -> Fold:
    """The fold of two tensors with rows, combined entry by entry: each row must match itself."""
    if left.axis != right.axis:
        raise Undecided(TWO_AXES)
    if left.order != right.order or left.ragged != right.ragged:
        raise Undecided("the rows of two tensors are in different orders")
    per = left.per if left.per == right.per else max(left.per, right.per)
    position = left.position or right.position
    if left.position and right.position and left.position != right.position:
        position = UNKNOWN_POSITION
    return left._replace(per=per, position=position, offset=left.offset or right.offset)


def list_axes(node: Node, place: int = 0, axis: int = 0) -> list[str]:
    """Labels of the axes of an input by their number from the left; without a rank only of the known ones."""
    rank = node.rank(place)
    return [str(each) for each in range(max(axis, node.folds[place].axis) + 1 if rank is None else rank)]


def describe_entries(node: Node) -> Axes:
    """Element-wise ops, with operands aligned from the right as in numpy. One tensor among scalars needs no rank."""
    ranks = [node.need_rank(place) for place in range(len(node.folds))]
    return Axes(tuple(map(number_axes, ranks)), (number_axes(max(ranks, default=0)),))
