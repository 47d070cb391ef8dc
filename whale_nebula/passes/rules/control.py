"""Rules for branches, loops and calls, whose bodies are interpreted with the folds of their arguments."""

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
    Node,
    Result,
    rule,
    whole,
)

_MAX_ITERATIONS = 8


@rule("PartitionedCall", "StatefulPartitionedCall", raw=True, positions=True)
def call(node: Node) -> Result:
    """The folds of a function call's results, from its body with the folds of the arguments."""
    return _run(node, node.op.functions[0], _clear_inputs(node.folds), len(node.op.outputs))


@rule("If", "StatelessIf", "Case", "StatelessCase", raw=True, positions=True)
def branch(node: Node) -> Result:
    """The folds of a conditional's results; every micro-batch must take the same branch."""
    test, arguments = node.folds[0], _clear_inputs(node.folds[1:])
    if test.kind != WHOLE:
        return (
            test.without_numbers
            if test.kind == COUPLED
            else node.couple("micro-batches may take different branches of a condition")
        )
    found = _run(node, node.op.functions[0], arguments, len(node.op.outputs))
    for name in node.op.functions[1:]:
        other = _run(node, name, arguments, len(found))
        found = tuple(join_folds(node, one, two) for one, two in zip(found, other, strict=True))
    return found


@rule("While", "StatelessWhile", raw=True, positions=True)
def loop(node: Node) -> Result:
    """The folds of a loop's results, iterated to a fixed point; every micro-batch must iterate equally often."""
    test, body = node.op.functions
    folds = _clear_inputs(node.folds)
    for _ in range(_MAX_ITERATIONS):
        turned = _run(node, body, folds, len(folds))
        found = tuple(join_folds(node, one, two) for one, two in zip(folds, turned, strict=True))
        if found == folds:
            break
        folds = found
    else:
        return _couple_results(node, folds, "a loop whose values depend on the batch differently in each iteration")
    end = _run(node, test, folds, 1)[0]
    if end.kind == WHOLE:
        return folds
    return _couple_results(node, folds, _explain_iterations(end, folds))


def _explain_iterations(end: Fold, folds: tuple[Fold, ...]) -> str:
    """Why micro-batches may differ in their number of iterations."""
    if end.kind == AFTER and any(fold.kind == COUNT for fold in folds):
        return BY_ROW
    why = end.reason if end.kind in (AFTER, COUPLED) else f"its condition depends on {end.description}"
    return f"micro-batches may run different numbers of loop iterations: {why}"


def _couple_results(node: Node, folds: tuple[Fold, ...], reason: str) -> tuple[Fold, ...]:
    """All results coupled, except those that the loop only passes through."""
    body = node.graph.functions[node.op.functions[1]]
    handed = {place for place, value in enumerate(body.returns) if value.op == body.arguments[place]}
    coupled = node.couple(reason)
    return tuple(fold if place in handed or fold.kind == COUPLED else coupled for place, fold in enumerate(folds))


def _run(node: Node, name: str, arguments: tuple[Fold, ...], expected: int) -> tuple[Fold, ...]:
    """The folds of the results of a body; coupled for one that calls itself."""
    found = node.caller.call(node.graph, name, arguments, node.owner)
    return found if len(found) == expected else (node.couple(f"{name!r} calls itself"),) * expected


def _clear_inputs(folds: tuple[Fold, ...]) -> tuple[Fold, ...]:
    """The folds with `inputs` off, which has no meaning for the arguments of a body."""
    return tuple(fold._replace(inputs=False) for fold in folds)


@rule("TensorListReserve", "EmptyTensorList", literal=True)
def empty_list(node: Node) -> Result:
    """An empty list, whose elements are not yet known."""
    return (
        Fold(EMPTY) if node.folds[1].kind == WHOLE else node.couple("a list has as many elements as the batch has rows")
    )


@rule("TensorListFromTensor")
def list_from_tensor(node: Node) -> Result:
    """A list with one element for each entry of axis 0."""
    data = node.folds[0]
    if data.kind != ROWS:
        return data.without_numbers
    return (
        data._replace(axis=data.axis - 1).without_numbers
        if data.axis
        else node.couple("a loop iterates over the rows of the batch")
    )


@rule("TensorListSetItem", "TensorListPushBack", raw=True)
def set_element(node: Node) -> Result:
    """The list with an element; all elements share one fold."""
    held, item = node.folds[0], node.folds[-1]
    if node.op.type == "TensorListSetItem" and node.folds[1].kind != WHOLE:
        coupled = next((fold.without_numbers for fold in node.folds if fold.kind == COUPLED), None)
        return coupled or node.couple("which element is set depends on the batch")
    return join_folds(node, held, item.without_numbers)


@rule("TensorListGetItem")
def get_element(node: Node) -> Result:
    """One element."""
    held, number = node.folds[:2]
    if number.kind != WHOLE:
        return node.couple("which element is read depends on the batch")
    return whole() if held.kind == EMPTY else held.without_numbers


@rule("TensorListStack", "TensorListGather")
def stack_list(node: Node) -> Result:
    """The elements stacked along a new first axis."""
    held = node.folds[0]
    if node.op.type == "TensorListGather" and node.folds[1].kind != WHOLE:
        return node.couple("which elements are read depends on the batch")
    if held.kind == EMPTY:
        return whole()
    return held._replace(axis=held.axis + 1).without_numbers if held.kind == ROWS else held.without_numbers


@rule("TensorListPopBack")
def pop_back(node: Node) -> Result:
    """The shorter list and its last element."""
    held = node.folds[0]
    return held.without_numbers, whole() if held.kind == EMPTY else held.without_numbers


@rule("TensorListResize")
def resize_list(node: Node) -> Result:
    """The same elements, fewer or more."""
    return (
        node.folds[0].without_numbers
        if node.folds[1].kind == WHOLE
        else node.couple("a list has as many elements as the batch has rows")
    )


@rule("TensorListLength", "TensorListElementShape")
def list_length(node: Node) -> Result:
    """The length of a list, which is the same in every micro-batch."""
    if node.op.type == "TensorListElementShape" and node.folds[0].kind == ROWS:
        return node.couple("the shape of a list's elements is read")
    return whole()


@rule("TensorListConcat", "TensorListConcatV2")
def concat_list(node: Node) -> Result:
    """The elements concatenated."""
    return (
        node.couple("rows of a list are concatenated") if node.folds[0].kind == ROWS else node.folds[0].without_numbers
    )


@rule("EagerPyFunc", "PyFunc", "PyFuncStateless")
def python_call(node: Node) -> Result:
    """The results of a Python function, which receives one micro-batch at a time."""
    called = "tf.py_function" if node.op.type == "EagerPyFunc" else "tf.numpy_function"
    return node.couple(f"{called} {PYTHON}")
