"""What a conditional masked language model is shown of a translation, and what it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf


class Hidden(NamedTuple):
    """Ids as they are shown, and the two labels: the hidden words (else padding), and how many words there are."""

    shown: tf.Tensor
    words: tf.Tensor
    length: tf.Tensor


@dataclass(frozen=True, slots=True)
class Hiding:
    """Hides some words of each sentence: 1 to all of them, each number as often, any of them.

    Start, end and padding are no words, and are always shown. Which are hidden, is a function of the seed and of the
    batch's number alone.

    >>> hiding = Hiding(mask=4, special=(0, 2, 3))
    >>> hidden = hiding(tf.constant([[2, 7, 8, 9, 3, 0]]), number=1)
    >>> hidden.length.numpy().tolist(), bool(tf.reduce_all((hidden.shown == 4) == (hidden.words > 0)))
    ([3], True)
    """

    mask: int
    special: tuple[int, ...] = (0,)
    seed: int = 0

    def __call__(self, ids: Any, number: Any) -> Hidden:
        """Of whole sentences (rows, length), start and end included, what is shown in this batch."""
        is_word = tf.reduce_all(ids[:, :, None] != tf.constant(self.special, ids.dtype), axis=2)
        words = tf.reduce_sum(tf.cast(is_word, tf.int32), axis=1)
        seeds = tf.random.split(tf.stack([self.seed, tf.cast(number, tf.int32)]), 2)
        share = tf.random.stateless_uniform(tf.shape(words), seeds[0])
        count = 1 + tf.cast(share * tf.cast(words, tf.float32), tf.int32)
        draw = tf.where(is_word, tf.random.stateless_uniform(tf.shape(ids), seeds[1]), 2.0)
        hidden = is_word & (tf.argsort(tf.argsort(draw)) < count[:, None])
        return Hidden(tf.where(hidden, self.mask, ids), tf.where(hidden, ids, 0), words)

    def of_batches(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Batches for a `MaskedABNet`, of those for a model that writes from left to right.

        ({"source", "target": all but the last word}, all but the first) becomes ({"source", "target": shown}, {"words",
        "length"}). A side that is not here (None) stays so.
        """

        def hide(number: Any, batch: tuple[Any, ...]) -> tuple[Any, Any]:
            inputs, labels = batch[0], batch[1]
            if inputs["target"] is None or labels is None:
                return {**inputs, "target": None}, {"words": None, "length": None}
            hidden = self(tf.concat([inputs["target"][:, :1], labels], axis=1), number)
            return {**inputs, "target": hidden.shown}, {"words": hidden.words, "length": hidden.length}

        return batches.enumerate().map(hide, num_parallel_calls=tf.data.AUTOTUNE)
