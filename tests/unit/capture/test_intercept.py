"""`tape.gradient` is ours only while a step of ours is traced, in the thread that traces."""

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.capture.intercept import intercepted
from whale_nebula.capture.keras_replay import replaying
from whale_nebula.capture.tracing import Tracing, current, tracing
from whale_nebula.errors import NebulaError, StaticBatchError

ORIGINAL = tf.GradientTape.gradient


def square_slope() -> float:
    x = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        y = x * x
    return float(tape.gradient(y, x))


def test_it_is_taken_off_again() -> None:
    with intercepted():
        assert tf.GradientTape.gradient is not ORIGINAL
        with intercepted():
            pass
        assert tf.GradientTape.gradient is not ORIGINAL
    assert tf.GradientTape.gradient is ORIGINAL


def test_it_is_taken_off_when_the_step_raises() -> None:
    @nb.function
    def step(x: Any) -> Any:
        raise ValueError("mine")

    run_through = keras.src.ops.function.Function._run_through_graph
    with pytest.raises(ValueError, match="mine") as caught:
        step(np.ones(2, "float32"))
    assert tf.GradientTape.gradient is ORIGINAL
    assert keras.src.ops.function.Function._run_through_graph is run_through
    assert current() is None
    assert any("captured" in note for note in caught.value.__notes__)


def test_other_threads_get_tensorflows_own() -> None:
    found: list[float] = []
    with intercepted(), tracing(Tracing(graph=tf.Graph())):
        assert current() is not None
        thread = threading.Thread(target=lambda: found.append(square_slope()))
        thread.start()
        thread.join(timeout=30)
    assert found == [6.0]


def test_eager_code_in_the_same_thread_gets_tensorflows_own() -> None:
    with intercepted(), tracing(Tracing(graph=tf.Graph())):
        assert square_slope() == 6.0


def test_replaying_is_taken_off_again() -> None:
    function = keras.src.ops.function.Function
    before = function._run_through_graph, function._get_operation_for_node, keras.Sequential.call
    with replaying():
        assert function._run_through_graph is not before[0]
    assert (function._run_through_graph, function._get_operation_for_node, keras.Sequential.call) == before


def test_errors_of_ours_are_not_wrapped() -> None:
    """TensorFlow rewrites errors from traced code; ours come out as they were raised."""

    @nb.function
    def step(x: Any) -> Any:
        with nb.stage(cluster="a"), nb.stage(cluster="b"):
            return x

    with pytest.raises(NebulaError) as caught:
        step(np.ones(2, "float32"))
    assert type(caught.value).__module__ == "whale_nebula.errors"
    assert caught.value.mend


def test_a_static_batch_is_told_from_a_mistake_with_none() -> None:
    @nb.function
    def baked(x: Any) -> Any:
        return tf.zeros((x.shape[0] + 1, 2))

    @nb.function
    def mistaken(x: Any) -> Any:
        nothing = None
        return x * (nothing + 1)

    with pytest.raises(StaticBatchError, match=r"test_intercept\.py"):
        baked(np.ones((2, 2), "float32"))
    with pytest.raises(TypeError):
        mistaken(np.ones((2, 2), "float32"))


def test_what_tensorflow_calls_bad_stays_so() -> None:
    @nb.function
    def step(x: Any) -> Any:
        with nb.stage(cluster="a"):
            return tf.matmul(x, tf.ones((3, 3)))

    with pytest.raises(ValueError, match="Dimensions must be equal"):
        step(np.ones((2, 2), "float32"))
