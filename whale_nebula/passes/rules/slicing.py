"""Rules for slices and gathers, which must keep the batch axis whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from whale_nebula.passes.rules.algebra import follow_entries, move_by_wholes, move_entries
from whale_nebula.passes.rules.axes import add_axis, axes, check_mixed, fold_axes, match_rows, number_axes
from whale_nebula.passes.rules.registry import (
    COUNT,
    COUPLED,
    ROW_NUMBERS,
    ROWS,
    SHAPE,
    SUM,
    UNKNOWN_POSITION,
    WHOLE,
    Axes,
    Describe,
    Fold,
    Node,
    Result,
    Undecided,
    blocks_of,
    rows,
    rule,
)

_GROWS = "rows are cut to a length that depends on the size of the batch"
_CUT = "the batch axis is sliced: the selected rows depend on the other rows"


class _Taken(NamedTuple):
    """The effect of a slice on one axis: `added`, `dropped`, or entries from `begin` to `end` with `stride`, None for
    defaults.
    """

    added: bool = False
    dropped: bool = False
    begin: Fold | None = None
    end: Fold | None = None
    stride: Fold | None = None

    @property
    def kinds(self) -> set[str]:
        """The kinds of the folds of the bounds."""
        return {bound.kind for bound in (self.begin, self.end, self.stride) if bound is not None}

    @property
    def from_start(self) -> bool:
        """Whether consecutive entries are taken from the first on."""
        in_turn = self.stride is None or self.stride.literal == (1,)
        return in_turn and (self.begin is None or self.begin.literal == (0,))

    def takes_size(self, size: int | None) -> bool:
        """Whether all entries of an axis of this size are taken; along the batch axis, as many as there are rows."""
        end = None if self.end is None or self.end.literal is None else self.end.literal[0]
        known = end is not None and size is not None and end >= size
        return self.from_start and (known or self.end is None or self.end.kind == COUNT)

    def takes_rows(self, data: Fold) -> bool:
        """Whether all rows are taken, in order."""
        counted = self.end is not None and self.end.kind == COUNT and self.end.per == data.per > 0 and not data.order
        return self.from_start and not self.dropped and (self.end is None or counted)


def _read_slice(node: Node, rank: int | None) -> list[_Taken] | None:
    """Parse `begin` and `size` of a slice, one for each axis."""
    begins, sizes = node.parts(1), node.parts(2)
    if begins is None or sizes is None:
        return None
    ends = [None if size.literal == (-1,) else size for size in sizes]  # an end is only known if all entries are taken
    return [_Taken(begin=begin, end=end) for begin, end in zip(begins, ends, strict=True)]


def _read_strided(node: Node, rank: int | None) -> list[_Taken] | None:
    """Parse begins, ends and strides with their masks; axes after the last are kept whole."""
    begins = node.parts(1)
    if begins is None:
        return None
    ends, strides = (node.parts(place) or (node.folds[place],) * len(begins) for place in (2, 3))

    def has(mask: str, place: int) -> bool:
        return bool(node.number(f"{mask}_mask", 0) >> place & 1)

    found: list[_Taken] = []
    for place, begin in enumerate(begins):
        if has("ellipsis", place):
            later = sum(not has("new_axis", other) for other in range(place + 1, len(begins)))
            if rank is None:
                return None
            found += [_Taken()] * (rank - later - sum(not each.added for each in found))
            continue
        if has("new_axis", place):
            found.append(_Taken(added=True))
            continue
        taken = _Taken(
            dropped=has("shrink_axis", place),
            begin=None if has("begin", place) else begin,
            end=None if has("end", place) else ends[place],
            stride=strides[place],
        )
        found.append(taken)
    return found


def _describe_taken(read: Callable[[Node, int | None], list[_Taken] | None]) -> Describe:
    """The axes of a slice: those taken completely and in order are kept; of others a part is taken."""

    def describe(node: Node) -> Axes:
        labels, kept, mixed = _name_taken(node.spec(0).shape, read(node, node.rank(0)))
        return Axes((labels,), (kept,), mixed=mixed)

    return describe


def _describe_put_back(node: Node) -> Axes:
    """The axes of a slice's gradient, including those that were taken completely."""
    shape = node.op.outputs[0].shape
    labels, kept, mixed = _name_taken(shape, _read_strided(node, None if shape is None else len(shape)))
    return Axes((None, None, None, None, kept), (labels,), mixed=mixed)


def _name_taken(
    shape: Sequence[int | None] | None, taken: Sequence[_Taken] | None
) -> tuple[list[str], list[str], dict[str, str]]:
    """The axes of a tensor, those of the slice, and the axes of which a part is taken."""
    if taken is None or shape is None:
        raise Undecided("the range of a slice is not known")
    labels = number_axes(len(shape))
    left = iter(zip(labels, shape, strict=True))
    kept: list[str] = []
    mixed: dict[str, str] = {}
    for each in taken:
        if each.added:
            kept.append(f"new {len(kept)}")
            continue
        label, size = next(left)
        kept += [] if each.dropped else [label]
        if not each.takes_size(size):
            mixed[label] = "only a part of it is used"
    return list(labels), [*kept, *(label for label, _ in left)], mixed


def _slice_rows(node: Node, data: Fold, taken: Sequence[_Taken]) -> Fold:
    """The rows, if all are taken, at their new axis."""
    if any(each.kinds - {WHOLE, COUNT} for each in taken):
        return node.couple("the range of a slice of rows depends on the batch")
    old = [place for place, each in enumerate(taken) if not each.added]
    own = old[data.axis] if data.axis < len(old) else len(taken)
    if own < len(taken) and not taken[own].takes_rows(data):
        return node.couple(_CUT)
    if any(COUNT in taken[place].kinds for place in old if place != own):
        return node.couple(_GROWS)
    kept = sum(not each.dropped for each in taken[:own])
    return data._replace(axis=kept + max(0, data.axis - len(old))).without_numbers


def _slice(node: Node, taken: Sequence[_Taken] | None) -> Result:
    data = node.folds[0]
    if data.kind != ROWS:
        return follow_entries(0)(node, node.folds)
    unknown = node.couple("the range of a slice of rows is not known")
    return unknown if taken is None else _slice_rows(node, data, taken)


@rule("StridedSlice", axes=_describe_taken(_read_strided), literal=True, positions=True)
def slice_strided(node: Node) -> Result:
    """A strided slice `x[begin:end:stride, ...]` with its masks."""
    return _slice(node, _read_strided(node, node.rank(0)))


@rule("Slice", axes=_describe_taken(_read_slice), literal=True)
def slice_by_size(node: Node) -> Result:
    """A slice by `begin` and `size`, one each an axis."""
    return _slice(node, _read_slice(node, node.rank(0)))


@rule("StridedSliceGrad", axes=_describe_put_back, literal=True)
def strided_gradient(node: Node) -> Result:
    """The gradient of a strided slice, padded with zeros: rows, if the slice takes all of them."""
    sizes, gradient = node.parts(0), node.folds[4]
    counts = [axis for axis, size in enumerate(sizes or ()) if size.kind == COUNT]
    if sizes is None or not counts or gradient.kind != ROWS:
        return move_by_wholes(node, (gradient, *node.folds[:4]))
    data = rows(counts[0], sizes[counts[0]].per)
    taken = _read_strided(node, len(sizes)) if len(counts) == 1 else None
    found = data if taken is None else _slice_rows(node, data, taken)
    if found.kind == COUPLED:
        return found
    same = all(getattr(found, name) == getattr(gradient, name) for name in ("axis", "per", "order", "ragged"))
    return data if same and taken is not None else node.couple("the position of a slice's gradient is not known")


@rule("XlaDynamicUpdateSlice", literal=True)
def update_slice(node: Node) -> Result:
    """A part of each row is replaced (keras.ops.slice_update)."""
    data, part, starts = node.folds[0], node.folds[1], node.parts(2)
    if data.kind != ROWS or part.kind != ROWS:
        if ROWS in (data.kind, part.kind):
            return node.couple("rows are inserted into a tensor without rows, or the reverse")
        return node.nonlinear(node.folds)
    if starts is None or any(start.kind != WHOLE for start in starts) or not starts[data.axis].is_zero:
        return node.couple("the replaced rows depend on the other rows")
    return match_rows(data, part).without_numbers


def _describe_split(node: Node) -> Axes:
    unknown, (data, place) = "the axis of a split is not known", (1, 0) if node.op.type == "Split" else (0, 2)
    axis, labels = node.need_int(place, unknown), number_axes(node.need_rank(data, unknown))
    inputs = (None, labels) if data else (labels,)
    return Axes(inputs, (labels,) * len(node.op.outputs), mixed={labels[axis]: _CUT})


@rule("Split", "SplitV", axes=_describe_split, literal=True)
def split(node: Node) -> Result:
    """Split along an axis; rows of several concatenated tensors are separated again."""
    data = 1 if node.op.type == "Split" else 0
    fold, pieces = node.folds[data], len(node.op.outputs)
    if fold.kind == ROWS and any(other.kind != WHOLE for place, other in enumerate(node.folds) if place != data):
        return node.couple(_GROWS)
    along = fold.kind == ROWS and node.int_at(0 if data else 2) in (fold.axis, fold.axis - (node.rank(data) or 0))
    if along and pieces == 1:
        return fold.without_numbers
    if along and data and len(fold.order) == pieces and fold.order[0] > 0 and len(set(fold.order)) == 1:
        return fold._replace(per=fold.order[0], order=()).without_numbers
    return fold_axes(node, _describe_split, follow_entries(data))


def _describe_unpack(node: Node) -> Axes:
    labels = number_axes(node.need_rank(0, "rows with an unknown number of axes are unstacked"))
    along = labels[node.number("axis", 0)]
    left = [label for label in labels if label != along]
    return Axes((labels,), (left,) * len(node.op.outputs), mixed={along: _CUT})


@rule("Unpack", axes=_describe_unpack, literal=True, positions=True)
def unpack(node: Node) -> Result:
    """One tensor for each entry of an axis."""
    columns = node.columns(0, node.number("axis", 0)) if node.folds[0].kind == ROWS else None
    if columns is not None and len(columns) == len(node.op.outputs):
        return columns
    return fold_axes(node, _describe_unpack, follow_entries(0))


_ACROSS = "rows are selected by number from the batch"


def _describe_gather(node: Node) -> Axes:
    """`table[.., axis, ..], numbers -> [.., numbers, ..]`: the indexed axis is mixed."""
    axis, ranks = node.int_at(2) if len(node.folds) > 2 else 0, _ranks(node)
    if axis is None or ranks is None:
        raise Undecided("the axis of a lookup is not known")
    table, numbers = [f"t{n}" for n in range(ranks[0])], [f"n{n}" for n in range(ranks[1])]
    at, shared = axis % ranks[0], node.number("batch_dims", 0) % (ranks[1] + 1)
    numbers[:shared] = table[:shared]
    out = [*table[:at], *numbers[shared:], *table[at + 1 :]]
    return Axes((table, numbers), (out,), mixed={table[at]: _ACROSS})


@rule("Gather", "GatherV2", "ResourceGather", axes=_describe_gather, literal=True, positions=True)
def gather(node: Node) -> Result:
    """A gather from a whole table, or from each row's own."""
    table, numbers = node.folds[:2]
    axis = node.int_at(2) if len(node.folds) > 2 else 0
    if ROWS not in (table.kind, numbers.kind):
        return _slice_without_rows(node)
    check_mixed((table, numbers))
    ranks = _ranks(node)
    if axis is None or ranks is None:
        raise Undecided("the axis of a lookup is not known")
    shared = node.number("batch_dims", 0) % (ranks[1] + 1)
    if table.kind == numbers.kind == ROWS and not table.axis == numbers.axis < shared:
        own = table.axis == axis % ranks[0] and numbers.position and not shared
        return _gather_own_rows(node, table, numbers, table.axis + numbers.axis) if own else node.couple(_ACROSS)
    if table.kind == WHOLE and numbers.position:
        return node.couple(ROW_NUMBERS)
    plain = (table, numbers._replace(position=0, offset=False), *node.folds[2:])
    return fold_axes(replace(node, folds=plain), _describe_gather, Node.nonlinear)


def _ranks(node: Node) -> tuple[int, int] | None:
    table = node.op.outputs[0].rank if node.op.type == "ResourceGather" else node.rank(0)
    numbers = node.rank(1)
    if table is None or numbers is None:
        return None
    return (table - numbers + 1 if node.op.type == "ResourceGather" else table), numbers


def _gather_own_rows(node: Node, table: Fold, numbers: Fold, axis: int) -> Fold:
    """Rows gathered by their numbers within the micro-batch."""
    entry_by_entry = numbers.position == 1 and not numbers.offset and numbers.per == table.per
    block_by_block = numbers.per == 1 and numbers.position == table.per > 1
    unknown_blocks = numbers.per == 1 and numbers.position < UNKNOWN_POSITION and _is_blocks(node, numbers.position)
    in_order = not (table.order or numbers.order or table.ragged)
    if not in_order or not (entry_by_entry or block_by_block or unknown_blocks):
        return node.couple(_ACROSS)
    return table._replace(axis=axis, per=numbers.per, ragged=numbers.ragged).without_numbers


def _is_blocks(node: Node, position: int) -> bool:
    """Whether this table was merged from the first two axes of the tensor whose blocks the positions count."""
    made = node.graph.ops[node.op.inputs[0].op]
    if made.type != "Reshape" or blocks_of(made.inputs[0]) != position or node.owner != node.op.index:
        return False
    before, after = node.graph.spec(made.inputs[0]).shape, node.spec(0).shape
    return before is not None and after is not None and None not in before[2:] and before[2:] == after[1:]


def _slice_without_rows(node: Node) -> Result:
    if (found := move_entries(node, [0])) is not None:
        return found
    counts = node.folds[0].kind in (SHAPE, COUNT)
    return node.nonlinear(node.folds) if counts else move_by_wholes(node, node.folds[:2])


@rule("GatherNd", "ResourceGatherNd", positions=True)
def gather_nd(node: Node) -> Result:
    """A gather in which each vector of numbers along the last axis selects one entry, or one block."""
    table, numbers = node.folds
    if ROWS not in (table.kind, numbers.kind):
        return move_by_wholes(node, node.folds)
    check_mixed(node.folds)
    rank, depth = node.need_rank(1, "the indices of a lookup are not known"), node.size(1, -1)
    if depth is None:
        raise Undecided("the indices of a lookup are not known")
    if numbers.kind == ROWS and numbers.axis == rank - 1:
        return node.couple("the batch is along the indices of a lookup")
    if table.kind == WHOLE:
        return node.couple(_ACROSS) if numbers.position else numbers.without_numbers
    if numbers.kind == WHOLE:
        return (
            table._replace(axis=table.axis - depth + rank - 1).without_numbers
            if table.axis >= depth
            else node.couple(_ACROSS)
        )
    parts = numbers.parts or ((numbers,) if depth == 1 else ())
    own = [place for place, part in enumerate(parts) if part.position]
    if own != [table.axis] or len(parts) != depth:
        return node.couple(_ACROSS)
    return _gather_own_rows(node, table, parts[table.axis]._replace(axis=numbers.axis), numbers.axis)


@axes("OneHot")
def one_hot(node: Node) -> Axes:
    """An additional axis of fixed size."""
    rank = node.need_rank(0, "an axis is added to rows with an unknown number of axes")
    labels, new = number_axes(rank), node.number("axis", -1) % (rank + 1)
    return Axes((labels,), (add_axis(labels, new),))


@rule("Where")
def where(node: Node) -> Result:
    """The indices at which a mask is true: each row has as many entries as true values."""
    mask, rank = node.folds[0], node.rank(0)
    if mask.kind != ROWS:
        return node.nonlinear(node.folds)
    if mask.axis != 0 or mask.order or rank is None:
        return node.couple("the true values of a mask are listed, and its rows are not contiguous")
    own = Fold(ROWS, per=mask.per, ragged=_mask(node), position=1)
    return own._replace(parts=(own, *(own._replace(position=0),) * (rank - 1)))


def _mask(node: Node) -> int:
    """A number for a mask, the same for its reshapes (see `Fold.ragged`): only entries of the same mask match."""
    value = node.op.inputs[0]
    while node.graph.ops[value.op].type in _SHAPED:
        value = node.graph.ops[value.op].inputs[0]
    return 1 + value.op


_SHAPED = frozenset({"Reshape", "Identity", "Squeeze", "ExpandDims"})


@rule("ScatterNd", "TensorScatterAdd")
def scatter(node: Node) -> Result:
    """A scatter of entries into a whole tensor: a sum."""
    numbers, entries, target = node.folds if node.op.type == "ScatterNd" else (*node.folds[1:], node.folds[0])
    if ROWS not in (numbers.kind, entries.kind, target.kind):
        return move_by_wholes(node, (entries, numbers, target))
    blank = target.kind == WHOLE and (node.op.type == "ScatterNd" or target.is_zero)
    if blank and {numbers.kind, entries.kind} == {ROWS} and numbers.axis == entries.axis:
        return (
            Fold(SUM)
            if numbers.order == entries.order
            else node.couple("rows and their positions are in different orders")
        )
    return node.couple("rows are inserted into a tensor by number")


@rule("LookupTableFindV2", "LookupTableFind")
def lookup_table_find(node: Node) -> Result:
    """A lookup in a table of the program."""
    table, keys, default = node.folds
    if table.kind == default.kind == WHOLE:
        return keys.without_numbers if keys.kind == ROWS else node.nonlinear([keys])
    return node.couple("the table depends on the batch")
