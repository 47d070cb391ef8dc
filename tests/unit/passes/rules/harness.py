"""Functions that are traced, folded and run: every value of the trace is checked against its fold.

A function is traced with an unknown batch size, mirrored and folded. Then it runs once on the whole batch and
once for each micro-batch (fed with the values that must come from the whole batch, its grown operands
multiplied), and each number in the graph whose fold is whole, rows, count, sum or mean must be that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from whale_nebula.capture.mirror import mirror, order_operations
from whale_nebula.ir.graph import CAPTURE, FEED, INPUT, Graph
from whale_nebula.passes.rules import Fold, Folding, fold
from whale_nebula.spec import Value
from whale_nebula.tf import private as tf_private

Arrays = Sequence[np.ndarray]
SPLITS = ((2, 2, 1), (1, 1, 3))
_NUMERIC_TYPES = {"float16", "float32", "float64", "int32", "int64", "bool", "uint8", "uint32"}
_RANDOM_OPS = ("Random", "Multinomial", "Dropout")


@dataclass
class Traced:
    """A function's trace, its mirror, and how it was folded."""

    wrapped: Any
    graph: Graph
    folding: Folding
    outputs: list[Fold]
    placeholders: dict[str, Any]
    first: Folding

    def __str__(self) -> str:
        return "\n".join(
            f"{op.index} {op.type} {' | '.join(str(self.folding.fold_of(v)) for v in op.values)}"
            for op in self.graph.ops
        )


def trace(
    function: Callable[..., Any], arrays: Arrays, *, target: int | None = None, whole: Sequence[int] = ()
) -> Traced:
    """Trace, mirror and fold; with a target (number of an output) also grow."""
    specs = [
        tf.TensorSpec(a.shape if i in whole else [None, *a.shape[1:]], a.dtype, f"in{i}") for i, a in enumerate(arrays)
    ]
    wrapped = tf.compat.v1.wrap_function(function, specs)
    places = {i: 0 for i, array in enumerate(arrays) if i not in whole and array.ndim}
    placeholders: dict[str, Any] = {}
    graph, folding, values = _fold_trace(wrapped, len(arrays), places, target, placeholders)
    first = folding
    if folding.grows:
        _insert_growth(wrapped.graph, folding, placeholders)
        graph, folding, values = _fold_trace(wrapped, len(arrays), places, target, placeholders)
    chosen = [folding.fold_of(value) for value in values]
    return Traced(wrapped, graph, folding, chosen, placeholders, first)


def list_output_folds(traced: Traced) -> list[str]:
    """List the folds of the function's results, as text."""
    return [str(each).removesuffix(" of inputs") for each in traced.outputs]


def _fold_trace(
    wrapped: Any, count: int, places: dict[int, int], target: int | None, placeholders: dict[str, Any]
) -> tuple[Graph, Folding, list[Value]]:
    inputs = wrapped.graph.inputs
    roles = {t.op.name: (INPUT if i < count else CAPTURE, t.op.name) for i, t in enumerate(inputs)}
    roles |= {tensor.op.name: (FEED, name) for name, tensor in placeholders.items()}
    graph = mirror(wrapped.graph, roles)
    numbers = {op.name: op.index for op in graph.ops}
    values = [Value(numbers[t.op.name], t.value_index) for t in _list_outputs(wrapped)]
    batched = {numbers[inputs[i].op.name]: axis for i, axis in places.items()}
    return graph, fold(graph, batched, targets=[] if target is None else [values[target]]), values


def _list_outputs(wrapped: Any) -> list[Any]:
    return [t for t in tf.nest.flatten(wrapped.graph.structured_outputs) if isinstance(t, tf.Tensor)]


def _insert_growth(graph: Any, folding: Folding, placeholders: dict[str, Any]) -> None:
    """Multiply the values of grown edges by a placeholder, as capture does."""
    operations = order_operations(graph.get_operations())
    with graph.as_default():
        placeholders["grow"] = tf.compat.v1.placeholder(tf.float32, [], "nebula_grow")
        for consumer, position, value in folding.grows:
            tensor = operations[value.op].outputs[value.out]
            grown = tf.multiply(tensor, tf.cast(placeholders["grow"], tensor.dtype))
            tf_private.set_input(operations[consumer], position, grown)


def check_values(
    traced: Traced,
    arrays: Arrays,
    *,
    whole: Sequence[int] = (),
    tolerance: float = 2e-5,
    cuts: Sequence[tuple[int, ...]] = SPLITS,
) -> int:
    """Run the trace on the whole batch and on micro-batches; return the number of values checked."""
    operations = order_operations(traced.wrapped.graph.get_operations())
    drawn = traced.graph.descend(op.index for op in traced.graph.ops if any(word in op.type for word in _RANDOM_OPS))
    promised = {
        Value(i, out): traced.folding.fold_of(Value(i, out))
        for i, op in enumerate(operations)
        if i not in drawn and op.type != "Placeholder"
        for out, tensor in enumerate(op.outputs)
        if tensor.dtype.name in _NUMERIC_TYPES and traced.folding.fold_of(Value(i, out)).is_mergeable
    }
    rows = next(len(a) for i, a in enumerate(arrays) if i not in whole and a.ndim)
    named = [f"{operations[v.op].name}:{v.out}" for v in promised]
    wholes = [f"{operations[v.op].name}:{v.out}" for v in traced.folding.wholes]
    expected = _prune(traced, len(arrays), [*named, *wholes], [])(arrays, [], 1.0)
    once, run = expected[len(named) :], _prune(traced, len(arrays), named, wholes)
    for cut in cuts:
        pieces = []
        for start, size in zip(np.cumsum((0, *cut[:-1])), cut, strict=True):
            part = [a if i in whole or not a.ndim else a[start : start + size] for i, a in enumerate(arrays)]
            pieces.append(run(part, once, rows / size))
        for number, (value, value_fold) in enumerate(promised.items()):
            got = [piece[number] for piece in pieces]
            _compare(traced, value, value_fold, expected[number], got, cut, tolerance)
    return len(promised)


def _prune(
    traced: Traced, count: int, names: list[str], fed: list[str]
) -> Callable[[Arrays, Arrays, float], list[np.ndarray]]:
    """Return a function that computes values by name from arrays, fed values and the growth of operands."""
    graph = traced.wrapped.graph
    grow = [traced.placeholders["grow"]] if "grow" in traced.placeholders else []
    feeds = [*graph.inputs[:count], *map(graph.get_tensor_by_name, fed), *grow]
    pruned = traced.wrapped.prune(feeds, [graph.get_tensor_by_name(name) for name in names])

    def run(arrays: Arrays, once: Arrays, grown: float) -> list[np.ndarray]:
        values = [*arrays, *once, *[np.float32(grown)] * len(grow)]
        return [np.asarray(e) for e in pruned(*[tf.constant(v, t.dtype) for t, v in zip(feeds, values, strict=True)])]

    return run


def _compare(
    traced: Traced,
    value: Value,
    value_fold: Fold,
    expected: np.ndarray,
    got: list[np.ndarray],
    cut: tuple[int, ...],
    tolerance: float,
) -> None:
    kind = value_fold.kind
    if kind == "whole":
        merged: Any = got[0]
        for other in got[1:]:
            _assert_near(traced, value, value_fold, got[0], other, tolerance)
    elif kind == "rows":
        if value_fold.order or value_fold.position:
            return
        merged = np.concatenate(got, value_fold.axis)
    elif kind in ("sum", "count"):
        merged = sum(part.astype("float64") for part in got)
    elif kind == "mean":
        merged = sum(part.astype("float64") * size for part, size in zip(got, cut, strict=True)) / sum(cut)
    else:
        return
    _assert_near(traced, value, value_fold, expected, merged, tolerance)


def _assert_near(
    traced: Traced, value: Value, value_fold: Fold, expected: np.ndarray, merged: np.ndarray, tolerance: float
) -> None:
    scale = np.max(np.abs(expected.astype("float64")), initial=0.0) + 1e-3
    try:
        assert expected.shape == merged.shape, f"{expected.shape} != {merged.shape}"
        np.testing.assert_allclose(
            merged.astype("float64"), expected.astype("float64"), rtol=tolerance, atol=tolerance * scale
        )
    except AssertionError as error:
        op = traced.graph.ops[value.op]
        description = f"{value} = {op.type} {op.name!r} has the fold {value_fold}"
        raise AssertionError(f"{error}: {description}\n{traced}") from None
