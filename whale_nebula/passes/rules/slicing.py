"""Rules for slices and gathers, which must keep the batch axis whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from whale_nebula.passes.rules.algebra import (
    move_by_wholes,
    move_entries,
    pack_entries,
    slice_entries,
)
from whale_nebula.passes.rules.axes import NO_RANK, add_axis, axes, find_mixed_rows, match_rows, number_axes
from whale_nebula.passes.rules.registry import (
    COUNT,
    COUPLED,
    ROWS,
    SHAPE,
    STRANGE,
    SUM,
    WHOLE,
    Axes,
    Fold,
    Result,
    Site,
    blocks_of,
    rows,
    rule,
)

_GROWS = "rows are cut to a length that grows with the batch"
_CUT = "the batch axis is sliced: which rows are taken depends on the other rows"


class _Axis(NamedTuple):
    """What a strided slice does with one axis of its input; `place` is its place in begin, end and
    strides.
    """

    place: int
    added: bool = False
    dropped: bool = False
    full: bool = False


def _describe_strided(site: Site) -> Axes | str:
    """Axes of which everything is taken, one after the other, stay; of others a part is taken."""
    rank, shape = site.rank(0), site.spec(0).shape
    found = _axes(site, rank)
    if found is None or rank is None or shape is None:
        return "what a slice takes is not known"
    labels, taken = number_axes(rank), _bounds(site)
    kept: list[str] = []
    mixed: dict[str, str] = {}
    seen = 0
    for axis in found:
        if axis.added:
            kept.append(f"new {len(kept)}")
            continue
        if not axis.full and not (taken is not None and _takes_all(taken, axis.place, shape[seen])):
            mixed[labels[seen]] = "a part of it is taken"
        kept += [] if axis.dropped else [labels[seen]]
        seen += 1
    return Axes((labels,), ([*kept, *labels[seen:]],), mixed=mixed)


def _bounds(site: Site) -> list[tuple[int | None, int | None, int]] | None:
    """Begin, end and stride of each place; None where a mask says that there is no bound, or it counts rows."""
    begins, ends, strides = site.parts(1), site.parts(2), site.ints(3)
    if begins is None or ends is None or strides is None:
        return None
    found: list[tuple[int | None, int | None, int]] = []
    for place, stride in enumerate(strides):
        first = None if site.number("begin_mask", 0) >> place & 1 else begins[place].literal
        last = None if site.number("end_mask", 0) >> place & 1 else ends[place].literal
        if not first and not site.number("begin_mask", 0) >> place & 1:
            return None
        found.append((None if not first else int(first[0]), None if not last else int(last[0]), stride))
    return found


def _takes_all(taken: list[tuple[int | None, int | None, int]], place: int, size: int | None) -> bool:
    begin, end, stride = taken[place]
    return stride == 1 and begin in (None, 0) and (end is None or (size is not None and end >= size))


@rule("StridedSlice", axes=_describe_strided, literal=True, positions=True)
def slice_strided(site: Site) -> Result:
    """`x[begin:end:stride, ...]` with its masks."""
    data = site.folds[0]
    if data.kind != ROWS:
        lane = site.parts(0)
        taken = None if lane is None else _take_lane(site, lane)
        return move_by_wholes(site, site.folds) if taken is None else taken
    axes = _axes(site, site.rank(0))
    if axes is None:
        return site.coupled("what a slice takes of rows is not known")
    known = [part for place in (1, 2, 3) for part in site.parts(place) or (site.folds[place],)]
    if any(part.kind not in (WHOLE, COUNT) for part in known):
        return site.coupled("what a slice takes of rows depends on the batch")
    found = _of_rows(site, data, axes)
    return site.coupled(_GROWS) if found.kind == ROWS and _counted_beside(site, data, axes) else found


@rule("StridedSliceGrad", literal=True)
def strided_gradient(site: Site) -> Result:
    """The gradient of a strided slice, put among zeros: rows, where the slice would have taken all of these."""
    sizes, gradient = site.parts(0), site.folds[4]
    counts = [axis for axis, size in enumerate(sizes or ()) if size.kind == COUNT]
    if sizes is None or not counts or gradient.kind != ROWS:
        return move_by_wholes(site, (gradient, *site.folds[:4]))
    axes, data = _axes(site, len(sizes)), rows(counts[0], sizes[counts[0]].per)
    bounds = [part for place in (1, 2, 3) for part in site.parts(place) or (site.folds[place],)]
    if axes is None or len(counts) > 1 or any(part.kind not in (WHOLE, COUNT) for part in bounds):
        return site.coupled("where the gradient of a slice belongs is not known")
    taken = site.coupled(_GROWS) if _counted_beside(site, data, axes) else _of_rows(site, data, axes)
    if taken.kind == COUPLED:
        return taken
    alike = (taken.axis, taken.per, taken.order, taken.ragged) == (
        gradient.axis, gradient.per, gradient.order, gradient.ragged,
    )  # fmt: skip
    return data if alike else site.coupled("where the gradient of a slice belongs is not known")


def _of_rows(site: Site, data: Fold, axes: Sequence[_Axis]) -> Fold:
    kept, seen = 0, 0
    for axis in axes:
        if axis.added:
            kept += 1
            continue
        if seen == data.axis:
            whole_axis = not axis.dropped and (axis.full or _everything(site, data, axis.place))
            return data._replace(axis=kept).bare if whole_axis else site.coupled(_CUT)
        kept, seen = kept + (not axis.dropped), seen + 1
    return data._replace(axis=kept + data.axis - seen).bare


def _counted_beside(site: Site, data: Fold, axes: Sequence[_Axis]) -> bool:
    """Whether what is taken along any axis but the batch's hangs on how many rows there are."""
    old = [axis for axis in axes if not axis.added]
    others = [axis.place for at, axis in enumerate(old) if at != data.axis and not axis.full]
    lanes = [(site.parts(which), site.folds[which]) for which in (1, 2, 3)]
    return any((lane[place] if lane else all_).kind == COUNT for lane, all_ in lanes for place in others)


def _everything(site: Site, data: Fold, place: int) -> bool:
    """From the first entry, or the mask, to as many as there are, one after the other."""
    begins, ends, strides = site.parts(1), site.parts(2), site.ints(3)
    if begins is None or ends is None or strides is None or strides[place] != 1:
        return False
    begin = bool(site.number("begin_mask", 0) >> place & 1) or begins[place].literal == (0,)
    all_of_them = ends[place].kind == COUNT and ends[place].per == data.per > 0 and not data.order
    return begin and (bool(site.number("end_mask", 0) >> place & 1) or all_of_them)


def _axes(site: Site, rank: int | None) -> list[_Axis] | None:
    """What happens to each axis of what is sliced, new axes between them; the axes after the last are left
    alone.
    """
    begins = site.parts(1)
    if begins is None:
        return None
    masks = {name: site.number(f"{name}_mask", 0) for name in ("ellipsis", "new_axis", "shrink_axis")}
    found: list[_Axis] = []
    for place in range(len(begins)):
        bit = 1 << place
        if masks["ellipsis"] & bit:
            later = range(place + 1, len(begins))
            used = sum(not axis.added for axis in found) + sum(not masks["new_axis"] >> p & 1 for p in later)
            if rank is None:
                return None
            found += [_Axis(place, full=True)] * (rank - used)
        elif masks["new_axis"] & bit:
            found.append(_Axis(place, added=True))
        else:
            found.append(_Axis(place, dropped=bool(masks["shrink_axis"] & bit)))
    return found


def _take_lane(site: Site, lane: tuple[Fold, ...]) -> Fold | None:
    """Entries of a vector that is followed entry by entry."""
    begin, end, stride = site.known(1), site.known(2), site.known(3)
    if begin is None or stride is None or site.number("new_axis_mask", 0) or site.number("ellipsis_mask", 0):
        return None
    if site.number("shrink_axis_mask", 0):
        return lane[begin] if -len(lane) <= begin < len(lane) else None
    first = None if site.number("begin_mask", 0) else begin
    if end is None and not site.number("end_mask", 0):
        return None
    return pack_entries(site, lane[slice(first, None if site.number("end_mask", 0) else end, stride)])


def _describe_slice(site: Site) -> Axes | str:
    begins, sizes, shape = site.ints(1), site.ints(2), site.spec(0).shape
    if begins is None or sizes is None or shape is None:
        return "what a slice takes is not known"
    labels = number_axes(len(shape))
    part = [n for n in range(len(shape)) if begins[n] or sizes[n] not in (-1, shape[n])]
    return Axes((labels,), (labels,), mixed={labels[axis]: "a part of it is taken" for axis in part})


@rule("Slice", axes=_describe_slice, literal=True)
def plain(site: Site) -> Result:
    """`begin` and `size`, one each an axis."""
    data, begins, sizes = site.folds[0], site.parts(1), site.parts(2)
    if data.kind != ROWS:
        return move_entries(site, [0], slice_entries) or move_by_wholes(site, site.folds)
    if begins is None or sizes is None or any(part.kind not in (WHOLE, COUNT) for part in (*begins, *sizes)):
        return site.coupled("what a slice takes of rows is not known")
    size_of = sizes[data.axis]
    all_of_them = size_of.kind == COUNT and size_of.per == data.per > 0 and not data.order
    if begins[data.axis].literal == (0,) and (size_of.literal == (-1,) or all_of_them):
        others = [part for axis, part in enumerate(sizes) if axis != data.axis]
        others += [part for axis, part in enumerate(begins) if axis != data.axis]
        if all(part.kind == WHOLE for part in others):
            return data.bare
    return site.coupled(_CUT)


@rule("XlaDynamicUpdateSlice", literal=True)
def update_slice(site: Site) -> Result:
    """A part of each row is replaced (keras.ops.slice_update)."""
    data, part, starts = site.folds[0], site.folds[1], site.parts(2)
    if data.kind != ROWS or part.kind != ROWS:
        if ROWS in (data.kind, part.kind):
            return site.coupled("rows are put into a tensor that has none, or the other way")
        return site.nonlinear(site.folds)
    if starts is None or any(start.kind != WHOLE for start in starts) or not starts[data.axis].zero:
        return site.coupled("which rows are replaced depends on the others")
    return match_rows(site, data, part).bare


def _describe_split(site: Site) -> Axes | str:
    data, axis = (1, site.known(0)) if site.op.type == "Split" else (0, site.known(2))
    rank = site.rank(data)
    if rank is None or axis is None:
        return "the axis of a split is not known"
    labels: list[str] = number_axes(rank)
    inputs = (None, labels) if data else (labels,)
    return Axes(inputs, (labels,) * len(site.op.outputs), mixed={labels[axis]: "it is taken apart"})


@rule("Split", axes=_describe_split, literal=True)
def split(site: Site) -> Result:
    """Equal parts along an axis."""
    return _split(site, data=1, axis=site.known(0))


@rule("SplitV", axes=_describe_split, literal=True)
def split_by_sizes(site: Site) -> Result:
    """Parts of given sizes along an axis."""
    return _split(site, data=0, axis=site.known(2))


def _split(site: Site, data: int, axis: int | None) -> Result:
    fold, rank, pieces = site.folds[data], site.rank(data), len(site.op.outputs)
    if fold.kind != ROWS:
        lane = site.parts(data)
        if lane is not None and site.op.type == "Split" and len(lane) % pieces == 0:
            step = len(lane) // pieces
            return tuple(pack_entries(site, lane[at * step : (at + 1) * step]) for at in range(pieces))
        return move_by_wholes(site, [fold, *(other for place, other in enumerate(site.folds) if place != data)])
    if axis is None or rank is None:
        return site.coupled("the axis of a split is not known")
    if any(other.kind != WHOLE for place, other in enumerate(site.folds) if place != data):
        return site.coupled(_GROWS)
    if axis % rank != fold.axis:
        return fold.bare
    if pieces == 1:
        return fold.bare
    if site.op.type == "Split" and len(fold.order) == pieces and fold.order[0] > 0 and len(set(fold.order)) == 1:
        return fold._replace(per=fold.order[0], order=()).bare
    return site.coupled(_CUT)


def _describe_unpack(site: Site) -> Axes | str:
    rank = site.rank(0)
    if rank is None:
        return NO_RANK
    labels, along = number_axes(rank), number_axes(rank)[site.number("axis", 0)]
    left = [label for label in labels if label != along]
    return Axes((labels,), (left,) * len(site.op.outputs), mixed={along: "it is taken apart"})


@rule("Unpack", axes=_describe_unpack, literal=True, positions=True)
def unpack(site: Site) -> Result:
    """One tensor for each entry of an axis."""
    data, rank = site.folds[0], site.rank(0)
    lane = site.parts(0)
    if data.kind != ROWS:
        known = lane is not None and len(lane) == len(site.op.outputs)
        return lane if known and lane is not None else move_by_wholes(site, site.folds)
    if rank is None:
        return site.coupled("rows with an unknown number of axes are taken apart")
    axis = site.number("axis", 0) % rank
    columns = site.columns(0, axis)
    if columns is not None and len(columns) == len(site.op.outputs):
        return columns
    return site.coupled(_CUT) if axis == data.axis else data._replace(axis=data.axis - (axis < data.axis)).bare


_ACROSS = "rows are picked by number out of the batch"


def _describe_gather(site: Site) -> Axes | str:
    """`table[.., axis, ..], numbers -> [.., numbers, ..]`: the axis that is looked up in is mixed."""
    axis, ranks = site.known(2) if len(site.folds) > 2 else 0, _ranks(site)
    if axis is None or ranks is None:
        return "the axis of a look-up is not known"
    table, numbers = [f"t{n}" for n in range(ranks[0])], [f"n{n}" for n in range(ranks[1])]
    at, shared = axis % ranks[0], site.number("batch_dims", 0) % (ranks[1] + 1)
    numbers[:shared] = table[:shared]
    out = [*table[:at], *numbers[shared:], *table[at + 1 :]]
    return Axes((table, numbers), (out,), mixed={table[at]: _ACROSS})


@rule("Gather", "GatherV2", "ResourceGather", axes=_describe_gather, literal=True, positions=True)
def gather(site: Site) -> Result:
    """A table that is the same everywhere, or each row's own."""
    table, numbers = site.folds[:2]
    axis = site.known(2) if len(site.folds) > 2 else 0
    if ROWS not in (table.kind, numbers.kind):
        return _of_vector(site)
    wrong = find_mixed_rows(site, (table, numbers))
    if wrong is not None:
        return wrong
    ranks = _ranks(site)
    if axis is None or ranks is None:
        return site.coupled("the axis of a look-up is not known")
    return _gather_rows(site, table, numbers, axis % ranks[0], site.number("batch_dims", 0) % (ranks[1] + 1))


def _ranks(site: Site) -> tuple[int, int] | None:
    table = site.op.outputs[0].rank if site.op.type == "ResourceGather" else site.rank(0)
    numbers = site.rank(1)
    if table is None or numbers is None:
        return None
    return (table - numbers + 1 if site.op.type == "ResourceGather" else table), numbers


def _gather_rows(site: Site, table: Fold, numbers: Fold, axis: int, together: int) -> Fold:
    rank = site.rank(1) or 0
    if table.kind == WHOLE:
        if numbers.position:
            return site.coupled("numbers of rows (a range over the batch) are others in a micro-batch")
        return numbers._replace(axis=numbers.axis + (axis - together if numbers.axis >= together else 0)).bare
    if numbers.kind == WHOLE:
        if table.axis == axis or table.axis < together:
            return site.coupled(_ACROSS)
        return table._replace(axis=table.axis + (rank - 1 - together if table.axis > axis else 0)).bare
    if table.axis < together and table.axis == numbers.axis:
        return match_rows(site, table, numbers._replace(position=0, offset=False)).bare
    if table.axis == axis and numbers.position and not together:
        return _own_rows(site, table, numbers, axis + numbers.axis)
    return site.coupled(_ACROSS)


def _own_rows(site: Site, table: Fold, numbers: Fold, axis: int) -> Fold:
    """Rows picked by the numbers that they have in their own micro-batch."""
    entry_by_entry = numbers.position == 1 and not numbers.offset and numbers.per == table.per
    block_by_block = numbers.per == 1 and numbers.position == table.per > 1
    unknown_blocks = numbers.per == 1 and numbers.position < STRANGE and _is_blocks(site, numbers.position)
    in_order = not (table.order or numbers.order or table.ragged)
    if not in_order or not (entry_by_entry or block_by_block or unknown_blocks):
        return site.coupled(_ACROSS)
    return table._replace(axis=axis, per=numbers.per, ragged=numbers.ragged).bare


def _is_blocks(site: Site, position: int) -> bool:
    """Whether the first two axes of the tensor that positions count the blocks of were merged to this table."""
    made = site.graph.ops[site.op.inputs[0].op]
    if made.type != "Reshape" or blocks_of(made.inputs[0]) != position or site.owner != site.op.index:
        return False
    before, after = site.graph.spec(made.inputs[0]).shape, site.spec(0).shape
    return before is not None and after is not None and None not in before[2:] and before[2:] == after[1:]


def _of_vector(site: Site) -> Fold:
    lane, numbers = site.parts(0), site.ints(1) if site.rank(1) in (0, 1) else None
    if lane is not None and numbers is not None and all(-len(lane) <= number < len(lane) for number in numbers):
        picked = tuple(lane[number] for number in numbers)
        return picked[0] if site.rank(1) == 0 else pack_entries(site, picked)
    if site.folds[0].kind in (SHAPE, COUNT):
        return site.nonlinear(site.folds)
    return move_by_wholes(site, site.folds[:2])


@rule("GatherNd", "ResourceGatherNd", positions=True)
def gather_nd(site: Site) -> Result:
    """Each vector of numbers along the last axis picks one entry, or one block."""
    table, numbers = site.folds
    if ROWS not in (table.kind, numbers.kind):
        return move_by_wholes(site, site.folds)
    wrong = find_mixed_rows(site, site.folds)
    rank, depth = site.rank(1), site.size(1, -1)
    if wrong is not None or rank is None or depth is None:
        return wrong or site.coupled("the numbers of a look-up are not known")
    if numbers.kind == ROWS and numbers.axis == rank - 1:
        return site.coupled("the batch lies along the numbers of a look-up")
    if table.kind == WHOLE:
        return site.coupled(_ACROSS) if numbers.position else numbers.bare
    if numbers.kind == WHOLE:
        return table._replace(axis=table.axis - depth + rank - 1).bare if table.axis >= depth else site.coupled(_ACROSS)
    parts = numbers.parts or ((numbers,) if depth == 1 else ())
    own = [place for place, part in enumerate(parts) if part.position]
    if own != [table.axis] or len(parts) != depth:
        return site.coupled(_ACROSS)
    return _own_rows(site, table, parts[table.axis]._replace(axis=numbers.axis), numbers.axis)


@axes("OneHot")
def one_hot(site: Site) -> Axes | str:
    """One more axis, as long everywhere."""
    rank = site.rank(0)
    if rank is None:
        return "rows with an unknown number of axes get one more"
    labels, new = number_axes(rank), site.number("axis", -1) % (rank + 1)
    return Axes((labels,), (add_axis(labels, new),))


@rule("Where")
def where(site: Site) -> Result:
    """Where a mask of rows holds: each row gives as many entries as it has."""
    mask, rank = site.folds[0], site.rank(0)
    if mask.kind != ROWS:
        return site.nonlinear(site.folds)
    if mask.axis != 0 or mask.order or rank is None:
        return site.coupled("a mask whose rows do not lie one after the other is listed")
    own = Fold(ROWS, per=mask.per, ragged=_mask(site), position=1)
    return own._replace(parts=(own, *(own._replace(position=0),) * (rank - 1)))


def _mask(site: Site) -> int:
    """Which mask it is, whatever shape it was given: entries of one mask belong together, those of two do not."""
    value = site.op.inputs[0]
    while site.graph.ops[value.op].type in _SHAPED:
        value = site.graph.ops[value.op].inputs[0]
    return 1 + value.op


_SHAPED = frozenset({"Reshape", "Identity", "Squeeze", "ExpandDims"})


@rule("ScatterNd", "TensorScatterAdd")
def scatter(site: Site) -> Result:
    """Entries added into places of a tensor that is the same everywhere: a sum."""
    numbers, entries, target = site.folds if site.op.type == "ScatterNd" else (*site.folds[1:], site.folds[0])
    if ROWS not in (numbers.kind, entries.kind, target.kind):
        return move_by_wholes(site, (entries, numbers, target))
    blank = target.kind == WHOLE and (site.op.type == "ScatterNd" or target.zero)
    if blank and {numbers.kind, entries.kind} == {ROWS} and numbers.axis == entries.axis:
        return (
            Fold(SUM) if numbers.order == entries.order else site.coupled("rows and their places lie in other orders")
        )
    return site.coupled("rows are put into a tensor by number")


@rule("LookupTableFindV2", "LookupTableFind")
def find(site: Site) -> Result:
    """A table of the program's own."""
    table, keys, default = site.folds
    if table.kind == default.kind == WHOLE:
        return keys.bare if keys.kind == ROWS else site.nonlinear([keys])
    return site.coupled("the table depends on the batch")
