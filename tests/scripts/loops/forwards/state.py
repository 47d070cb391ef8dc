"""Forwards with state: what they write, the next step reads."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.scripts.loops.forwards.forward_loop import make_forward_loop
from tests.scripts.loops.loop_scripts import Cut, Loop, chain, descend, normal, script, step_script, weights


@script()
def moving_mean_by_hand(cut: Cut) -> Loop:
    """BatchNorm-like: the forward writes what the next step reads. Its mean is over the batch."""
    w, mean = weights(), tf.Variable(tf.zeros([4]), trainable=False)

    def first(x: Any) -> Any:
        hidden = x @ w[0]
        centred = hidden - mean
        mean.assign(0.9 * mean + 0.1 * tf.stop_gradient(tf.reduce_mean(hidden, axis=0)))
        return tf.tanh(centred)

    return make_forward_loop(cut, first, w=w, more=[mean])


@script(micro=(1,))
def batch_norm_by_hand(cut: Cut) -> Loop:
    w, mean = weights(), tf.Variable(tf.zeros([4]), trainable=False)

    def first(x: Any) -> Any:
        hidden = x @ w[0]
        middle, variance = tf.nn.moments(hidden, axes=[0])
        mean.assign_sub(0.1 * (mean - middle))
        return tf.nn.batch_normalization(hidden, middle, variance, None, None, 1e-3)

    return make_forward_loop(cut, first, w=w, more=[mean])


@script()
def counting_in_the_forward(cut: Cut) -> Loop:
    w, count, seen = weights(), tf.Variable(0.0), tf.Variable(0)

    def first(x: Any) -> Any:
        count.assign_add(1.0)
        seen.assign_add(tf.shape(x)[0])
        return tf.tanh(x @ w[0]) * (1.0 + 0.1 * count)

    return make_forward_loop(cut, first, w=w, more=[count, seen])


@step_script(state=lambda: [tf.Variable(normal(12, 4, seed=3), trainable=False)], micro=(1,))
def memory_bank(cut: Cut, w: Any, x: Any, y: Any, bank: Any) -> Any:
    """A queue of the last outputs, written with the batch's rows (MoCo)."""
    with tf.GradientTape() as tape, cut.program():
        outputs = chain(cut, x, w)
        with cut.at(2):
            keys = tf.nn.softmax(y @ tf.transpose(bank))
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(keys, outputs @ tf.transpose(bank)))
    descend(w, tape.gradient(loss, w))
    bank.assign(tf.concat([tf.stop_gradient(outputs), bank[:6]], axis=0))
    return loss


@script()
def metrics_in_the_function(cut: Cut) -> Loop:
    w = weights()
    mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
    root, area = keras.metrics.RootMeanSquaredError(), keras.metrics.AUC(num_thresholds=5)

    @cut.function
    def step(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            outputs = chain(cut, x, w)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
            loss = tf.reduce_mean(losses)
        descend(w, tape.gradient(loss, w))
        mean.update_state(loss)
        accuracy.update_state(labels, outputs)
        root.update_state(tf.one_hot(labels, 4), outputs)
        area.update_state(tf.one_hot(labels, 4), tf.nn.softmax(outputs))
        return {"loss": mean.result(), "accuracy": accuracy.result(), "root": root.result(), "area": area.result()}

    metrics = [v for m in (mean, accuracy, root, area) for v in m.variables]
    batches = [(normal(6, 4, seed=n), np.array([0, 1, 2, 3, 0, 1])) for n in range(3)]
    return Loop(step, [*w, *metrics], batches)
