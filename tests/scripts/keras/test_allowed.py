"""Results that micro-batches change are refused; allowed ones are those of a manual loop over micro-batches."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import whale_nebula as nb
from tests.parity_harness import Cut, data
from tests.scripts.keras import precision  # noqa: F401 - registers its scripts
from tests.scripts.keras.script import SCRIPTS
from whale_nebula.errors import BatchCoupledError

PARTS = 3
X, Y = data(24, 6), data(24, 3, seed=1)


def _model(cut: Cut, layer: Any, kind: type = keras.Model, *, first: bool = False, **options: Any) -> Any:
    keras.utils.set_random_seed(7)
    inputs = keras.Input((6,))
    with cut.program(**options):
        with cut.at(0):
            hidden = layers.Dense(8, activation="tanh")(layer()(inputs) if first else inputs)
            hidden = hidden if first else layer()(hidden)
        with cut.at(1):
            outputs = layers.Dense(3)(hidden)
    model = kind(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def _fit_model(model: Any) -> Any:
    return model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0).history


class TrainedByHand(keras.Model):
    """The uncut model, its batch cut by hand."""

    def train_step(self, data: Any) -> Any:
        cut = [tf.split(tensor, PARTS) for tensor in data]
        sums, loss, outputs = [0.0] * len(self.trainable_weights), 0.0, []
        for x, y in zip(*cut, strict=True):
            with tf.GradientTape() as tape:
                outputs.append(self(x, training=True))
                part = self.compute_loss(y=y, y_pred=outputs[-1]) / PARTS
            sums = [a + b for a, b in zip(sums, tape.gradient(part, self.trainable_weights), strict=True)]
            loss += part
        self.optimizer.apply(sums, self.trainable_weights)
        self._loss_tracker.update_state(loss, sample_weight=tf.shape(data[0])[0])
        return self.compute_metrics(data[0], data[1], tf.concat(outputs, 0))


class Sorted(layers.Layer):
    """Rows in the order of their first numbers: which these are comes from the inputs alone."""

    def call(self, x: Any) -> Any:
        return tf.gather(x, tf.argsort(x[:, 0]))


def test_allowed_coupled_layers_use_micro_batch_rows() -> None:
    """And not of the whole batch, beside which labels of a micro-batch would be broadcast."""
    by_hand = _model(Cut(0), Sorted, TrainedByHand, first=True)
    model = _model(Cut(2, PARTS), Sorted, first=True, coupled="allow")
    for a, b in zip(_fit_model(by_hand).values(), _fit_model(model).values(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5)
    for a, b in zip(by_hand.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


def test_batch_norm_with_micro_batches_is_refused_with_fixes() -> None:
    model = _model(Cut(2, PARTS), layers.BatchNormalization)
    with pytest.raises(BatchCoupledError) as caught:
        _fit_model(model)
    assert "batch_normalization" in str(caught.value)
    assert 'coupled="allow"' in caught.value.mend


def test_overwritten_variables_with_micro_batches_are_refused_by_name() -> None:
    with pytest.raises(BatchCoupledError, match=r"the value of 'dense.*_(scale|amax_history)'") as caught:
        SCRIPTS["scales_of_float8"].run(Cut(2, 2, coupled="allow"))
    assert "nb.pipeline(micro_batch=1)" in caught.value.mend


@pytest.mark.parametrize("parts", [2, 6])
def test_allowed_coupling_of_inputs_is_per_micro_batch(parts: int) -> None:
    weight = tf.Variable(data(6, 1))

    @nb.function
    def step(x: Any, p: Any) -> Any:
        with nb.pipeline(parts, coupled="allow"):
            with nb.stage(cluster="a"):
                hidden = x @ weight
            with nb.stage(cluster="b"):
                return tf.reduce_mean(tf.cumsum(p) * hidden[:, 0])

    x, p = X[:6], data(6, 1, seed=2)[:, 0]
    by_hand = [
        float(tf.reduce_mean(tf.cumsum(own) * (rows @ weight)[:, 0]))
        for rows, own in zip(tf.split(tf.constant(x), parts), tf.split(tf.constant(p), parts), strict=True)
    ]
    assert float(step(x, p)) == pytest.approx(np.mean(by_hand), rel=1e-5)
