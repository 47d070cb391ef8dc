"""A loop of three parts, of which a script writes the first two."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.scripts.loops.book import Cut, Loop, descend, mse, rows, weights


def within(cut: Cut, first: Any, second: Any = None, *, w: Any = None, more: Any = (), batches: Any = None) -> Loop:
    """A loop whose first and second parts are `first(x)` and `second(hidden)`; the third is a matrix."""
    w = weights() if w is None else w
    second = second or (lambda hidden: tf.tanh(hidden @ w[1]))

    @cut.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape, cut.program():
            with cut.at(0):
                hidden = first(x)
            with cut.at(1):
                hidden = second(hidden)
            with cut.at(2):
                loss = mse(y, hidden @ w[2])
        gradients = tape.gradient(loss, w, unconnected_gradients="zero")
        descend(w, gradients)
        return loss, gradients

    return Loop(step, [*w, *more], batches or rows())
