"""Refused loops: each with its own error, the user's line, and the line to write instead."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.loops.loop_scripts import Cut, chain, descend, load_scripts, mse, rows, weights
from whale_nebula.errors import (
    BatchCoupledError,
    GradientError,
    NebulaError,
    NebulaWarning,
    PlacementError,
    StageOrderError,
)

SCRIPTS = load_scripts()
X, Y = rows(1)[0]
COUPLED = {
    "edited.gradient_in_a_cond": "mixed with a number of rows",
    "forwards.scan_over_rows": "as many elements as the batch has rows",
    "forwards.map_over_rows": "once for each row",
    "forwards.cond_on_the_batch": "different branches of a condition",
    "forwards.batch_norm_by_hand": "mixed with a mean",
    "forwards.memory_bank": "combined with a tensor that is not part",
    "forwards.hard_examples": "TopKV2 over the batch",
    "forwards.extremes_returned": "over the batch",
}


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_rows_in_scripts_are_refused(name: str) -> None:
    """Exact with one micro-batch (see `LOOP_SCRIPTS`), refused by op and line with more."""
    with pytest.raises(BatchCoupledError, match=COUPLED[name]) as caught:
        SCRIPTS[name].run(Cut(2, 2))
    assert ".py:" in caught.value.line
    assert "nb.pipeline(micro_batch=1)" in caught.value.mends


def test_seed_generator_in_two_stages_is_refused() -> None:
    with pytest.raises(PlacementError, match="read in that of"):
        SCRIPTS["forwards.keras_seeds_in_two_parts"].run(Cut(2, 2))


def make_second_order_step(inner: Any, *, micro: int = 1) -> Any:
    """A step of two stages in which `inner(loss, x, w)` says what happens next."""
    w, cut = weights(), Cut(2, micro)

    @nb.function
    def step(x: Any, y: Any) -> Any:
        with cut.program():
            loss = mse(y, chain(cut, x, w))
            return inner(loss, x, w)

    return step(X, Y)


def second_order_by_gradients(loss: Any, x: Any, w: Any) -> Any:
    (slope,) = tf.gradients(loss, [x])
    return tf.gradients(tf.reduce_sum(slope**2), w)


def second_order_by_hessian(loss: Any, x: Any, w: Any) -> Any:
    return tf.hessians(loss, w[:1])


@pytest.mark.parametrize("inner", [second_order_by_gradients, second_order_by_hessian])
def test_tf_gradients_of_a_gradient_is_refused(inner: Any) -> None:
    with pytest.raises(GradientError, match="a value that depends on a gradient") as caught:
        make_second_order_step(inner)
    assert "test_refused.py" in caught.value.where
    assert "tf.GradientTape() as outer" in caught.value.mend


def test_tf_gradients_of_a_stopped_gradient_is_allowed() -> None:
    def stopped(loss: Any, x: Any, w: Any) -> Any:
        (slope,) = tf.gradients(loss, [w[2]])
        return tf.gradients(loss * tf.norm(tf.stop_gradient(slope)), w)

    found = make_second_order_step(stopped)
    assert all(gradient is not None for gradient in found)


def test_inner_step_returning_to_the_first_stage_is_refused() -> None:
    """MAML without names for the second pass; `LOOP_SCRIPTS` has it with the fix."""
    w, cut = weights(), Cut(2)

    @nb.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as outer, cut.program():
            with tf.GradientTape() as inner:
                first = mse(y, chain(cut, x, w))
            fast = [v - 0.1 * g for v, g in zip(w, inner.gradient(first, w), strict=True)]
            loss = mse(y, chain(cut, x, fast))
        return outer.gradient(loss, w)

    with pytest.raises(StageOrderError, match="comes after it") as caught:
        step(X, Y)
    assert "name=" in caught.value.mend


def test_batch_read_inside_the_step_warns_and_is_not_divided() -> None:
    """It is exact, as one micro-batch, and says so."""
    w, cut = weights(), Cut(2, 2)
    batches = iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(6))

    @nb.function
    def step(source: Any) -> Any:
        x, y = next(source)
        with tf.GradientTape() as tape, cut.program():
            loss = mse(y, chain(cut, x, w))
        descend(w, tape.gradient(loss, w))
        return loss

    with pytest.warns(NebulaWarning, match="no argument of the step has rows") as said:
        step(batches)
    (found,) = [each.message for each in said if each.category is NebulaWarning]
    assert "not the iterator" in found.mend
    assert nb.last_report().micro_batches == 1


def test_omitted_argument_does_not_warn() -> None:
    """A step that is given its batch does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NebulaWarning)
        SCRIPTS["edited.scaled"].run(Cut(2, 2))


def test_gradient_error_is_a_nebula_error() -> None:
    assert issubclass(GradientError, NebulaError)
