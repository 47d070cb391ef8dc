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


def draw_real(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("float32")


IMAGE, FILTERS = draw_real(4, 6, 6, 2), draw_real(3, 3, 2, 4)
STRIDE_ONE = {"strides": [1, 1, 1, 1], "padding": "SAME"}
POOL = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
SAMPLES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "MatMul": ([draw_real(4, 6), draw_real(6, 2)], {}),
    "MatMul turned": ([draw_real(6, 4), draw_real(2, 6)], {"transpose_a": True, "transpose_b": True}),
    "BatchMatMulV2": ([draw_real(2, 4, 6), draw_real(6, 2)], {"adj_x": False}),
    "Einsum": ([[draw_real(4, 6, 2), draw_real(6, 8, 2)]], {"equation": "abc,bdc->acd"}),
    "Conv2D": ([IMAGE, FILTERS], STRIDE_ONE),
    "DepthwiseConv2dNative": ([IMAGE, draw_real(3, 3, 2, 2)], STRIDE_ONE),
    "Conv2DBackpropFilter": ([IMAGE, [3, 3, 2, 4], draw_real(4, 6, 6, 4)], STRIDE_ONE),
    "BiasAdd": ([draw_real(4, 6, 2), draw_real(2)], {}),
    "BiasAddGrad": ([draw_real(4, 6, 2)], {}),
    "AddV2": ([draw_real(4, 6), draw_real(6)], {}),
    "SelectV2": ([draw_real(4, 1) > 0, draw_real(4, 6), draw_real(6)], {}),
    "Select": ([draw_real(4) > 0, draw_real(4, 6), draw_real(4, 6)], {}),
    "TanhGrad": ([draw_real(4, 6), draw_real(4, 6)], {}),
    "Softmax": ([draw_real(4, 6)], {}),
    "TopKV2": ([draw_real(4, 6), 2], {}),
    "MatrixBandPart": ([draw_real(4, 6, 2), 1, 1], {}),
    "MatrixDiagV3": ([draw_real(4, 6), 0, -1, -1, 0.0], {}),
    "MatrixSolve": ([draw_real(4, 2, 2), draw_real(4, 2, 6)], {}),
    "MaxPool": ([IMAGE], POOL),
    "MaxPoolGrad": ([IMAGE, draw_real(4, 3, 3, 2), draw_real(4, 3, 3, 2)], POOL),
    "LRN": ([IMAGE], {}),
    "SparseSoftmaxCrossEntropyWithLogits": ([draw_real(4, 6), [1, 2, 5, 0]], {}),
    "SoftmaxCrossEntropyWithLogits": ([draw_real(4, 6), draw_real(4, 6)], {}),
    "FusedBatchNormV3": ([IMAGE, *draw_real(4, 2)], {"is_training": False}),
    "Sum": ([draw_real(4, 6, 2), [1]], {}),
    "Mean": ([draw_real(4, 6, 2), [0, 2]], {"keep_dims": True}),
    "Max": ([draw_real(4, 6, 2), [-1]], {}),
    "L2Loss": ([draw_real(4, 6)], {}),
    "ArgMax": ([draw_real(4, 6), 1], {}),
    "Cumsum": ([draw_real(4, 6), 0], {}),
    "InTopKV2": ([draw_real(4, 6), [1, 2, 5, 0], 2], {}),
    "Transpose": ([draw_real(4, 6, 2), [2, 0, 1]], {}),
    "ExpandDims": ([draw_real(4, 6), 1], {}),
    "Squeeze": ([draw_real(4, 1, 6)], {"axis": [1]}),
    "Pack": ([[draw_real(4, 6), draw_real(4, 6)]], {"axis": 1}),
    "ConcatV2": ([[draw_real(4, 6), draw_real(4, 2)], 1], {}),
    "Split": ([1, draw_real(4, 6)], {"num_split": 3}),
    "Unpack": ([draw_real(4, 6)], {"num": 6, "axis": 1}),
    "StridedSlice": (
        [draw_real(4, 6, 2), [0, 1, 0], [0, 4, 0], [1, 1, 1]],
        {"begin_mask": 1, "end_mask": 1, "shrink_axis_mask": 4},
    ),
    "GatherV2": ([draw_real(4, 6), [[0, 3, 2, 1]], 0], {}),
    "GatherV2 of rows": ([draw_real(4, 6, 2), [[0], [3], [2], [1]], 1], {"batch_dims": 1}),
    "OneHot": ([[0, 1, 2, 1], 3, 1.0, 0.0], {}),
    "Pad": ([draw_real(4, 6), [[0, 0], [1, 2]]], {}),
    "ReverseV2": ([draw_real(4, 6), [1]], {}),
    "Tile": ([draw_real(4, 6), [1, 2]], {}),
    "ZerosLike": ([draw_real(4, 6)], {}),
}  # fmt: skip


COMBINE_BY_FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "mean": lambda one, two: (one + two) / 2,
    "max": np.maximum,
}


def run_op(name: str, operands: list[Any], options: dict[str, Any]) -> list[np.ndarray]:
    """Run an op eagerly on these operands, in its order of inputs."""
    op = getattr(tf.raw_ops, name.partition(" ")[0])
    names = [each for each in op.__signature__.parameters if each not in (*options, "name")]
    found = op(**dict(zip(names, operands, strict=False)), **options)
    return [np.asarray(each) for each in tf.nest.flatten(found)]


def find_sample_axes(name: str, operands: list[Any], options: dict[str, Any]) -> Axes:
    """Return the axes that the rule of an op describes, with known constants."""
    arrays = [np.asarray(each) for each in tf.nest.flatten([_leaves(each) for each in operands])]
    traced = trace(lambda *given: trace_op(name, operands, given, options), arrays, whole=range(len(arrays)))
    op = next(op for op in reversed(traced.graph.ops) if op.type == name.partition(" ")[0])
    folds = tuple(_input_fold(traced.graph.ops[value.op].name, arrays) for value in op.inputs)
    entry = RULES[op.type]
    assert entry.axes is not None
    found = entry.axes(Node(traced.graph, op, folds, None, op.index))  # type: ignore[arg-type]
    assert isinstance(found, Axes), found
    return found


def trace_op(name: str, operands: list[Any], given: Any, options: dict[str, Any]) -> Any:
    remaining = list(given)
    traced_operands = [
        [remaining.pop(0) for _ in each] if _is_tensor_list(each) else remaining.pop(0) for each in operands
    ]
    op = getattr(tf.raw_ops, name.partition(" ")[0])
    names = [each for each in op.__signature__.parameters if each not in (*options, "name")]
    return op(**dict(zip(names, traced_operands, strict=False)), **options)


def _is_tensor_list(operand: Any) -> bool:
    return isinstance(operand, list) and isinstance(operand[0], np.ndarray)


def _leaves(operand: Any) -> list[Any]:
    if _is_tensor_list(operand):
        return list(operand)
    found = np.asarray(operand)
    return [found.astype({"i": "int32", "f": "float32"}.get(found.dtype.kind, found.dtype))]


def _input_fold(name: str, arrays: list[np.ndarray]) -> Fold:
    """Return the fold of an input: integers are known constants."""
    array = arrays[int(name.removeprefix("in"))] if name.startswith("in") and name[2:].isdigit() else None
    return whole(*array.ravel().tolist()) if array is not None and array.dtype.kind == "i" else whole()


@pytest.mark.parametrize("name", SAMPLES)
def test_op_on_shards_gives_shards_of_its_output(name: str) -> None:
    operands, options = SAMPLES[name]
    found = find_sample_axes(name, operands, options)
    flat = [leaf for each in operands for leaf in _leaves(each)]
    labels = {label for side in found.inputs if side is not None for label in side} - set(found.mixed)
    cut = [label for label in sorted(labels) if _axis_size(flat, found, label) % 2 == 0]
    expected = run_op(name, operands, options)
    for label in cut:
        pieces = [run_op(name, _take_half(operands, found, label, half), options) for half in (0, 1)]
        for one, two, total, out in zip(*pieces, expected, found.outputs, strict=True):
            if out is None:
                continue
            if label in out:
                got = np.concatenate([one, two], list(out).index(label))
            else:
                got = COMBINE_BY_FOLD[found.folded](one, two)
            assert_same(total, got, "sums")
    assert cut or name in ("LRN", "Transpose"), "no axis of the sample can be cut"


def _axis_size(flat: list[np.ndarray], found: Axes, label: str) -> int:
    return next(
        len(np.moveaxis(a, list(s).index(label), 0))
        for a, s in zip(flat, found.inputs, strict=False)
        if s and label in s
    )


def _take_half(operands: list[Any], found: Axes, label: str, half: int) -> list[Any]:
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
        made.append(leaves if _is_tensor_list(operand) else leaves[0])
    return made
