"""Optimizers: several, Keras's and TensorFlow 1's, moving averages, changing rates."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.scripts.loops.loop_scripts import (
    Cut,
    Loop,
    chain,
    differentiate,
    mse,
    normal,
    rows,
    script,
    step_script,
    train_loop,
    weights,
)

v1 = tf.compat.v1
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def applying(cut: Cut, apply: Any, variables: Any = (), *, w: Any = None, steps: int = 3) -> Loop:
    """A loop whose gradients go to `apply(gradients, w)`; `variables` are looked at beside the weights."""
    w = weights() if w is None else w
    return train_loop(cut, w, variables, calls=rows(steps), update=apply)(lambda x, y: mse(y, chain(cut, x, w)))


def pairs(gradients: Any, variables: Any) -> Any:
    return list(zip(gradients, variables, strict=True))


@script()
def one_for_each_part(cut: Cut) -> Loop:
    chosen = [SGD(0.1, momentum=0.9), Adam(0.01, epsilon=1e-3), keras.optimizers.RMSprop(0.01, epsilon=1e-3)]

    def apply(gradients: Any, w: Any) -> None:
        for optimizer, gradient, variable in zip(chosen, gradients, w, strict=True):
            optimizer.apply_gradients([(gradient, variable)])

    return applying(cut, apply)


@script()
def discriminative_rates(cut: Cut) -> Loop:
    def apply(gradients: Any, w: Any) -> None:
        for n, (gradient, variable) in enumerate(pairs(gradients, w)):
            variable.assign_sub(0.1 * 0.3 ** (2 - n) * gradient)

    return applying(cut, apply)


@script(grid_only=True)
def apply_with_variables(cut: Cut) -> Loop:
    """`optimizer.apply`, built in the step."""
    chosen = Adam(0.01, epsilon=1e-3)
    return applying(cut, lambda gradients, w: chosen.apply(gradients, w))


@script()
def accumulating(cut: Cut) -> Loop:
    w, chosen = weights(), SGD(0.1, gradient_accumulation_steps=2)
    chosen.build(w)
    return applying(cut, lambda g, w: chosen.apply_gradients(pairs(g, w)), chosen.variables, w=w, steps=4)


@script()
def loss_scaled(cut: Cut) -> Loop:
    w = weights()
    chosen = keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=8.0, dynamic_growth_steps=2)
    chosen.build(w)

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            loss = mse(y, chain(cut, x, w))
            large = chosen.scale_loss(loss)
        chosen.apply_gradients(pairs(tape.gradient(large, w), w))
        return loss, large

    return Loop(step, [*w, *chosen.variables], rows(4))


@script()
def alternating_by_python(cut: Cut) -> Loop:
    w, chosen = weights(), [SGD(0.05, momentum=0.9), SGD(0.1)]
    chosen[0].build(w[1:])
    chosen[1].build(w[:1])

    @cut.function
    def step(x: Any, y: Any, turn: int) -> Any:
        with tf.GradientTape() as tape, cut.program():
            loss = mse(y, chain(cut, x, w))
        own = w[:1] if turn else w[1:]
        chosen[turn].apply_gradients(pairs(tape.gradient(loss, own), own))
        return loss

    return Loop(step, w, [(*batch, n % 2) for n, batch in enumerate(rows(4))])


@script()
def rate_assigned_in_the_step(cut: Cut) -> Loop:
    """Warm-up by hand: the rate follows a count that the step keeps."""
    w, chosen, count = weights(), SGD(0.1), tf.Variable(0.0)
    chosen.build(w)

    def apply(gradients: Any, w: Any) -> Any:
        count.assign_add(1.0)
        chosen.learning_rate.assign(0.1 * tf.minimum(1.0, count / 3.0))
        chosen.apply_gradients(pairs(gradients, w))
        return chosen.learning_rate

    return applying(cut, apply, [*chosen.variables, count], w=w)


@step_script(state=lambda: [tf.Variable(0.1), tf.Variable(1e9)], steps=4)
def rate_after_the_loss(cut: Cut, w: Any, x: Any, y: Any, rate: Any, best: Any) -> Any:
    """Reduce on plateau, inside the step."""
    loss, gradients = differentiate(cut, w, x, y)
    for v, g in zip(w, gradients, strict=True):
        v.assign_sub(rate * g)
    rate.assign(tf.where(loss < best, rate, 0.5 * rate))
    best.assign(tf.minimum(best, loss))
    return loss, rate


@script()
def moving_averages_with_updates(cut: Cut) -> Loop:
    """... whose decay grows with the number of updates, made in the step itself."""
    w, count = weights(), tf.Variable(0.0)
    average = tf.train.ExponentialMovingAverage(0.9, num_updates=count)

    def apply(gradients: Any, w: Any) -> Any:
        count.assign_add(1.0)
        for v, g in zip(w, gradients, strict=True):
            v.assign_sub(0.1 * g)
        average.apply(w)
        return [average.average(v) for v in w]

    return applying(cut, apply, [count], w=w)


# ---------------------------------------------------------------------- TensorFlow 1's


@script()
def v1_compute_gradients_of_a_tensor(cut: Cut) -> Loop:
    w, chosen = weights(), v1.train.GradientDescentOptimizer(0.1)

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with cut.program():
            loss = mse(y, chain(cut, x, w))
        found = chosen.compute_gradients(loss, w)
        clipped = [(tf.clip_by_value(g, -0.1, 0.1), v) for g, v in found]
        chosen.apply_gradients(clipped)
        return loss

    return Loop(step, w, rows())


@script()
def v1_minimize(cut: Cut) -> Loop:
    w, chosen = weights(), v1.train.RMSPropOptimizer(0.01, epsilon=1e-3)

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with cut.program():
            loss = mse(y, chain(cut, x, w))
        chosen.minimize(loss, var_list=w)
        return loss

    return Loop(step, w, rows())


@step_script()
def v1_gradients(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """`tf.gradients` instead of a tape."""
    with cut.program():
        loss = mse(y, chain(cut, x, w))
    gradients = tf.gradients(loss, w)
    for v, g in zip(w, gradients, strict=True):
        v.assign_sub(0.1 * g)
    return loss, gradients


@step_script()
def v1_gradients_with_stops(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    with cut.program():
        with cut.at(0):
            hidden = tf.tanh(x @ w[0])
        with cut.at(1):
            deeper = tf.tanh(hidden @ w[1])
        with cut.at(2):
            outputs = deeper @ w[2] + tf.reduce_sum(hidden, axis=1, keepdims=True)
    gradients = v1.gradients(outputs, [*w, x], grad_ys=y, stop_gradients=[deeper])
    w[0].assign_sub(0.1 * gradients[0])
    return [g for g in gradients if g is not None], [g is None for g in gradients]


@step_script(state=lambda: [tf.Variable(0, dtype=tf.int64)])
def v1_style(cut: Cut, w: Any, x: Any, y: Any, count: Any) -> Any:
    """The old words: v1 losses, control dependencies, assign_add, a decayed rate, a train_op."""
    with tf.GradientTape() as tape, cut.program():
        outputs = chain(cut, x, w)
        loss = v1.losses.mean_squared_error(y, outputs) + 0.1 * v1.losses.absolute_difference(y, outputs)
    rate = v1.train.exponential_decay(0.1, count, 2, 0.5, staircase=True)
    rate = rate() if callable(rate) else rate
    chosen = [v1.assign_sub(v, rate * g) for v, g in zip(w, tape.gradient(loss, w), strict=True)]
    with tf.control_dependencies(chosen):
        v1.assign_add(count, 1)
        return tf.identity(loss), rate


# ---------------------------------------------------------------------- sparse
def words(count: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(5)
    return [(random.integers(0, 9, (6, 3)), normal(6, 4, seed=n)) for n in range(count)]


def embedded(cut: Cut, apply: Any) -> Loop:
    table, w = tf.Variable(normal(9, 4, seed=1)), weights()

    @cut.function
    def step(ids: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            with cut.at(0):
                x = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), axis=1)
            loss = mse(y, chain(cut, x, w))
        return loss, apply(tape.gradient(loss, [table, *w]), [table, *w])

    return Loop(step, [table, *w], words())


@script()
def sparse_by_keras(cut: Cut) -> Loop:
    chosen = Adam(0.01, epsilon=1e-3)
    return embedded(cut, lambda gradients, w: chosen.apply_gradients(pairs(gradients, w)))


@script()
def sparse_by_hand(cut: Cut) -> Loop:
    def apply(gradients: Any, w: Any) -> Any:
        sparse = gradients[0]
        scaled = tf.IndexedSlices(0.1 * sparse.values, sparse.indices, sparse.dense_shape)
        w[0].scatter_sub(scaled)
        for v, g in zip(w[1:], gradients[1:], strict=True):
            v.assign_sub(0.1 * g)

    return embedded(cut, apply)
