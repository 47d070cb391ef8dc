"""A scope inside what TensorFlow runs as one op is refused at the scope's own line, with the line to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.error_checks import marked, told
from whale_nebula.errors import BoundaryInBodyError

layers = keras.layers


def staged(h: Any) -> Any:
    with nb.stage(cluster="b"):  # mark: staged
        return h * 2.0


def step(body: Callable[[Any], Any]) -> Any:
    @nb.function
    def run(x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="a"):
                h = x + 1.0
            return body(h)

    return run(tf.ones([4, 3]))


@pytest.mark.parametrize(
    ("body", "inside", "mend"),
    [
        (lambda h: tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, staged(h)), [0, h]), "a loop", "whole loop"),
        (lambda h: tf.map_fn(staged, h), "a loop", "whole loop"),
        (lambda h: tf.scan(lambda _, row: staged(row), h), "a loop", "whole loop"),
        (lambda h: tf.cond(h[0, 0] > 0, lambda: staged(h), lambda: h), "a branch", "whole condition"),
        (lambda h: tf.vectorized_map(staged, h), "tf.vectorized_map", "around the tf.vectorized_map"),
    ],
)
def test_a_scope_in_a_body(body: Any, inside: str, mend: str) -> None:
    told(BoundaryInBodyError, lambda: step(body), f"is entered inside {inside}", mend, at=marked("staged"))


def test_a_python_loop_that_autograph_makes_one() -> None:
    def body(h: Any) -> Any:
        for _ in tf.range(3):
            with nb.stage(cluster="b"):  # mark: python loop
                h = h * 2.0
        return h

    told(BoundaryInBodyError, lambda: step(body), "a loop", at=marked("python loop"))


class Cell(layers.Layer):
    """An RNN's cell whose stage would be entered once for each word."""

    state_size = 3

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3))

    def call(self, x: Any, states: Any) -> Any:
        with nb.stage(cluster="b"):  # mark: cell
            h = x @ self.kernel + states[0]
        return h, [h]


class Inner(layers.Layer):
    """A layer that says itself which shape it gives, so that Keras does not call it before it trains."""

    def compute_output_shape(self, shape: Any) -> Any:
        return shape

    def call(self, x: Any) -> Any:
        with nb.stage(cluster="b"):  # mark: inner
            return x * 2.0


def trained(layer: Any, words: int | None = 5) -> Any:
    inputs = keras.Input((words, 3))
    hidden = layers.Dense(1)(layer(inputs))
    model = keras.Model(inputs, layers.GlobalAveragePooling1D()(hidden) if len(hidden.shape) == 3 else hidden)
    model.compile("sgd", "mse")
    return model.fit(np.ones((4, 5, 3), "float32"), np.ones((4, 1), "float32"), verbose=0)


def test_in_an_rnns_cell() -> None:
    told(BoundaryInBodyError, lambda: trained(layers.RNN(Cell())), "an RNN", at=marked("cell"))


def test_in_time_distributed_of_known_length_it_is_a_loop_of_pythons() -> None:
    trained(layers.TimeDistributed(Inner()))
    assert "b" in nb.last_report().stages


def test_the_mend_works() -> None:
    def body(h: Any) -> Any:
        with nb.stage(cluster="b"):
            return tf.map_fn(lambda row: row * 2.0, h)

    assert step(body).numpy().tolist() == [[4.0] * 3] * 4
    assert list(nb.last_report().stages) == ["a", "b"]
