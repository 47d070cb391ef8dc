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
