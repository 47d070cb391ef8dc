"""Forwards with control flow: loops, conditions, recurrent layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.scripts.loops.forwards.forward_loop import make_forward_loop
from tests.scripts.loops.loop_scripts import (
    Cut,
    Loop,
    descend,
    mse,
    normal,
    rows,
    script,
    step_script,
    train_loop,
    two_layers,
    weights,
)


@script()
def while_loop(cut: Cut) -> Loop:
    w = weights()

    def looped(x: Any) -> Any:
        return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w[0])), (tf.constant(0), x))[1]

    return make_forward_loop(cut, looped, w=w)


@script()
def scan_over_time(cut: Cut) -> Loop:
    w = weights()

    def scanned(x: Any) -> Any:
        time = tf.transpose(tf.reshape(x, [-1, 3, 4]), [1, 0, 2])
        states = tf.scan(lambda h, t: tf.tanh(t + h @ w[0]), time, initializer=tf.zeros_like(time[0]))
        return states[-1]

    batches = [(normal(6, 12, seed=n), normal(6, 4, seed=30 + n)) for n in range(3)]
    return make_forward_loop(cut, scanned, w=w, batches=batches)


@script(micro=(1,), grid_only=True)
def scan_over_rows(cut: Cut) -> Loop:
    """Along the batch: rows depend on each other. With one micro-batch it is exact."""
    w = weights()
    return make_forward_loop(cut, lambda x: tf.scan(lambda h, r: tf.tanh(r + 0.1 * h), x @ w[0]), w=w)


@script(micro=(1,), grid_only=True)
def map_over_rows(cut: Cut) -> Loop:
    w = weights()
    return make_forward_loop(
        cut,
        lambda x: tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(w[0], row)), x),
        lambda h: tf.map_fn(lambda row: tf.linalg.matvec(w[1], row), h, parallel_iterations=1),
        w=w,
    )


@step_script(micro=(1,))
def gradients_of_each_row(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """A gradient for each example, clipped alone (DP-SGD): the inner tape is part of what is vectorized."""

    def of_row(row: Any) -> Any:
        features, label = row
        with tf.GradientTape() as tape:
            tape.watch(w[2])
            loss = mse(label, features[None] @ w[2])
        return tf.clip_by_norm(tape.gradient(loss, w[2]), 0.1)

    with cut.program():
        hidden = two_layers(cut, x, w)
        with cut.at(2):
            each = tf.vectorized_map(of_row, (hidden, y))
    w[2].assign_sub(tf.reduce_mean(each, axis=0))
    return each


@script()
def cond_on_a_number(cut: Cut) -> Loop:
    w, turn = weights(), tf.Variable(0)

    @cut.function
    def step(x: Any, y: Any, flag: Any) -> Any:
        turn.assign_add(1)
        with tf.GradientTape() as tape, cut.program():
            with cut.at(0):
                hidden = tf.cond(flag > 0, lambda: tf.tanh(x @ w[0]), lambda: tf.sin(x @ w[0]))
            with cut.at(1):
                hidden = tf.cond(turn % 2 == 0, lambda: hidden @ w[1], lambda: tf.tanh(hidden @ w[1]))
            with cut.at(2):
                hidden = tf.switch_case(turn % 3, [lambda: hidden, lambda: 2.0 * hidden, lambda: tf.sin(hidden)])
                loss = mse(y, hidden @ w[2])
        gradients = tape.gradient(loss, w)
        descend(w, gradients)
        return loss, gradients

    return Loop(step, [*w, turn], [(*b, np.float32((-1) ** n)) for n, b in enumerate(rows(4))])


@script()
def cond_by_autograph(cut: Cut) -> Loop:
    """Python's `if` on an argument, with a value that only one side makes."""
    w = weights()

    @train_loop(cut, w, calls=[(*b, tf.constant(n != 1)) for n, b in enumerate(rows())])
    def loop(x: Any, y: Any, deep: Any) -> Any:
        with cut.at(0):
            hidden = tf.tanh(x @ w[0])
            if deep:
                extra = tf.sin(hidden)
                hidden = hidden + extra
        with cut.at(1):
            hidden = tf.tanh(hidden @ w[1])
        with cut.at(2):
            return mse(y, hidden @ w[2])

    return loop


@script(micro=(1,))
def cond_on_the_batch(cut: Cut) -> Loop:
    """A predicate that looks at all rows: exact with one micro-batch, coupled with more."""
    w = weights()

    def first(x: Any) -> Any:
        hidden = x @ w[0]
        return tf.cond(tf.reduce_mean(hidden) > 0.0, lambda: tf.tanh(hidden), lambda: tf.sin(hidden))

    return make_forward_loop(cut, first, w=w)
