"""Models with synchronized batch normalisation, cut or not, and the results of their training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.parity_harness import data

WORKERS = {"c0/0": "c0", "c0/1": "c0", "c0/2": "c0"}
X, Y = data(31, 8), data(31, 1, seed=1)
Scopes = Callable[[int], contextlib.AbstractContextManager[Any]]


def build_model(scopes: Scopes) -> keras.Model:
    """Two normalised layers in two blocks; gradients of biases before them would be only rounding errors."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8,))
    with scopes(0):
        hidden = keras.layers.Dense(12, use_bias=False)(inputs)
        hidden = keras.layers.BatchNormalization(synchronized=True, momentum=0.7)(hidden)
        hidden = keras.layers.Activation("tanh")(hidden)
    with scopes(1):
        hidden = keras.layers.Dense(6, use_bias=False)(hidden)
        hidden = keras.layers.BatchNormalization(synchronized=True, momentum=0.5, scale=False)(hidden)
        outputs = keras.layers.Dense(1)(keras.layers.Activation("relu")(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.05, global_clipnorm=1.0), "mse", metrics=["mae"])
    return model


def make_scopes(copies: Sequence[int], micro_batch: int = 1, **options: Any) -> Scopes:
    """Scopes of a stage for each number of copies; further blocks are in the last stage."""

    @contextlib.contextmanager
    def enter(number: int) -> Any:
        stage = min(number, len(copies) - 1)
        with nb.replica(copies[stage]), nb.pipeline(micro_batch, **options), nb.stage(cluster="c0", name=f"s{stage}"):
            yield

    return enter


def enter_no_scopes(number: int) -> contextlib.AbstractContextManager[Any]:
    """No scopes."""
    return contextlib.nullcontext()


def train_model(model: keras.Model) -> dict[str, Any]:
    """Two epochs of ten, ten, ten and one row, with validation: histories and variables."""
    fitted = model.fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0, validation_data=(X[:7], Y[:7]))
    return {"history": fitted.history, "weights": [weight.tolist() for weight in model.get_weights()]}


def run_custom_loop(scopes: Scopes) -> dict[str, Any]:
    """The gradients of a custom step on pictures, with a layer in half precision before the normalisation."""
    keras.utils.set_random_seed(4)
    first = keras.layers.Conv2D(3, 3, dtype="mixed_float16")
    norm = keras.layers.BatchNormalization(axis=-1, synchronized=True, dtype="float32")
    last = keras.layers.Dense(2)

    def call(x: Any, scopes: Scopes) -> Any:
        with scopes(0):
            hidden = tf.nn.relu(norm(tf.cast(first(x), tf.float32), training=True))
        with scopes(1):
            return last(tf.reduce_mean(hidden, [1, 2]))

    pictures = data(7, 6 * 6 * 2).reshape(7, 6, 6, 2)
    call(pictures[:1], enter_no_scopes)

    @(tf.function if scopes is enter_no_scopes else nb.function)
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(call(x, scopes) - 1.0))
        variables = [*first.trainable_variables, *norm.trainable_variables, *last.trainable_variables]
        return loss, tape.gradient(loss, variables)

    loss, gradients = step(pictures)
    return {"loss": float(loss), "gradients": [np.asarray(each).tolist() for each in gradients]}


TOLERANCE = {"trained": "normalised", "looped": "mixed"}
"""A replica rounds its part of a gradient to half precision, where the uncut step rounds it all."""

CASES: Mapping[str, Callable[[Scopes], dict[str, Any]]] = {
    "trained": lambda scopes: train_model(build_model(scopes)),
    "looped": run_custom_loop,
}
