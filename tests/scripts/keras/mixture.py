"""A mixture of experts with top-k gating, and two towers that are joined."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.parity_harness import Cut
from tests.scripts.keras.script import classes, momentum, numbers, rows, script


class Mixture(layers.Layer):
    """Every row goes to the `k` experts that its gate likes best, weighted by a softmax over these."""

    def __init__(self, experts: int, k: int, width: int) -> None:
        super().__init__()
        self.k = k
        self.gate = layers.Dense(experts, use_bias=False)
        self.experts = [layers.Dense(width, activation="gelu") for _ in range(experts)]

    def build(self, shape: Any) -> None:
        for layer in (self.gate, *self.experts):
            layer.build(shape)

    def call(self, x: Any) -> Any:
        scores, chosen = ops.top_k(self.gate(x), self.k)
        slots = ops.one_hot(chosen, len(self.experts), dtype=scores.dtype)
        weights = ops.sum(ops.expand_dims(ops.softmax(scores), -1) * slots, axis=1)
        outputs = ops.stack([expert(x) for expert in self.experts], axis=1)
        return ops.sum(outputs * ops.expand_dims(weights, -1), axis=1)


@script(rows(), stages=(1, 2, 3))
def mixture(cut: Cut) -> Any:
    inputs = keras.Input((6,))
    with cut.program():
        with cut.at(0):
            hidden = layers.Dense(8, activation="tanh")(inputs)
        with cut.at(1):
            hidden = hidden + Mixture(4, 2, 8)(hidden)
        with cut.at(2):
            outputs = layers.Dense(3)(Mixture(3, 2, 8)(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(momentum(), "mse", metrics=["mae"])
    return model


def _pairs() -> dict[str, Any]:
    return {"x": {"left": numbers(6), "right": classes(9, 5, seed=2)}, "y": np.sign(numbers(1, seed=3))}


@script(_pairs, stages=(1, 2, 3), grid_only=True)
def towers(cut: Cut) -> Any:
    """One tower in each of the first two stages, a skip over the second, and what joins them in the third."""
    left, right = keras.Input((6,), name="left"), keras.Input((5,), dtype="int32", name="right")
    with cut.program():
        with cut.at(0):
            first = layers.Dense(8, activation="tanh")(left)
        with cut.at(1):
            second = layers.GRU(8)(layers.Embedding(9, 8, mask_zero=True)(right))
        with cut.at(2):
            outputs = layers.Dense(1)(layers.Concatenate()([first, second, first * second]))
    model = keras.Model([left, right], outputs)
    model.compile(momentum(), "hinge", metrics=["accuracy"])
    return model
