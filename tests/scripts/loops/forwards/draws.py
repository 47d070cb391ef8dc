"""Forwards with random numbers."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tests.scripts.loops.forwards.forward_loop import make_forward_loop
from tests.scripts.loops.loop_scripts import (
    Cut,
    Loop,
    chain,
    descend,
    learn,
    mse,
    rows,
    script,
    step_script,
    weights,
)


@script(micro=(1,))
def dropout_with_a_counted_seed(cut: Cut) -> Loop:
    w, count = weights(), tf.Variable(0)

    def first(x: Any) -> Any:
        return tf.nn.experimental.stateless_dropout(tf.tanh(x @ w[0]), 0.3, seed=[1, count])

    return make_forward_loop(cut, first, w=w, more=[count])


@script()
def counter_as_a_seed(cut: Cut) -> Loop:
    """A count of steps that seeds a draw: it must be the count of steps whatever the cut."""
    w, count = weights(), tf.Variable(0)

    def first(x: Any) -> Any:
        count.assign_add(1)
        scale = tf.random.stateless_uniform([], [3, count])
        return tf.tanh(x @ w[0]) * scale

    return make_forward_loop(cut, first, w=w, more=[count])


@script(micro=(1,))
def generator(cut: Cut) -> Loop:
    w, one, other = weights(), tf.random.Generator.from_seed(3), tf.random.Generator.from_seed(4)
    return make_forward_loop(
        cut,
        lambda x: tf.tanh(x @ w[0]) + 0.1 * one.normal(tf.shape(x)),
        lambda h: h @ w[1] * other.uniform([1, 4]) + other.normal([4]),
        w=w,
        more=[one.state, other.state],
    )


@script(micro=(1,), grid_only=True)
def keras_seeds_in_two_parts(cut: Cut) -> Loop:
    w, seed = weights(), keras.random.SeedGenerator(4)
    return make_forward_loop(
        cut,
        lambda x: tf.tanh(x @ w[0]) + keras.random.normal((1, 4), seed=seed),
        lambda h: h @ w[1] * keras.random.uniform((1, 4), seed=seed),
        w=w,
        more=[seed.state],
    )


@script()
def generator_before_the_forward(cut: Cut) -> Loop:
    """One number drawn for the whole batch, before it: stochastic depth."""
    w, chance = weights(), tf.random.Generator.from_seed(3)

    @cut.function
    def step(x: Any, y: Any) -> Any:
        keep = chance.uniform([])
        with tf.GradientTape() as tape, cut.program():
            loss = mse(y, keep * chain(cut, x, w))
        descend(w, tape.gradient(loss, w))
        return loss, keep

    return Loop(step, [*w, chance.state], rows())


@step_script(state=lambda: [tf.Variable(0.3)])
def a_number_for_all_parts(cut: Cut, w: Any, x: Any, y: Any, log: Any) -> Any:
    """A temperature made of a variable outside any part: read in two of them, returned, and trained."""
    with tf.GradientTape() as tape, cut.program():
        temperature = tf.exp(log)
        with cut.at(0):
            hidden = tf.tanh(x @ w[0]) / temperature
        with cut.at(1):
            hidden = tf.tanh(hidden @ w[1]) * temperature
        with cut.at(2):
            loss = mse(y, hidden @ w[2] / temperature)
    gradients = tape.gradient(loss, [*w, log])
    descend([*w, log], gradients)
    return loss, temperature, gradients


@step_script()
def drawn_before_the_forward(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """The same from TensorFlow's own seeds: drawn once, used in two parts, and returned."""
    keep, tilt = tf.random.uniform([]), tf.random.normal([4], seed=3)
    with tf.GradientTape() as tape, cut.program():
        with cut.at(0):
            hidden = tf.tanh(x @ w[0]) * keep
        with cut.at(1):
            hidden = tf.tanh(hidden @ w[1]) + tilt
        with cut.at(2):
            loss = mse(y, keep * (hidden @ w[2]))
    descend(w, tape.gradient(loss, w))
    return loss, keep, tilt


@step_script(micro=(1,))
def noise_drawn_outside(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """What is drawn for the batch before any stage has its rows from the batch."""
    noise = tf.random.stateless_normal(tf.shape(x), [1, 2])
    return learn(cut, w, x + 0.1 * noise, y)
