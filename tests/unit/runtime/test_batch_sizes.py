"""Ops that take sizes from the batch's own shape couple no rows; what is refused is refused in true words."""

from __future__ import annotations

import contextlib
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
PLACES = RANDOM.integers(0, 5, (8, 3, 1)).astype("int32")
IMAGES = RANDOM.random((8, 6, 6, 1)).astype("float32")


class Take(keras.layers.Layer):
    """What a masked language model's head does: the hidden states at some positions."""

    def call(self, x: Any, places: Any) -> Any:
        return keras.ops.take_along_axis(x, places, axis=1)


def scope(cut: bool, made: Callable[[], Any]) -> contextlib.AbstractContextManager[Any]:
    return made() if cut else contextlib.nullcontext()


def masked_model(cut: bool) -> tuple[list[float], np.ndarray]:
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    inputs, places = keras.Input((5, 4)), keras.Input((None, 1), dtype="int32")
    with scope(cut, lambda: nb.pipeline(micro_batch=4)):
        with scope(cut, lambda: nb.stage(cluster="gpu")):
            hidden = keras.layers.Dense(4)(inputs)
        with scope(cut, lambda: nb.stage(cluster="npu")):
            outputs = keras.layers.Dense(2)(Take()(hidden, places))
    model = keras.Model([inputs, places], outputs)
    model.compile("adam", "mse")
    y = np.ones((8, 3, 2), "float32")
    losses = model.fit([X, PLACES], y, epochs=2, verbose=0).history["loss"]
    return losses, model.predict([X, PLACES], verbose=0)


class Critic(keras.Model):
    """A gradient penalty through a padding, as in WGAN-GP: its gradient is a slice by the batch's own sizes."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.cut = cut
        self.pad, self.conv = keras.layers.ZeroPadding2D(2), keras.layers.Conv2D(3, 3, activation="tanh")
        self.flat, self.out = keras.layers.Flatten(), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        with scope(self.cut, lambda: nb.stage(cluster="gpu")):
            hidden = self.conv(self.pad(x))
        with scope(self.cut, lambda: nb.stage(cluster="npu")):
            return self.out(self.flat(hidden))

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                scores = self(x)
            norms = tf.sqrt(tf.reduce_sum(inner.gradient(scores, x) ** 2, [1, 2, 3]) + 1e-9)
            loss = tf.reduce_mean(scores) + tf.reduce_mean((norms - 1.0) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"penalised": loss}


def critic(cut: bool) -> tuple[list[float], np.ndarray]:
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model = Critic(cut)
    model.compile("sgd")
    with scope(cut, lambda: nb.pipeline(micro_batch=4)):
        losses = model.fit(IMAGES, epochs=2, verbose=0, shuffle=False).history["penalised"]
    return losses, np.concatenate([each.numpy().ravel() for each in model.weights])


@pytest.mark.parametrize("train", [masked_model, critic])
def test_sizes_of_the_batch_itself_couple_no_rows(train: Callable[[bool], tuple[list[float], np.ndarray]]) -> None:
    losses, state = train(False)
    found_losses, found = train(True)
    np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
    np.testing.assert_allclose(found, state, rtol=1e-4, atol=1e-6)


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
