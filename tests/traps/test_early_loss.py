"""A loss in another stage than the last, and a loss with explicitly allowed coupling of rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.traps.conftest import Cut

layers = keras.layers


@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.grid), 3])
def test_loss_in_the_first_stage(compare_step: Any, normal: Any, weights: Any, runner: str, micro: int) -> None:
    def build(cut: Cut) -> tuple[Any, list[tf.Variable]]:
        first, second = weights()

        @cut.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape, cut.program():
                with cut.at("a"):
                    hidden = x @ first
                    loss = tf.reduce_mean(hidden**2)
                with cut.at("b"):
                    other = tf.reduce_sum(tf.tanh(hidden @ second))
            first.assign_sub(0.1 * tape.gradient(loss, first))
            return loss, other

        return step, [first, second]

    compare_step(build, (normal(6, 4),), (normal(6, 4, seed=1),), micro=micro)


def test_losses_in_two_stages_are_weighted(compare_step: Any, normal: Any, weights: Any, runner: str) -> None:
    def build(cut: Cut) -> tuple[Any, list[tf.Variable]]:
        first, second = weights()

        @cut.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape, cut.program():
                with cut.at("a"):
                    hidden = x @ first
                    early = tf.reduce_mean(hidden**2)
                with cut.at("b"):
                    late = tf.reduce_sum(tf.tanh(hidden @ second))
            gradients = tape.gradient([early, late], [first, second])
            first.assign_sub(0.1 * gradients[0])
            second.assign_sub(0.1 * gradients[1])
            return early, late

        return step, [first, second]

    compare_step(build, (normal(7, 4),), micro=3)


def test_activity_regularizer_is_the_only_loss(compare_fit: Any, normal: Any, runner: str) -> None:
    def build(cut: Cut) -> keras.Model:
        inputs = keras.Input((4,))
        with cut.program():
            with cut.at("a"):
                hidden = layers.Dense(3, activity_regularizer="l2")(inputs)
            with cut.at("b"):
                outputs = layers.Dense(2, activity_regularizer="l2")(hidden)
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), None)
        return model

    compare_fit(build, normal(12, 4), None, micro=2, batch_size=6)


def build_normalised(cut: Cut) -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    with cut.program():
        with cut.at("a"):
            hidden = layers.BatchNormalization()(layers.Dense(8)(inputs))
        with cut.at("b"):
            outputs = [layers.Dense(2, name="one")(hidden), layers.Dense(2, name="two")(hidden)]
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), ["mse", "mae"], loss_weights=[1.0, 0.5])
    return model


ALLOWED = Cut(True, 2, {"coupled": "allow"})


def test_plan_of_allowed_coupled_rows(normal: Any, runner: str) -> None:
    """What crosses has rows, and the last stage reads no input for its row count alone."""
    batch = normal(8, 4), [normal(8, 2, seed=1), normal(8, 2, seed=2)]
    plan = nb.plan(build_normalised(ALLOWED), *batch)
    (boundary,) = plan.boundaries
    assert (boundary.bytes, boundary.backward_bytes) == (4 * 8 * 4, 4 * 8 * 4)
    assert "x" not in plan.stages["b"].inputs
    assert any("BatchNormalization" in note for note in plan.notes)


@pytest.mark.grid
def test_allowed_coupled_rows_train_like_separate_micro_batches(normal: Any, runner: str) -> None:
    """The oracle: gradients of two halves, averaged, and Keras's own metrics of the averaged losses. Averages of the
    layer move once for each half.
    """
    x, y = normal(8, 4), [normal(8, 2, seed=1), normal(8, 2, seed=2)]
    cut, plain = build_normalised(ALLOWED), build_normalised(Cut(on=False))
    found = cut.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    assert nb.last_report().micro_batches == 2
    halves = []
    for half in (slice(0, 4), slice(4, 8)):
        with tf.GradientTape() as tape:
            one, two = plain(x[half], training=True)
            first, second = tf.reduce_mean((one - y[0][half]) ** 2), tf.reduce_mean(abs(two - y[1][half]))
            loss = first + 0.5 * second
        halves.append((loss, first, second, *tape.gradient(loss, plain.trainable_variables)))
    loss, first, second, *gradients = [(a + b) / 2 for a, b in zip(*halves, strict=True)]
    for variable, gradient in zip(plain.trainable_variables, gradients, strict=True):
        variable.assign_sub(0.1 * gradient)
    for a, b in zip(plain.variables, cut.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)
    expected = {"loss": loss, "one_loss": first, "two_loss": second}
    assert {key: found[key][0] for key in expected} == pytest.approx(
        {key: float(value) for key, value in expected.items()}, rel=1e-5
    )
