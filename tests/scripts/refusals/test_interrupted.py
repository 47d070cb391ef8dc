"""Ctrl-C in the middle of a step: variables are whole, and the next step runs. Every runner, every part of a step."""

from __future__ import annotations

import signal
import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.telling import batch, fit, functional

EMULATED = "1gbit,0ms"


def interrupt() -> None:
    """What Ctrl-C does, at this moment: the main thread gets a KeyboardInterrupt as soon as it runs Python."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def interrupting(x: Any, armed: list[bool]) -> Any:
    def python(value: Any) -> Any:
        if armed[0]:
            armed[0] = False
            interrupt()
        return value

    return tf.ensure_shape(tf.py_function(python, [x], tf.float32), x.shape)


def loop(where: str, armed: list[bool]) -> tuple[Any, list[tf.Variable]]:
    """A training step that is interrupted in its forward or between the two halves of its update."""
    weights = [tf.Variable(tf.eye(4) * number) for number in (1.0, 2.0)]

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster():
            with nb.stage(cluster="a"):
                hidden = x @ weights[0]
                hidden = interrupting(hidden, armed) if where == "forward" else hidden
            with nb.stage(cluster="b"):
                loss = tf.reduce_mean((hidden @ weights[1]) ** 2)
        gradients = tape.gradient(loss, weights)
        weights[0].assign_sub(0.01 * gradients[0])
        late = interrupting(gradients[1], armed) if where == "update" else gradients[1]
        weights[1].assign_sub(0.01 * late)
        return loss

    return step, weights


@pytest.mark.parametrize("links", [None, EMULATED])
@pytest.mark.parametrize("where", ["forward", "update"])
def test_variables_are_whole_and_the_next_step_runs(where: str, links: str | None) -> None:
    if links is not None:
        nb.init(links=links)
    x = tf.constant(batch()[0])
    armed = [False]
    step, weights = loop(where, armed)
    step(x)
    before = [weight.numpy() for weight in weights]
    armed[0] = True
    with pytest.raises(KeyboardInterrupt):
        step(x)
    moved = [not np.array_equal(weight.numpy(), was) for weight, was in zip(weights, before, strict=True)]
    assert moved in ([True, True], [False, False]), "one half of an update"
    assert moved == [where == "update"] * 2 or links is None
    losses = [float(step(x)) for _ in range(2)]
    assert losses[1] < losses[0]


def test_keras_goes_on_after_an_interrupt() -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if step == 1:
                interrupt()

    model, twin = functional(micro=2), functional(scoped=False)
    with pytest.raises(KeyboardInterrupt):
        fit(model, rows=24, callbacks=[Stop()])
    x, y = batch(24)
    for start in (0, 8):
        twin.train_on_batch(x[start : start + 8], y[start : start + 8])
    for one, other in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    assert fit(model)["loss"][0] == pytest.approx(fit(twin)["loss"][0], rel=2e-5)
