"""Sizes and loop counts of traced graphs, compared with TensorFlow's at run time."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from whale_nebula.capture.mirror import mirror, order_operations
from whale_nebula.ir.graph import Graph, Op
from whale_nebula.ir.integers import COMPUTE, ELEMENTWISE, KnownOp, broadcast_shapes, compute_integers, compute_outputs
from whale_nebula.ir.sizes import Sizes
from whale_nebula.models import SwitchFeedForward
from whale_nebula.plan.flops import FlopCounter
from whale_nebula.spec import Spec, Value

ROWS = 5


def attention(x: Any) -> Any:
    return layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)


def dense(x: Any) -> Any:
    return layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, "gelu")(x)))


def pictures(x: Any) -> Any:
    x = tf.reshape(x, [-1, 6, 8, 1])
    return layers.Flatten()(layers.MaxPooling2D()(layers.Conv2D(3, 3, padding="same")(x)))


def rearrange(x: Any) -> Any:
    flat = tf.reshape(x, [-1, 8])
    pairs = tf.reshape(flat, [tf.shape(x)[0] * 3, 2, 8])
    turned = tf.transpose(pairs, [1, 0, 2])
    return tf.gather(turned, [0, 1], axis=0) + tf.broadcast_to(tf.reduce_mean(pairs, [1]), [2, tf.shape(x)[0] * 3, 8])


def experts(x: Any) -> Any:
    return SwitchFeedForward(4, 8, k=2, row_groups=5)(SwitchFeedForward(4, 8, groups=2)(x), training=True)


def classes(x: Any) -> Any:
    best = tf.math.top_k(tf.pad(x, [[0, 0], [1, 2], [0, 0]]), 3)
    marks = tf.one_hot(best.indices[:, 0], 7) + tf.one_hot(tf.argmax(x, -1), 7)[:, :3]
    return tf.squeeze(tf.stack([marks, tf.where(marks > 0.5, marks, 0.1)], 1)[..., tf.newaxis], [-1])


@pytest.mark.parametrize(
    "make",
    [
        attention,
        pytest.param(dense, marks=pytest.mark.grid),
        pictures,
        pytest.param(rearrange, marks=pytest.mark.grid),
        experts,
        classes,
    ],
)
def test_sizes_match_the_shapes_at_run_time(make: Callable[[Any], Any]) -> None:
    """The graph contains forward and gradients; a session computes all its tensors."""
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [None, 6, 8])
        loss = tf.reduce_mean(make(x))
        tf.gradients(loss, [x, *tf.compat.v1.trainable_variables()])
        operations = order_operations(graph.get_operations())
        tensors = [t for op in operations for t in op.outputs if t.dtype in (tf.float32, tf.int32, tf.bool)]
        session.run(tf.compat.v1.global_variables_initializer())
        found = session.run(tensors, {x: np.ones((ROWS, 6, 8), "float32")})
        mirrored = mirror(graph)
    sizes = Sizes(mirrored, ROWS).follow(range(len(mirrored)))
    numbers = {op.name: index for index, op in enumerate(operations)}
    computed = {t.name: sizes.shape(Value(numbers[t.op.name], t.value_index)) for t in tensors}
    real = {t.name: np.shape(value) for t, value in zip(tensors, found, strict=True)}
    assert {name: (computed[name], real[name]) for name in computed if computed[name] != real[name]} == {}


def count_traced_flops(function: Callable[..., Any], *specs: Any) -> FlopCounter:
    graph = mirror(tf.function(function).get_concrete_function(*specs).graph)
    return FlopCounter(Sizes(graph, ROWS).follow(range(len(graph))))


def list_trip_counts(counter: FlopCounter) -> list[int]:
    ops = [op for op in counter.sizes.graph.ops if op.type in ("While", "StatelessWhile")]
    counter.flops(op.index for op in ops)
    return [counter.trips[op.index] for op in ops]


def test_trip_count_of_an_autograph_loop() -> None:
    def total(x: Any) -> Any:
        i = tf.constant(0)
        while i < 7:
            x, i = x * 2.0, i + 2
        return x

    assert list_trip_counts(count_traced_flops(total, tf.TensorSpec([None, 3]))) == [4]


def test_trip_count_of_the_gradient_of_a_loop() -> None:
    def step(x: Any) -> Any:
        body = lambda i, h: (i + 1, tf.tanh(h))  # noqa: E731
        hidden = tf.while_loop(lambda i, h: i < 3, body, [tf.constant(0), x], maximum_iterations=9)[1]
        return tf.gradients(hidden, x)

    counter = count_traced_flops(step, tf.TensorSpec([None, 3]))
    assert list_trip_counts(counter) == [9, 9]  # `maximum_iterations` is the trip count
    assert counter.open_loops == set()


def test_trip_count_is_maximum_iterations() -> None:
    def step(x: Any) -> Any:
        return tf.while_loop(lambda h: tf.reduce_sum(h) < 9.0, lambda h: [h + 1.0], [x], maximum_iterations=6)

    counter = count_traced_flops(step, tf.TensorSpec([None, 3]))
    assert list_trip_counts(counter) == [6]
    assert counter.flops(range(len(counter.sizes.graph))) == 6 * ROWS * 3


def test_data_dependent_loop_is_open() -> None:
    def step(x: Any) -> Any:
        return tf.while_loop(lambda h: tf.reduce_sum(h) < 9.0, lambda h: [h + 1.0], [x])

    counter = count_traced_flops(step, tf.TensorSpec([None, 3]))
    assert (list_trip_counts(counter), len(counter.open_loops)) == ([1], 1)


def test_flops_of_a_cond_are_those_of_the_larger_branch() -> None:
    def step(x: Any) -> Any:
        return tf.cond(x[0, 0] > 0.0, lambda: x, lambda: tf.tanh(tf.tanh(x)))

    counter = count_traced_flops(step, tf.TensorSpec([None, 3]))
    (branch,) = (op for op in counter.sizes.graph.ops if op.functions)
    assert counter.count_op(branch) == 2 * ROWS * 3


def test_bytes_of_a_tensor_list_of_a_loop() -> None:
    def step(x: Any) -> Any:
        rows = tf.TensorArray(tf.float32, 4)
        for i in tf.range(4):
            rows = rows.write(i, x * 2.0)
        return rows.stack()

    counter = count_traced_flops(step, tf.TensorSpec([None, 3]))
    (loop,) = (op for op in counter.sizes.graph.ops if op.functions)
    lists = [value for value in loop.values if counter.sizes.graph.spec(value).dtype == "variant"]
    assert [counter.nbytes(value) for value in lists] == [4 * ROWS * 3 * 4]


# ---------------------------------------------------------------------- numbers are TensorFlow's
GRID = np.arange(1, 7).reshape(2, 3)
SAMPLES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "Ceil": ([2.25], {}),
    "Floor": ([2.75], {}),
    "Transpose": ([GRID, [1, 0]], {}),
    "Reshape": ([GRID, [-1, 2]], {}),
    "ExpandDims": ([GRID, -1], {}),
    "Squeeze": ([GRID[None]], {"squeeze_dims": (0,)}),
    "GatherV2": ([GRID, [[1, 0]], 1], {}),
    "Pack": ([(GRID, GRID)], {"axis": 1}),
    "Unpack": ([GRID], {"axis": 1, "num": 3}),
    "ConcatV2": ([(GRID, GRID), 1], {}),
    "Split": ([1, GRID], {"num_split": 3}),
    "SplitV": ([GRID, [1, 2], 1], {"num_split": 2}),
    "StridedSlice": ([GRID, [0, 2, 0], [0, 0, 0], [1, -1, 1]], {"begin_mask": 1, "end_mask": 3, "new_axis_mask": 4}),
    "Slice": ([GRID, [0, 1], [-1, 2]], {}),
    "Range": ([3, 12, 4], {}),
    "Fill": ([[2, 2], 7], {}),
    "InvertPermutation": ([[2, 0, 1]], {}),
    "DynamicStitch": ([([0, 2], [1, 2]), ([5, 6], [7, 8])], {}),
    "BroadcastArgs": ([[3, 1], [2, 1, 4]], {}),
    "SelectV2": ([[True, False], [1, 2], [3, 4]], {}),
    "LogicalAnd": ([[True, True], [True, False]], {}),
    "All": ([[[True, False], [True, True]], [1]], {}),
    "Neg": ([GRID], {}),
    **{kind: ([GRID, [1]], {"keep_dims": kind == "Sum"}) for kind in ("Prod", "Sum", "Max", "Min")},
}
for _kind in ELEMENTWISE:
    SAMPLES.setdefault(_kind, ([GRID, [4, 2, 2]], {}))


@pytest.mark.parametrize("kind", COMPUTE)
def test_computed_integers_match_tensorflow(kind: str) -> None:
    """A tuple among the operands is a list of tensors."""
    operands, attributes = SAMPLES[kind]
    raw, options = (
        getattr(tf.raw_ops, kind),
        {name.replace("squeeze_dims", "axis"): v for name, v in attributes.items()},
    )
    names = [name for name in raw.__signature__.parameters if name not in (*options, "name")]
    called = raw(**dict(zip(names, operands, strict=False)), **options)
    expected = [np.asarray(each) for each in tf.nest.flatten(called)]
    given = [np.asarray(each) for part in operands for each in (part if isinstance(part, tuple) else [part])]
    found = compute_outputs(make_op(kind, *[Spec("int32", None)] * len(expected), **attributes), given)
    for each, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(each, other)


# ---------------------------------------------------------------------- what is not known stays unknown
def make_op(kind: str, *outputs: Spec, **attributes: Any) -> Op:
    return Op(0, kind, outputs=outputs or (Spec("int32", (1,)),), attributes=attributes)


@pytest.mark.parametrize(
    ("kind", "shapes", "numbers"),
    [
        ("Nothing", ((2,),), ((1, 2),)),
        ("Range", ((), (), ()), ((0,), (10**9,), (1,))),
        ("GatherV2", ((2,), (1,), ()), ((1, 2), (5,), (0,))),
        ("FloorDiv", ((), ()), ((1,), (0,))),
        ("Fill", ((1,), ()), ((10**6,), (0,))),
        ("ConcatV2", ((1,), (1,), ()), ((1,), None, (0,))),
    ],
)
def test_unknown_integers_stay_unknown(kind: str, shapes: Any, numbers: Any) -> None:
    assert list(compute_integers(KnownOp(make_op(kind), shapes, numbers))) == [None]


@pytest.mark.parametrize(
    ("left", "right", "axes"),
    [
        ((3, 4), (4,), [(), (0,)]),
        ((3, 1), (3, 4), [(1,), ()]),
        ((), (2,), [(0,), ()]),
        ((1, 3), (1, 3), [(), ()]),
        ((1, 3, 8), (1, 3, 1), [(0,), (0, 2)]),
    ],
)
def test_broadcast_gradient_axes_match_tensorflow(
    left: tuple[int, ...], right: tuple[int, ...], axes: list[tuple[int, ...]]
) -> None:
    node = KnownOp(
        make_op("BroadcastGradientArgs", Spec("int32", (None,)), Spec("int32", (None,))), ((), ()), (left, right)
    )
    assert list(compute_integers(node)) == axes
    real = tf.raw_ops.BroadcastGradientArgs(s0=list(left), s1=list(right))
    assert [tuple(map(int, each)) for each in real] == axes
    assert broadcast_shapes(left, right) == tuple(np.broadcast_shapes(left, right))


def test_unknown_axis_of_an_unfollowed_value_has_the_rows() -> None:
    graph = Graph((make_op("Placeholder", Spec("float32", (None, 3))),))
    assert Sizes(graph, ROWS).shape(Value(0)) == (ROWS, 3)
    assert Spec("float32", None).fill_shape(ROWS) == ()
