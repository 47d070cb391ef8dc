"""Operations on a tensor in pieces, and on a partial sum: the same values and gradients as without `nb.split`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb

X = np.random.default_rng(0).normal(size=(7, 5)).astype("float32")
LABELS = np.random.default_rng(1).integers(0, 3, (7, 5)).astype("float32")


def outer(h: Any) -> Any:
    """The product of each row with itself: a value that is both inputs of an operation."""
    return tf.einsum("bi,bj->bij", h, h)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "size": tf.size,
    "product of sizes": lambda h: tf.reduce_prod(tf.shape(h)),
    "mean": tf.reduce_mean,
    "mean along": lambda h: tf.reduce_mean(h, 1),
    "deviation": lambda h: tf.math.reduce_std(h, 1),
    "running sum": lambda h: tf.cumsum(h, 1),
    "running product": lambda h: tf.math.cumprod(h, 1, reverse=True),
    "running logarithm": lambda h: tf.math.cumulative_logsumexp(h, 1),
    "place of the largest": lambda h: tf.argmax(h, 1),
    "place of the smallest": lambda h: tf.argmin(h, -1),
    "sort": lambda h: tf.sort(h, 1),
    "median": lambda h: tf.sort(h, 1)[:, tf.shape(h)[1] // 2],
    "largest two": lambda h: tf.math.top_k(h, 2)[0],
    "softmax": tf.nn.softmax,
    "logarithm of a softmax": lambda h: tf.nn.log_softmax(h)[:, 0],
    "length": lambda h: tf.norm(h, axis=1),
    "unit length": lambda h: tf.nn.l2_normalize(h, 1),
    "reverse": lambda h: tf.reverse(h, [1]),
    "roll": lambda h: tf.roll(h, 1, 1),
    "count": lambda h: tf.math.count_nonzero(h > 0),
    "any": lambda h: tf.reduce_any(h > 1, 1),
    "product along": lambda h: tf.reduce_prod(h, 1),
    "share of zeros": lambda h: tf.math.zero_fraction(tf.nn.relu(h)),
    "gather": lambda h: tf.gather(h, [0, 4, 2], axis=1),
    "slice": lambda h: h[:, 1:4],
    "every second": lambda h: h[:, ::2],
    "pad": lambda h: tf.pad(h, [[0, 0], [1, 2]]),
    "concatenation": lambda h: tf.concat([h, h], 1),
    "stack": lambda h: tf.stack([h, h], 1),
    "split": lambda h: tf.split(h, [2, 3], 1)[1],
    "range": lambda h: h * tf.cast(tf.range(tf.shape(h)[1]), tf.float32),
    "one-hot": lambda h: tf.one_hot(tf.argmax(h, 1), tf.shape(h)[1]) * h,
    "transposition": tf.transpose,
    "flat": lambda h: tf.reshape(h, [-1]),
    "tile": lambda h: tf.tile(h, [1, 2]),
    "repeat": lambda h: tf.repeat(h, 2, axis=1),
    "places": lambda h: tf.where(h > 0),
    "outer": outer,
    "trace": lambda h: tf.linalg.trace(outer(h)),
    "upper triangle": lambda h: tf.linalg.band_part(outer(h), 0, -1),
    "matrix times vector": lambda h: tf.linalg.matvec(outer(h), h),
    "product with itself": lambda h: tf.matmul(h, h, transpose_b=True),
    "histogram": lambda h: tf.histogram_fixed_width(h, [-3.0, 3.0], 5),
    "sum of ones": lambda h: tf.reduce_sum(tf.ones_like(h)),
    "segments": lambda h: tf.math.unsorted_segment_sum(tf.transpose(h), [2, 0, 1, 1, 2], 3),
    "resize": lambda h: tf.image.resize(h[:, :, None, None], [8, 1]),
    "scan": lambda h: tf.scan(lambda total, row: total + row, tf.transpose(h)),
    "map": lambda h: tf.map_fn(lambda row: row / tf.reduce_sum(row), h),
    "spread": lambda h: tf.reduce_max(h) - tf.reduce_min(h),
    "response normalization": lambda h: tf.nn.local_response_normalization(h[:, None, None, :]),
    "pool": lambda h: tf.nn.max_pool1d(h[:, :, None], 2, 1, "SAME"),
    "cross-entropy with labels that do not sum to 1": lambda h: tf.nn.softmax_cross_entropy_with_logits(LABELS, h),
    "cross product": lambda h: tf.linalg.cross(h[:, :3], h[:, 2:]),
}
SAMPLE = frozenset({"size", "outer", "one-hot", "median", "cross-entropy with labels that do not sum to 1"})


@pytest.mark.parametrize("axis", [-1, 0], ids=["pieces", "partial sum"])
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.grid] * (each not in SAMPLE)) for each in OPERATIONS]
)
def test_operation_on_a_divided_tensor_has_the_same_value_and_gradient(name: str, axis: int) -> None:
    nb.init({"clusters": {"c1": {"workers": ["a.example:1", "a.example:2"]}}})
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense(5)
    dense.build((None, 5))

    def run(hidden: Any, tape: tf.GradientTape) -> Any:
        with tape:
            found = OPERATIONS[name](hidden())
            weight = tf.cos(tf.reshape(tf.cast(tf.range(tf.size(found)), tf.float32), tf.shape(found)))
            loss = tf.reduce_sum(tf.cast(found, tf.float32) * weight)
        return found, loss, tape.gradient(loss, dense.kernel.value, unconnected_gradients="zero")

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="c1"), nb.split(2, axis=axis):
            return run(lambda: dense(x), tf.GradientTape())

    expected = run(lambda: dense(tf.constant(X)), tf.GradientTape())
    for one, other in zip(expected, step(tf.constant(X)), strict=True):
        np.testing.assert_allclose(other, one, 1e-4, 1e-5)


def test_loss_of_a_label_that_is_no_class_is_not_a_number() -> None:
    nb.init({"clusters": {"c1": {"workers": ["a.example:1", "a.example:2"]}}})
    dense = keras.layers.Dense(5)

    @nb.function
    def compute_losses(x: Any, labels: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="c1"), nb.split(2):
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, dense(x))

    dense.build((None, 5))
    losses = compute_losses(tf.constant(X), tf.constant([0, 4, 5, -1, 2, 7, 3])).numpy()
    assert np.isnan(losses).tolist() == [False, False, True, True, False, True, False]
