"""Traced programs with coupled rows: they are refused, and the coupling op is named."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.unit.passes.rules.harness import check, folds, trace
from whale_nebula.passes.rules import verdict

X = np.random.default_rng(3).normal(size=(5, 4)).astype("float32")


def normalised(h: Any) -> Any:
    norm = layers.BatchNormalization()
    norm.build(h.shape)
    return tf.reduce_mean(norm(h, training=True) ** 2)


def in_batch_negatives(h: Any) -> Any:
    scores = tf.matmul(h, h, transpose_b=True)
    labels = tf.range(tf.shape(scores)[0])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))


def centred(h: Any) -> Any:
    return tf.reduce_sum((h - tf.reduce_mean(h, 0)) ** 2)


def hardest(h: Any) -> Any:
    return tf.reduce_sum(tf.sort(tf.reduce_sum(h**2, 1))[:2])


def neighbours(h: Any) -> Any:
    return tf.reduce_mean((h[1:] - h[:-1]) ** 2)


def shuffled(h: Any) -> Any:
    return tf.reduce_mean(h * tf.reverse(h, [0]))


def worst(h: Any) -> Any:
    return tf.reduce_max(h)


def softmax_over_the_batch(h: Any) -> Any:
    return tf.reduce_sum(tf.nn.softmax(h, 0) * h)


def branch(h: Any) -> Any:
    return tf.reduce_mean(tf.cond(tf.reduce_mean(h) > 0, lambda: 2 * h, lambda: h))


def row_by_row(h: Any) -> Any:
    return tf.reduce_mean(tf.map_fn(tf.tanh, h))


def root(h: Any) -> Any:
    return tf.sqrt(tf.reduce_mean(h**2))


def own_denominator(h: Any) -> Any:
    return tf.reduce_sum(h) / tf.reduce_sum(tf.abs(h))


def picked(h: Any) -> Any:
    return tf.reduce_mean(tf.boolean_mask(h, h > 0) ** 2)


def covariance(h: Any) -> Any:
    return tf.norm(tf.matmul(h, h, transpose_a=True))


COUPLED: dict[Callable[..., Any], tuple[str, str]] = {
    normalised: ("coupled", "a mean over the batch"),
    in_batch_negatives: ("coupled", "in-batch negatives"),
    centred: ("coupled", "a mean over the batch"),
    hardest: ("coupled", "TopKV2 over the batch axis"),
    neighbours: ("coupled", "the batch axis is sliced"),
    shuffled: ("coupled", "ReverseV2 along the batch axis"),
    worst: ("coupled", "Max over the batch"),
    softmax_over_the_batch: ("coupled", "Softmax over the batch axis"),
    branch: ("coupled", "different branches"),
    row_by_row: ("coupled", "a list has as many elements as the batch has rows"),
    root: ("after", "Sqrt of a mean"),
    own_denominator: ("after", "RealDiv of a sum"),
    picked: ("coupled", "a different number of entries in each row"),
    covariance: ("after", "sum over the batch"),
}


@pytest.mark.parametrize("loss", COUPLED, ids=lambda loss: loss.__name__)
def test_it_is_refused_and_the_reason_is_said(loss: Callable[..., Any]) -> None:
    dense = layers.Dense(4)
    dense(X)
    traced = trace(lambda x: loss(dense(x)), [X], target=0)
    kind, why = COUPLED[loss]
    assert folds(traced) == [kind]
    error = verdict(traced.outputs[0], traced.graph)
    assert error is not None
    assert error.why is not None and why in error.why, error
    assert error.op
    check(traced, [X])
