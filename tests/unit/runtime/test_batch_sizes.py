"""Ops with sizes from the batch's own shape couple no rows; refusals give the true reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import BatchCoupledError, CaptureError, NebulaWarning, StageFailedError
from whale_nebula.ir.graph import Graph
from whale_nebula.passes.rules import COUPLED, Fold, verdict
from whale_nebula.passes.rules.registry import BESIDE, FIXED
from whale_nebula.runtime.step.rollback import Guard

RANDOM = np.random.default_rng(0)
X = RANDOM.random((8, 5, 4)).astype("float32")


def test_a_program_that_updates_nothing_is_never_torn() -> None:
    for updates in (True, False):
        guard = Guard({}, [], updates=updates)
        guard.begin()
        with pytest.raises(StageFailedError) as caught, guard.once("update", 0):
            raise tf.errors.InvalidArgumentError(None, None, "Incompatible shapes")
        assert caught.value.torn is updates
        assert ("torn" in caught.value.what) is updates


# ---------------------------------------------------------------------- words of refusals
def loss_of(body: Callable[[Any], Any]) -> str:
    """What is said of a step with this loss when it is cut."""
    weights = tf.Variable(tf.ones((4, 4)))

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.stage(name="one"):
            loss = body(x @ weights)
        return tape.gradient(loss, weights)

    with nb.pipeline(micro_batch=4), pytest.raises(BatchCoupledError) as caught:
        step(X)
    return str(caught.value)


HEADLINES = {
    "no rule": (lambda h: tf.reduce_mean(tf.linalg.sqrtm(h[:, :4, :4])), "is not known: there is no rule for op type"),
    "undecided": (
        lambda h: tf.reduce_mean(tf.tensor_scatter_nd_add(h, [[0], [1]], tf.ones((2, 5, 4)))),
        "is not known: no rule",
    ),
    "coupled": (lambda h: tf.reduce_mean(h - tf.reduce_mean(h, 0)) ** 2, "neither a sum nor a mean|depend on each"),
}


@pytest.mark.parametrize("case", HEADLINES)
def test_a_missing_rule_is_not_called_coupled_rows(case: str) -> None:
    body, headline = HEADLINES[case]
    said = loss_of(body).partition("\n")[0]
    assert any(part in said for part in headline.split("|")), said
    assert ("depend on each other" in said) is False or case == "coupled"


def test_a_fixed_number_of_rows_beside_the_batch_offers_what_helps() -> None:
    """`coupled="allow"` would fail with the first micro-batch; rows as many as the batch's do not."""
    weights = tf.Variable(tf.ones(5))
    for reason in (BESIDE, FIXED):
        refusal = verdict(Fold(COUPLED, reason=reason), Graph(()))
        assert refusal is not None and "tf.fill([tf.shape(x)[0], 1], value)" in refusal.mend
        assert "allow" not in refusal.mend

    @nb.function
    def decode(x: Any) -> Any:
        with nb.stage(name="one"):
            return tf.concat([tf.fill([tf.shape(x)[0], 1], 1.0), x * weights], axis=1)

    with nb.pipeline(micro_batch=4):
        np.testing.assert_array_equal(decode(X[:, :, 0]), np.concatenate([np.ones((8, 1)), X[:, :, 0]], 1))


def test_an_argument_with_one_axis_that_is_no_batch_is_told_to_be_named() -> None:
    def make_step() -> Callable[[Any], Any]:
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])

        def step(state: Any) -> Any:
            with nb.stage(cluster="gpu"):
                return tf.reduce_sum(model(tf.expand_dims(state, 0)))

        return step

    with pytest.raises(CaptureError, match="cannot be traced") as caught:
        nb.function(make_step())(tf.ones(4))
    assert '@nb.function(whole=("state",))' in caught.value.mend
    assert np.isfinite(float(nb.function(whole=("state",))(make_step())(tf.ones(4))))


def test_a_step_without_a_batch_is_not_said_to_have_no_rows() -> None:
    @nb.function
    def step() -> Any:
        with nb.stage(name="one"):
            return tf.reduce_sum(tf.ones((4, 4)))

    with nb.pipeline(micro_batch=4), pytest.warns(NebulaWarning, match="the step has no batch: it runs as one"):
        assert float(step()) == 16.0
