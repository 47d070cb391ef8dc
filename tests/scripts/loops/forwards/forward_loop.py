"""A loop of three parts, of which a script defines the first two."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.scripts.loops.loop_scripts import Cut, Loop, mse, train_loop, weights


def make_forward_loop(
    cut: Cut, first: Any, second: Any = None, *, w: Any = None, more: Any = (), batches: Any = None
) -> Loop:
    """A loop whose first and second parts are `first(x)` and `second(hidden)`; the third is a matrix."""
    w = weights() if w is None else w
    second = second or (lambda hidden: tf.tanh(hidden @ w[1]))

    @train_loop(cut, w, more, calls=batches, unconnected="zero")
    def loop(x: Any, y: Any) -> Any:
        with cut.at(0):
            hidden = first(x)
        with cut.at(1):
            hidden = second(hidden)
        with cut.at(2):
            return mse(y, hidden @ w[2])

    return loop
