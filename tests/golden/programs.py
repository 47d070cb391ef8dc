"""Named programs for the golden files of the passes: models, scopes and codecs that together reach every pass."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.unit.ir.example_plans import adversaries, everything, inference, parted, skipping, tied

layers = keras.layers


def plan_training(model: keras.Model, x: Any, y: Any, loss: Any = "mse", optimizer: Any = "sgd") -> nb.Plan:
    model.compile(optimizer, loss)
    return nb.plan(model, x, y)


def dense_chain() -> nb.Plan:
    """Three stages in three clusters, int8 both ways, Adam."""
    inputs = keras.Input((8,))
    with nb.cluster(), nb.compress(int8=True):
        with nb.stage(cluster="a"):
            hidden = layers.Dense(16, activation="relu")(inputs)
        with nb.stage(cluster="b"):
            hidden = layers.Dense(16, activation="tanh")(hidden)
        with nb.stage(cluster="c"):
            outputs = layers.Dense(1)(hidden)
    return plan_training(keras.Model(inputs, outputs), np.zeros((6, 8)), np.zeros((6, 1)), optimizer="adam")


def convolution() -> nb.Plan:
    """Images through a convolution and a pooling; a low rank crosses."""
    inputs = keras.Input((8, 8, 3))
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="a"), nb.compress(svd=0.5, fp16=True):
            hidden = layers.MaxPooling2D()(layers.Conv2D(4, 3, padding="same", activation="relu")(inputs))
        with nb.stage(cluster="b"):
            outputs = layers.Dense(2)(layers.Flatten()(hidden))
    return plan_training(keras.Model(inputs, outputs), np.zeros((6, 8, 8, 3)), np.zeros((6, 2)))


def masked_attention() -> nb.Plan:
    """Token and position embeddings, a mask, self-attention; gradients of the tables are sparse."""
    inputs = keras.Input((5,), dtype="int32")
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="a"), nb.compress(bf16=True):
            hidden = layers.Embedding(20, 8, mask_zero=True)(inputs)
            hidden = hidden + layers.Embedding(5, 8)(keras.ops.arange(5))
        with nb.stage(cluster="b"):
            hidden = layers.MultiHeadAttention(2, 4)(hidden, hidden)
            outputs = layers.Dense(20)(hidden)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return plan_training(keras.Model(inputs, outputs), np.ones((4, 5), "int32"), np.ones((4, 5), "int32"), loss)


def shared_layer() -> nb.Plan:
    """One layer is called in both stages."""
    inputs, shared = keras.Input((8,)), layers.Dense(8)
    with nb.cluster():
        with nb.stage(cluster="a"):
            hidden = shared(inputs)
        with nb.stage(cluster="b"):
            outputs = shared(keras.ops.tanh(hidden))
    return plan_training(keras.Model(inputs, outputs), np.zeros((6, 8)), np.zeros((6, 8)))


def two_outputs_of_several_inputs() -> nb.Plan:
    """Two inputs that meet in the second stage, an output and a loss in each stage."""
    left, right = keras.Input((8,), name="left"), keras.Input((4,), name="right")
    with nb.cluster(), nb.pipeline(2, schedule="1f1b"):
        with nb.stage(cluster="a"):
            hidden = layers.Dense(6, activation="relu")(left)
            first = layers.Dense(2, name="first")(hidden)
        with nb.stage(cluster="b"):
            second = layers.Dense(3, name="second")(layers.Concatenate()([hidden, right]))
    model = keras.Model({"left": left, "right": right}, {"first": first, "second": second})
    x = {"left": np.zeros((6, 8)), "right": np.zeros((6, 4))}
    return plan_training(
        model, x, {"first": np.zeros((6, 2)), "second": np.zeros((6, 3))}, {"first": "mse", "second": "mae"}
    )


def replicas() -> nb.Plan:
    """Two replicas of a pipeline of two stages."""
    inputs = keras.Input((8,))
    with nb.cluster(), nb.replica(2), nb.pipeline(2):
        with nb.stage(cluster="a"):
            hidden = layers.Dense(6, activation="relu")(inputs)
        with nb.stage(cluster="b"):
            outputs = layers.Dense(1)(hidden)
    return plan_training(keras.Model(inputs, outputs), np.zeros((8, 8)), np.zeros((8, 1)))


def pipeline() -> nb.Plan:
    """GPipe with four micro-batches, recomputed forwards, top-k gradients."""
    inputs = keras.Input((8,))
    with nb.cluster(), nb.pipeline(4, schedule="gpipe", recompute=True), nb.compress(topk=0.25):
        with nb.stage(cluster="a"):
            hidden = layers.Dense(16, activation="gelu")(inputs)
        with nb.stage(cluster="b"):
            hidden = layers.LayerNormalization()(layers.Dense(16)(hidden))
        with nb.stage(cluster="c"):
            outputs = layers.Dense(1)(hidden)
    return plan_training(keras.Model(inputs, outputs), np.zeros((8, 8)), np.zeros((8, 1)), optimizer="adamw")


def penalties() -> nb.Plan:
    """A regulariser in the first stage, an activity loss in the second, dropout, micro-batches."""
    inputs = keras.Input((8,))
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="a"):
            hidden = layers.Dropout(0.5, seed=1)(layers.Dense(6, kernel_regularizer="l2")(inputs))
        with nb.stage(cluster="b"):
            hidden = layers.ActivityRegularization(l1=0.01)(layers.Dense(6)(hidden))
            outputs = layers.Dense(1)(hidden)
    return plan_training(keras.Model(inputs, outputs), np.zeros((6, 8)), np.zeros((6, 1)))


def custom_loop() -> nb.Plan:
    """A step of variables and a tape, weighted by nb.loss_weight."""
    first, second = (tf.Variable(tf.ones((4, 4)), name=name) for name in ("first", "second"))

    @nb.function
    def step(x: Any, weights: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(2):
            with nb.stage(cluster="a"):
                hidden = tf.tanh(x @ first)
            with nb.stage(cluster="b"):
                nb.loss_weight(tf.reduce_sum(weights))
                losses = tf.reduce_sum(tf.square(hidden @ second), axis=1)
                loss = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
        for variable, gradient in zip((first, second), tape.gradient(loss, (first, second)), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return nb.plan(step, np.zeros((6, 4), "float32"), np.ones(6, "float32"))


def local_sgd() -> nb.Plan:
    """Each cluster trains a copy, and they average every four steps."""
    inputs = keras.Input((8,))
    with nb.cluster(), nb.replica(2, sync_every=4), nb.stage(name="all"):
        outputs = layers.Dense(1)(layers.Dense(6, activation="relu")(inputs))
    return plan_training(keras.Model(inputs, outputs), np.zeros((8, 8)), np.zeros((8, 1)))


PROGRAMS = {
    make.__name__: make
    for make in (
        dense_chain,
        convolution,
        masked_attention,
        shared_layer,
        two_outputs_of_several_inputs,
        replicas,
        pipeline,
        penalties,
        custom_loop,
        local_sgd,
        skipping,
        adversaries,
        tied,
        inference,
        everything,
        parted,
    )
}
