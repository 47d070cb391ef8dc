"""Refused loops: each with its own error, the user's line, and the line to write instead."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.loops.loop_scripts import Cut, chain, descend, mse, opened, rows, weights
from whale_nebula.errors import (
    BatchCoupledError,
    GradientError,
    NebulaError,
    NebulaWarning,
    PlacementError,
    StageOrderError,
)

SCRIPTS = opened()
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
def test_rows_that_depend_on_each_other(name: str) -> None:
    """Exact with one micro-batch (see the book), refused by op and line with more."""
    with pytest.raises(BatchCoupledError, match=COUPLED[name]) as caught:
        SCRIPTS[name].run(Cut(2, 2))
    assert ".py:" in caught.value.line
    assert "nb.pipeline(micro_batch=1)" in caught.value.mends


def test_one_seed_generator_in_two_parts() -> None:
    with pytest.raises(PlacementError, match="read in that of"):
        SCRIPTS["forwards.keras_seeds_in_two_parts"].run(Cut(2, 2))


def stepped(inner: Any, *, micro: int = 1) -> Any:
    """A step of two stages in which `inner(loss, x, w)` says what happens next."""
    w, cut = weights(), Cut(2, micro)

    @nb.function
    def step(x: Any, y: Any) -> Any:
        with cut.program():
            loss = mse(y, chain(cut, x, w))
            return inner(loss, x, w)

    return step(X, Y)


def twice(loss: Any, x: Any, w: Any) -> Any:
    (slope,) = tf.gradients(loss, [x])
    return tf.gradients(tf.reduce_sum(slope**2), w)


def curvature(loss: Any, x: Any, w: Any) -> Any:
    return tf.hessians(loss, w[:1])


@pytest.mark.parametrize("inner", [twice, curvature])
def test_tf_gradients_of_a_gradient(inner: Any) -> None:
    with pytest.raises(GradientError, match="a value that depends on a gradient") as caught:
        stepped(inner)
    assert "test_refused.py" in caught.value.where
    assert "tf.GradientTape() as outer" in caught.value.mend


def test_a_gradient_that_was_stopped_may_go_on() -> None:
    def stopped(loss: Any, x: Any, w: Any) -> Any:
        (slope,) = tf.gradients(loss, [w[2]])
        return tf.gradients(loss * tf.norm(tf.stop_gradient(slope)), w)

    found = stepped(stopped)
    assert all(gradient is not None for gradient in found)


def test_an_inner_step_goes_back_to_the_first_stage() -> None:
    """MAML without names for the second pass; the book has it with the mend."""
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


def test_a_batch_that_the_step_takes_itself_is_not_cut() -> None:
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
    assert "not the iterator" in said[0].message.mend
    assert nb.last_report().micro_batches == 1


def test_what_is_left_out_of_the_way_warns_of_nothing() -> None:
    """A step that is given its batch does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NebulaWarning)
        SCRIPTS["edited.scaled"].run(Cut(2, 2))


def test_every_refusal_is_one_of_ours() -> None:
    assert issubclass(GradientError, NebulaError)
