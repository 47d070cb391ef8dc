"""Traced layers of Keras: every value of the trace is compared with its fold."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.unit.passes.rules.harness import check_values, list_output_folds, trace

Model = Callable[[Any], Any]
DRAW = np.random.default_rng(7)
WORDS = DRAW.integers(1, 5, (5, 7)).astype("int32")
WORDS[:, 5:] = 0
WORDS[0, 2:] = 0
PICTURES = DRAW.normal(size=(5, 8, 8, 3)).astype("float32")
SERIES = DRAW.normal(size=(5, 6, 8)).astype("float32")
VECTORS = DRAW.normal(size=(5, 8)).astype("float32")


def transformer() -> Model:
    attend, first, second = (
        layers.MultiHeadAttention(2, 4),
        layers.LayerNormalization(),
        layers.LayerNormalization(),
    )
    wide, narrow = layers.Dense(16, "gelu"), layers.Dense(8)

    def call(x: Any) -> Any:
        x = first(x + attend(x, x, use_causal_mask=True))
        return second(x + narrow(wide(x)))

    return call


def picture_network() -> Model:
    return keras.Sequential(
        [
            layers.Conv2D(4, 3),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(4, 2, padding="same", dilation_rate=2),
            layers.DepthwiseConv2D(2),
            layers.GlobalAveragePooling2D(),
        ]
    )


def series_network() -> Model:
    return keras.Sequential(
        [
            layers.Conv1D(4, 3),
            layers.AveragePooling1D(2),
            layers.Conv1DTranspose(3, 3),
            layers.UpSampling1D(),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )


def masked_network() -> Model:
    return keras.Sequential(
        [layers.Embedding(5, 6, mask_zero=True), layers.GRU(4, return_sequences=True), layers.Dense(3)]
    )


def norm_layers() -> Model:
    return keras.Sequential([layers.LayerNormalization(), layers.GroupNormalization(2), layers.UnitNormalization()])


def batch_norm_in_inference() -> Model:
    norm = layers.BatchNormalization()
    return lambda x: norm(x, training=False)


def keras_operations() -> Model:
    ops = keras.ops

    def call(x: Any) -> Any:
        h = ops.reshape(ops.concatenate([x, 2 * x], -1), (-1, 4, 4))
        h = ops.max(ops.transpose(h, (0, 2, 1)), -1) + ops.split(x, 2, 1)[0][:, :1]
        h = ops.where(h > 0, h, 0.1 * h)
        h = ops.clip(ops.pad(h, ((0, 0), (1, 1))), -1, 1) * ops.cumsum(ops.ones_like(x[:, :6]), 1)
        return ops.stack([ops.flip(h, 1), ops.sort(h, 1), ops.roll(h, 1, 1)], 1)

    return call


def affine_transforms() -> Model:
    """An affine transform per image, and one for all: the ops of `RandomRotation`."""
    turn = np.array([0.8, 0.2, 0.5, -0.2, 0.9, 0.0, 0.0, 0.0], "float32")

    def call(x: Any) -> Any:
        each = turn * (1.0 + tf.reduce_mean(x, (1, 2))[:, :1])
        h = keras.ops.image.affine_transform(x, each, interpolation="bilinear")
        return keras.ops.image.affine_transform(h, tf.constant(turn), fill_mode="reflect")

    return call


def time_major() -> Model:
    weight = tf.constant(DRAW.normal(size=(8, 8)).astype("float32"))

    def call(x: Any) -> Any:
        h = tf.tanh(tf.tensordot(tf.transpose(x, [1, 0, 2]), weight, 1))
        return tf.transpose(h, [1, 0, 2])

    return call


def control_flow() -> Model:
    weight = tf.Variable(DRAW.normal(size=(8, 8)).astype("float32"))

    def call(x: Any) -> Any:
        h = tf.cond(tf.reduce_sum(weight) > 0, lambda: x @ weight, lambda: tf.nn.relu(x @ weight))
        h = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ weight)), [0, h])[1]
        return tf.cond(tf.reduce_mean(x) > 0, lambda: 2 * h, lambda: h)

    return call


def split_halves() -> Model:
    dense = layers.Dense(4)

    def call(x: Any) -> Any:
        left, right = tf.split(dense(tf.concat([x, 2 * x], 0)), 2)
        return left - right

    return call


MODELS: dict[str, tuple[Callable[[], Model], np.ndarray]] = {
    "transformer": (transformer, SERIES),
    "gru": (lambda: layers.GRU(4), SERIES),
    "lstm": (lambda: layers.LSTM(4, return_sequences=True), SERIES),
    "both ways": (lambda: layers.Bidirectional(layers.GRU(3, return_sequences=True)), SERIES),
    "pictures": (picture_network, PICTURES),
    "series": (series_network, SERIES),
    "masked words": (masked_network, WORDS),
    "norms": (norm_layers, SERIES),
    "resting batch norm": (batch_norm_in_inference, VECTORS),
    "operations": (keras_operations, VECTORS),
    "time major": (time_major, SERIES),
    "turned": (affine_transforms, PICTURES),
    "control flow": (control_flow, VECTORS),
    "twins": (split_halves, VECTORS),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.grid] if name == "both ways" else []) for name in MODELS]
)
def test_models_map_rows_to_rows(name: str) -> None:
    build, inputs = MODELS[name]
    model = build()
    model(inputs)

    def step(x: Any) -> tuple[Any, Any, Any]:
        y = model(x)
        return tf.reduce_mean(y**2), tf.reduce_sum(y**2), y

    traced = trace(step, [inputs], target=0)
    assert list_output_folds(traced) == ["mean", "sum", "rows(0)"]
    assert check_values(traced, [inputs]) > 0.7 * len(traced.graph) - 10


def test_batch_norm_of_inputs_uses_whole_batch_statistics() -> None:
    norm, dense = layers.BatchNormalization(), layers.Dense(3)
    dense(norm(VECTORS))
    traced = trace(lambda x: tf.reduce_mean(dense(norm(x, training=True)) ** 2), [VECTORS], target=0)
    assert list_output_folds(traced) == ["mean"]
    assert len(traced.first.wholes) == 3
    check_values(traced, [VECTORS])


def test_random_layers_keep_rows() -> None:
    drop, noise = layers.Dropout(0.5), layers.GaussianNoise(0.1)
    drop(VECTORS, training=True)

    def step(x: Any) -> Any:
        return tf.reduce_mean(noise(drop(x, training=True), training=True))

    traced = trace(step, [VECTORS], target=0)
    assert list_output_folds(traced) == ["mean"]
    check_values(traced, [VECTORS])


def test_unbatched_argument_stays_whole() -> None:
    table = DRAW.normal(size=(7, 8)).astype("float32")
    traced = trace(lambda x, t: tf.nn.log_softmax(x @ tf.transpose(t)), [VECTORS, table], whole=(1,))
    assert list_output_folds(traced) == ["rows(0)"]
    check_values(traced, [VECTORS, table], whole=(1,))


@pytest.mark.parametrize(
    "metric",
    [
        lambda: keras.metrics.AUC(),
        pytest.param(lambda: keras.metrics.BinaryAccuracy(), marks=pytest.mark.grid),
        pytest.param(lambda: keras.metrics.Precision(), marks=pytest.mark.grid),
        pytest.param(lambda: keras.metrics.Recall(), marks=pytest.mark.grid),
        lambda: keras.metrics.MeanSquaredError(),
        lambda: keras.metrics.F1Score(threshold=0.5),
    ],
)
def test_metric_updates_are_not_coupled(metric: Callable[[], Any]) -> None:
    held, dense = metric(), layers.Dense(1, "sigmoid")
    labels = DRAW.integers(0, 2, (5, 1)).astype("int32")
    held.update_state(labels, dense(VECTORS))

    def step(x: Any, y: Any) -> Any:
        p = dense(x)
        held.update_state(y, p)
        return tf.reduce_mean(p)

    traced = trace(step, [VECTORS, labels], target=0)
    assert list_output_folds(traced) == ["mean"]
    assert traced.first.wholes == ()
    assert not any(traced.folding.fold_of(v).kind == "coupled" for op in traced.graph.ops for v in op.values)
    check_values(traced, [VECTORS, labels])
