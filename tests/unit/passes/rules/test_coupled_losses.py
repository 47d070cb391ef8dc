"""Traced programs with coupled rows: they are refused, and the coupling op is named."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.unit.passes.rules.harness import check_values, list_output_folds, trace
from whale_nebula.passes.rules import coupling_error

X = np.random.default_rng(3).normal(size=(5, 4)).astype("float32")


def batch_normalized(h: Any) -> Any:
    norm = layers.BatchNormalization()
    norm.build(h.shape)
    return tf.reduce_mean(norm(h, training=True) ** 2)


def in_batch_negatives(h: Any) -> Any:
    scores = tf.matmul(h, h, transpose_b=True)
    labels = tf.range(tf.shape(scores)[0])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))


def centered(h: Any) -> Any:
    return tf.reduce_sum((h - tf.reduce_mean(h, 0)) ** 2)


def hardest_rows(h: Any) -> Any:
    return tf.reduce_sum(tf.sort(tf.reduce_sum(h**2, 1))[:2])


def neighbour_differences(h: Any) -> Any:
    return tf.reduce_mean((h[1:] - h[:-1]) ** 2)


def reversed_rows(h: Any) -> Any:
    return tf.reduce_mean(h * tf.reverse(h, [0]))


def largest_entry(h: Any) -> Any:
    return tf.reduce_max(h)


def softmax_over_the_batch(h: Any) -> Any:
    return tf.reduce_sum(tf.nn.softmax(h, 0) * h)


def branch_by_mean(h: Any) -> Any:
    return tf.reduce_mean(tf.cond(tf.reduce_mean(h) > 0, lambda: 2 * h, lambda: h))


def map_over_rows(h: Any) -> Any:
    return tf.reduce_mean(tf.map_fn(tf.tanh, h))


def root_of_mean(h: Any) -> Any:
    return tf.sqrt(tf.reduce_mean(h**2))


def ratio_of_sums(h: Any) -> Any:
    return tf.reduce_sum(h) / tf.reduce_sum(tf.abs(h))


def masked_mean(h: Any) -> Any:
    return tf.reduce_mean(tf.boolean_mask(h, h > 0) ** 2)


def covariance_norm(h: Any) -> Any:
    return tf.norm(tf.matmul(h, h, transpose_a=True))


COUPLED: dict[Callable[..., Any], tuple[str, str]] = {
    batch_normalized: ("coupled", "a mean over the batch"),
    in_batch_negatives: ("coupled", "in-batch negatives"),
    centered: ("coupled", "a mean over the batch"),
    hardest_rows: ("coupled", "TopKV2 over the batch axis"),
    neighbour_differences: ("coupled", "the batch axis is sliced"),
    reversed_rows: ("coupled", "ReverseV2 along the batch axis"),
    largest_entry: ("coupled", "Max over the batch"),
    softmax_over_the_batch: ("coupled", "Softmax over the batch axis"),
    branch_by_mean: ("coupled", "different branches"),
    map_over_rows: ("coupled", "a list has as many elements as the batch has rows"),
    root_of_mean: ("after", "Sqrt of a mean"),
    ratio_of_sums: ("after", "RealDiv of a sum"),
    masked_mean: ("coupled", "a different number of entries in each row"),
    covariance_norm: ("after", "sum over the batch"),
}


@pytest.mark.parametrize("loss", COUPLED, ids=lambda loss: loss.__name__)
def test_coupled_loss_is_refused_with_its_reason(loss: Callable[..., Any]) -> None:
    dense = layers.Dense(4)
    dense(X)
    traced = trace(lambda x: loss(dense(x)), [X], target=0)
    kind, why = COUPLED[loss]
    assert list_output_folds(traced) == [kind]
    error = coupling_error(traced.outputs[0], traced.graph)
    assert error is not None
    assert error.why is not None and why in error.why, error
    assert error.op
    check_values(traced, [X])
