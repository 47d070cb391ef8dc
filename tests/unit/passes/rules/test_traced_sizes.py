"""Sizes that a step computes from the shapes of its batch: of tensors created, sliced or broadcast by them, and in
gradients of its own forward. Every value of the trace is compared with its fold.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.unit.passes.rules.harness import check_values, list_output_folds, trace

DRAW = np.random.default_rng(7)
PICTURES = DRAW.normal(size=(5, 8, 8, 3)).astype("float32")
SERIES = DRAW.normal(size=(5, 6, 8)).astype("float32")
VECTORS = DRAW.normal(size=(5, 8)).astype("float32")
INDICES = DRAW.integers(0, 6, (5, 3, 1)).astype("int32")
WEIGHT = tf.Variable(DRAW.normal(size=(8, 8)).astype("float32"))
FIXED_INDICES = np.array([[[0], [2]]])
ONE_SPLIT = ((2, 3),)
"""TensorFlow also sums axes along which both of two operands have one entry, so one row has other axes than several."""


def apply_to_hidden(function: Callable[..., Any], *others: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Apply a function to a hidden layer of the series, and to the inputs."""
    return lambda x, *more: function(x @ WEIGHT, x, *more), (SERIES, *others)


def find_largest(h: Any) -> Any:
    """Return the index of the largest entry along axis 1."""
    return ops.argmax(h, 1, keepdims=True)


def count_rows(x: Any) -> Any:
    """Return the number of rows."""
    return tf.shape(x)[0]


def broadcast_first(h: Any, shape: Any) -> Any:
    """Repeat the first entries of each row to a shape."""
    return tf.broadcast_to(h[:, :1], shape)


SIZES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "take along an axis, places given": apply_to_hidden(lambda h, x, p: ops.take_along_axis(h, p, 1), INDICES),
    "take along an axis, the same places": apply_to_hidden(lambda h, x: ops.take_along_axis(h, FIXED_INDICES, 1)),
    "take along an axis, from the end": apply_to_hidden(
        lambda h, x: ops.take_along_axis(h, -1 - ops.argsort(h, -2), -2)
    ),
    "take along an axis, the best": apply_to_hidden(lambda h, x: ops.take_along_axis(h, find_largest(h), 1)),
    "sorted along the last axis": apply_to_hidden(lambda h, x: ops.take_along_axis(h, ops.argsort(h, -1)[..., :3], -1)),
    "the larger of two shapes": apply_to_hidden(lambda h, x: broadcast_first(h, tf.maximum(tf.shape(h), tf.shape(x)))),
    "the smaller of two shapes": apply_to_hidden(lambda h, x: tf.zeros(tf.minimum(tf.shape(h), tf.shape(x))) + h),
    "the largest of several sizes": apply_to_hidden(
        lambda h, x: h + tf.zeros([tf.reduce_max([count_rows(h), count_rows(x)]), 1, 8])
    ),
    "a broadcast shape": apply_to_hidden(
        lambda h, x: broadcast_first(h, tf.broadcast_dynamic_shape(tf.shape(h), tf.shape(x)))
    ),
    "no less than one row": apply_to_hidden(
        lambda h, x: h * tf.cast(tf.maximum(count_rows(h), 1), "float32") / tf.cast(count_rows(x), "float32")
    ),
    "as many rows as the shorter": apply_to_hidden(lambda h, x: h[: tf.minimum(count_rows(h), count_rows(x))]),
    "padding by numbers": apply_to_hidden(lambda h, x: tf.pad(h, tf.stack([[0, 0], [tf.shape(x)[1] - 5, 0], [1, 1]]))),
    "a part of each row replaced": apply_to_hidden(lambda h, x: ops.slice_update(h, (0, 1, 0), x[:, :2])),
    "looked for among sorted numbers": apply_to_hidden(lambda h, x: tf.cast(tf.searchsorted(tf.sort(h), x), "float32")),
    "cross products": apply_to_hidden(lambda h, x: ops.cross(h[..., :3], x[..., 1:4])),
}

GRADIENTS: dict[str, tuple[Callable[..., Any], Any]] = {
    "zero padding": (layers.ZeroPadding2D(2), PICTURES),
    "padding with a constant": (lambda x: ops.pad(x, ((0, 0), (1, 1), (0, 0)), constant_values=1.0), SERIES),
    "padding by reflection": (lambda x: tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT"), PICTURES),
    "cropping": (layers.Cropping2D(1), PICTURES),
    "a slice": (lambda x: ops.slice(x, (0, 1, 0), (ops.shape(x)[0], 3, 4)), SERIES),
    "a strided slice": (lambda x: x[:, None, 1:5:2, ..., ::3], SERIES),
    "the last": (lambda x: x[:, -1], SERIES),
    "concatenation": (lambda x: tf.concat([x, 2 * x[..., :3]], -1), SERIES),
    "concatenation of many": (lambda x: tf.concat([x[..., :2]] * 20, -1), SERIES),
    "tiles": (lambda x: tf.tile(x, [1, 2, 1]), SERIES),
    "upsampling": (layers.UpSampling2D(), PICTURES),
    "repetition": (layers.RepeatVector(3), VECTORS),
    "broadcasting": (lambda x: ops.broadcast_to(x[:, None], (ops.shape(x)[0], 4, 8)), VECTORS),
    "transposition": (layers.Permute((2, 1)), SERIES),
    "a dense layer on series": (layers.Dense(4, "tanh"), SERIES),
    "a causal convolution": (layers.Conv1D(4, 3, padding="causal"), SERIES),
    "a dilated convolution": (layers.Conv2D(4, 3, dilation_rate=2, padding="same"), PICTURES),
    "a transposed convolution": (layers.Conv2DTranspose(4, 3, strides=2), PICTURES),
    "pooling": (layers.MaxPooling1D(), SERIES),
    "products of rows": (lambda x: ops.matmul(x, ops.transpose(x, (0, 2, 1))), SERIES),
    "an einsum": (layers.EinsumDense("abc,cd->abd", (None, 4)), SERIES),
    "a look-up along an axis": (lambda x: ops.take(x, [0, 2], axis=1), SERIES),
    "differences": (lambda x: ops.diff(x, axis=1), SERIES),
    "layer normalization": (layers.LayerNormalization(), SERIES),
    "a recurrent layer, unrolled": (layers.LSTM(4, unroll=True), SERIES),
}  # fmt: skip
ONLY_IN_GRID = (
    "upsampling", "repetition", "a recurrent layer, unrolled", "the last", "concatenation", "cropping",
    "a dilated convolution", "a causal convolution", "zero padding", "a slice", "a dense layer on series",
    "transposition", "a look-up along an axis", "differences", "tiles", "take along an axis, the same places",
    "sorted along the last axis", "the smaller of two shapes", "the largest of several sizes",
    "as many rows as the shorter",
)  # fmt: skip
"""Samples whose ops other samples cover."""


def mark_grid(names: Iterable[str]) -> list[Any]:
    """Parameters, of which some are of the grid only."""
    return [pytest.param(name, marks=[pytest.mark.grid] if name in ONLY_IN_GRID else []) for name in names]


@pytest.mark.parametrize("name", mark_grid(SIZES))
def test_sizes_computed_from_the_batch_fold_per_micro_batch(name: str) -> None:
    function, arrays = SIZES[name]
    traced = trace(lambda *given: tf.reduce_mean(function(*given) ** 2), arrays, target=0)
    assert list_output_folds(traced) == ["mean"], f"{traced.outputs[0].reason}\n{traced}"
    check_values(traced, arrays)


@pytest.mark.parametrize("name", mark_grid(GRADIENTS))
def test_gradient_penalty_is_computed_per_row(name: str) -> None:
    """The penalty of WGAN-GP: the gradient of a forward with respect to its inputs is a part of the loss."""
    function, inputs = GRADIENTS[name]
    scale = tf.Variable(tf.ones(inputs.shape[-1:]))
    function(inputs)

    def penalty(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            score = tf.reduce_sum(function(x * scale) ** 3)
        slope = tape.gradient(score, x)
        return tf.reduce_mean((tf.norm(tf.reshape(slope, [tf.shape(x)[0], -1]), axis=1) - 1.0) ** 2)

    traced = trace(penalty, [inputs], target=0)
    assert list_output_folds(traced) == ["mean"], f"{traced.outputs[0].reason}\n{traced}"
    check_values(traced, [inputs], cuts=ONE_SPLIT, tolerance=1e-4)


ROW_DEPENDENT: dict[str, Callable[..., Any]] = {
    "the rows of two batches behind each other": lambda h, x: tf.zeros([tf.maximum(count_rows(h), 8), 8]),
    "rows of which the first are taken": lambda h, x: h[: tf.minimum(count_rows(h), 2)],
    "as many columns as rows": lambda h, x: h[:, : tf.maximum(count_rows(h), count_rows(x))],
    "the first row of each micro-batch replaced": lambda h, x: ops.slice_update(h, (1, 0, 0), x[:1]),
    "entries put behind the batch": lambda h, x: tf.pad(h, tf.stack([[0, tf.shape(x)[1]], [0, 0], [0, 0]])),
}


@pytest.mark.parametrize("name", ROW_DEPENDENT)
def test_result_that_depends_on_the_row_count_is_refused(name: str) -> None:
    function = ROW_DEPENDENT[name]
    traced = trace(lambda x: tf.reduce_mean(function(x @ WEIGHT, x) ** 2), [SERIES], target=0)
    assert list_output_folds(traced) in (["coupled"], ["after"]), str(traced)
