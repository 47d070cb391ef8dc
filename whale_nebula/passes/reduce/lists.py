"""Lists of tensors, as loops use them: a list has the state of its elements."""

from __future__ import annotations

from whale_nebula.passes.reduce.algebra import joined
from whale_nebula.passes.reduce.registry import Result, Site, rule
from whale_nebula.passes.reduce.state import COUPLED, EMPTY, ROWS, WHOLE, Fold, whole


@rule("TensorListReserve", "EmptyTensorList", literal=True)
def fresh(site: Site) -> Result:
    """Nothing is known of the elements until there are some."""
    return Fold(EMPTY) if site.folds[1].kind == WHOLE else site.coupled("a list is as long as the batch")


@rule("TensorListFromTensor")
def taken_apart(site: Site) -> Result:
    """One element for each entry of axis 0."""
    data = site.folds[0]
    if data.kind != ROWS:
        return data.bare
    return data._replace(axis=data.axis - 1).bare if data.axis else site.coupled("the batch is looped over row by row")


@rule("TensorListSetItem", "TensorListPushBack", raw=True)
def put(site: Site) -> Result:
    """The elements of a list have one state."""
    held, item = site.folds[0], site.folds[-1]
    if site.op.type == "TensorListSetItem" and site.folds[1].kind != WHOLE:
        return _bad(site) or site.coupled("which element is set depends on the batch")
    return joined(site, held, item.bare)


def _bad(site: Site) -> Fold | None:
    return next((fold.bare for fold in site.folds if fold.kind == COUPLED), None)


@rule("TensorListGetItem")
def element(site: Site) -> Result:
    """One element."""
    held, number = site.folds[:2]
    if number.kind != WHOLE:
        return site.coupled("which element is read depends on the batch")
    return whole() if held.kind == EMPTY else held.bare


@rule("TensorListStack", "TensorListGather")
def stacked(site: Site) -> Result:
    """The elements along a new first axis."""
    held = site.folds[0]
    if site.op.type == "TensorListGather" and site.folds[1].kind != WHOLE:
        return site.coupled("which elements are read depends on the batch")
    if held.kind == EMPTY:
        return whole()
    return held._replace(axis=held.axis + 1).bare if held.kind == ROWS else held.bare


@rule("TensorListPopBack")
def pop(site: Site) -> Result:
    """The shorter list and its last element."""
    held = site.folds[0]
    return held.bare, whole() if held.kind == EMPTY else held.bare


@rule("TensorListResize")
def resized(site: Site) -> Result:
    """The same elements, fewer or more."""
    return site.folds[0].bare if site.folds[1].kind == WHOLE else site.coupled("a list is as long as the batch")


@rule("TensorListLength", "TensorListElementShape")
def length(site: Site) -> Result:
    """As many turns in every micro-batch."""
    if site.op.type == "TensorListElementShape" and site.folds[0].kind == ROWS:
        return site.coupled("the shape of a list's elements is asked for")
    return whole()


@rule("TensorListConcat", "TensorListConcatV2")
def put_behind(site: Site) -> Result:
    """The elements behind each other."""
    return (
        site.coupled("rows of a list are put behind each other") if site.folds[0].kind == ROWS else site.folds[0].bare
    )
