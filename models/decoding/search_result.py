"""The result of a search, and log-probabilities with excluded words."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

NEVER = float("-inf")


class Found(NamedTuple):
    """The sentences that a search found for each row, best first: their ids, padded, and scores.

    >>> found = Found(tf.constant([[[5, 3, 0], [6, 7, 3]]]), tf.constant([[-0.1, -0.7]]))
    >>> found.best.numpy().tolist()
    [[5, 3, 0]]
    """

    ids: tf.Tensor  # [rows, found, longest]
    scores: tf.Tensor  # [rows, found]

    @property
    def best(self) -> tf.Tensor:
        """The best sentence of each row: ids [rows, longest]."""
        return self.ids[:, 0]


def log_probabilities(logits: tf.Tensor, never: tuple[int, ...]) -> tf.Tensor:
    """The log-probability of each word in float32; the words `never` have none.

    >>> print(log_probabilities(tf.constant([[9.0, 0.0, 0.0]]), never=(0,)).numpy().round(3))
    [[  -inf -0.693 -0.693]]
    """
    logits = tf.cast(logits, tf.float32)
    if never:
        left_out = tf.reduce_any(tf.range(tf.shape(logits)[-1])[:, None] == tf.constant(never), axis=1)
        logits = tf.where(left_out, NEVER, logits)
    return tf.nn.log_softmax(logits)
