"""`tf.py_function` and `tf.numpy_function` in a stage: they run, with gradients, and the plan says they cannot move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.telling import batch, fit, marked, same_training, sub, told
from whale_nebula.errors import BatchCoupledError, StageFailedError


def cubed(x: Any) -> Any:
    found = tf.py_function(lambda t: t * t * t, [x], tf.float32)  # mark: py
    return tf.ensure_shape(found, x.shape)


def rounded(x: Any) -> Any:
    found = tf.numpy_function(np.round, [x], tf.float32)  # mark: numpy
    return x + tf.stop_gradient(tf.ensure_shape(found, x.shape))


@pytest.mark.parametrize("middle", [cubed, rounded])
def test_python_in_a_stage_learns_the_same(middle: Any) -> None:
    same_training(sub(middle), sub(middle, scoped=False))
    called, mark = ("tf.py_function", marked("py")) if middle is cubed else ("tf.numpy_function", marked("numpy"))
    assert nb.last_report().notes == (
        f"{called} at {mark} cannot be moved out of stage 'b': it runs Python, in the process of cluster 'b'",
    )


def test_the_plan_says_it_before_anything_runs() -> None:
    text = nb.plan(sub(cubed), *batch()).to_text()
    assert f"tf.py_function at {marked('py')} cannot be moved" in text


def test_what_python_does_to_rows_nobody_knows() -> None:
    said = "tf.py_function runs Python"
    told(BatchCoupledError, lambda: fit(sub(cubed, micro=2)), said, 'coupled="allow"', at=marked("py"))


@pytest.mark.parametrize("schedule", ["gpipe", "eager-1f1b"])
def test_gradients_of_python_over_links(schedule: str) -> None:
    """TensorFlow keeps one call's tape for a py_function: one micro-batch is in flight, whatever the schedule."""
    weight = tf.Variable(tf.ones([4, 4]) * 0.3)

    def step(micro: int) -> Any:
        @nb.function
        def gradient(x: Any) -> Any:
            pipeline = nb.pipeline(micro, schedule=schedule, coupled="allow")
            with tf.GradientTape() as tape, nb.cluster(), pipeline:
                with nb.stage(cluster="a"):
                    hidden = cubed(x @ weight)
                with nb.stage(cluster="b"):
                    loss = tf.reduce_mean(hidden**2)
            return tape.gradient(loss, weight)

        return gradient(tf.constant(batch(6)[0]))

    whole = step(1)
    nb.shutdown()
    nb.init(links="1gbit,1ms")
    np.testing.assert_allclose(step(3), whole, rtol=1e-5)
    assert nb.last_report().micro_batches == 3


def test_what_python_raises_is_told_with_stage_and_line() -> None:
    def failing(x: Any) -> Any:
        def no(value: Any) -> Any:
            raise ValueError("python said no")

        return tf.ensure_shape(tf.py_function(no, [x], tf.float32), x.shape)  # mark: failing

    said = ("python said no", "stage 'b'", "cluster 'b'", "as they were before")
    told(StageFailedError, lambda: fit(sub(failing)), *said, at=marked("failing"))
