"""Iterators over datasets: the parts of TensorFlow and Keras on which their ends depend."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.tf import iterators, keras_training

X, Y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")


def make_dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)


@pytest.mark.parametrize(
    ("is_divided", "get_data", "tunes"),
    [(True, lambda: (X, Y), False), (True, lambda: (make_dataset(),), None), (False, lambda: (X, Y), None)],
    ids=["arrays", "dataset", "model without scopes"],
)
def test_disable_array_tuning_only_of_arrays_that_a_divided_model_reads(
    is_divided: bool, get_data: Callable[[], Any], tunes: bool | None
) -> None:
    found = []
    inputs = hidden = keras.Input((2,))
    if is_divided:
        with nb.cluster(), nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(2)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse")

    def read(*_: Any) -> None:
        fit = keras_training.find_fit()
        found.append(None if fit is None else fit.data._distributed_dataset.options().autotune.enabled)

    model.fit(*get_data(), verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_begin=read)])
    assert found == [tunes]


def test_disable_array_tuning_once_of_data_that_validation_reads_after_each_epoch() -> None:
    found = []
    inputs = keras.Input((2,))
    with nb.cluster(), nb.stage(cluster="gpu"):
        hidden = keras.layers.Dense(2)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse")

    def read(*_: Any) -> None:
        found.append(model._eval_epoch_iterator._distributed_dataset)

    after = keras.callbacks.LambdaCallback(on_epoch_end=read)
    model.fit(X, Y, validation_data=(X, Y), epochs=3, verbose=0, callbacks=[after])
    assert len(found) == 3 and found[0] is found[1] is found[2] and found[0].options().autotune.enabled is False


def test_find_epoch_iterator_of_the_running_loop() -> None:
    found: list[Any] = []
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def read(*_: Any) -> None:
        found.extend(iterators.find_epoch_iterator(model, name) for name in ("fit", "evaluate"))
        found.append(keras_training.find_fit())

    model.fit(X, Y, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_begin=read)])
    data, other, fit = found
    assert data is fit.data and other is None and iterators.find_epoch_iterator(model, "fit") is None


def test_release_iterators_destroys_them_although_they_are_referenced(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    dataset = tf.data.Dataset.from_generator(lambda: read_until_closed(ended), output_signature=tf.TensorSpec(()))
    iterator = iter(dataset)
    next(iterator)
    monkeypatch.setattr(gc, "get_objects", lambda: [iterator])
    iterators.release_iterators(30.0)
    gc.collect()
    assert ended == [True] and not hasattr(iterator, "_iterator_resource")


def read_until_closed(ended: list[bool]) -> Any:
    try:
        while True:
            yield 1.0
    finally:
        ended.append(True)
