"""Optimizers: several, Keras's and TensorFlow 1's, moving averages, rates that move."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.scripts.loops.book import (
    Cut,
    Loop,
    chain,
    differentiate,
    loss_script,
    mse,
    normal,
    rows,
    script,
    step_script,
    trained,
    two_layers,
    weights,
)

v1 = tf.compat.v1
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def applying(cut: Cut, apply: Any, variables: Any = (), *, w: Any = None, steps: int = 3) -> Loop:
    """A loop whose gradients go to `apply(gradients, w)`; `variables` are looked at beside the weights."""
    w = weights() if w is None else w
    return trained(cut, w, variables, calls=rows(steps), update=apply)(lambda x, y: mse(y, chain(cut, x, w)))


def applied_by(optimizer: Any, **options: Any) -> Any:
    """An update by a v1 optimizer; the op that it gives is no tensor, so it is not returned."""

    def apply(gradients: Any, w: Any) -> None:
        optimizer.apply_gradients(pairs(gradients, w), **options)

    return apply


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


@script(rarely=True)
def apply_with_variables(cut: Cut) -> Loop:
    """`optimizer.apply`, built in the step."""
    chosen = Adam(0.01, epsilon=1e-3)
    return applying(cut, lambda gradients, w: chosen.apply(gradients, w))


@script(rarely=True)
def clipped_and_averaged(cut: Cut) -> Loop:
    """What Keras's optimizer can do by itself: global clipping, EMA, decay."""
    w = weights()
    chosen = Adam(0.01, epsilon=1e-3, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=2, weight_decay=0.01)
    chosen.build(w)
    return applying(cut, lambda gradients, w: chosen.apply_gradients(pairs(gradients, w)), chosen.variables, w=w)


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


@script(rarely=True)
def rate_assigned_in_the_loop(cut: Cut) -> Loop:
    w, chosen = weights(), SGD(0.1, momentum=0.9)
    chosen.build(w)
    inner = applying(cut, lambda gradients, w: chosen.apply_gradients(pairs(gradients, w)), w=w)

    def step(x: Any, y: Any, rate: float) -> Any:
        chosen.learning_rate = rate
        return inner.step(x, y)

    return Loop(step, [*w, *chosen.variables], [(*b, r) for b, r in zip(rows(), (0.1, 0.03, 0.01), strict=True)])


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
@script(rarely=True)
def v1_momentum_with_global_step(cut: Cut) -> Loop:
    count = tf.Variable(0, dtype=tf.int64)
    return applying(cut, applied_by(v1.train.MomentumOptimizer(0.1, 0.9), global_step=count), [count])


@script(rarely=True)
def v1_compute_gradients_of_a_callable(cut: Cut) -> Loop:
    w, chosen = weights(), v1.train.AdagradOptimizer(0.1)

    @cut.function
    def step(x: Any, y: Any) -> Any:
        def loss() -> Any:
            with cut.program():
                return mse(y, chain(cut, x, w))

        found = chosen.compute_gradients(loss, w)
        chosen.apply_gradients(found)
        return [g for g, _ in found]

    return Loop(step, w, rows())


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


@loss_script(micro=(1, 2, 4), rarely=True)
def v1_gradients_inside_a_tape(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """A gradient penalty in one part: tf.gradients inside, a tape around."""
    hidden = two_layers(cut, x, w)
    with cut.at(2):
        scores = tf.tanh(hidden @ w[2])
        (slopes,) = tf.gradients(scores, [hidden])
        return tf.reduce_mean(scores * y) + tf.reduce_mean(tf.reduce_sum(slopes**2, axis=1))


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


@script(rarely=True)
def sparse_by_v1(cut: Cut) -> Loop:
    return embedded(cut, applied_by(v1.train.AdagradOptimizer(0.1)))


@script()
def sparse_by_hand(cut: Cut) -> Loop:
    def apply(gradients: Any, w: Any) -> Any:
        sparse = gradients[0]
        scaled = tf.IndexedSlices(0.1 * sparse.values, sparse.indices, sparse.dense_shape)
        w[0].scatter_sub(scaled)
        for v, g in zip(w[1:], gradients[1:], strict=True):
            v.assign_sub(0.1 * g)

    return embedded(cut, apply)


@script(rarely=True)
def sparse_clipped(cut: Cut) -> Loop:
    chosen = SGD(0.1, momentum=0.9)

    def apply(gradients: Any, w: Any) -> Any:
        clipped, norm = tf.clip_by_global_norm(gradients, 0.1)
        chosen.apply_gradients(pairs(clipped, w))
        return norm

    return embedded(cut, apply)
