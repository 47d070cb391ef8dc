"""Traced steps for the tests of digests and plans; as a script it prints their digests."""

import functools
import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb

layers = keras.layers


@tf.custom_gradient
def squashed(x: Any) -> Any:
    """A custom gradient that closes over a tensor of the trace."""
    y = tf.tanh(x)
    return y, lambda d: d * (1.0 - y * y)


def everything(
    *,
    width: int = 4,
    activation: Callable[[Any], Any] = tf.tanh,
    second: str = "npu",
    micro_batches: int = 1,
    table: tuple[float, ...] = (1.0, 2.0, 3.0),
    turns: int = 3,
    fp16: bool = False,
    rate: float = 0.1,
) -> nb.Plan:
    """A step with an embedding, a custom gradient, dropout, a while, a cond and a table of floats."""
    keras.utils.clear_session(free_memory=False)
    embedding, dropout = layers.Embedding(10, width), layers.Dropout(0.5)
    embedding.build((None,))
    weight = tf.Variable(tf.ones((width, width)), name="weight")
    variables = [*embedding.trainable_variables, weight]

    @nb.function
    def step(tokens: Any, sign: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(micro_batches):
            with nb.stage(cluster="gpu"), nb.compress(**({"fp16": True} if fp16 else {"bf16": True})):
                hidden = dropout(squashed(embedding(tokens)), training=True)
            with nb.stage(cluster=second, name="second"):
                hidden = tf.while_loop(
                    lambda i, h: i < turns, lambda i, h: (i + 1, h @ weight), [tf.constant(0), hidden]
                )[1]
                hidden = tf.cond(sign > 0.0, lambda: activation(hidden), lambda: -hidden)
                hidden = hidden[:, :3] * tf.constant(table)
            loss = tf.reduce_mean(hidden)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(rate * tf.convert_to_tensor(gradient))
        return loss

    return nb.plan(step, np.array([1, 2, 3, 4, 5]), np.float32(1.0))


def skipping() -> nb.Plan:
    """A functional model whose first stage feeds both others; micro-batches, codecs, metrics, AdamW."""
    keras.utils.clear_session(free_memory=False)
    inputs = keras.Input((8,), name="features")
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="gpu"):
            first = layers.Dense(16, activation="gelu", name="first")(inputs)
        with nb.stage(cluster="npu", name="middle"), nb.compress(fp16=True):
            second = layers.Dense(16, name="second", kernel_regularizer="l2")(first)
        with nb.stage(cluster="npu"):
            outputs = layers.Dense(3, name="third")(layers.Add(name="sum")([first, second]))
    model = keras.Model(inputs, outputs, name="skipping")
    model.compile(keras.optimizers.AdamW(global_clipnorm=1.0), "mse", metrics=["mae"])
    return nb.plan(model, np.zeros((20, 8)), np.zeros((20, 3)))


def adversaries() -> nb.Plan:
    """Two phases: a critic is trained, then a generator through it."""
    generator, critic = (tf.Variable(tf.ones((4, 4)), name=name) for name in ("generator", "critic"))

    @nb.function
    def adversarial(noise: Any) -> Any:
        with nb.cluster():
            with tf.GradientTape() as tape, nb.stage(cluster="npu", name="judging"):
                verdict = tf.reduce_mean(tf.nn.softplus(noise @ critic))
            critic.assign_sub(0.1 * tape.gradient(verdict, critic))
            with tf.GradientTape() as tape:
                with nb.stage(cluster="gpu", name="making"):
                    fake = tf.tanh(noise @ generator)
                with nb.stage(cluster="npu", name="judging_again"):
                    fooled = tf.reduce_mean(tf.nn.softplus(-(fake @ critic)))
            generator.assign_sub(0.1 * tape.gradient(fooled, generator))
            return verdict, fooled

    return nb.plan(adversarial, np.zeros((6, 4), "float32"))


def tied() -> nb.Plan:
    """A table that embeds in the first stage and projects in the last, frozen layers in between."""
    table = tf.Variable(tf.ones((50, 8)), name="table")
    frozen = tf.Variable(tf.ones((8, 8)), trainable=False, name="frozen")

    @nb.function
    def tying(tokens: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(3, schedule="gpipe"):
            with nb.stage(cluster="gpu", name="embed"):
                hidden = tf.gather(table, tokens)
            with nb.stage(cluster="gpu", name="mix"):
                hidden = tf.nn.relu(hidden @ frozen)
            with nb.stage(cluster="npu", name="project"):
                loss = tf.reduce_mean(tf.square(tf.matmul(hidden, table, transpose_b=True)))
        table.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, table)))
        return loss

    return nb.plan(tying, np.arange(10))


def inference() -> nb.Plan:
    """No gradient at all."""
    weight = tf.Variable(tf.ones((4, 2)), name="weight")

    @nb.function
    def predict(x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="gpu"):
                hidden = x @ weight
            with nb.stage(cluster="npu"):
                return tf.nn.softmax(hidden)

    return nb.plan(predict, np.zeros((6, 4), "float32"))


def divided() -> nb.Plan:
    """Words, and a wide layer and back, in pieces in the first stage; classes in the second."""
    keras.utils.clear_session(free_memory=False)
    inputs = keras.Input((6,), dtype="int32", name="tokens")
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="gpu", name="body"):
            with nb.split(2, axis=0):
                hidden = layers.Embedding(4001, 16, name="words")(inputs)
            with nb.split(2, axis=1):
                wide = layers.Dense(64, activation="gelu", name="wide")(hidden)
            with nb.split(2, axis=0):
                hidden = layers.Dense(16, name="narrow")(wide)
        with nb.stage(cluster="npu", name="head"), nb.split(3):
            outputs = layers.Dense(1000, name="classes")(layers.GlobalAveragePooling1D()(hidden))
    model = keras.Model(inputs, outputs, name="divided")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(5)])
    return nb.plan(model, np.zeros((8, 6), "int32"), np.zeros(8, "int32"))


def parted() -> nb.Plan:
    """Backwards in two parts, but for those of the first stage, and of one that has no weights."""
    keras.utils.clear_session(free_memory=False)
    hidden = inputs = keras.Input((8,), name="features")
    own = {"one": [layers.Dense(16)], "two": [layers.Dense(16), layers.LayerNormalization()], "three": [layers.ReLU()]}
    with nb.cluster(), nb.pipeline(6, schedule="zero-bubble"):
        for name, several in {**own, "four": [layers.Dense(3)]}.items():
            with nb.stage(cluster=name):
                for layer in several:
                    hidden = layer(hidden)
    model = keras.Model(inputs, hidden, name="parted")
    model.compile("sgd", "mse")
    return nb.plan(model, np.zeros((24, 8)), np.zeros((24, 3)))


PLANS = {make.__name__: make for make in (skipping, adversaries, tied, inference, everything, divided, parted)}


@functools.cache
def plan(name: str) -> nb.Plan:
    """Return an example plan, traced once per process; callers must not change it."""
    return PLANS[name]()


if __name__ == "__main__":
    json.dump({name: make().program_digest for name, make in PLANS.items()}, sys.stdout)
