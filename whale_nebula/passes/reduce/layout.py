"""Axes that are moved, added, dropped, merged and split: where the batch axis goes."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from whale_nebula.passes.reduce.algebra import own_order, packed, structured
from whale_nebula.passes.reduce.entries import moved, reshaped, transposed
from whale_nebula.passes.reduce.registry import Result, Site, rule
from whale_nebula.passes.reduce.state import COUNT, ROWS, UNDER, UNKNOWN, WHOLE, Fold, whole

Sizes = tuple[int | None, ...]


@rule("Transpose", "ConjugateTranspose", literal=True, positions=True)
def transpose(site: Site) -> Result:
    """The batch axis moves with the others."""
    data, order = site.folds[0], site.ints(1)
    if data.kind != ROWS:
        return moved(site, [0], transposed) or structured(site, site.folds)
    rank = site.rank(0)
    if order is None or rank is None:
        return site.coupled("the order of a transposition is not known")
    return data._replace(axis=[axis % rank for axis in order].index(data.axis)).bare


@rule("InvertPermutation", literal=True)
def inverse_order(site: Site) -> Result:
    """The order that undoes a transposition."""
    order = site.ints(0)
    if order is None or sorted(order) != list(range(len(order))):
        return site.nonlinear(site.folds)
    return whole(*(order.index(axis) for axis in range(len(order))))


@rule("ExpandDims", literal=True, positions=True)
def expand(site: Site) -> Result:
    """One more axis of size one."""
    data, axis, rank = site.folds[0], site.known(1), site.rank(0)
    if rank == 0:
        return packed(site, (data,))
    if data.kind != ROWS:
        return moved(site, [0], reshaped) or structured(site, site.folds)
    if axis is None or rank is None:
        return site.coupled("the place of a new axis is not known")
    new = axis % (rank + 1)
    return data._replace(axis=data.axis + (new <= data.axis), parts=(data.bare,) if new == rank else None)


@rule("Squeeze", literal=True, positions=True)
def squeeze(site: Site) -> Result:
    """Axes of size one go; the batch axis must not."""
    data, sizes = site.folds[0], site.spec(0).shape
    if data.kind != ROWS:
        return moved(site, [0], reshaped) or structured(site, site.folds)
    named = site.attribute("squeeze_dims", ())
    if sizes is None or (not named and None in sizes[: data.axis] + sizes[data.axis + 1 :]):
        return site.coupled("which axes are dropped depends on sizes")
    axes = {a % len(sizes) for a in named if isinstance(a, int)} if isinstance(named, tuple) else set()
    gone = axes or {axis for axis, size in enumerate(sizes) if size == 1}
    if data.axis in gone or not named:
        return site.coupled("the batch axis may be dropped: name the axes to squeeze")
    column = site.columns(0, max(gone)) if len(gone) == 1 else None
    if column is not None and len(column) == 1:
        return column[0]
    return data._replace(axis=data.axis - sum(axis < data.axis for axis in gone)).bare


@rule("Reshape", literal=True, positions=True)
def reshape(site: Site) -> Result:
    """The batch axis may be merged with axes behind it, and split from them again."""
    data, target = site.folds
    lane = site.parts(0) if site.rank(0) == 1 else (data,) if site.rank(0) == 0 else None
    if lane is not None and data.kind != ROWS:
        rank = site.op.outputs[0].rank
        if rank == 1 or (rank == 0 and len(lane) == 1):
            return packed(site, lane) if rank else lane[0]
    if data.kind != ROWS:
        return moved(site, [0], reshaped) or structured(site, site.folds)
    if site.parts(1) is None and target.kind != WHOLE:
        return site.coupled("the shape that rows are given depends on the batch")
    return _reshaped(site, data)


class _Move(NamedTuple):
    """Where the batch goes, the sizes before and behind it, old and new, and its length as counted."""

    place: int
    heads: tuple[Sizes, Sizes]
    tails: tuple[Sizes, Sizes]
    counted: int | None


def _reshaped(site: Site, data: Fold) -> Fold:
    before, after = site.spec(0).shape, _sizes(site)
    if before is None or after is None:
        return site.coupled("rows are given a shape with an unknown number of axes")
    place = _batch_place(site, after)
    if isinstance(place, Fold):
        return place
    heads = before[: data.axis], after[:place]
    tails = before[data.axis + 1 :], after[place + 1 :]
    part = (site.parts(1) or (None,) * len(after))[place]
    move = _Move(place, heads, tails, part.per if part is not None and part.kind == COUNT else None)
    per = _per(site, data, move)
    if isinstance(per, Fold):
        return per
    if data.order and data.order[0] == UNDER:
        return _from_under(site, data, move)
    return _kept(site, data, move) if data.order or data.ragged else _moved(site, data, move, per)


def _moved(site: Site, data: Fold, move: _Move, per: int) -> Fold:
    """Rows that lie one after the other: as many entries must lie above them as before, or none."""
    if _same(*move.heads) or (move.counted == data.per > 0 and _same(*move.tails)):
        return data._replace(axis=move.place, per=per).bare
    if move.place or _known(move.heads[0]) == 1:
        return site.coupled("a reshape puts the batch under other axes than before")
    old, new = _known(move.tails[0]), _known(move.tails[1])
    if move.tails[1] and not _same(*move.tails) and (UNKNOWN in (old, new) or old % new):
        return site.coupled("a reshape puts entries of several rows together")
    merged = 1 if _same(*move.tails) else _known(move.tails[0]) if not move.tails[1] else UNKNOWN
    order = (UNDER, data.per * merged) if data.per * merged else own_order(site)
    return data._replace(axis=0, per=UNKNOWN, order=order).bare


def _sizes(site: Site) -> Sizes | None:
    """The sizes asked for; None is a size that is not known, and the batch."""
    static, parts = site.op.outputs[0].shape, site.parts(1)
    if parts is None:
        return static
    known = static if static is not None else (None,) * len(parts)
    literal = (part.literal[0] if part.literal is not None else None for part in parts)
    return tuple(
        size if size is not None else int(n) if n is not None and n >= 0 else None
        for size, n in zip(known, literal, strict=True)
    )


def _batch_place(site: Site, after: Sizes) -> int | Fold:
    """Where the batch lies in the new shape: at the count, or else at the -1."""
    parts = site.parts(1)
    if parts is None:
        places = [axis for axis, size in enumerate(after) if size is None]
        return places[0] if len(places) == 1 else site.coupled("where a reshape puts the batch is not known")
    if any(part.kind not in (COUNT, WHOLE) for part in parts):
        return site.coupled("the shape that rows are given depends on the batch")
    counts = [axis for axis, part in enumerate(parts) if part.kind == COUNT]
    free = [axis for axis, part in enumerate(parts) if part.literal == (-1,) and after[axis] is None]
    found = counts or free
    if len(found) == 1:
        return found[0]
    return site.coupled("rows are given a fixed shape" if not found else "a reshape makes two axes of the batch")


def _per(site: Site, data: Fold, move: _Move) -> int | Fold:
    """Entries a row along the batch axis: what is counted, or what the axes behind a -1 leave over."""
    if move.counted is not None or data.order or data.ragged:
        return data.per if move.counted is None else move.counted
    old, new = _left_over(*move.tails)
    has, needs = (prod(size for size in sizes if size is not None) for sizes in (old, new))
    if (max(data.per, 1) * has) % max(needs, 1) or new.count(None) > old.count(None):
        return site.coupled("a reshape may put several rows together: give the batch axis its size, -1 to another")
    return UNKNOWN if None in old or data.per == UNKNOWN else data.per * has // max(needs, 1)


def _left_over(old: Sizes, new: Sizes) -> tuple[Sizes, Sizes]:
    """Both without the sizes that they share at the end."""
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    return old, new


def _from_under(site: Site, data: Fold, move: _Move) -> Fold:
    """Rows that were merged under other axes come out again, where the sizes prove it."""
    inner, more = data.order[1], _known(move.tails[0])
    if move.place > 0 and move.counted == inner and _same(*move.tails):
        return data._replace(axis=move.place, per=inner, order=()).bare
    if move.place == 0 and _same(*move.tails):
        return data.bare
    if move.place == 0 and not move.tails[1] and more != UNKNOWN:
        return data._replace(order=(UNDER, inner * more)).bare
    return site.coupled("a reshape puts the batch under other axes than before")


def _kept(site: Site, data: Fold, move: _Move) -> Fold:
    """Interleaved and ragged rows may get other axes behind them, no more."""
    equal = _same(*move.tails) or _known(move.tails[0]) == _known(move.tails[1]) != UNKNOWN
    if equal and _same(*move.heads):
        return data._replace(axis=move.place).bare
    return site.coupled("rows that do not lie one after the other are given another shape")


def _same(old: Sizes, new: Sizes) -> bool:
    """Whether as many entries lie along both, for sure; a size that is not known equals one in its own
    place.
    """
    left, right = _left_over(old, new)
    if None in left or None in right:
        return False
    return prod(size for size in left if size is not None) == prod(size for size in right if size is not None)


def _known(sizes: Sizes) -> int:
    return UNKNOWN if None in sizes else prod(size for size in sizes if size is not None)
