"""Descriptions of axes: an op run on shards of an axis gives the shards of its whole output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.parity_harness import assert_same
from tests.unit.passes.rules.harness import trace
from whale_nebula.passes.rules.registry import RULES, Axes, Fold, Node, whole

RNG = np.random.default_rng(0)


def real(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


IMAGE, FILTERS = real(4, 6, 6, 2), real(3, 3, 2, 4)
ONES = {"strides": [1, 1, 1, 1], "padding": "SAME"}
POOL = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
SAMPLES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "MatMul": ([real(4, 6), real(6, 2)], {}),
    "MatMul turned": ([real(6, 4), real(2, 6)], {"transpose_a": True, "transpose_b": True}),
    "BatchMatMulV2": ([real(2, 4, 6), real(6, 2)], {"adj_x": False}),
    "Einsum": ([[real(4, 6, 2), real(6, 8, 2)]], {"equation": "abc,bdc->acd"}),
    "Conv2D": ([IMAGE, FILTERS], ONES),
    "DepthwiseConv2dNative": ([IMAGE, real(3, 3, 2, 2)], ONES),
    "Conv2DBackpropFilter": ([IMAGE, [3, 3, 2, 4], real(4, 6, 6, 4)], ONES),
    "BiasAdd": ([real(4, 6, 2), real(2)], {}),
    "BiasAddGrad": ([real(4, 6, 2)], {}),
    "AddV2": ([real(4, 6), real(6)], {}),
    "SelectV2": ([real(4, 1) > 0, real(4, 6), real(6)], {}),
    "Select": ([real(4) > 0, real(4, 6), real(4, 6)], {}),
    "TanhGrad": ([real(4, 6), real(4, 6)], {}),
    "Softmax": ([real(4, 6)], {}),
    "TopKV2": ([real(4, 6), 2], {}),
    "MatrixBandPart": ([real(4, 6, 2), 1, 1], {}),
    "MatrixDiagV3": ([real(4, 6), 0, -1, -1, 0.0], {}),
    "MatrixSolve": ([real(4, 2, 2), real(4, 2, 6)], {}),
    "MaxPool": ([IMAGE], POOL),
    "MaxPoolGrad": ([IMAGE, real(4, 3, 3, 2), real(4, 3, 3, 2)], POOL),
    "LRN": ([IMAGE], {}),
    "SparseSoftmaxCrossEntropyWithLogits": ([real(4, 6), [1, 2, 5, 0]], {}),
    "SoftmaxCrossEntropyWithLogits": ([real(4, 6), real(4, 6)], {}),
    "FusedBatchNormV3": ([IMAGE, *real(4, 2)], {"is_training": False}),
    "Sum": ([real(4, 6, 2), [1]], {}),
    "Mean": ([real(4, 6, 2), [0, 2]], {"keep_dims": True}),
    "Max": ([real(4, 6, 2), [-1]], {}),
    "L2Loss": ([real(4, 6)], {}),
    "ArgMax": ([real(4, 6), 1], {}),
    "Cumsum": ([real(4, 6), 0], {}),
    "InTopKV2": ([real(4, 6), [1, 2, 5, 0], 2], {}),
    "Transpose": ([real(4, 6, 2), [2, 0, 1]], {}),
    "ExpandDims": ([real(4, 6), 1], {}),
    "Squeeze": ([real(4, 1, 6)], {"axis": [1]}),
    "Pack": ([[real(4, 6), real(4, 6)]], {"axis": 1}),
    "ConcatV2": ([[real(4, 6), real(4, 2)], 1], {}),
    "Split": ([1, real(4, 6)], {"num_split": 3}),
    "Unpack": ([real(4, 6)], {"num": 6, "axis": 1}),
    "StridedSlice": (
        [real(4, 6, 2), [0, 1, 0], [0, 4, 0], [1, 1, 1]],
        {"begin_mask": 1, "end_mask": 1, "shrink_axis_mask": 4},
    ),
    "GatherV2": ([real(4, 6), [[0, 3, 2, 1]], 0], {}),
    "GatherV2 of rows": ([real(4, 6, 2), [[0], [3], [2], [1]], 1], {"batch_dims": 1}),
    "OneHot": ([[0, 1, 2, 1], 3, 1.0, 0.0], {}),
    "Pad": ([real(4, 6), [[0, 0], [1, 2]]], {}),
    "ReverseV2": ([real(4, 6), [1]], {}),
    "Tile": ([real(4, 6), [1, 2]], {}),
    "ZerosLike": ([real(4, 6)], {}),
}  # fmt: skip


COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "mean": lambda one, two: (one + two) / 2,
    "max": np.maximum,
}


def call(name: str, operands: list[Any], options: dict[str, Any]) -> list[np.ndarray]:
    """Run an op eagerly on these operands, in its order of inputs."""
    op = getattr(tf.raw_ops, name.partition(" ")[0])
    names = [each for each in op.__signature__.parameters if each not in (*options, "name")]
    found = op(**dict(zip(names, operands, strict=False)), **options)
    return [np.asarray(each) for each in tf.nest.flatten(found)]


def described(name: str, operands: list[Any], options: dict[str, Any]) -> Axes:
    """What the table says of an op, whose constants are known."""
    arrays = [np.asarray(each) for each in tf.nest.flatten([_leaves(each) for each in operands])]
    traced = trace(lambda *given: call_traced(name, operands, given, options), arrays, whole=range(len(arrays)))
    op = next(op for op in reversed(traced.graph.ops) if op.type == name.partition(" ")[0])
    folds = tuple(_known(traced.graph.ops[value.op].name, arrays) for value in op.inputs)
    entry = RULES[op.type]
    assert entry.axes is not None
    found = entry.axes(Node(traced.graph, op, folds, None, op.index))  # type: ignore[arg-type]
    assert isinstance(found, Axes), found
    return found


def call_traced(name: str, operands: list[Any], given: Any, options: dict[str, Any]) -> Any:
    left = list(given)
    again = [[left.pop(0) for _ in each] if _is_list(each) else left.pop(0) for each in operands]
    op = getattr(tf.raw_ops, name.partition(" ")[0])
    names = [each for each in op.__signature__.parameters if each not in (*options, "name")]
    return op(**dict(zip(names, again, strict=False)), **options)


def _is_list(operand: Any) -> bool:
    return isinstance(operand, list) and isinstance(operand[0], np.ndarray)


def _leaves(operand: Any) -> list[Any]:
    if _is_list(operand):
        return list(operand)
    found = np.asarray(operand)
    return [found.astype({"i": "int32", "f": "float32"}.get(found.dtype.kind, found.dtype))]


def _known(name: str, arrays: list[np.ndarray]) -> Fold:
    """What is known of an input: the numbers of an integer constant."""
    array = arrays[int(name.removeprefix("in"))] if name.startswith("in") and name[2:].isdigit() else None
    return whole(*array.ravel().tolist()) if array is not None and array.dtype.kind == "i" else whole()


@pytest.mark.parametrize("name", SAMPLES)
def test_pieces_make_pieces(name: str) -> None:
    operands, options = SAMPLES[name]
    found = described(name, operands, options)
    flat = [leaf for each in operands for leaf in _leaves(each)]
    labels = {label for side in found.inputs if side is not None for label in side} - set(found.mixed)
    cut = [label for label in sorted(labels) if _size(flat, found, label) % 2 == 0]
    expected = call(name, operands, options)
    for label in cut:
        pieces = [call(name, _piece(operands, found, label, half), options) for half in (0, 1)]
        for one, two, total, out in zip(*pieces, expected, found.outputs, strict=True):
            if out is None:
                continue
            if label in out:
                got = np.concatenate([one, two], list(out).index(label))
            else:
                got = COMBINED[found.folded](one, two)
            assert_same(total, got, "sums")
    assert cut or name in ("LRN", "Transpose"), "no axis of the sample can be cut"


def _size(flat: list[np.ndarray], found: Axes, label: str) -> int:
    return next(
        len(np.moveaxis(a, list(s).index(label), 0))
        for a, s in zip(flat, found.inputs, strict=False)
        if s and label in s
    )


def _piece(operands: list[Any], found: Axes, label: str, half: int) -> list[Any]:
    """The operands with the first or second half of an axis; where one has a single entry there, it keeps it."""
    described = iter(found.inputs)
    made = []
    for operand in operands:
        leaves = []
        for leaf in _leaves(operand):
            side = next(described, None)
            if side is not None and label in side and leaf.shape[list(side).index(label)] > 1:
                leaf = np.split(leaf, 2, list(side).index(label))[half]
            leaves.append(leaf)
        made.append(leaves if _is_list(operand) else leaves[0])
    return made
