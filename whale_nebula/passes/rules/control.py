"""Rules for branches, loops and calls, whose bodies are interpreted with the states of their arguments."""

from __future__ import annotations

from whale_nebula.passes.rules.algebra import join_folds
from whale_nebula.passes.rules.registry import (
    AFTER,
    BY_ROW,
    COUNT,
    COUPLED,
    EMPTY,
    PYTHON,
    ROWS,
    WHOLE,
    Fold,
    Result,
    Site,
    rule,
    whole,
)

_TURNS = 8


@rule("PartitionedCall", "StatefulPartitionedCall", raw=True, positions=True)
def call(site: Site) -> Result:
    """The states of a function call's results, from its body with the states of the arguments."""
    return _run(site, site.op.functions[0], _forget_sources(site.folds), len(site.op.outputs))


@rule("If", "StatelessIf", "Case", "StatelessCase", raw=True, positions=True)
def branch(site: Site) -> Result:
    """The states of a conditional's results; every micro-batch must take the same branch."""
    test, arguments = site.folds[0], _forget_sources(site.folds[1:])
    if test.kind != WHOLE:
        return test.bare if test.kind == COUPLED else site.couple("micro-batches may go different ways at a condition")
    found = _run(site, site.op.functions[0], arguments, len(site.op.outputs))
    for name in site.op.functions[1:]:
        other = _run(site, name, arguments, len(found))
        found = tuple(join_folds(site, one, two) for one, two in zip(found, other, strict=True))
    return found


@rule("While", "StatelessWhile", raw=True, positions=True)
def loop(site: Site) -> Result:
    """The states of a loop's results, iterated to a fixed point; every micro-batch must iterate equally often."""
    test, body = site.op.functions
    state = _forget_sources(site.folds)
    for _ in range(_TURNS):
        turned = _run(site, body, state, len(state))
        found = tuple(join_folds(site, one, two) for one, two in zip(state, turned, strict=True))
        if found == state:
            break
        state = found
    else:
        return _spoilt(site, state, "a loop whose folds do not settle")
    end = _run(site, test, state, 1)[0]
    if end.kind == WHOLE:
        return state
    return _spoilt(site, state, _turning(end, state))


def _turning(end: Fold, state: tuple[Fold, ...]) -> str:
    """Why micro-batches may differ in their number of iterations."""
    if end.kind == AFTER and any(fold.kind == COUNT for fold in state):
        return BY_ROW
    why = end.reason if end.kind in (AFTER, COUPLED) else f"its end hangs on {end.spoken}"
    return f"micro-batches may turn a loop differently often: {why}"


def _spoilt(site: Site, state: tuple[Fold, ...], reason: str) -> tuple[Fold, ...]:
    """All results coupled, except those that the loop only passes through."""
    body = site.graph.functions[site.op.functions[1]]
    handed = {place for place, value in enumerate(body.returns) if value.op == body.arguments[place]}
    coupled = site.couple(reason)
    return tuple(fold if place in handed or fold.kind == COUPLED else coupled for place, fold in enumerate(state))


def _run(site: Site, name: str, arguments: tuple[Fold, ...], expected: int) -> tuple[Fold, ...]:
    """The results of a body; None yet for a body that calls itself."""
    found = site.caller.call(site.graph, name, arguments, site.owner)
    return found if len(found) == expected else (site.couple(f"{name!r} calls itself"),) * expected


def _forget_sources(folds: tuple[Fold, ...]) -> tuple[Fold, ...]:
    """The states without their sources, which do not matter inside a body."""
    return tuple(fold._replace(inputs=False) for fold in folds)


@rule("TensorListReserve", "EmptyTensorList", literal=True)
def fresh(site: Site) -> Result:
    """An empty list, whose elements are not yet known."""
    return Fold(EMPTY) if site.folds[1].kind == WHOLE else site.couple("a list is as long as the batch")


@rule("TensorListFromTensor")
def taken_apart(site: Site) -> Result:
    """A list with one element for each entry of axis 0."""
    data = site.folds[0]
    if data.kind != ROWS:
        return data.bare
    return data._replace(axis=data.axis - 1).bare if data.axis else site.couple("the batch is looped over row by row")


@rule("TensorListSetItem", "TensorListPushBack", raw=True)
def put(site: Site) -> Result:
    """The list with an element; all elements share one state."""
    held, item = site.folds[0], site.folds[-1]
    if site.op.type == "TensorListSetItem" and site.folds[1].kind != WHOLE:
        coupled = next((fold.bare for fold in site.folds if fold.kind == COUPLED), None)
        return coupled or site.couple("which element is set depends on the batch")
    return join_folds(site, held, item.bare)


@rule("TensorListGetItem")
def element(site: Site) -> Result:
    """One element."""
    held, number = site.folds[:2]
    if number.kind != WHOLE:
        return site.couple("which element is read depends on the batch")
    return whole() if held.kind == EMPTY else held.bare


@rule("TensorListStack", "TensorListGather")
def stack_list(site: Site) -> Result:
    """The elements stacked along a new first axis."""
    held = site.folds[0]
    if site.op.type == "TensorListGather" and site.folds[1].kind != WHOLE:
        return site.couple("which elements are read depends on the batch")
    if held.kind == EMPTY:
        return whole()
    return held._replace(axis=held.axis + 1).bare if held.kind == ROWS else held.bare


@rule("TensorListPopBack")
def pop(site: Site) -> Result:
    """The shorter list and its last element."""
    held = site.folds[0]
    return held.bare, whole() if held.kind == EMPTY else held.bare


@rule("TensorListResize")
def resize_list(site: Site) -> Result:
    """The same elements, fewer or more."""
    return site.folds[0].bare if site.folds[1].kind == WHOLE else site.couple("a list is as long as the batch")


@rule("TensorListLength", "TensorListElementShape")
def length(site: Site) -> Result:
    """The length of a list, which is the same in every micro-batch."""
    if site.op.type == "TensorListElementShape" and site.folds[0].kind == ROWS:
        return site.couple("the shape of a list's elements is asked for")
    return whole()


@rule("TensorListConcat", "TensorListConcatV2")
def put_behind(site: Site) -> Result:
    """The elements concatenated."""
    return site.couple("rows of a list are put behind each other") if site.folds[0].kind == ROWS else site.folds[0].bare


@rule("EagerPyFunc", "PyFunc", "PyFuncStateless")
def python(site: Site) -> Result:
    """The results of a Python function, which receives one micro-batch at a time."""
    called = "tf.py_function" if site.op.type == "EagerPyFunc" else "tf.numpy_function"
    return site.couple(f"{called} {PYTHON}")
