"""A scope inside what TensorFlow runs as one op is refused at the scope's own line, with the line to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.error_checks import check_error, find_marked_line
from whale_nebula.errors import BoundaryInBodyError

layers = keras.layers


def double_in_stage(h: Any) -> Any:
    with nb.stage(cluster="b"):  # mark: staged
        return h * 2.0


def run_step(body: Callable[[Any], Any]) -> Any:
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
        (
            lambda h: tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, double_in_stage(h)), [0, h]),
            "a loop",
            "whole loop",
        ),
        (lambda h: tf.map_fn(double_in_stage, h), "a loop", "whole loop"),
        pytest.param(
            lambda h: tf.scan(lambda _, row: double_in_stage(row), h), "a loop", "whole loop", marks=pytest.mark.grid
        ),
        (lambda h: tf.cond(h[0, 0] > 0, lambda: double_in_stage(h), lambda: h), "a branch", "whole condition"),
        (lambda h: tf.vectorized_map(double_in_stage, h), "tf.vectorized_map", "around the tf.vectorized_map"),
    ],
)
def test_scope_in_a_body_is_refused(body: Any, inside: str, mend: str) -> None:
    check_error(
        BoundaryInBodyError, lambda: run_step(body), f"is entered inside {inside}", mend, at=find_marked_line("staged")
    )


def test_scope_in_an_autograph_loop_is_refused() -> None:
    def body(h: Any) -> Any:
        for _ in tf.range(3):
            with nb.stage(cluster="b"):  # mark: python loop
                h = h * 2.0
        return h

    check_error(BoundaryInBodyError, lambda: run_step(body), "a loop", at=find_marked_line("python loop"))


def test_scope_in_a_loop_over_a_dataset_is_refused() -> None:
    dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0])

    def body(h: Any) -> Any:
        for scale in dataset:
            with nb.stage(cluster="b"):  # mark: dataset loop
                h = h * scale
        return h

    where = find_marked_line("dataset loop")
    check_error(BoundaryInBodyError, lambda: run_step(body), "a loop over a dataset", "step(*batch)", at=where)


class Cell(layers.Layer):
    """An RNN's cell whose stage would be entered once for each word."""

    state_size = 3

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3))

    def call(self, x: Any, states: Any) -> Any:
        with nb.stage(cluster="b"):  # mark: cell
            h = x @ self.kernel + states[0]
        return h, [h]


class LayerWithStage(layers.Layer):
    """A layer that says itself which shape it gives, so that Keras does not call it before it trains."""

    def compute_output_shape(self, shape: Any) -> Any:
        return shape

    def call(self, x: Any) -> Any:
        with nb.stage(cluster="b"):  # mark: inner
            return x * 2.0


def train_layer(layer: Any, words: int | None = 5) -> Any:
    inputs = keras.Input((words, 3))
    hidden = layers.Dense(1)(layer(inputs))
    model = keras.Model(inputs, layers.GlobalAveragePooling1D()(hidden) if len(hidden.shape) == 3 else hidden)
    model.compile("sgd", "mse")
    return model.fit(np.ones((4, 5, 3), "float32"), np.ones((4, 1), "float32"), verbose=0)


def test_scope_in_an_rnn_cell_is_refused() -> None:
    check_error(BoundaryInBodyError, lambda: train_layer(layers.RNN(Cell())), "an RNN", at=find_marked_line("cell"))


def test_scope_in_time_distributed_of_known_length_is_allowed() -> None:
    train_layer(layers.TimeDistributed(LayerWithStage()))
    assert "b" in nb.last_report().stages


def test_suggested_scope_around_a_loop_works() -> None:
    def body(h: Any) -> Any:
        with nb.stage(cluster="b"):
            return tf.map_fn(lambda row: row * 2.0, h)

    assert run_step(body).numpy().tolist() == [[4.0] * 3] * 4
    assert list(nb.last_report().stages) == ["a", "b"]
