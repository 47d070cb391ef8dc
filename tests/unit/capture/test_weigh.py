"""The divisor of a target determines the weight with which its gradient starts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import BatchCoupledError

ROWS = np.random.default_rng(0).standard_normal((7, 4)).astype("float32")
WEIGHT = np.linspace(-1.0, 1.0, 12, dtype="float32").reshape(4, 3)
Target = Callable[[Any, Any], Any]


def _gradient(micro_batch: int, target: Target) -> np.ndarray:
    """What differentiating a target of the rows' outputs gives; without micro-batches there are no scopes."""
    weight = tf.Variable(WEIGHT)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, contextlib.ExitStack() as stack:
            if micro_batch:
                stack.enter_context(nb.pipeline(micro_batch))
                stack.enter_context(nb.stage(cluster="a"))
            targets = target(tf.tanh(x @ weight), weight)
        return tape.gradient(targets, weight)

    return np.asarray((nb.function(step) if micro_batch else step)(ROWS))


def _count(out: Any) -> Any:
    return tf.cast(tf.shape(out)[0], tf.float32)


def _prior(out: Any, weight: Any) -> Any:
    return tf.reduce_sum(weight**2) / _count(out)


def _beside_a_mean(out: Any, weight: Any) -> Any:
    return [tf.reduce_mean(out**2), _prior(out, weight)]


def _two_of_them(out: Any, weight: Any) -> Any:
    return _prior(out, weight) + tf.reduce_sum(tf.abs(weight)) / _count(out)


def _times_rows(out: Any, weight: Any) -> Any:
    return [tf.reduce_sum(weight**2) * _count(out), tf.reduce_sum(out)]


def _a_vector(out: Any, weight: Any) -> Any:
    return tf.stack([tf.reduce_sum(weight**2), tf.reduce_sum(weight) / 2.0]) / _count(out)


@pytest.mark.parametrize("target", [_prior, _beside_a_mean, _two_of_them, _times_rows, _a_vector])
def test_the_gradient_is_that_of_the_whole_batch(target: Target) -> None:
    np.testing.assert_allclose(_gradient(3, target), _gradient(0, target), rtol=1e-5, atol=1e-6)


def test_entries_that_need_several_weights_are_refused() -> None:
    def mixed(out: Any, weight: Any) -> Any:
        total = tf.reduce_sum(weight**2)
        return tf.stack([_count(out), total])

    with pytest.raises(BatchCoupledError, match="its entries are no one kind"):
        _gradient(3, mixed)
