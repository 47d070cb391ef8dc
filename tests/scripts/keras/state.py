"""Layers with state between steps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.parity_harness import Cut
from tests.scripts.keras.script import FitArguments, LogRecorder, fit, momentum, numbers, rows, script, two_parts


def _model(cut: Cut, first: Any, second: Any) -> Any:
    before, after = layers.Dense(8, activation="tanh"), layers.Dense(3)
    return two_parts(cut, keras.Input((6,)), lambda x: first(before(x)), lambda x: after(second(x)), metrics=["mae"])


@script(rows(), micro=(1,))
def batch_norm(cut: Cut) -> Any:
    """Statistics of a whole batch."""
    return _model(cut, layers.BatchNormalization(), layers.BatchNormalization(momentum=0.5))


@script(rows(), micro=(1,))
def dropout(cut: Cut) -> Any:
    """Seeds are drawn as in the uncut step, by other layers that draw numbers, too."""
    first = keras.Sequential([layers.Dropout(0.3), layers.GaussianNoise(0.3)])
    return _model(cut, first, keras.Sequential([layers.Dropout(0.2, seed=3), layers.AlphaDropout(0.2)]))


@script(rows())
def batch_norm_frozen(cut: Cut) -> Any:
    """A frozen BatchNormalization uses its averages, so rows are independent."""
    frozen = layers.BatchNormalization()
    frozen.trainable = False
    return _model(cut, frozen, layers.Dense(8))


@script(rows())
def norms(cut: Cut) -> Any:
    """Normalisations that look at single rows."""
    return _model(cut, layers.LayerNormalization(), layers.UnitNormalization())


@script(rows(), micro=(1,))
def spectral_norm(cut: Cut) -> Any:
    """A layer that writes a vector of its own in every forward."""
    return _model(cut, layers.SpectralNormalization(layers.Dense(8)), layers.Dense(8))


def _sequences() -> FitArguments:
    return {"x": numbers(5, 3)[:24], "y": numbers(2, seed=1)[:24], "batch_size": 8}


def _from_epoch_to_epoch(model: Any, given: FitArguments, watch: LogRecorder) -> None:
    """As Keras's guide does it: the state goes on from batch to batch, and is reset by hand."""
    for _ in range(2):
        fit(model, given, watch, epochs=1)
        for layer in model.layers:
            if getattr(layer, "stateful", False):
                layer.reset_state()


@script(_sequences, _from_epoch_to_epoch, micro=(1,))
def stateful_rnn(cut: Cut) -> Any:
    """Stateful recurrent layers, with the batch size they must know."""
    first, second = layers.LSTM(4, stateful=True, return_sequences=True), layers.GRU(4, stateful=True)
    return two_parts(cut, keras.Input(batch_shape=(8, 5, 3)), first, lambda hidden: layers.Dense(2)(second(hidden)))


class Counting(layers.Layer):
    """A layer that counts its calls and scales by the count; a branch also computes the sum of earlier counts."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.sum = self.add_weight(shape=(), initializer="zeros", trainable=False, name="sum")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            count, added = ops.cond(self.count < 5.0, self._add, lambda: (self.count + 2.0, self.sum + 0.0))
            self.sum.assign(added)
            self.count.assign(count)
        return x * (1.0 + 0.1 * self.count)

    def _add(self) -> tuple[Any, Any]:
        return self.count + 1.0, self.sum + self.count


@script(rows(), micro=(1,))
def counting_layer(cut: Cut) -> Any:
    """Non-trainable weights that the forward writes, one of which it reads."""
    return _model(cut, Counting(), Counting())


@script(rows())
def adapted(cut: Cut) -> Any:
    """A Normalization that was adapted before, and a Discretization with an Embedding."""
    inputs = keras.Input((6,))
    norm, buckets = layers.Normalization(), layers.Discretization([-1.0, 0.0, 1.0])
    norm.adapt(numbers(6))
    with cut.program():
        with cut.at(0):
            hidden = layers.Dense(8, activation="tanh")(norm(inputs))
        with cut.at(1):
            kinds = layers.Flatten()(layers.Embedding(4, 2)(buckets(inputs)))
            outputs = layers.Dense(3)(layers.Concatenate()([hidden, kinds]))
    model = keras.Model(inputs, outputs)
    model.compile(momentum(), "mse")
    return model


def images() -> FitArguments:
    """Small pictures, one channel."""
    return {"x": numbers(8, 8, 1), "y": np.argmax(numbers(3, seed=1), axis=-1)}


@script(images)
def pictures(cut: Cut) -> Any:
    """Convolutions, pooling and a group norm."""

    def first(x: Any) -> Any:
        return layers.MaxPooling2D()(layers.Conv2D(4, 3, padding="same", activation="relu")(x))

    def second(x: Any) -> Any:
        hidden = layers.GroupNormalization(2)(layers.SeparableConv2D(4, 3)(x))
        return layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling2D()(hidden))

    loss = "sparse_categorical_crossentropy"
    return two_parts(cut, keras.Input((8, 8, 1)), first, second, loss, metrics=["accuracy"])
