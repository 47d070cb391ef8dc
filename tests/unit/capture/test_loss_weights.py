"""The divisor of a target determines the weight with which its gradient starts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import BatchCoupledError

ROWS = np.random.default_rng(0).standard_normal((7, 4)).astype("float32")
WEIGHT = np.linspace(-1.0, 1.0, 12, dtype="float32").reshape(4, 3)
Target = Callable[[Any, Any], Any]


def _gradient(micro_batch: int, target: Target) -> np.ndarray:
    """What differentiating a target of the rows' outputs gives; without micro-batches there are no scopes."""
    weight = tf.Variable(WEIGHT)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, contextlib.ExitStack() as stack:
            if micro_batch:
                stack.enter_context(nb.pipeline(micro_batch))
                stack.enter_context(nb.stage(cluster="a"))
            targets = target(tf.tanh(x @ weight), weight)
        return tape.gradient(targets, weight)

    return np.asarray((nb.function(step) if micro_batch else step)(ROWS))


def _count_rows(out: Any) -> Any:
    return tf.cast(tf.shape(out)[0], tf.float32)


def _penalty_per_row(out: Any, weight: Any) -> Any:
    return tf.reduce_sum(weight**2) / _count_rows(out)


def _mean_and_penalty(out: Any, weight: Any) -> Any:
    return [tf.reduce_mean(out**2), _penalty_per_row(out, weight)]


def _two_penalties(out: Any, weight: Any) -> Any:
    return _penalty_per_row(out, weight) + tf.reduce_sum(tf.abs(weight)) / _count_rows(out)


def _penalty_times_rows(out: Any, weight: Any) -> Any:
    return [tf.reduce_sum(weight**2) * _count_rows(out), tf.reduce_sum(out)]


def _penalty_vector(out: Any, weight: Any) -> Any:
    return tf.stack([tf.reduce_sum(weight**2), tf.reduce_sum(weight) / 2.0]) / _count_rows(out)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(_penalty_per_row, marks=pytest.mark.grid),
        _mean_and_penalty,
        _two_penalties,
        pytest.param(_penalty_times_rows, marks=pytest.mark.grid),
        _penalty_vector,
    ],
)
def test_gradient_over_micro_batches_equals_that_of_the_batch(target: Target) -> None:
    np.testing.assert_allclose(_gradient(3, target), _gradient(0, target), rtol=1e-5, atol=1e-6)


def test_target_with_entries_of_different_kinds_is_refused() -> None:
    def mixed(out: Any, weight: Any) -> Any:
        total = tf.reduce_sum(weight**2)
        return tf.stack([_count_rows(out), total])

    with pytest.raises(BatchCoupledError, match="its entries are of different kinds"):
        _gradient(3, mixed)


# -------------------- Inputs that are reshaped with a model's output's shape count their own rows
RECOUNTED = np.linspace(-1.0, 1.0, 20, dtype="float32").reshape(4, 5)


def _step(micro_batch: int, shaped: Callable[[Any, Any], Any]) -> list[Any]:
    """Loss and gradient of a masked mean; `shaped` reshapes the mask; without micro-batches there are no scopes."""
    weight = tf.Variable(RECOUNTED)

    @contextlib.contextmanager
    def scopes() -> Iterator[None]:
        with nb.cluster(), nb.pipeline(micro_batch), nb.stage(cluster="a"):
            yield

    def step(x: Any, mask: Any) -> Any:
        with tf.GradientTape() as tape:
            with scopes() if micro_batch else contextlib.nullcontext():
                hidden = tf.tanh(x @ weight)
            kept = shaped(mask, hidden)
            loss = tf.reduce_sum(hidden * kept) / tf.reduce_sum(kept)
        return loss, tape.gradient(loss, weight)

    random = np.random.default_rng(0)
    x = random.standard_normal((7, 4)).astype("float32")
    mask = (random.random((7, 1, 5)) > 0.5).astype("float32")
    return [np.array(t) for t in (nb.function(step) if micro_batch else step)(x, mask)]


def _reshape_to_output(mask: Any, hidden: Any) -> Any:
    return tf.reshape(mask, tf.shape(hidden))


def _reshape_by_rows(mask: Any, hidden: Any) -> Any:
    return tf.reshape(mask, [tf.shape(hidden)[0], 5])


def _reshape_by_sliced_shape(mask: Any, hidden: Any) -> Any:
    return tf.reshape(mask, tf.concat([tf.shape(hidden)[:1], [5]], 0))


def _concatenate_ones(mask: Any, hidden: Any) -> Any:
    return tf.reduce_max(tf.concat([tf.tile(mask, [1, 5, 1]), tf.ones_like(hidden)[:, :, None] / 2], 2), 2)


def _add_zeros(mask: Any, hidden: Any) -> Any:
    return mask[:, 0] + tf.zeros_like(hidden)


@pytest.mark.parametrize(
    "shaped",
    [
        _reshape_to_output,
        pytest.param(_reshape_by_rows, marks=pytest.mark.grid),
        pytest.param(_reshape_by_sliced_shape, marks=pytest.mark.grid),
        _concatenate_ones,
        _add_zeros,
    ],
)
def test_divisor_of_a_mean_may_have_the_shape_of_the_output(shaped: Callable[[Any, Any], Any]) -> None:
    for expected, found in zip(_step(0, shaped), _step(3, shaped), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert nb.last_report().micro_batches == 3


IDS = np.random.default_rng(1).integers(1, 20, (10, 6))
IDS[::2, 3:], IDS[::3, 1:] = 0, 0
OTHERS = np.random.default_rng(2).normal(size=(10, 6, 5)).astype("float32")
LABELS = np.random.default_rng(3).integers(0, 3, (10, 6))


def _concatenate(masked: Any, plain: Any, kind: str) -> Any:
    return keras.layers.Concatenate()([masked, plain] if kind == "masked first" else [plain, masked])


def _masked_model(kind: str) -> Any:
    ids, others = keras.Input((6,), dtype="int32"), keras.Input((6, 5))
    with nb.cluster(), nb.pipeline(micro_batch=4):
        with nb.stage(cluster="a"):
            plain = keras.layers.Dense(4)(others)
        with nb.stage(cluster="b"):
            masked = keras.layers.Dense(4)(keras.layers.Embedding(20, 4, mask_zero=True)(ids))
            inside = _concatenate(masked, keras.layers.Dense(4)(others), kind) if kind == "in one stage" else None
        with nb.stage(cluster="c"):
            out = keras.layers.Dense(3)(_concatenate(masked, plain, kind) if inside is None else inside)
    model = keras.Model([ids, others], out)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), weighted_metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    "kind", ["masked first", *(pytest.param(kind, marks=pytest.mark.grid) for kind in ("plain first", "in one stage"))]
)
def test_masked_and_unmasked_tensors_may_be_concatenated(kind: str) -> None:
    keras.utils.set_random_seed(0)
    checked = nb.verify(_masked_model(kind), [IDS, OTHERS], LABELS)
    assert checked.ok and checked.micro_batches == 4, str(checked)
