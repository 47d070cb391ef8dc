"""Losses that a step computes and returns beside the differentiated one."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.loops.loop_scripts import (
    Cut,
    Loop,
    chain,
    descend,
    loss_script,
    mse,
    normal,
    rows,
    script,
    step_script,
    train_loop,
    weights,
)


@loss_script()
def losses_not_used(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    outputs = chain(cut, x, w)
    loss = mse(y, outputs)
    other = {
        "l1": tf.reduce_mean(tf.abs(outputs - y)),
        "sum": tf.reduce_sum(outputs),
        "rows": tf.reduce_mean((outputs - y) ** 2, axis=1),
        "accuracy": tf.reduce_mean(tf.cast(tf.argmax(outputs, 1) == tf.argmax(y, 1), tf.float32)),
        "right": tf.reduce_sum(tf.cast(tf.argmax(outputs, 1) == tf.argmax(y, 1), tf.int32)),
        "count": tf.shape(x)[0],
    }
    return loss, other


@loss_script(micro=(1,))
def extremes_returned(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    outputs = chain(cut, x, w)
    loss = mse(y, outputs)
    return loss, tf.reduce_max(outputs), tf.reduce_all(outputs < 1000.0), tf.sort(outputs, axis=0)


@step_script()
def statistics_returned(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """What many loops log: norms, a standard deviation, the mean of the hidden layer."""
    with tf.GradientTape() as tape, cut.program():
        outputs = chain(cut, x, w)
        loss = mse(y, outputs)
    gradients = tape.gradient(loss, w)
    descend(w, gradients)
    return {
        "loss": loss,
        "root": tf.sqrt(loss),
        "perplexity": tf.exp(loss),
        "norm": tf.linalg.global_norm(gradients),
        "weights": tf.linalg.global_norm(w),
        "columns": tf.reduce_mean(outputs, axis=0),
    }


@script()
def weighted_by_hand(cut: Cut) -> Loop:
    """nb.loss_weight: a mean over what the pass cannot see through."""
    w = weights()
    tokens = np.array([1, 5, 2, 0.5, 7, 1], "float32")

    @train_loop(cut, w, calls=[(*batch, tokens) for batch in rows()])
    def loop(x: Any, y: Any, tokens: Any) -> Any:
        losses = tf.reduce_mean((chain(cut, x, w) - y) ** 2, axis=1)
        total = nb.loss_weight(tf.reduce_sum(tokens))
        return tf.reduce_sum(losses * tokens) / tf.maximum(total, 1e-3)

    return loop


@script()
def reinforce(cut: Cut) -> Loop:
    """A policy gradient with a baseline that the step keeps."""
    w, baseline = weights(), tf.Variable(0.0, trainable=False)

    @cut.function
    def step(states: Any, actions: Any, rewards: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            logits = chain(cut, states, w)
            chosen = tf.reduce_sum(tf.nn.log_softmax(logits) * tf.one_hot(actions, 4), axis=1)
            loss = -tf.reduce_mean(chosen * (rewards - baseline))
        descend(w, tape.gradient(loss, w))
        baseline.assign(0.9 * baseline + 0.1 * tf.reduce_mean(rewards))
        return loss

    actions = np.array([0, 1, 2, 3, 0, 1])
    return Loop(step, [*w, baseline], [(normal(6, 4, seed=n), actions, normal(6, seed=9 + n)) for n in range(3)])
