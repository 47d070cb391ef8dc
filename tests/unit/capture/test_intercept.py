"""`tape.gradient` is intercepted only while a step is captured, in the thread that traces."""

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.capture.patches import BUILDING_PATCHES, TRACING_PATCHES, apply_tracing_patches
from whale_nebula.capture.tracing import Tracing, current_trace, tracing
from whale_nebula.errors import GradientError

ORIGINAL, ENTER = tf.GradientTape.gradient, tf.GradientTape.__enter__


def compute_slope() -> float:
    x = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        y = x * x
    return float(tape.gradient(y, x))


def list_applied_patches() -> list[str]:
    """The patches that are on."""
    return [
        str(each)
        for each in (*BUILDING_PATCHES, *TRACING_PATCHES)
        if getattr(each.owner, each.name) is each.replacement
    ]


def test_patches_are_applied_during_a_trace_only() -> None:
    assert not list_applied_patches()
    with apply_tracing_patches():
        with apply_tracing_patches():
            assert list_applied_patches() == [str(each) for each in TRACING_PATCHES]
        assert list_applied_patches() == [str(each) for each in TRACING_PATCHES]
    assert not list_applied_patches()
    with nb.stage(cluster="a"):
        keras.layers.Dense(1)(keras.Input((2,)))
        assert list_applied_patches() == [str(each) for each in BUILDING_PATCHES]
    assert not list_applied_patches()
    assert tf.GradientTape.gradient is ORIGINAL
    assert tf.GradientTape.__enter__ is ENTER


def test_patches_are_removed_when_the_step_raises() -> None:
    @nb.function
    def step(x: Any) -> Any:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        step(np.ones(2, "float32"))
    assert tf.GradientTape.gradient is ORIGINAL
    assert not list_applied_patches()
    assert current_trace() is None
    assert any("captured" in note for note in caught.value.__notes__)


def test_other_threads_use_the_original_gradient() -> None:
    found: list[float] = []
    with apply_tracing_patches(), tracing(Tracing(tf.Graph(), [])):
        assert current_trace() is not None
        thread = threading.Thread(target=lambda: found.append(compute_slope()))
        thread.start()
        thread.join(timeout=30)
    assert found == [6.0]


def test_eager_code_uses_the_original_gradient() -> None:
    with apply_tracing_patches(), tracing(Tracing(tf.Graph(), [])):
        assert compute_slope() == 6.0


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("method", ["gradient", "jacobian"])
def test_tape_used_after_the_step_is_refused(persistent: bool, method: str) -> None:
    weight, kept = tf.Variable([[1.0], [2.0]]), []

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape(persistent=persistent) as tape:
            with nb.stage(cluster="a"):
                hidden = x @ weight
            with nb.stage(cluster="b"):
                loss = tf.reduce_mean(hidden)
        slope = tape.gradient(loss, weight) if persistent else None
        kept.append((tape, loss))
        return loss if slope is None else loss + 0.0 * tf.reduce_sum(slope)

    assert float(step(tf.ones([4, 2]))) == 3.0
    tape, loss = kept[-1]
    with pytest.raises(GradientError, match="a tape of a step is used after the step") as caught:
        getattr(tape, method)(loss, weight)
    assert caught.value.where.startswith(f"{__file__}:")
    assert "return loss, tape.gradient(loss, variables)" in caught.value.mend


def test_tape_of_a_step_is_reusable() -> None:
    tape, variable = tf.GradientTape(persistent=True), tf.Variable(3.0)

    @nb.function
    def step(x: Any) -> Any:
        with tape, nb.stage(cluster="a"):
            loss = tf.reduce_sum(x * variable)
        return tape.gradient(loss, variable)

    assert float(step(tf.ones([2]))) == 2.0
    assert float(step(tf.ones([2, 2]))) == 4.0
    with tape:
        square = variable * variable
    assert float(tape.gradient(square, variable)) == 6.0
