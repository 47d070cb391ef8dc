"""The choice task, which needs no labels: which of two sentences is the translation? Trained on one pair of languages
and tested on others, it measures whether languages share representations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras import ops

from whale_nebula.errors import OptionError

from ..attention import near_zero
from ..bert import Bert
from ..text import Tokenizer
from .mixing import encode_pairs_in_rows
from .training import make_adam

Ints = npt.NDArray[np.int32]


def encode_choices(
    words: Tokenizer, sentences: Sequence[str], right: Sequence[str], wrong: Sequence[str], length: int
) -> Ints:
    """Encode each sentence with its right and with a wrong translation: (rows, 2, length), the right one first."""
    both = [encode_pairs_in_rows(words, sentences, others, length) for others in (right, wrong)]
    return np.stack(both, axis=1)


def choice_model(bert: Bert) -> keras.Model:
    """A BERT with a score for each sentence pair: how well the second half translates the first. The BERT is trained in
    place.

    It is the mean of a score for each token of a row, because a discriminator is trained on tokens.
    """
    width = bert.sizes.width
    dense = keras.layers.Dense(width, "tanh", kernel_initializer=near_zero(width**-0.5), name="dense")
    score = keras.layers.Dense(1, kernel_initializer=near_zero(0.02), name="score")
    each = ops.squeeze(score(dense(bert.output)), -1)
    there = ops.cast(bert.visible(bert.input), each.dtype)
    return keras.Model(bert.input, ops.sum(each * there, axis=1) / ops.sum(there, axis=1), name="choice")


def tune_choice(
    model: keras.Model, rows: Ints, *, steps: int, batch: int = 32, rate: float = 5e-4, seed: int = 0
) -> list[float]:
    """Fine-tune a model so that the right candidate has the higher score; returns the loss of each step.

    Args:
        model: a `choice_model`.
        rows: result of `encode_choices`.
        steps: number of steps.
        batch: sentences in a batch.
        rate: maximum learning rate.
        seed: seed of the order of rows.
    """
    if not len(rows):
        raise OptionError(
            "tune_choice got no rows", why="a batch is drawn from them", mend="tune_choice(model, encode_choices(...))"
        )
    adam = make_adam(model, rate, steps=steps)

    @tf.function
    def step(pairs: Any) -> Any:
        with tf.GradientTape() as tape:
            scores = model(tf.reshape(pairs, (-1, pairs.shape[-1])), training=True)
            scores = tf.reshape(scores, (-1, 2))
            loss = tf.reduce_mean(tf.nn.softplus(scores[:, 1] - scores[:, 0]))
        gradients = tape.gradient(loss, model.trainable_variables)
        adam.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    draw, losses = np.random.default_rng(seed), []
    order = draw.permutation(len(rows))
    for number in range(steps):
        taken = np.take(order, np.arange(number * batch, (number + 1) * batch), mode="wrap")
        losses.append(step(tf.constant(rows[taken])))
    return [float(each) for each in losses]


def choice_accuracy(model: keras.Model, rows: Ints, batch: int = 64) -> float:
    """The share of sentences for which the right translation has the higher score; 0.5 is chance."""
    right = 0.0
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        scores = np.asarray(model(part.reshape(-1, part.shape[-1]), training=False)).reshape(-1, 2)
        right += float(np.sum(scores[:, 0] > scores[:, 1]) + 0.5 * np.sum(scores[:, 0] == scores[:, 1]))
    return right / len(rows)
