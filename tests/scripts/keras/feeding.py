"""The forms of batches, and the options of `fit` about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.parity_harness import Cut
from tests.scripts.keras.outputs import heads, two_targets
from tests.scripts.keras.script import (
    ROWS,
    FitArguments,
    abs_numbers,
    add,
    classes,
    dense,
    fit,
    momentum,
    numbers,
    rows,
)


def _model(cut: Cut) -> Any:
    model = dense(cut)
    model.compile(momentum(), "mse", metrics=["mae"], weighted_metrics=["mse"])
    return model


def _heads(cut: Cut) -> Any:
    model = heads(cut)
    model.compile(
        momentum(), {"kind": "sparse_categorical_crossentropy", "size": "mse"}, metrics={"kind": ["accuracy"]}
    )
    return model


def _triple() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return numbers(6), numbers(3, seed=1), abs_numbers(seed=3)


def _batches(*parts: np.ndarray, size: int = 12) -> Iterator[tuple[np.ndarray, ...]]:
    for start in range(0, ROWS, size):
        yield tuple(part[start : start + size] for part in parts)


class Sequence(keras.utils.PyDataset):
    """A user's PyDataset."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = _triple()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return tuple(part[12 * index : 12 * index + 12] for part in self.parts)


def feeding(
    name: str, data: Callable[[], FitArguments], build: Any = _model, evaluates: bool = False, **options: Any
) -> None:
    """A script that differs in what `fit` is given."""
    add(f"fed_{name}", build, data, evaluates=evaluates, **options)


def _dataset() -> FitArguments:
    return {"x": tf.data.Dataset.from_tensor_slices(_triple()).batch(12), "batch_size": None}


def _repeated() -> FitArguments:
    dataset = tf.data.Dataset.from_tensor_slices(_triple()[:2]).shuffle(ROWS, seed=4).repeat().batch(10)
    return {"x": dataset, "batch_size": None, "steps_per_epoch": 3}


def _dropping() -> FitArguments:
    dataset = tf.data.Dataset.from_tensor_slices(two_targets()).map(lambda given: (given["x"], given["y"]))
    return {"x": dataset.batch(10, drop_remainder=True).prefetch(1), "batch_size": None}


def _generator() -> FitArguments:
    def forever() -> Iterator[Any]:
        while True:
            yield from _batches(*_triple())

    return {"x": forever(), "batch_size": None, "steps_per_epoch": 3}


def _validated() -> FitArguments:
    held = (numbers(6, seed=8)[:17], numbers(3, seed=9)[:17], abs_numbers(seed=10)[:17])
    return {**rows()(), "validation_data": held, "validation_batch_size": 7, "epochs": 3, "validation_freq": 2}


feeding("dataset", _dataset)
feeding("dataset_repeated", _repeated)
feeding("dataset_dropping", _dropping, _heads)
feeding("generator", _generator)
feeding("pydataset", lambda: {"x": Sequence(), "batch_size": None})
feeding("tensors", lambda: {"x": tf.constant(numbers(6)), "y": tf.constant(numbers(3, seed=1))}, evaluates=True)
feeding("dicts", two_targets, _heads, evaluates=True)
feeding("validation_data", _validated)
feeding("validation_split", rows(validation_split=0.3, sample_weight=abs_numbers(seed=3)))
feeding("shuffled", rows(shuffle=True, epochs=3))
feeding("one_row", rows(batch_size=1, epochs=1), micro=(1,))
feeding("fewer_rows_than_parts", rows(batch_size=16), micro=(3,))  # the last batch has 2 rows
feeding("whole_numbers", lambda: {"x": classes(5, 6), "y": classes(3, 3, seed=1)}, evaluates=True)
feeding(
    "doubles", lambda: {"x": numbers(6).astype("float64"), "y": numbers(3, seed=1).astype("float64")}, evaluates=True
)


class Four(keras.Model):
    """A step of the user's own that takes four tensors a batch."""

    def train_step(self, data: Any) -> Any:
        x, y, weight, other = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = tf.reduce_mean(weight[:, None] * tf.square(y - y_pred)) + tf.reduce_mean(other * y_pred)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def _four(cut: Cut) -> Any:
    model = dense(cut, kind=Four)
    model.compile(momentum())
    return model


def _quadruple() -> FitArguments:
    dataset = tf.data.Dataset.from_tensor_slices((*_triple(), numbers(3, seed=6))).batch(12)
    return {"x": dataset, "batch_size": None}


feeding("four_parts", _quadruple, _four)


class Named(keras.Model):
    """A step that takes a dict."""

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=data["target"], y_pred=self(data["features"], training=True))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def _named(cut: Cut) -> Any:
    model = dense(cut, kind=Named)
    model.compile(momentum(), "mse")
    return model


def _named_data() -> FitArguments:
    dataset = tf.data.Dataset.from_tensor_slices({"features": numbers(6), "target": numbers(3, seed=1)}).batch(12)
    return {"x": dataset, "batch_size": None}


feeding("a_dict", _named_data, _named)


def _two_sizes(model: Any, given: FitArguments, watch: Any) -> None:
    """Other batch sizes in one run: the ragged last ones differ too."""
    fit(model, given, watch, epochs=1)
    fit(model, given, watch, epochs=1, batch_size=7)


add("fed_other_batch_sizes", _model, rows(), _two_sizes)
