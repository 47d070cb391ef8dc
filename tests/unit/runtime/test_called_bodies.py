"""Steps with loops and branches that TensorFlow wraps, or creates in its old form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb

ROWS = np.random.default_rng(0).standard_normal((6, 4)).astype("float32")


def _gradients(cut: bool, micro_batch: int, loss: Callable[[Any], Any]) -> list[Any]:
    first, second = tf.Variable(tf.eye(4) * 0.5), tf.Variable(tf.eye(4))

    def stage(cluster: str) -> contextlib.AbstractContextManager[Any]:
        return nb.stage(cluster=cluster) if cut else contextlib.nullcontext()

    def step(x: Any) -> Any:
        around = nb.pipeline(micro_batch) if cut else contextlib.nullcontext()
        with tf.GradientTape(persistent=True) as tape, around:
            with stage("a"):
                hidden = tf.tanh(x @ first)
            with stage("b"):
                found = loss(hidden @ second)
        return found, tape.gradient(found, first), tape.gradient(found, second)

    return [np.asarray(each) for each in (nb.function(step) if cut else step)(ROWS)]


def _branch(out: Any) -> Any:
    return tf.cond(tf.reduce_mean(out) > 0.0, lambda: tf.reduce_mean(out**2), lambda: tf.reduce_sum(out))


def _loop(out: Any) -> Any:
    return tf.while_loop(lambda turn, _: turn < 3, lambda turn, x: (turn + 1, x + tf.reduce_mean(out)), [0, 0.0])[1]


def _ctc(out: Any) -> Any:
    ones = tf.ones([tf.shape(out)[0]], tf.int32)
    scores = tf.stack([out, 2.0 * out, -out], 1)
    return tf.reduce_mean(tf.nn.ctc_loss(ones[:, None], scores, ones, 3 * ones, logits_time_major=False, blank_index=0))


@pytest.mark.parametrize(("loss", "micro_batch"), [(_branch, 1), (_loop, 3), (_ctc, 1)])
def test_under_a_tape_that_is_asked_twice(loss: Callable[[Any], Any], micro_batch: int) -> None:
    for expected, found in zip(_gradients(False, 1, loss), _gradients(True, micro_batch, loss), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
