"""FLOPs of ops: compared with TensorFlow's profiler where it counts them, otherwise with manual values."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from whale_nebula.capture.mirror import mirror
from whale_nebula.ir.graph import Op
from whale_nebula.ir.sizes import Sizes
from whale_nebula.plan.flops import FlopCounter, flops
from whale_nebula.spec import Spec


def count_flops(graph: Any) -> int:
    mirrored = mirror(graph)
    return FlopCounter(Sizes(mirrored, rows=1).follow(range(len(mirrored)))).flops(range(len(mirrored)))


def profile_flops(graph: Any) -> int:
    options = tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
    options["output"] = "none"
    return int(tf.compat.v1.profiler.profile(graph, options=options).total_float_ops)


def multiply() -> None:
    tf.matmul(tf.ones((4, 6)), tf.ones((5, 6)), transpose_b=True)


def multiply_batches() -> None:
    tf.matmul(tf.ones((2, 3, 4, 6)), tf.ones((2, 3, 6, 5)))


def convolve() -> None:
    tf.nn.conv2d(tf.ones((2, 8, 8, 3)), tf.ones((3, 3, 3, 4)), 1, "SAME")


def convolve_depthwise() -> None:
    tf.nn.depthwise_conv2d(tf.ones((2, 8, 8, 3)), tf.ones((3, 3, 3, 2)), [1, 1, 1, 1], "SAME")


def differentiate_to_input() -> None:
    tf.raw_ops.Conv2DBackpropInput(
        input_sizes=[2, 8, 8, 3], filter=tf.ones((3, 3, 3, 4)), out_backprop=tf.ones((2, 8, 8, 4)),
        strides=[1, 1, 1, 1], padding="SAME",
    )  # fmt: skip


def differentiate_to_filter() -> None:
    tf.raw_ops.Conv2DBackpropFilter(
        input=tf.ones((2, 8, 8, 3)), filter_sizes=[3, 3, 3, 4], out_backprop=tf.ones((2, 8, 8, 4)),
        strides=[1, 1, 1, 1], padding="SAME",
    )  # fmt: skip


def compute_elementwise() -> None:
    x = tf.ones((4, 6))
    (x + x) * x - tf.nn.bias_add(-x, tf.ones((6,)))


@pytest.mark.parametrize(
    "make",
    [
        multiply,
        multiply_batches,
        convolve,
        convolve_depthwise,
        differentiate_to_input,
        differentiate_to_filter,
        compute_elementwise,
    ],
)
def test_flops_match_the_profiler(make: Callable[[], None]) -> None:
    with tf.Graph().as_default() as graph:
        make()
    assert count_flops(graph) == profile_flops(graph) > 0


@pytest.mark.parametrize(
    ("equation", "shapes", "count"),
    [
        ("abc,cd->abd", [(2, 3, 4), (4, 5)], 2 * 2 * 3 * 4 * 5),
        ("BTNH,BSNH->BNTS", [(2, 6, 4, 8), (2, 7, 4, 8)], 2 * 2 * 6 * 7 * 4 * 8),
        ("...ij,jk->...ik", [(2, 3, 4, 5), (5, 6)], 2 * 2 * 3 * 4 * 5 * 6),
        ("...i,...i->...i", [(2, 3), (3,)], 2 * 3),
        ("ab->ba", [(2, 3)], 2 * 3),
        ("i,j->ij", [(2,), (3,)], 2 * 3),
    ],
)
def test_flops_of_an_einsum(equation: str, shapes: list[tuple[int, ...]], count: int) -> None:
    einsum = Op(0, "Einsum", outputs=(Spec("float32", None),), attributes={"equation": equation})
    assert flops(einsum, shapes, [()]) == count


def test_flops_of_data_movement_are_zero() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.ones((4, 6))
        tf.transpose(tf.reshape(tf.concat([x, tf.cast(tf.cast(x, tf.float64), tf.float32)], 0)[1:], [6, -1]))
        tf.gather(x, [1, 2]), tf.pad(x, [[1, 1], [0, 0]]), tf.range(9) * 2
    assert count_flops(graph) == 0


def test_flops_of_an_op_with_invalid_shapes_are_zero() -> None:
    assert flops(Op(0, "Einsum", outputs=(Spec("float32", None),)), [(2,)], [(2,)]) == 0
    assert flops(Op(0, "MatMul", outputs=(Spec("float32", None),)), [()], [()]) == 0
