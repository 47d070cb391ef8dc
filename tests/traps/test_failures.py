"""A failing step has no effect: one error tells where, and all state is as before."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.parity_harness import assert_same
from tests.traps.conftest import Cut
from whale_nebula.errors import StageFailedError
from whale_nebula.runtime.exchange.link_exchange import LinkExchange

layers = keras.layers
ROWS, MICRO = 6, 3


def assert_small(x: Any) -> Any:
    tf.debugging.assert_less(tf.reduce_max(x), 50.0, message="too large")
    return x


def divide_if_large(x: Any) -> Any:
    return x * tf.cast(1 // tf.cast(x < 50.0, tf.int32), tf.float32)


def call_python(x: Any) -> Any:
    def python(value: Any) -> Any:
        if value.numpy().max() > 50.0:
            raise ValueError("python said no")
        return value

    found = tf.py_function(python, [x], tf.float32)
    found.set_shape(x.shape)
    return x + 0.0 * tf.stop_gradient(found)


FAILURES: dict[str, Callable[[Any], Any]] = {"assert": assert_small, "division": divide_if_large, "python": call_python}


class FailingLayer(layers.Layer):
    """Passes its input through, unless that is too large."""

    def __init__(self, failure: str) -> None:
        super().__init__()
        self.failure = failure

    def call(self, x: Any) -> Any:
        return FAILURES[self.failure](x)


def build_model(failure: str, stage: int) -> keras.Model:
    """Two stages with dropout, an optimizer with slots and decay, and metrics; `stage` is the one that may fail."""
    keras.utils.set_random_seed(5)
    inputs = keras.Input((4,))
    allowed = {"coupled": "allow"} if failure == "python" else {}  # what Python does to rows, nobody knows
    with Cut(True, MICRO, allowed).program():
        with nb.stage(cluster="a"):
            hidden = layers.Dense(4)(inputs)
            hidden = FailingLayer(failure)(hidden) if stage == 0 else hidden
            hidden = layers.Dropout(0.3)(layers.Dense(8)(hidden))
        with nb.stage(cluster="b"):
            hidden = layers.Dropout(0.3)(hidden)
            outputs = layers.Dense(2)(FailingLayer(failure)(hidden) if stage == 1 else hidden)
    made = keras.Model(inputs, outputs)
    made.compile(keras.optimizers.SGD(0.01, momentum=0.9, weight_decay=0.1), "mse", metrics=["mae"])
    return made


def list_state(made: keras.Model) -> list[np.ndarray]:
    """Weights, seeds, optimizer and metrics."""
    metrics = [variable for metric in made.metrics for variable in metric.variables]
    return [np.array(v) for v in [*made.variables, *made.optimizer.variables, *metrics]]


def train(made: keras.Model, batch: tuple[np.ndarray, np.ndarray]) -> None:
    """One step of `fit`; unlike `train_on_batch` it leaves the metrics as they are before."""
    made.make_train_function()(iter([tuple(map(tf.constant, batch))]))


def valid_batch() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.standard_normal((ROWS, 4)).astype("float32"), random.standard_normal((ROWS, 2)).astype("float32")


def failing_batch(micro_batch: int) -> tuple[np.ndarray, np.ndarray]:
    """One row, in this micro-batch, is too large."""
    x, y = valid_batch()
    x[micro_batch * ROWS // MICRO] = 1e4
    return x, y


@pytest.mark.parametrize(
    ("failure", "stage", "micro_batch"),
    [
        ("assert", 1, 1),
        *(
            pytest.param(*each, marks=pytest.mark.grid)
            for each in (("python", 0, 2), ("assert", 0, 0), ("division", 0, 2))
        ),
    ],
)
def test_failing_forward_restores_all_state(runner: str, failure: str, stage: int, micro_batch: int) -> None:
    failed, undisturbed = build_model(failure, stage), build_model(failure, stage)
    for each in (failed, undisturbed):
        train(each, valid_batch())
    before = list_state(failed)
    with pytest.raises(StageFailedError) as caught:
        train(failed, failing_batch(micro_batch))
    assert (caught.value.stage, caught.value.phase) == ("ab"[stage], 0)
    assert caught.value.micro_batch == micro_batch
    assert not caught.value.torn
    assert_same(before, list_state(failed), "exact")
    assert_same(list_state(undisturbed), list_state(failed), "exact")
    for each in (failed, undisturbed):
        train(each, valid_batch())
    assert_same(list_state(undisturbed), list_state(failed), "exact")


def test_failing_first_step_restores_all_state(runner: str) -> None:
    """Nothing has run yet: optimizer and metrics are made, and untouched."""
    failed, undisturbed = build_model("assert", 1), build_model("assert", 1)
    with pytest.raises(StageFailedError):
        train(failed, failing_batch(0))
    for each in (failed, undisturbed):
        train(each, valid_batch())
    assert_same(list_state(undisturbed), list_state(failed), "exact")


def make_step(where: str) -> tuple[Any, list[tf.Variable]]:
    """A custom step that fails in its backward, its update, or the second of its phases."""
    first, second = (tf.Variable(np.eye(4, dtype="float32") * n, name=f"v{n}") for n in (1, 2))

    @tf.custom_gradient
    def fail_in_backward(x: Any) -> Any:
        return tf.identity(x), divide_if_large

    @nb.function
    def step(x: Any, size: Any) -> Any:
        with nb.cluster(), nb.pipeline(2):
            with tf.GradientTape() as tape:
                with nb.stage(cluster="a"):
                    hidden = x @ first
                with nb.stage(cluster="b"):
                    hidden = fail_in_backward(hidden * size) if where == "backward" else hidden * size
                    loss = tf.reduce_mean((hidden @ second) ** 2)
            gradients = tape.gradient(loss, [first, second])
            first.assign_sub(0.01 * gradients[0])
            if where == "update":
                tf.debugging.assert_less(tf.reduce_max(tf.abs(first)), 50.0, message="update is too large")
            second.assign_sub(0.01 * gradients[1])
            if where == "phase":
                with nb.stage(cluster="b"):
                    return tf.reduce_mean(assert_small(x @ second @ first))
        return loss

    return step, [first, second]


def test_failing_backward_restores_variables(runner: str) -> None:
    step, variables = make_step("backward")
    x = np.ones((4, 4), "float32")
    step(x, np.float32(1.0))
    before = [v.numpy() for v in variables]
    with pytest.raises(StageFailedError) as caught:
        step(x * np.array([1, 1, 99, 1], "float32")[:, None], np.float32(50.0))
    assert (caught.value.stage, caught.value.micro_batch, caught.value.torn) == ("b", 1, False)
    assert "backward" in caught.value.what or "fused" in caught.value.what or "forward" in caught.value.what
    assert_same(before, [v.numpy() for v in variables], "exact")


def test_failing_update_is_torn(runner: str) -> None:
    step, _ = make_step("update")
    with pytest.raises(StageFailedError, match="torn") as caught:
        step(np.full((4, 4), -60.0, "float32"), np.float32(60.0))
    assert caught.value.torn
    assert "checkpoint" in str(caught.value)


def test_failure_after_the_first_update_is_torn(runner: str) -> None:
    """The second phase fails: what the first phase's update wrote cannot be taken back."""
    step, _ = make_step("phase")
    with pytest.raises(StageFailedError) as caught:
        step(np.full((4, 4), 30.0, "float32"), np.float32(0.01))
    assert caught.value.torn


def test_step_frees_boundaries_and_residuals() -> None:
    """After a step no boundary and no residual is alive, whichever schedule."""
    width = 37  # no other tensor of the test has it
    left: list[int] = []
    ended: list[LinkExchange] = []
    nb.init(links="1gbit,0ms")
    variables = [tf.Variable(tf.ones((width, width)) * 0.01) for _ in range(2)]

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(4):
            with nb.stage(cluster="a"):
                hidden = tf.tanh(tf.sin(x @ variables[0]))
            with nb.stage(cluster="b"):
                loss = tf.reduce_mean(tf.tanh(tf.sin(hidden @ variables[1])) ** 2)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    x = tf.ones((8, width))
    for _ in range(3):
        step(x)
        gc.collect()
        found = [t for t in gc.get_objects() if isinstance(t, tf.Tensor) and hasattr(t, "_numpy")]
        left.append(sum(t.shape.rank == 2 and t.shape[1] == width and t is not x for t in found))
        ended += [post for post in gc.get_objects() if isinstance(post, LinkExchange)]
    assert left == [0, 0, 0]
    assert not any(post._values for post in ended)  # every value was received


def test_failed_step_frees_its_tensors() -> None:
    nb.init(links="1gbit,0ms")
    made = build_model("assert", 1)
    train(made, valid_batch())

    def count_tensors() -> int:
        gc.collect()
        return sum(isinstance(t, tf.Tensor) and hasattr(t, "_numpy") for t in gc.get_objects())

    counts = []
    for _ in range(3):
        with pytest.raises(StageFailedError):
            train(made, failing_batch(1))
        counts.append(count_tensors())
    assert counts[1] == counts[2]


def stage_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith(("nebula", "link", "line")))


def test_shutdown_ends_all_threads() -> None:
    before = set(threading.enumerate())
    nb.init(links="1gbit,1ms")
    made = build_model("assert", 1)
    train(made, valid_batch())
    with pytest.raises(StageFailedError):
        train(made, failing_batch(1))
    assert stage_threads()
    nb.shutdown()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=2.0)
    assert [t.name for t in set(threading.enumerate()) - before if t.is_alive()] == []
