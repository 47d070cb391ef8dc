"""The folds of sums, products and quotients of values without rows, of branches that join, and of moved entries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

import numpy as np

from whale_nebula.ir.integers import compute_outputs
from whale_nebula.passes.rules.axes import match_rows
from whale_nebula.passes.rules.registry import (
    COUNT,
    COUPLED,
    EMPTY,
    INVERSE,
    MEAN,
    ROWS,
    SHAPE,
    SUM,
    UNKNOWN,
    WHOLE,
    Fold,
    Node,
    Rest,
    Result,
    Undecided,
    count,
    vector,
    whole,
)

_PRODUCTS = {
    frozenset({COUNT, MEAN}): SUM,
    frozenset({COUNT, INVERSE}): WHOLE,
    frozenset({INVERSE, SUM}): MEAN,
}
_INVERTED = {WHOLE: WHOLE, COUNT: INVERSE, INVERSE: COUNT}


def add_folds(node: Node, folds: Sequence[Fold]) -> Fold:
    """The fold of a sum: only two sums, or means with means and wholes, keep their fold."""
    kinds = {fold.kind for fold in folds if not fold.is_zero}
    if not kinds:
        return whole()
    if kinds == {COUNT}:
        known = [fold.per for fold in folds if fold.kind == COUNT]
        return count(UNKNOWN if UNKNOWN in known else sum(known))
    if kinds <= {SUM, COUNT}:
        return Fold(SUM)
    if kinds <= {MEAN, WHOLE}:
        return Fold(MEAN if MEAN in kinds else WHOLE)
    if kinds == {INVERSE}:
        return Fold(INVERSE)
    return node.nonlinear(folds)


def multiply_folds(node: Node, folds: Sequence[Fold]) -> Fold:
    """The fold of a product, which is linear in each factor: that of the one factor that is not whole."""
    return reduce(lambda left, right: _multiply_two(node, left, right), folds)


def _multiply_two(node: Node, left: Fold, right: Fold) -> Fold:
    if left.kind == WHOLE and right.kind == WHOLE:
        return whole()
    if WHOLE in (left.kind, right.kind):
        other, factor = (left, right) if right.kind == WHOLE else (right, left)
        if other.kind != COUNT:
            return node.nonlinear([other]) if other.kind == SHAPE else other.without_numbers
        scale = factor.literal[0] if factor.literal is not None and len(factor.literal) == 1 else UNKNOWN
        return count(other.per * scale if isinstance(scale, int) and scale > 0 else UNKNOWN)
    kind = _PRODUCTS.get(frozenset({left.kind, right.kind}))
    return node.nonlinear([left, right]) if kind is None else Fold(kind)


def divide_folds(node: Node, folds: Sequence[Fold]) -> Fold:
    """The fold of a quotient, a product with the divisor's inverse."""
    above, below = folds
    kind = _INVERTED.get(below.kind)
    return (
        node.nonlinear(folds) if kind is None else _multiply_two(node, above.without_numbers, Fold(kind, per=UNKNOWN))
    )


def fold_extremum(node: Node, folds: Sequence[Fold]) -> Fold:
    """The maximum or minimum of two: for numbers of rows a number of rows, as every batch has at least one row."""
    larger = node.op.type in ("Maximum", "Max")
    known = [fold.per for fold in folds if fold.kind == COUNT]
    if len(known) == 2:
        return count(UNKNOWN if UNKNOWN in known else max(known) if larger else min(known))
    least = [fold.literal[0] for fold in folds if fold.kind == WHOLE and fold.literal is not None]
    if larger and known and least and known[0] > 0 and least[0] <= 1:
        return count(known[0])
    return node.nonlinear(folds)


def pack_entries(node: Node, parts: tuple[Fold, ...]) -> Fold:
    """The fold of a vector of numbers."""
    if {part.kind for part in parts} <= {WHOLE, COUNT}:
        return vector(parts)
    return add_folds(node, parts)._replace(parts=parts)


def move_by_wholes(node: Node, folds: Sequence[Fold]) -> Fold:
    """Entries of the first operand are moved, omitted or repeated by whole indices: its fold is kept."""
    if all(fold.kind == WHOLE for fold in folds[1:]) and folds[0].kind != SHAPE:
        return folds[0].without_numbers
    return node.nonlinear(folds)


def join_folds(node: Node, left: Fold, right: Fold) -> Fold:
    """The fold of a value that may come from either side: a branch, or an iteration of a loop."""
    return _join(node, left, right)._replace(inputs=left.inputs and right.inputs)


def _join(node: Node, left: Fold, right: Fold) -> Fold:
    left, right = left._replace(inputs=False), right._replace(inputs=False)
    if left == right or right.kind == EMPTY:
        return left
    if left.kind == EMPTY:
        return right
    for fold in (left, right):
        if fold.kind == COUPLED:
            return fold.without_numbers
    if left.parts is not None and right.parts is not None and len(left.parts) == len(right.parts):
        pairs = zip(left.parts, right.parts, strict=True)
        parts = tuple(_join(node, one, other) for one, other in pairs)
        return left.without_numbers._replace(kind=left.kind if left.kind == right.kind else SHAPE, parts=parts)
    if left.kind == right.kind == ROWS:
        try:
            both = match_rows(left.without_numbers, right.without_numbers)
        except Undecided as error:
            return node.couple(str(error))
        return both if left.per == right.per else both._replace(per=UNKNOWN)
    if ROWS in (left.kind, right.kind):
        return node.couple(f"one case gives {left.description}, the other {right.description}")
    if left.kind == right.kind == COUNT:
        return count(UNKNOWN)
    return add_folds(node, [left, right])


_MAX_ENTRIES = 64


def list_entries(node: Node, place: int) -> tuple[Fold, ...] | None:
    """The folds of the entries of an input in row-major order; None if they cannot be distinguished."""
    fold, shape = node.folds[place], node.spec(place).shape
    if fold.kind == ROWS or shape is None or None in shape:
        return None
    if len(shape) <= 1:
        return node.parts(place) if shape else (fold,)
    count = prod(size for size in shape if size is not None)
    if fold.literal is not None and len(fold.literal) == count:
        return tuple(whole(number) for number in fold.literal)
    if fold.parts is not None and len(fold.parts) == count:
        return fold.parts
    return (whole(),) * count if fold.kind == WHOLE and 0 < count <= _MAX_ENTRIES else None


def move_entries(node: Node, data: Sequence[int]) -> Result | None:
    """The folds of results that move the entries of the inputs `data`; None if they cannot be followed."""
    known: list[Fold] = []
    inputs: list[tuple[Sequence[int], list[int]]] = []
    for place in range(len(node.folds)):
        numbers: Sequence[int] | None = node.ints(place)
        if place in data:
            lane = list_entries(node, place)
            numbers = None if lane is None else range(len(known), len(known) + len(lane))
            known.extend(lane or ())
        if numbers is None:
            return None
        shape = node.spec(place).shape
        inputs.append((numbers, [-1] if shape is None else [-1 if size is None else size for size in shape]))
    try:
        made = compute_outputs(node.op, [np.array(numbers, np.int64).reshape(sizes) for numbers, sizes in inputs])
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None
    found = [tuple(known[number] for number in each.ravel()) for each in made]
    return tuple(pack_entries(node, own) if each.ndim else own[0] for own, each in zip(found, made, strict=True))


def follow_entries(*data: int) -> Rest:
    """The rule for values without rows of an op that moves the entries of these of its inputs."""
    return lambda node, folds: move_entries(node, data) or move_by_wholes(node, folds)
