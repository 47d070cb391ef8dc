"""A tape around a step: no gradient goes back through a plan, and requests for one are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import GradientError
from whale_nebula.runtime.step.engine import refuse_outer_gradients
from whale_nebula.runtime.step.results import PendingResult

X = tf.constant(np.linspace(-1.0, 1.0, 32, dtype="float32").reshape(8, 4))


def make_forward(micro_batches: int = 1) -> tuple[Any, tuple[keras.layers.Layer, keras.layers.Layer]]:
    """A forward of two stages, whose layers are built when it is first called."""
    first, second = keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)

    @nb.function
    def step(x: Any) -> Any:
        with nb.pipeline(micro_batches):
            with nb.stage(cluster="a"):
                hidden = first(x)
            with nb.stage(cluster="b"):
                return second(hidden)

    return step, (first, second)


@pytest.mark.parametrize(
    ("links", "micro_batches", "built"),
    [
        pytest.param(None, 1, False, marks=pytest.mark.grid),
        (None, 2, True),
        pytest.param("100mbit,1ms", 1, True, marks=pytest.mark.grid),
        ("100mbit,1ms", 2, False),
    ],
)
def test_outer_gradient_for_the_step_variables_is_refused(links: str | None, micro_batches: int, built: bool) -> None:
    nb.init(links=links)
    step, (first, second) = make_forward(micro_batches)
    if built:
        first.build((None, 4))
        second.build((None, 3))
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(step(X) ** 2)
        with pytest.raises(GradientError, match="a tape outside step requests a gradient") as caught:
            tape.gradient(loss, [*first.trainable_variables, *second.trainable_variables])
        assert "test_outer_tapes.py" in caught.value.where
        assert "tf.stop_gradient" in caught.value.mend


def watch_input(tape: Any) -> Any:
    tape.watch(X)
    return X, X


def scale_input(tape: Any) -> Any:
    scale = tf.Variable(2.0)
    return scale * X, scale


@pytest.mark.parametrize("make_argument", [watch_input, scale_input])
def test_outer_gradient_for_the_step_arguments_is_refused(make_argument: Callable[[Any], Any]) -> None:
    step, _ = make_forward()
    for _ in range(2):
        with tf.GradientTape() as tape:
            argument, source = make_argument(tape)
            found = step(argument)
        with pytest.raises(GradientError):
            tape.gradient(found, source)


def test_gradients_of_ops_after_the_step_are_computed() -> None:
    """A head of plain TensorFlow on a trunk that is not trained."""
    (step, (first, _)), head = make_forward(), tf.Variable(2.0)
    for _ in range(2):
        with tf.GradientTape() as tape:
            features = step(X)
            loss = tf.reduce_sum(head * features)
        np.testing.assert_allclose(tape.gradient(loss, head), tf.reduce_sum(features), rtol=1e-5)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(head * tf.stop_gradient(step(X)))
    assert tape.gradient(loss, first.trainable_variables) == [None, None]


def test_outer_gradient_through_a_single_stage_is_computed() -> None:
    weight = tf.Variable(3.0)

    @nb.function
    def step(x: Any) -> Any:
        with nb.stage(cluster="a"):
            return tf.reduce_sum(weight * x)

    for _ in range(2):
        with tf.GradientTape() as tape:
            found = step(X)
        np.testing.assert_allclose(tape.gradient(found, weight), tf.reduce_sum(X), atol=1e-5)


def test_results_are_equal_with_and_without_an_outer_tape() -> None:
    weight = tf.Variable(3.0)

    @nb.function
    def step(x: Any) -> Any:
        with nb.stage(cluster="a"):
            hidden = weight * x
        with nb.stage(cluster="b"):
            return {"sum": tf.reduce_sum(hidden), "shape": tf.shape(hidden), "same": x, "name": "step"}

    plain = step(X)
    with tf.GradientTape():
        taped = step(X)
    assert plain.keys() == taped.keys()
    assert taped["name"] == "step"
    for name in ("sum", "shape", "same"):
        np.testing.assert_array_equal(plain[name], taped[name])


def test_pending_result_is_resolved_under_an_outer_tape() -> None:
    from concurrent.futures import Future

    from whale_nebula.spec import Spec

    promise: Future[Any] = Future()
    promise.set_result([tf.constant(2.0)])
    weight = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        (loss,) = refuse_outer_gradients("step", [weight], [], [PendingResult(promise, 0, Spec("float32", ()))])
        doubled = 2.0 * loss
    assert float(doubled) == 4.0
    with pytest.raises(GradientError, match="step"):
        tape.gradient(doubled, weight)
