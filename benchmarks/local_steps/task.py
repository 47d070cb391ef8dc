"""What is trained: 20 million weights that learn to do as a small teacher does, on rows that never come twice."""

from __future__ import annotations

import argparse
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

ROWS, INPUTS, WIDTH, OUTPUTS = 64, 64, 2048, 16
HELD, NOISE = 2048, 0.5


class Teacher:
    """Draws rows, and says what they should give, with noise: the loss of who knows all that it knows is 0.25."""

    def __init__(self, seed: int) -> None:
        fixed = np.random.default_rng(99)
        self._in = fixed.normal(size=(INPUTS, 16)).astype("float32") / 8.0
        self._out = fixed.normal(size=(16, OUTPUTS)).astype("float32") / 4.0
        self._rng = np.random.default_rng(seed)

    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """So many rows, and what they give."""
        x = self._rng.normal(size=(count, INPUTS)).astype("float32")
        noise = NOISE * self._rng.normal(size=(count, OUTPUTS)).astype("float32")
        return x, np.tanh(2.0 * x @ self._in) @ self._out + noise


def model(seed: int, rate: float) -> keras.Model:
    """Seven dense layers."""
    keras.utils.set_random_seed(seed)
    layers: list[Any] = [keras.Input((INPUTS,))]
    layers += [keras.layers.Dense(WIDTH, activation="relu") for _ in range(6)]
    made = keras.Sequential([*layers, keras.layers.Dense(OUTPUTS)])
    made.compile(keras.optimizers.Adam(rate), "mse")
    return made


def batches(seed: int, steps: int) -> tf.data.Dataset:
    """The same rows in every process."""
    teacher = Teacher(seed)
    forms = tf.TensorSpec((ROWS, INPUTS)), tf.TensorSpec((ROWS, OUTPUTS))
    return tf.data.Dataset.from_generator(lambda: (teacher.rows(ROWS) for _ in range(steps)), output_signature=forms)


class Clock(keras.callbacks.Callback):
    """When each step ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take it down."""
        self.ends.append(time.perf_counter())

    def seconds(self, begin: int) -> float:
        """From the end of one step to that of the last."""
        return self.ends[-1] - self.ends[begin]


def options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """What both kinds of runs are told."""
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--outer", default="average")
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--rate", type=float, default=3e-4)
    return parser
