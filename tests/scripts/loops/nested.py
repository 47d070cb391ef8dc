"""A tf.function inside the step: with scopes inside it is inlined, without any it may stay a call."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tests.scripts.loops.loop_scripts import (
    Cut,
    Loop,
    chain,
    descend,
    differentiate,
    mse,
    normal,
    rows,
    script,
    train_loop,
    weights,
)


def around(cut: Cut, forward: Any, w: Any, more: Any = ()) -> Loop:
    """A loop around a forward that is a tf.function (or many)."""
    return train_loop(cut, w, more)(lambda x, y: mse(y, forward(x)))


@script()
def scopes_inside(cut: Cut) -> Loop:
    w = weights()

    @tf.function
    def forward(x: Any) -> Any:
        return chain(cut, x, w)

    return around(cut, forward, w)


@script()
def without_scopes(cut: Cut) -> Loop:
    """... inside one part each: they stay calls."""
    w = weights()
    layer = [tf.function(lambda v, n=n: tf.tanh(v @ w[n])) for n in range(3)]

    def forward(x: Any) -> Any:
        for n in range(3):
            with cut.at(n):
                x = layer[n](x)
        return x

    return around(cut, forward, w)


@script()
def with_a_signature_that_casts(cut: Cut) -> Loop:
    """Numpy arrays and Python numbers become tensors of the signature."""
    w = weights()

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([], tf.float32)])
    def forward(x: Any, factor: Any) -> Any:
        return chain(cut, x, w) * tf.cast(tf.rank(factor) + 1, tf.float32) * factor

    return around(cut, lambda x: forward(x, 0.5), w)


@script()
def variables_on_the_first_call(cut: Cut) -> Loop:
    made: list[tf.Variable] = []

    @tf.function
    def forward(x: Any) -> Any:
        if not made:
            made.extend(weights())
        return chain(cut, x, made)

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            loss = mse(y, forward(x))
        gradients = tape.gradient(loss, made)
        descend(made, gradients)
        return loss, gradients

    return Loop(step, [], rows())


@script()
def autograph_inside(cut: Cut) -> Loop:
    """Python's `if` and `for` on tensors, inside the inner function, inside the parts."""
    w, count = weights(), tf.Variable(2)

    @tf.function
    def forward(x: Any) -> Any:
        with cut.at(0):
            for _ in tf.range(count):
                x = tf.tanh(x @ w[0])
        with cut.at(1):
            if count > 1:  # noqa: SIM108 - AutoGraph is to see it
                x = tf.sin(x @ w[1])
            else:
                x = x @ w[1]
        with cut.at(2):
            return x @ w[2]

    return around(cut, forward, w)


@script()
def effects_inside(cut: Cut) -> Loop:
    """Writes and reads inside keep their order, and are seen by what follows."""
    w, count = weights(), tf.Variable(1.0)

    @tf.function
    def forward(x: Any) -> Any:
        before = count.read_value()
        count.assign_add(1.0)
        outputs = chain(cut, x, w) * before
        count.assign_add(1.0)
        return outputs

    return around(cut, forward, w, [count])


@script()
def all_of_the_step(cut: Cut) -> Loop:
    """Tape, scopes and update, all in an inner function; the outer one only counts."""
    w, count = weights(), tf.Variable(0)

    @tf.function
    def inner(x: Any, y: Any) -> Any:
        loss, gradients = differentiate(cut, w, x, y)
        descend(w, gradients)
        return loss, gradients

    @cut.function
    def step(x: Any, y: Any) -> Any:
        found = inner(x, y)
        count.assign_add(1)
        return found

    return Loop(step, [*w, count], rows())


@script()
def tape_in_a_function_without_scopes(cut: Cut) -> Loop:
    """The forward has scopes outside; a helper without scopes asks its own tape about its own ops."""
    w = weights()

    @tf.function
    def slope(v: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(v)
            energy = tf.reduce_sum(tf.sin(v), axis=1)
        return tape.gradient(energy, v)

    @train_loop(cut, w)
    def loop(x: Any, y: Any) -> Any:
        with cut.at(0):
            hidden = slope(x @ w[0])
        with cut.at(1):
            hidden = tf.tanh(hidden @ w[1])
        with cut.at(2):
            return mse(y, slope(hidden @ w[2]))

    return loop


@script()
def called_twice(cut: Cut) -> Loop:
    """Siamese: one inner function, both inputs in one step."""
    w = weights()

    @tf.function
    def embed(x: Any) -> Any:
        with cut.at(0):
            x = tf.tanh(x @ w[0])
        with cut.at(1):
            return tf.tanh(x @ w[1])

    @train_loop(cut, w)
    def loop(x: Any, y: Any) -> Any:
        left, right = embed(x), embed(y)
        with cut.at(2):
            return tf.reduce_mean(((left - right) @ w[2]) ** 2)

    return loop


class Block:
    """A layer of one's own whose call is a tf.function, as many write it."""

    def __init__(self, cut: Cut, n: int) -> None:
        self.cut, self.n, self.w = cut, n, tf.Variable(normal(4, 4, seed=90 + n) * 0.5)

    @tf.function
    def __call__(self, x: Any, *, factor: float = 1.0) -> Any:
        with self.cut.at(self.n):
            return tf.tanh(x @ self.w) * factor


@script()
def methods(cut: Cut) -> Loop:
    blocks = [Block(cut, n) for n in range(3)]
    w = [block.w for block in blocks]

    def forward(x: Any) -> Any:
        for block in blocks:
            x = block(x, factor=0.9)
        return x

    return around(cut, forward, w)


class Cell(keras.layers.Layer):
    """A Keras layer whose `call` is a tf.function."""

    def __init__(self, cut: Cut, n: int) -> None:
        super().__init__()
        self.cut, self.n, self.dense = cut, n, keras.layers.Dense(4, activation="tanh")

    @tf.function
    def call(self, x: Any) -> Any:
        with self.cut.at(self.n):
            return self.dense(x)


@script()
def keras_calls(cut: Cut) -> Loop:
    cells = [Cell(cut, n) for n in range(3)]
    for cell in cells:
        cell.dense.build((None, 4))
    w = [v for cell in cells for v in cell.dense.trainable_variables]

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            for cell in cells:
                x = cell(x)
            loss = mse(y, x)
        gradients = tape.gradient(loss, w)
        descend([v.value for v in w], gradients)
        return loss, gradients

    return Loop(step, w, rows())


@script()
def structures_through(cut: Cut) -> Loop:
    """Dicts in and out, keywords, a default, None."""
    w = weights()

    @tf.function
    def forward(batch: Any, extra: Any = None, *, scale: float = 1.0) -> Any:
        outputs = chain(cut, batch["x"], w) * scale
        return {"outputs": outputs, "none": extra, "number": 3}

    return around(cut, lambda x: forward({"x": x}, scale=0.5)["outputs"], w)


@script()
def one_of_ours_inside(cut: Cut) -> Loop:
    """An nb.function that calls an nb.function."""
    w = weights()

    @cut.function
    def forward(x: Any) -> Any:
        return chain(cut, x, w)

    return around(cut, forward, w)


@script()
def used_inside_and_outside(cut: Cut) -> Loop:
    """The inner function is also called by itself, eagerly, before and after."""
    w = weights()

    @tf.function
    def forward(x: Any) -> Any:
        return chain(cut, x, w)

    loop = around(cut, forward, w)
    plain = tf.function(lambda x: chain(Cut(0), x, w))

    def step(x: Any, y: Any) -> Any:
        return plain(x), loop.step(x, y), plain(x)

    return Loop(step, w, rows())


@script()
def compiled_without_scopes(cut: Cut) -> Loop:
    """jit_compile=True inside one part: a call like any other."""
    w = weights()
    layer = tf.function(lambda v: tf.tanh(v @ w[0]), jit_compile=True)

    def forward(x: Any) -> Any:
        with cut.at(0):
            x = layer(x)
        with cut.at(1):
            x = tf.tanh(x @ w[1])
        with cut.at(2):
            return x @ w[2]

    return around(cut, forward, w)


@script()
def random_inside(cut: Cut) -> Loop:
    """A function without scopes that draws: its own ops, its own seeds."""
    w, chance = weights(), tf.random.Generator.from_seed(5)

    @tf.function
    def drawn() -> Any:
        return chance.normal([4])

    @cut.function
    def step(x: Any, y: Any) -> Any:
        loss, gradients = differentiate(cut, w, x, y)
        descend(w, [g + 0.1 * drawn() for g in gradients])
        return loss

    return Loop(step, [*w, chance.state], rows())
