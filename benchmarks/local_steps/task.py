"""The task: 20 million weights that learn the outputs of a small teacher, on rows that never repeat."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

ROWS, INPUTS, WIDTH, OUTPUTS = 64, 64, 2048, 16
HELD_OUT_ROWS, NOISE = 2048, 0.5


class Teacher:
    """Draws rows and their targets, with noise: the loss of a perfect student is 0.25."""

    def __init__(self, seed: int) -> None:
        fixed = np.random.default_rng(99)
        self._in = fixed.normal(size=(INPUTS, 16)).astype("float32") / 8.0
        self._out = fixed.normal(size=(16, OUTPUTS)).astype("float32") / 4.0
        self._rng = np.random.default_rng(seed)

    def draw_rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows with their targets."""
        x = self._rng.normal(size=(count, INPUTS)).astype("float32")
        noise = NOISE * self._rng.normal(size=(count, OUTPUTS)).astype("float32")
        return x, np.tanh(2.0 * x @ self._in) @ self._out + noise


def make_model(seed: int, rate: float) -> keras.Model:
    """Seven dense layers."""
    keras.utils.set_random_seed(seed)
    layers: list[Any] = [keras.Input((INPUTS,))]
    layers += [keras.layers.Dense(WIDTH, activation="relu") for _ in range(6)]
    made = keras.Sequential([*layers, keras.layers.Dense(OUTPUTS)])
    made.compile(keras.optimizers.Adam(rate), "mse")
    return made


def make_batches(seed: int, steps: int) -> tf.data.Dataset:
    """The same rows in every process."""
    teacher = Teacher(seed)
    forms = tf.TensorSpec((ROWS, INPUTS)), tf.TensorSpec((ROWS, OUTPUTS))
    return tf.data.Dataset.from_generator(
        lambda: (teacher.draw_rows(ROWS) for _ in range(steps)), output_signature=forms
    )


class Clock(keras.callbacks.Callback):
    """Callback that records the end of each step, and switches the line between slow and free every so many steps.

    Blocks after the first, which is not counted, alternate as slow, free, free, slow ...
    """

    def __init__(self, steps: int, lines: Sequence[str], change: Callable[[str], None]) -> None:
        super().__init__()
        self._steps, self._lines, self._change = steps, lines, change
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record the end of a step."""
        self.ends.append(time.perf_counter())
        if len(self.ends) % self._steps == 0:
            self._change(self._lines[_find_line_index(len(self.ends) // self._steps - 1)])

    def blocks(self) -> tuple[list[float], list[float]]:
        """Seconds of each block over the first and over the second line."""
        marks = self.ends[self._steps - 1 :: self._steps]
        found: tuple[list[float], list[float]] = [], []
        for number, (begin, end) in enumerate(itertools.pairwise(marks)):
            found[_find_line_index(number)].append(end - begin)
        return found


def _find_line_index(block: int) -> int:
    return (0, 1, 1, 0)[block % 4]


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of both kinds of runs."""
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--outer", default="average")
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--rate", type=float, default=3e-4)
    return parser
