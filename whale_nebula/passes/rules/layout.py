"""Rules for ops that move, add, drop, merge and split axes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from whale_nebula.passes.rules.algebra import (
    add_folds,
    follow_entries,
    move_entries,
    pack_entries,
)
from whale_nebula.passes.rules.axes import (
    add_axis,
    axes,
    check_mixed,
    fold_axes,
    match_rows,
    number_axes,
    select_first,
)
from whale_nebula.passes.rules.registry import (
    BESIDE,
    COUNT,
    FIXED,
    NO_RANK,
    OWN,
    ROWS,
    SUM,
    UNDER,
    UNKNOWN,
    WHOLE,
    Axes,
    Fold,
    Node,
    Result,
    Undecided,
    count,
    rule,
    whole,
)

Sizes = tuple[int | None, ...]


@axes("Transpose ConjugateTranspose", rest=follow_entries(0), literal=True, positions=True)
def transpose(node: Node) -> Axes:
    """Permute axes."""
    unknown = "the order of a transposition is not known"
    order, labels = node.need_ints(1, unknown), number_axes(node.need_rank(0, unknown))
    return Axes((labels,), ([labels[axis] for axis in order],))


@rule("InvertPermutation", literal=True)
def invert_permutation(node: Node) -> Result:
    """The inverse of a permutation."""
    order = node.ints(0)
    if order is None or sorted(order) != list(range(len(order))):
        return node.nonlinear(node.folds)
    return whole(*(order.index(axis) for axis in range(len(order))))


def _describe_expanded(node: Node) -> Axes:
    unknown = "the position of a new axis is not known"
    axis, rank = node.need_int(1, unknown), node.need_rank(0, unknown)
    labels, new = number_axes(rank), axis % (rank + 1)
    return Axes((labels,), (add_axis(labels, new),))


@rule("ExpandDims", axes=_describe_expanded, literal=True, positions=True)
def expand(node: Node) -> Result:
    """Add an axis of size one; as the last axis it makes a column of rows."""
    data = node.folds[0]
    found = select_first(fold_axes(node, _describe_expanded, follow_entries(0)))
    column = data.kind == found.kind == ROWS and node.int_at(1) in (-1, node.rank(0))
    return found._replace(parts=(data.without_numbers,)) if column else found


def _describe_squeezed(node: Node) -> Axes:
    """Remove axes of size one, except the batch axis."""
    sizes, named, data = node.spec(0).shape, node.attribute("squeeze_dims", ()), node.folds[0]
    if sizes is None or (not named and None in sizes[: data.axis] + sizes[data.axis + 1 :]):
        raise Undecided("which axes are dropped depends on sizes")
    if not named and data.kind == ROWS:
        raise Undecided(_DROPPED)
    labels = number_axes(len(sizes))
    axes = named if isinstance(named, tuple) else ()
    gone = [labels[axis] for axis in axes if isinstance(axis, int)] or [
        label for label, size in zip(labels, sizes, strict=True) if size == 1
    ]
    left = [label for label in labels if label not in gone]
    return Axes((labels,), (left,), mixed=dict.fromkeys(gone, _DROPPED))


_DROPPED = "the batch axis may be removed: name the axes to squeeze"


@rule("Squeeze", axes=_describe_squeezed, literal=True, positions=True)
def squeeze(node: Node) -> Result:
    """Remove axes of size one; a known column of rows keeps its one entry."""
    found = select_first(fold_axes(node, _describe_squeezed, follow_entries(0)))
    named = node.attribute("squeeze_dims", ())
    known = found.kind == ROWS and isinstance(named, tuple) and len(named) == 1 and isinstance(named[0], int)
    column = node.columns(0, int(named[0])) if known and isinstance(named, tuple) else None  # type: ignore[arg-type]
    return column[0] if column is not None and len(column) == 1 else found


def describe_reshape(node: Node) -> Axes:
    """The axes of a reshape: runs of axes with as many entries before as after are grouped. In each group the first
    axes of more than one entry are the same axis, if one's size is a multiple of the other's.
    """
    before, after = node.spec(0).shape, read_target(node)
    if before is None or after is None:
        raise Undecided(NO_RANK)
    inputs, outputs = [f"in {n}" for n in range(len(before))], [f"out {n}" for n in range(len(after))]
    mixed: dict[str, str] = {}
    for run in group_axes(before, after):
        old, new = _skip_ones(before, run[0]), _skip_ones(after, run[1])
        if old and new and _is_multiple(before[old[0]], after[new[0]]):
            outputs[new[0]] = inputs[old[0]]
            old, new = old[1:], new[1:]
        mixed |= dict.fromkeys([inputs[axis] for axis in old], "a reshape merges it with other axes")
        mixed |= dict.fromkeys([outputs[axis] for axis in new], "a reshape splits it from another axis")
    return Axes((inputs,), (outputs,), mixed=mixed)


def _skip_ones(sizes: Sizes, axes: range) -> range:
    """Axes of a run, from the first one with more than one entry on, if any."""
    return next((axes[place:] for place, axis in enumerate(axes) if sizes[axis] != 1), axes)


def _is_multiple(one: int | None, other: int | None) -> bool:
    return one == other or one is None or other is None or min(one, other) > 0 == max(one, other) % min(one, other)


def group_axes(before: Sizes, after: Sizes) -> Iterator[tuple[range, range]]:
    """The shortest runs of axes with as many entries before as after; all remaining axes if sizes are unknown.

    >>> [(list(old), list(new)) for old, new in group_axes((None, 16, 32), (None, 16, 4, 8))]
    [([0], [0]), ([1], [1]), ([2], [2, 3])]
    >>> [(list(old), list(new)) for old, new in group_axes((None, 16, 32), (None, 32))]
    [([2], [1]), ([0, 1], [0])]
    """
    ends = len(before), len(after)
    while min(ends) > 0 and before[ends[0] - 1] == after[ends[1] - 1] is not None:
        ends = ends[0] - 1, ends[1] - 1
        yield range(ends[0], ends[0] + 1), range(ends[1], ends[1] + 1)
    left = right = 0
    while left < ends[0] and right < ends[1]:
        run = _next_run(before[left : ends[0]], after[right : ends[1]])
        yield range(left, left + run[0]), range(right, right + run[1])
        left, right = left + run[0], right + run[1]
    if (left, right) != ends:
        yield range(left, ends[0]), range(right, ends[1])


def _next_run(before: Sizes, after: Sizes) -> tuple[int, int]:
    """The numbers of axes on both sides with equally many entries."""
    if before[0] is None and after[0] is None and _is_same_count(before[1:], after[1:]):
        return 1, 1
    for many, few in itertools.product(range(1, len(before) + 1), range(1, len(after) + 1)):
        sizes = _count_known(before[:many]), _count_known(after[:few])
        if UNKNOWN not in sizes and sizes[0] == sizes[1]:
            return many, few
    return len(before), len(after)


@rule("Reshape", axes=describe_reshape, literal=True, positions=True)
def reshape(node: Node) -> Result:
    """A reshape, which may merge the batch axis with axes after it, and split it from them again."""
    data, target = node.folds
    if data.kind != ROWS:
        return follow_entries(0)(node, node.folds)
    if node.parts(1) is None and target.kind != WHOLE:
        return node.couple("the new shape of rows depends on the batch")
    return _reshape_rows(node, data)


class _Move(NamedTuple):
    """A move of the batch axis by a reshape: old and new position, the sizes before and after it, and its length."""

    place: int
    heads: tuple[Sizes, Sizes]
    tails: tuple[Sizes, Sizes]
    counted: int | None


def _reshape_rows(node: Node, data: Fold) -> Fold:
    before, after = node.spec(0).shape, read_target(node)
    if before is None or after is None:
        raise Undecided("the new shape of rows has an unknown number of axes")
    place = _find_batch_place(node, after)
    heads = before[: data.axis], after[:place]
    tails = before[data.axis + 1 :], after[place + 1 :]
    part = (node.parts(1) or (None,) * len(after))[place]
    move = _Move(place, heads, tails, part.per if part is not None and part.kind == COUNT else None)
    per = _count_per_row(data, move)
    if data.order and data.order[0] == UNDER:
        return _from_under(node, data, move)
    return _keep_interleaved(node, data, move) if data.order or data.ragged else _move_rows(node, data, move, per)


def _move_rows(node: Node, data: Fold, move: _Move, per: int) -> Fold:
    """Move rows in sequence: the number of entries before the batch axis must be unchanged, or one."""
    if _is_same_count(*move.heads) or (move.counted == data.per > 0 and _is_same_count(*move.tails)):
        return data._replace(axis=move.place, per=per).without_numbers
    if move.place or _count_known(move.heads[0]) == 1:
        return node.couple("a reshape moves the batch below different axes")
    old, new = _count_known(move.tails[0]), _count_known(move.tails[1])
    if move.tails[1] and not _is_same_count(*move.tails) and (UNKNOWN in (old, new) or old % new):
        return node.couple("a reshape merges entries of several rows")
    merged = 1 if _is_same_count(*move.tails) else _count_known(move.tails[0]) if not move.tails[1] else UNKNOWN
    order = (UNDER, data.per * merged) if data.per * merged else (OWN, node.owner, node.op.index)
    return data._replace(axis=0, per=UNKNOWN, order=order).without_numbers


def read_target(node: Node) -> Sizes | None:
    """The sizes requested from a reshape, None for unknown ones and the batch axis; None if the rank is unknown."""
    static, parts = node.op.outputs[0].shape, node.parts(1)
    if parts is None:
        return static
    known = static if static is not None else (None,) * len(parts)
    literal = (part.literal[0] if part.literal is not None else None for part in parts)
    return tuple(
        size if size is not None else int(n) if n is not None and n >= 0 else None
        for size, n in zip(known, literal, strict=True)
    )


def _find_batch_place(node: Node, after: Sizes) -> int:
    """The position of the batch axis in the new shape: at the size that counts rows, otherwise at the -1."""
    parts = node.parts(1)
    if parts is None:
        places = [axis for axis, size in enumerate(after) if size is None]
        if len(places) != 1:
            raise Undecided("the batch axis after a reshape is not known")
        return places[0]
    if any(part.kind not in (COUNT, WHOLE) for part in parts):
        raise Undecided("the new shape of rows depends on the batch")
    counts = [axis for axis, part in enumerate(parts) if part.kind == COUNT]
    free = [axis for axis, part in enumerate(parts) if part.literal == (-1,) and after[axis] is None]
    found = counts or free
    if len(found) != 1:
        raise Undecided(FIXED if not found else "a reshape splits the batch into two axes")
    return found[0]


def _count_per_row(data: Fold, move: _Move) -> int:
    """Entries per row along the batch axis: the counted ones, or those that remain for a -1."""
    if move.counted is not None or data.order or data.ragged:
        return data.per if move.counted is None else move.counted
    old, new = _drop_common_end(*move.tails)
    has, needs = (prod(size for size in sizes if size is not None) for sizes in (old, new))
    if (max(data.per, 1) * has) % max(needs, 1) or new.count(None) > old.count(None):
        raise Undecided(
            "a reshape may merge several rows: specify the size of the batch axis, and -1 for a different axis"
        )
    return UNKNOWN if None in old or data.per == UNKNOWN else data.per * has // max(needs, 1)


def _drop_common_end(old: Sizes, new: Sizes) -> tuple[Sizes, Sizes]:
    """Both without their common sizes at the end."""
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    return old, new


def _from_under(node: Node, data: Fold, move: _Move) -> Fold:
    """Rows that were merged under other axes are restored, if the sizes prove it."""
    inner, more = data.order[1], _count_known(move.tails[0])
    if move.place > 0 and move.counted == inner and _is_same_count(*move.tails):
        return data._replace(axis=move.place, per=inner, order=()).without_numbers
    if move.place == 0 and _is_same_count(*move.tails):
        return data.without_numbers
    if move.place == 0 and not move.tails[1] and more != UNKNOWN:
        return data._replace(order=(UNDER, inner * more)).without_numbers
    return node.couple("a reshape moves the batch below different axes")


def _keep_interleaved(node: Node, data: Fold, move: _Move) -> Fold:
    """Reshape interleaved and ragged rows, for which only the axes after them may change."""
    equal = _is_same_count(*move.tails) or _count_known(move.tails[0]) == _count_known(move.tails[1]) != UNKNOWN
    if equal and _is_same_count(*move.heads):
        return data._replace(axis=move.place).without_numbers
    return node.couple("rows that are not contiguous are reshaped")


def _is_same_count(old: Sizes, new: Sizes) -> bool:
    """Whether both certainly have equally many entries; unknown sizes at the same place are equal."""
    left, right = _drop_common_end(old, new)
    if None in left or None in right:
        return False
    return prod(size for size in left if size is not None) == prod(size for size in right if size is not None)


def _count_known(sizes: Sizes) -> int:
    return UNKNOWN if None in sizes else prod(size for size in sizes if size is not None)


@rule("Shape", "ShapeN", literal=True, positions=True)
def shape(node: Node) -> Result:
    """The size of the batch axis is a count, other sizes are whole."""
    return tuple(_shape(node, place) for place in range(len(node.folds)))


def _shape(node: Node, place: int) -> Fold:
    fold, sizes = node.folds[place], node.spec(place).shape
    if fold.kind not in (ROWS, WHOLE) and (sizes is None or None in sizes) and not fold.is_mergeable:
        return node.nonlinear([fold])
    if sizes is None:
        return node.couple("the shape of rows with an unknown number of axes is used") if fold.kind == ROWS else whole()
    parts = [whole() if size is None else whole(size) for size in sizes]
    if fold.kind == ROWS:
        parts[fold.axis] = count_along_batch(fold)
    return pack_entries(node, tuple(parts))


def count_along_batch(fold: Fold) -> Fold:
    """The number of entries along the batch axis."""
    if fold.ragged:
        return Fold(SUM)
    return count(fold.per if not fold.order or fold.order[0] >= 0 else UNKNOWN)


@rule("Size", literal=True, positions=True)
def size(node: Node) -> Result:
    """The number of entries: a multiple of the rows."""
    fold, sizes = node.folds[0], node.spec(0).shape
    if fold.kind != ROWS:
        return whole() if fold.is_mergeable else node.nonlinear([fold])
    number = count_along_batch(fold)
    for axis, each in enumerate(sizes or (None,)):
        if number.kind == COUNT and axis != fold.axis:
            number = count(UNKNOWN if each is None else number.per * each)
    return number


@rule("Rank", literal=True, positions=True)
def rank(node: Node) -> Result:
    """The rank is whole."""
    axes = node.rank(0)
    return whole() if axes is None else whole(axes)


def _describe_pack(node: Node) -> Axes:
    rank = node.need_rank(0)
    labels, new = number_axes(rank), node.number("axis", 0) % (rank + 1)
    return Axes((labels,) * len(node.folds), (add_axis(labels, new),))


@rule("Pack", axes=_describe_pack, literal=True, positions=True)
def pack(node: Node) -> Result:
    """Pack numbers to a vector; tensors get an additional axis."""
    if not any(fold.kind == ROWS for fold in node.folds):
        return move_entries(node, range(len(node.folds))) or add_folds(node, node.folds)
    found, own = _match_all(node.folds), node.need_rank(0, "rows with an unknown number of axes are stacked")
    axis = node.number("axis", 0) % (own + 1)
    put = found._replace(axis=found.axis + (axis <= found.axis))
    return put._replace(parts=tuple(fold.without_numbers for fold in node.folds)) if axis == own else put


def _match_all(folds: Sequence[Fold]) -> Fold:
    """The common fold of tensors of one shape with rows."""
    check_mixed(folds)
    if any(fold.kind == WHOLE for fold in folds):
        raise Undecided(BESIDE)
    return functools.reduce(match_rows, [fold.without_numbers for fold in folds])


def _describe_concat(node: Node) -> Axes:
    unknown = "the axis of a concatenation is not known"
    along, labels = node.need_int(len(node.folds) - 1, unknown), number_axes(node.need_rank(0, unknown))
    inputs = (labels,) * (len(node.folds) - 1)
    return Axes(inputs, (labels,), mixed={labels[along]: "tensors are concatenated along it"})


@rule("ConcatV2", axes=_describe_concat, literal=True, positions=True)
def concat(node: Node) -> Result:
    """Concatenation: along another axis rows stay rows; along the batch axis they are interleaved."""
    *folds, _ = node.folds
    places = range(len(folds))
    if not any(fold.kind == ROWS for fold in folds):
        return move_entries(node, places) or add_folds(node, folds)
    found, unknown = _match_all(folds), "the axis of a concatenation is not known"
    along, own = node.need_int(len(folds), unknown), node.need_rank(0, unknown)
    if along % own == found.axis:
        pers = tuple(fold.per for fold in folds)
        if any(fold.order or fold.ragged or fold.per <= 0 for fold in folds):
            return node.couple("rows in different orders are concatenated")
        return (
            folds[0].without_numbers._replace(per=sum(pers), order=pers) if len(pers) > 1 else folds[0].without_numbers
        )
    return found._replace(parts=_columns(node, places)) if along % own == own - 1 else found


def _columns(node: Node, places: range) -> tuple[Fold, ...] | None:
    found: list[Fold] = []
    for place in places:
        fold = node.folds[place]
        if fold.parts is None and node.size(place, -1) != 1:
            return None
        found.extend(fold.parts or (fold.without_numbers,))
    return tuple(found)


@rule("ConcatOffset", literal=True)
def offsets(node: Node) -> Result:
    """The offsets of the inputs of a concatenation, from its axis and all shapes."""
    axis, lanes = node.int_at(0), [node.parts(place) for place in range(1, len(node.folds))]
    known = [lane for lane in lanes if lane is not None]
    if axis is None or len(known) < len(lanes):
        return node.nonlinear(node.folds)
    found: list[Fold] = []
    start = whole(0)
    for lane in known:
        along = axis % len(lane)
        found.append(pack_entries(node, tuple(start if at == along else whole(0) for at in range(len(lane)))))
        literals = (start.literal, lane[along].literal)
        start = add_folds(node, [start, lane[along]])
        start = whole(literals[0][0] + literals[1][0]) if literals[0] and literals[1] else start
    return tuple(found)


@rule("BroadcastArgs", literal=True)
def broadcast_shape(node: Node) -> Result:
    """The shape that two shapes broadcast to."""
    pairs = pair_sizes(node)
    if pairs is None:
        return node.nonlinear(node.folds)
    return pack_entries(node, tuple(_wider(node, one, other) for one, other in pairs))


def pair_sizes(node: Node) -> list[tuple[Fold, Fold]] | None:
    """The pairs of sizes of two shapes that are broadcast; None if their entries cannot be distinguished."""
    left, right = node.parts(0), node.parts(1)
    if left is None or right is None:
        return None
    rank = max(len(left), len(right))
    left, right = ((whole(1),) * (rank - len(parts)) + parts for parts in (left, right))
    return list(zip(left, right, strict=True))


def _wider(node: Node, one: Fold, other: Fold) -> Fold:
    if one == other or other.literal == (1,):
        return one
    if one.literal == (1,):
        return other
    if one.kind == other.kind == WHOLE:
        return one if one.literal is not None else other
    return one if one.kind == other.kind == COUNT else node.nonlinear([one, other])


@rule("BroadcastGradientArgs", literal=True)
def summed_axes(node: Node) -> Result:
    """The axes along which either of two operands was broadcast."""
    pairs = pair_sizes(node)
    if pairs is None:
        return node.nonlinear(node.folds)
    return _find_broadcast_axes(pairs), _find_broadcast_axes([(other, one) for one, other in pairs])


def _find_broadcast_axes(pairs: list[tuple[Fold, Fold]]) -> Fold:
    """The axes that a broadcast repeats: the first size is 1 and the second is not; unknown sizes may be 1."""
    found: list[int] = []
    for axis, (one, other) in enumerate(pairs):
        if one.kind == WHOLE and one.literal is None and other.literal != (1,) and one != other:
            return whole()
        if one.literal == (1,) and other.literal != (1,):
            found.append(axis)
    return Fold(WHOLE, literal=tuple(found))


@rule("DynamicStitch", "ParallelDynamicStitch", literal=True)
def dynamic_stitch(node: Node) -> Result:
    """Entries of vectors by index; for equal indices the later one counts."""
    if any(fold.kind == ROWS for fold in node.folds):
        return node.couple("rows are stacked by number")
    return move_entries(node, range(len(node.folds) // 2, len(node.folds))) or node.nonlinear(node.folds)
