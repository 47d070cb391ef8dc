"""What tensors say of their shapes: vectors of counts and wholes, followed entry by entry."""

from __future__ import annotations

from whale_nebula.passes.reduce.algebra import added, matched, mixed, packed
from whale_nebula.passes.reduce.entries import concatenated, moved, stacked
from whale_nebula.passes.reduce.registry import BESIDE, Result, Site, rule
from whale_nebula.passes.reduce.state import (
    COUNT,
    COUPLED,
    ROWS,
    SUM,
    UNKNOWN,
    WHOLE,
    Fold,
    count,
    whole,
)


@rule("Shape", "ShapeN", literal=True, positions=True)
def shape(site: Site) -> Result:
    """The batch axis is a count, the rest is the same everywhere."""
    return tuple(_shape(site, place) for place in range(len(site.folds)))


def _shape(site: Site, place: int) -> Fold:
    fold, sizes = site.folds[place], site.spec(place).shape
    if fold.kind not in (ROWS, WHOLE) and (sizes is None or None in sizes) and not fold.good:
        return site.nonlinear([fold])
    if sizes is None:
        return site.coupled("the shape of rows with an unknown number of axes") if fold.kind == ROWS else whole()
    parts = [whole() if size is None else whole(size) for size in sizes]
    if fold.kind == ROWS:
        parts[fold.axis] = long(fold)
    return packed(site, tuple(parts))


def long(fold: Fold) -> Fold:
    """How many entries lie along the batch axis."""
    if fold.ragged:
        return Fold(SUM)
    return count(fold.per if not fold.order or fold.order[0] >= 0 else UNKNOWN)


@rule("Size", literal=True, positions=True)
def size(site: Site) -> Result:
    """As many entries as rows have."""
    fold, sizes = site.folds[0], site.spec(0).shape
    if fold.kind != ROWS:
        return whole() if fold.good else site.nonlinear([fold])
    number = long(fold)
    for axis, each in enumerate(sizes or (None,)):
        if number.kind == COUNT and axis != fold.axis:
            number = count(UNKNOWN if each is None else number.per * each)
    return number


@rule("Rank", literal=True, positions=True)
def rank(site: Site) -> Result:
    """The same everywhere."""
    axes = site.rank(0)
    return whole() if axes is None else whole(axes)


@rule("Pack", literal=True, positions=True)
def pack(site: Site) -> Result:
    """Numbers become a vector; tensors get one more axis."""
    ranks = {site.rank(place) for place in range(len(site.folds))}
    if ranks == {0}:
        return packed(site, site.folds)
    if not any(fold.kind == ROWS for fold in site.folds):
        return moved(site, range(len(site.folds)), stacked) or added(site, site.folds)
    found = _alike(site, range(len(site.folds)))
    own = site.rank(0)
    if found.kind == COUPLED or own is None:
        return found if found.kind == COUPLED else site.coupled("rows with an unknown number of axes are stacked")
    axis = site.number("axis", 0) % (own + 1)
    put = found._replace(axis=found.axis + (axis <= found.axis))
    return put._replace(parts=tuple(fold.bare for fold in site.folds)) if axis == own else put


def _alike(site: Site, places: range) -> Fold:
    """Tensors of one shape, rows all of them."""
    folds = [site.folds[place] for place in places]
    wrong = mixed(site, folds)
    if wrong is not None:
        return wrong
    if any(fold.kind == WHOLE for fold in folds):
        return site.coupled(BESIDE)
    found = folds[0].bare
    for fold in folds[1:]:
        if found.kind != COUPLED:
            found = matched(site, found, fold.bare)
    return found


@rule("ConcatV2", "Concat", literal=True, positions=True)
def concat(site: Site) -> Result:
    """Along another axis rows stay rows; along the batch axis they are interleaved."""
    first = site.op.type == "Concat"
    places = range(1, len(site.folds)) if first else range(len(site.folds) - 1)
    folds = [site.folds[place] for place in places]
    along, own = site.known(0 if first else len(site.folds) - 1), site.rank(places[0])
    if not any(fold.kind == ROWS for fold in folds):
        return moved(site, places, concatenated(along)) or added(site, folds)
    found = _alike(site, places)
    if found.kind == COUPLED or along is None or own is None:
        return found if found.kind == COUPLED else site.coupled("the axis of a concatenation is not known")
    if along % own == found.axis:
        return _behind(site, folds)
    return found._replace(parts=_columns(site, places)) if along % own == own - 1 else found


def _behind(site: Site, folds: list[Fold]) -> Fold:
    if any(fold.order or fold.ragged or fold.per <= 0 for fold in folds):
        return site.coupled("rows in several orders are put behind each other")
    pers = tuple(fold.per for fold in folds)
    return folds[0].bare._replace(per=sum(pers), order=pers) if len(pers) > 1 else folds[0].bare


def _columns(site: Site, places: range) -> tuple[Fold, ...] | None:
    found: list[Fold] = []
    for place in places:
        fold = site.folds[place]
        if fold.parts is None and site.size(place, -1) != 1:
            return None
        found.extend(fold.parts or (fold.bare,))
    return tuple(found)


@rule("ConcatOffset", literal=True)
def offsets(site: Site) -> Result:
    """Where each tensor of a concatenation begins, given its axis and all shapes."""
    axis, lanes = site.known(0), [site.parts(place) for place in range(1, len(site.folds))]
    known = [lane for lane in lanes if lane is not None]
    if axis is None or len(known) < len(lanes):
        return site.nonlinear(site.folds)
    found: list[Fold] = []
    start = whole(0)
    for lane in known:
        along = axis % len(lane)
        found.append(packed(site, tuple(start if at == along else whole(0) for at in range(len(lane)))))
        start = _summed(site, start, lane[along])
    return tuple(found)


def _summed(site: Site, left: Fold, right: Fold) -> Fold:
    if left.literal is not None and right.literal is not None:
        return whole(left.literal[0] + right.literal[0])
    return added(site, [left, right])


@rule("BroadcastArgs", literal=True)
def broadcast_shape(site: Site) -> Result:
    """The shape that two shapes broadcast to."""
    left, right = site.parts(0), site.parts(1)
    if left is None or right is None:
        return site.nonlinear(site.folds)
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    padded = (whole(1),) * (len(longer) - len(shorter)) + shorter
    return packed(site, tuple(_wider(site, one, other) for one, other in zip(longer, padded, strict=True)))


def _wider(site: Site, one: Fold, other: Fold) -> Fold:
    if one == other or other.literal == (1,):
        return one
    if one.literal == (1,):
        return other
    if one.kind == other.kind == WHOLE:
        return one if one.literal is not None else other
    return one if one.kind == other.kind == COUNT else site.nonlinear([one, other])


@rule("DynamicStitch", "ParallelDynamicStitch", literal=True)
def stitch(site: Site) -> Result:
    """Entries of vectors, each put at its number; of two at one number the later stays."""
    half = len(site.folds) // 2
    found: dict[int, Fold] = {}
    for place in range(half):
        numbers, lane = site.ints(place), _lane(site, half + place)
        if numbers is None or lane is None or len(numbers) != len(lane):
            return _stitched(site)
        found.update(zip(numbers, lane, strict=True))
    if sorted(found) != list(range(len(found))):
        return _stitched(site)
    return packed(site, tuple(found[number] for number in range(len(found))))


def _lane(site: Site, place: int) -> tuple[Fold, ...] | None:
    return (site.folds[place],) if site.rank(place) == 0 else site.parts(place)


def _stitched(site: Site) -> Fold:
    """Entries that cannot be told apart, or that are rows."""
    if any(fold.kind == ROWS for fold in site.folds):
        return site.coupled("rows are put side by side by number")
    return site.nonlinear(site.folds)
