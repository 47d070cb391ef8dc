"""A small language model whose feed-forward layers are dense, or have eight experts: equal arithmetic for a token.

The text is the documentation of topics that comes with Python, as bytes; the last tenth is held out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from whale_nebula.models import SwitchFeedForward

EXPERTS, WIDTH, HIDDEN, LENGTH, ROWS, RATE, EVERY = 8, 64, 64, 128, 16, 3e-3, 50
SYMBOLS = 128
layers = keras.layers


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """The training bytes, and the held-out ones."""
    text = "\n".join(topics[name] for name in sorted(topics))
    numbers = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype("int32")
    end = len(numbers) * 9 // 10
    return numbers[:end], numbers[end:]


def make_model(experts: bool, seed: int) -> keras.Model:
    """Two blocks: a causal convolution over the last bytes, and a feed-forward layer."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(SYMBOLS, WIDTH)(inputs)
    for block in range(2):
        near = layers.Conv1D(WIDTH, 4, padding="causal", dilation_rate=4**block, activation="relu")
        hidden = hidden + near(layers.LayerNormalization()(hidden))
        found = layers.LayerNormalization()(hidden)
        if experts:
            hidden = hidden + SwitchFeedForward(EXPERTS, HIDDEN, capacity_factor=1.0)(found)
        else:
            hidden = hidden + layers.Dense(WIDTH)(layers.Dense(HIDDEN, activation="relu")(found))
    return keras.Model(inputs, layers.Dense(SYMBOLS)(layers.LayerNormalization()(hidden)))


def train(experts: bool, seed: int, steps: int) -> Iterator[tuple[int, float]]:
    """The held-out loss, in bits a byte, before the first step and after every so many."""
    learned, held_out = read_text()
    model, optimizer = make_model(experts, seed), keras.optimizers.Adam(RATE)
    draw = np.random.default_rng(seed)

    def loss_of(rows: Any, training: bool) -> Any:
        scores = model(rows[:, :-1], training=training)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(rows[:, 1:], scores))

    @tf.function
    def step(rows: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([loss_of(rows, True), *model.losses])
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    evaluate = tf.function(lambda rows: loss_of(rows, False))
    whole = len(held_out) // (LENGTH + 1)
    tests = held_out[: whole * (LENGTH + 1)].reshape(whole, LENGTH + 1)[: 16 * (whole // 16)]
    for number in range(steps + 1):
        if number % EVERY == 0:
            found = [float(evaluate(tf.constant(rows))) for rows in np.split(tests, len(tests) // 16)]
            yield number, sum(found) / len(found) / math.log(2)
        begins = draw.integers(0, len(learned) - LENGTH - 1, ROWS)
        step(tf.constant(np.stack([learned[begin : begin + LENGTH + 1] for begin in begins])))
