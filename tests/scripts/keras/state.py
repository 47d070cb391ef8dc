"""Layers that keep something from step to step."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

from tests.same import Cut
from tests.scripts.keras.script import Given, Watch, adam, fit, numbers, rows, script


def _model(cut: Cut, first: Any, second: Any, **options: Any) -> Any:
    inputs = keras.Input((6,))
    with cut.program(**options):
        with cut.at(0):
            hidden = first(layers.Dense(8, activation="tanh")(inputs))
        with cut.at(1):
            outputs = layers.Dense(3)(second(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(adam(), "mse", metrics=["mae"])
    return model


@script(rows(), micro=(1,))
def batch_norm(cut: Cut) -> Any:
    """Statistics of a whole batch."""
    return _model(cut, layers.BatchNormalization(), layers.BatchNormalization(momentum=0.5))


@script(rows(), micro=(1,))
def dropout(cut: Cut) -> Any:
    """Seeds are drawn as in the uncut step."""
    return _model(cut, layers.Dropout(0.3), layers.Dropout(0.2, seed=3))


@script(rows(), micro=(1,))
def noise(cut: Cut) -> Any:
    """Other layers that draw numbers."""
    return _model(cut, layers.GaussianNoise(0.3), layers.AlphaDropout(0.2))


@script(rows(), micro=(1,))
def batch_norm_frozen(cut: Cut) -> Any:
    """A frozen BatchNormalization uses its averages, so rows are independent: see `batch_norm_frozen_in_parts`."""
    frozen = layers.BatchNormalization()
    frozen.trainable = False
    return _model(cut, frozen, layers.Dense(8))


@script(rows(), micro=(2, 3))
def batch_norm_frozen_in_parts(cut: Cut) -> Any:
    """The same with several micro-batches."""
    return batch_norm_frozen(cut)


@script(rows())
def norms(cut: Cut) -> Any:
    """Normalisations that look at single rows."""
    return _model(cut, layers.LayerNormalization(), layers.UnitNormalization())


@script(rows(), micro=(1,))
def spectral_norm(cut: Cut) -> Any:
    """A layer that writes a vector of its own in every forward."""
    return _model(cut, layers.SpectralNormalization(layers.Dense(8)), layers.Dense(8))


def _sequences() -> Given:
    return {"x": numbers(5, 3)[:24], "y": numbers(2, seed=1)[:24], "batch_size": 8}


def _from_epoch_to_epoch(model: Any, given: Given, watch: Watch) -> None:
    """As Keras's guide does it: the state goes on from batch to batch, and is reset by hand."""
    for _ in range(2):
        fit(model, given, watch, epochs=1)
        for layer in model.layers:
            if getattr(layer, "stateful", False):
                layer.reset_state()


@script(_sequences, _from_epoch_to_epoch, micro=(1,))
def stateful_rnn(cut: Cut) -> Any:
    """Stateful recurrent layers, with the batch size they must know."""
    inputs = keras.Input(batch_shape=(8, 5, 3))
    with cut.program():
        with cut.at(0):
            hidden = layers.LSTM(4, stateful=True, return_sequences=True)(inputs)
        with cut.at(1):
            outputs = layers.Dense(2)(layers.GRU(4, stateful=True)(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(adam(), "mse")
    return model


class Counting(layers.Layer):
    """A layer that counts its calls, and scales by what it has counted."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.count.assign_add(1.0)
        return x * (1.0 + 0.1 * self.count)


@script(rows(), micro=(1,))
def counting_layer(cut: Cut) -> Any:
    """A non-trainable weight that the forward writes and reads."""
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
    model.compile(adam(), "mse")
    return model


def images() -> Given:
    """Small pictures, one channel."""
    return {"x": numbers(8, 8, 1), "y": np.argmax(numbers(3, seed=1), axis=-1)}


@script(images)
def pictures(cut: Cut) -> Any:
    """Convolutions, pooling and a group norm."""
    inputs = keras.Input((8, 8, 1))
    with cut.program():
        with cut.at(0):
            hidden = layers.MaxPooling2D()(layers.Conv2D(4, 3, padding="same", activation="relu")(inputs))
        with cut.at(1):
            hidden = layers.GroupNormalization(2)(layers.SeparableConv2D(4, 3)(hidden))
            outputs = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling2D()(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
