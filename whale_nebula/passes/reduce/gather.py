"""Look-ups: entries that are picked by number, and what the numbers count."""

from __future__ import annotations

from whale_nebula.passes.reduce.algebra import matched, mixed, packed, structured
from whale_nebula.passes.reduce.registry import Result, Site, rule
from whale_nebula.passes.reduce.state import COUNT, ROWS, SHAPE, STRANGE, SUM, WHOLE, Fold, blocks_of

_ACROSS = "rows are picked by number out of the batch"


@rule("Gather", "GatherV2", "ResourceGather", literal=True, positions=True)
def gather(site: Site) -> Result:
    """A table that is the same everywhere, or each row's own."""
    table, numbers = site.folds[:2]
    axis = site.known(2) if len(site.folds) > 2 else 0
    if ROWS not in (table.kind, numbers.kind):
        return _of_vector(site)
    wrong = mixed(site, (table, numbers))
    if wrong is not None:
        return wrong
    ranks = _ranks(site)
    if axis is None or ranks is None:
        return site.coupled("the axis of a look-up is not known")
    return _gathered(site, table, numbers, axis % ranks[0], site.number("batch_dims", 0) % (ranks[1] + 1))


def _ranks(site: Site) -> tuple[int, int] | None:
    table = site.op.outputs[0].rank if site.op.type == "ResourceGather" else site.rank(0)
    numbers = site.rank(1)
    if table is None or numbers is None:
        return None
    return (table - numbers + 1 if site.op.type == "ResourceGather" else table), numbers


def _gathered(site: Site, table: Fold, numbers: Fold, axis: int, together: int) -> Fold:
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
        return matched(site, table, numbers._replace(position=0, offset=False)).bare
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
        return picked[0] if site.rank(1) == 0 else packed(site, picked)
    if site.folds[0].kind in (SHAPE, COUNT):
        return site.nonlinear(site.folds)
    return structured(site, site.folds[:2])


@rule("GatherNd", "ResourceGatherNd", positions=True)
def gather_nd(site: Site) -> Result:
    """Each vector of numbers along the last axis picks one entry, or one block."""
    table, numbers = site.folds
    if ROWS not in (table.kind, numbers.kind):
        return structured(site, site.folds)
    wrong = mixed(site, site.folds)
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


@rule("OneHot")
def one_hot(site: Site) -> Result:
    """One more axis, as long everywhere."""
    numbers, rank = site.folds[0], site.rank(0)
    if numbers.kind != ROWS:
        return site.nonlinear(site.folds)
    if any(fold.kind != WHOLE for fold in site.folds[1:]):
        return site.coupled("a one-hot of rows is as wide as the batch")
    if rank is None:
        return site.coupled("rows with an unknown number of axes get one more")
    axis = site.number("axis", -1) % (rank + 1)
    return numbers._replace(axis=numbers.axis + (axis <= numbers.axis)).bare


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
        return structured(site, (entries, numbers, target))
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
