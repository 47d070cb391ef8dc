"""Forwards of tensors other than batches of floats, or of a part of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.scripts.loops.forwards.forward_loop import make_forward_loop
from tests.scripts.loops.loop_scripts import (
    Cut,
    Loop,
    chain,
    loss_script,
    mse,
    normal,
    rows,
    script,
    train_loop,
    weights,
)


@script()
def strings(cut: Cut) -> Loop:
    """Words looked up in a table, inside the first part; strings come back."""
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a", "b", "c"], tf.constant([0, 1, 2], tf.int64)), 3
    )
    embeddings, w = tf.Variable(normal(4, 4, seed=2)), weights()

    @cut.function
    def step(words: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            with cut.at(0):
                x = tf.gather(embeddings, table.lookup(words))
            outputs = chain(cut, x, w)
            loss = mse(y, outputs)
        variables = [embeddings, *w]
        for v, g in zip(variables, tape.gradient(loss, variables), strict=True):
            v.assign_sub(0.1 * tf.convert_to_tensor(g))
        return loss, tf.strings.join([words, tf.strings.as_string(tf.argmax(outputs, axis=1))])

    words = np.array([b"a", b"c", b"x", b"b", b"a", b"b"])
    return Loop(step, [embeddings, *w], [(np.roll(words, n), normal(6, 4, seed=n)) for n in range(3)])


@script()
def doubles_and_complex(cut: Cut) -> Loop:
    w = [tf.Variable(normal(4, 4, seed=90 + n).astype("float64") * 0.5) for n in range(3)]

    @train_loop(cut, w, calls=[tuple(part.astype("float64") for part in batch) for batch in rows()], rate=0.01)
    def loop(x: Any, y: Any) -> Any:
        with cut.at(0):
            wave = tf.signal.fft(tf.cast(x @ w[0], tf.complex128))
        with cut.at(1):
            hidden = tf.math.real(tf.signal.ifft(wave * tf.cast(w[1][0], tf.complex128)))
        with cut.at(2):
            loss = tf.reduce_mean((hidden @ w[2] - y) ** 2)
        return loss, wave

    return loop


@script()
def boolean_mask(cut: Cut) -> Loop:
    w = weights()
    masks = [np.array(m, bool) for m in ([1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1])]

    @train_loop(cut, w, calls=[(*b, m) for b, m in zip(rows(), masks, strict=True)])
    def loop(x: Any, y: Any, mask: Any) -> Any:
        losses = tf.reduce_mean((chain(cut, x, w) - y) ** 2, axis=1)
        return tf.reduce_sum(tf.boolean_mask(losses, mask))

    return loop


@loss_script(micro=(1,))
def hard_examples(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """Only the worst rows count: coupled with micro-batches."""
    losses = tf.reduce_mean((chain(cut, x, w) - y) ** 2, axis=1)
    return tf.reduce_mean(tf.math.top_k(losses, 2).values)


@loss_script(micro=(1,))
def float16_inside(cut: Cut, w: Any, x: Any, y: Any) -> Any:
    """Half precision between the parts, weights in single."""
    with cut.at(0):
        hidden = tf.tanh(tf.cast(x, tf.bfloat16) @ tf.cast(w[0], tf.bfloat16))
    with cut.at(1):
        hidden = tf.tanh(hidden @ tf.cast(w[1], tf.bfloat16))
    with cut.at(2):
        return tf.reduce_mean((tf.cast(hidden, tf.float32) @ w[2] - y) ** 2)


@script()
def traces_of_matrices(cut: Cut) -> Loop:
    """The gradient of a trace needs the static size of its diagonal, which is not an input of it."""
    w = weights()

    def first(x: Any) -> Any:
        hidden = tf.tanh(x @ w[0])
        return hidden + tf.linalg.trace(tf.einsum("bi,bj->bij", hidden, hidden))[:, tf.newaxis]

    return make_forward_loop(cut, first, w=w)
