"""The losses of pretraining: the generator's, and the discriminator's two.

*Replaced token detection* asks of each token whether it is the original one: over sentences of many languages (MRTD)
and over pairs of translations (TRTD) it is the same loss, of other rows. *Corrective language modelling* (CLM) asks of
each token what the original one was; a discriminator may copy what it is shown, and is sure of it as far as it takes
the token to be original:

    p(original = w) = [w is shown] c + (1 - c) softmax(scores)[w],  c = 1 - p(replaced)

The gradient of that loss does not go through c, which the detection teaches.

Each loss is the mean over rows of the mean over a row's tokens that count: so it is the same in micro-batches and in
replicas, whatever of the batch is padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from whale_nebula.errors import OptionError


@dataclass(frozen=True, slots=True)
class Objectives:
    """What is learned and how much it weighs; 0 leaves it out, and what only it needs does not cross.

    >>> Objectives(correction=0).originals
    False
    """

    detection: float = 50.0
    correction: float = 1.0

    def __post_init__(self) -> None:
        if min(self.detection, self.correction) < 0:
            raise OptionError(f"{self} has a weight below zero", mend="Objectives(detection=50.0, correction=1.0)")
        if not self.detection:
            raise OptionError(
                "a discriminator without detection has nothing to copy by",
                why="how sure it is of a token is what the correction copies by",
                mend="Objectives(detection=50.0)",
            )

    @property
    def originals(self) -> bool:
        """Whether the original ids at hidden places have to be known to the discriminator."""
        return self.correction > 0


def guess_loss(originals: Any, scores: Any, weights: Any) -> Any:
    """The generator's: cross-entropy over the tokens that were hidden."""
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(originals, tf.cast(scores, tf.float32))
    return _mean(each, weights)


def detection_loss(replaced: Any, logits: Any, there: Any) -> Any:
    """The surprise at whether tokens were replaced (bool), over those that are `there` (float)."""
    each = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(replaced, tf.float32), tf.cast(logits, tf.float32))
    return _mean(each, there)


def correction_loss(originals: Any, shown: Any, logits: Any, scores: Any, there: Any) -> Any:
    """The surprise at the original tokens, over those that are there, with the copy mechanism.

    `logits` are those of the detection, `scores` (rows, length, vocabulary) say what the token was if it is no copy.
    """
    logits = tf.stop_gradient(tf.cast(logits, tf.float32))
    surprise = tf.nn.sparse_softmax_cross_entropy_with_logits(originals, tf.cast(scores, tf.float32))
    other = tf.math.log_sigmoid(logits) - surprise
    copied = tf.math.log_sigmoid(-logits)
    most, least = tf.maximum(copied, other), tf.minimum(copied, other)
    either = most + tf.math.log1p(tf.exp(least - most))
    each = -tf.where(originals == shown, either, other)
    return _mean(each, there)


def _mean(each: Any, weights: Any) -> Any:
    return tf.reduce_mean(tf.reduce_sum(each * weights, axis=1) / tf.reduce_sum(weights, axis=1))
