"""Traced losses: their state, what must be fed or grown for it, and the numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from tests.unit.passes.rules.harness import Traced, check_values, list_output_folds, trace

DRAW = np.random.default_rng(11)
X = DRAW.normal(size=(5, 4)).astype("float32")
ONE_HOT = np.eye(3, dtype="float32")[DRAW.integers(0, 3, 5)]
TARGETS = DRAW.normal(size=(5, 3)).astype("float32")
WEIGHTS = np.abs(DRAW.normal(size=5)).astype("float32")
WORDS = DRAW.integers(1, 9, (5, 7)).astype("int32")
WORDS[:, 4:] = 0
WORDS[1, 1:] = 0
LENGTHS = np.array([1, 3, 6, 2, 4], "int32")
SERIES = DRAW.normal(size=(5, 6, 4)).astype("float32")


def fold_loss(step: Callable[..., Any], *arrays: np.ndarray) -> Traced:
    """Trace a loss and check its numbers."""
    step(*arrays)
    traced = trace(step, arrays, target=0)
    check_values(traced, arrays)
    return traced


@pytest.mark.parametrize(
    ("reduction", "weighted", "fold", "fed"),
    [
        pytest.param("sum", False, "sum", 0, marks=pytest.mark.grid),
        pytest.param("sum", True, "sum", 0, marks=pytest.mark.grid),
        ("sum_over_batch_size", False, "mean", 0),
        ("sum_over_batch_size", True, "mean", 0),
        pytest.param("mean", True, "mean", 0, marks=pytest.mark.grid),
        ("mean_with_sample_weight", True, "sum", 1),
        pytest.param("mean_with_sample_weight", False, "mean", 0, marks=pytest.mark.grid),
        (None, True, "rows(0)", 0),
    ],
)
def test_keras_loss_reductions_fold_as_expected(reduction: str | None, weighted: bool, fold: str, fed: int) -> None:
    dense, loss = layers.Dense(3), losses.CategoricalCrossentropy(from_logits=True, reduction=reduction)
    found = fold_loss(lambda x, y, w: loss(y, dense(x), sample_weight=w if weighted else None), X, ONE_HOT, WEIGHTS)
    assert list_output_folds(found) == [fold]
    assert (len(found.first.wholes), found.first.grows) == (fed, ())


@pytest.mark.parametrize(
    "name",
    [
        "KLDivergence",
        "CosineSimilarity",
        *(pytest.param(name, marks=pytest.mark.grid) for name in ("MeanAbsoluteError", "Huber", "LogCosh")),
    ],
)
def test_keras_losses_are_means(name: str) -> None:
    dense, loss = layers.Dense(3, "softmax"), getattr(losses, name)()
    assert list_output_folds(fold_loss(lambda x, y: loss(y, dense(x)), X, ONE_HOT)) == ["mean"]


def test_keras_mask_is_measured_over_the_whole_batch() -> None:
    embed, recur, dense = (
        layers.Embedding(9, 6, mask_zero=True),
        layers.GRU(4, return_sequences=True),
        layers.Dense(9),
    )
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    found = fold_loss(lambda x, y: loss(y, dense(recur(embed(x)))), WORDS, WORDS)
    assert list_output_folds(found) == ["mean"]
    assert len(found.first.wholes) == 1


def test_sum_plus_mean_is_grown() -> None:
    dense = layers.Dense(3)
    total, mean = losses.CategoricalCrossentropy(from_logits=True, reduction="sum"), losses.MeanSquaredError()

    def step(x: Any, y: Any, w: Any) -> Any:
        out = dense(x)
        return total(y, out, sample_weight=w) + mean(y, out) + 1e-3 * tf.reduce_sum(dense.kernel**2)

    found = fold_loss(step, X, ONE_HOT, WEIGHTS)
    assert list_output_folds(found) == ["mean"]
    assert len(found.first.grows) == 1


def test_loss_weighted_by_tokens_is_a_sum() -> None:
    embed, dense = layers.Embedding(9, 6), layers.Dense(9)

    def step(x: Any) -> tuple[Any, Any]:
        mask, out = tf.cast(x != 0, "float32"), dense(embed(x))
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(x, out)
        right = tf.cast(tf.argmax(out, -1, tf.int32) == x, "float32")
        tokens = tf.reduce_sum(mask)
        return tf.reduce_sum(each * mask) / tokens, tf.reduce_sum(right * mask) / tf.maximum(tokens, 1.0)

    found = fold_loss(step, WORDS)
    assert list_output_folds(found) == ["sum", "sum"]
    assert len(found.first.wholes) == 1


def test_loss_divided_by_counted_rows_is_a_mean() -> None:
    dense = layers.Dense(3)

    def step(x: Any, y: Any) -> Any:
        out = dense(x)
        rows = tf.cast(tf.shape(out)[0], "float32")
        error = tf.reduce_sum((out - y) ** 2)
        return error / rows + error / tf.maximum(rows, 1.0) + error / (2 * rows + 1)

    found = fold_loss(step, X, TARGETS)
    assert list_output_folds(found) == ["mean"]
    assert len(found.first.grows) >= 2


def test_entries_selected_by_mask_or_position_stay_rows() -> None:
    dense = layers.Dense(4)

    def step(x: Any, lengths: Any) -> Any:
        out = dense(x)
        rows = tf.range(tf.shape(out)[0])
        last = tf.gather_nd(out, tf.stack([rows, lengths - 1], 1))
        again = tf.gather(tf.reshape(out, [-1, 4]), rows * 6 + lengths - 1)
        mask = tf.sequence_mask(lengths, 6)
        kept = tf.boolean_mask(out, mask)
        tokens = tf.reduce_sum(tf.cast(mask, "float32"))
        loss = tf.reduce_mean(last**2) + tf.reduce_mean(again**2) + tf.reduce_sum(kept**2) / tokens
        return loss, last - again, kept, tf.sequence_mask(lengths)

    found = fold_loss(step, SERIES, LENGTHS)
    assert list_output_folds(found) == ["mean", "rows(0)", "rows(0) ragged", "rows(0)"]


def test_class_weights_and_confusion_matrix_fold_as_expected() -> None:
    dense, weights = layers.Dense(2, "softmax"), tf.Variable([0.3, 0.7])
    labels = DRAW.integers(0, 2, 5).astype("int32")

    def step(x: Any, y: Any) -> Any:
        out = dense(x)
        loss = tf.reduce_mean(-tf.math.log(tf.gather(out, y, batch_dims=1)) * tf.gather(weights, y))
        confusion = tf.math.confusion_matrix(y, tf.argmax(out, -1), 2)
        return loss, tf.one_hot(y, 2) @ tf.ones([2, 2]), confusion, tf.math.top_k(out, 1)[1]

    found = fold_loss(step, X, labels)
    assert list_output_folds(found) == ["mean", "rows(0)", "sum", "rows(0)"]


def test_statistics_of_inputs_come_from_the_whole_batch() -> None:
    dense = layers.Dense(3)

    def step(x: Any, y: Any) -> Any:
        x = (x - tf.reduce_mean(x, 0)) / tf.math.reduce_std(x, 0)
        return tf.reduce_mean((dense(x) - y / tf.reduce_max(tf.abs(y))) ** 2)

    found = fold_loss(step, X, TARGETS)
    assert list_output_folds(found) == ["mean"]
    assert len(found.first.wholes) >= 3


def test_loss_in_a_nested_function_is_a_mean() -> None:
    dense = layers.Dense(3)

    @tf.function
    def loss(out: Any, y: Any) -> Any:
        return tf.reduce_mean((out - y) ** 2)

    assert list_output_folds(fold_loss(lambda x, y: loss(dense(x), y), X, TARGETS)) == ["mean"]
