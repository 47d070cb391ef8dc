"""Models of two layers in two stages, built in each way of Keras."""

from typing import Any

import keras
import numpy as np

import whale_nebula as nb

layers = keras.layers
X, Y = np.ones((8, 4), "float32"), np.ones((8, 3), "float32")
PLAN = ("a", "b")


def compiled(model: keras.Model, **options: Any) -> keras.Model:
    model.compile("sgd", "mse", **options)
    return model


def functional() -> keras.Model:
    inputs = keras.Input((4,))
    with nb.cluster():
        with nb.stage(cluster="a"):
            hidden = layers.Dense(5)(inputs)
        with nb.stage(cluster="b"):
            outputs = layers.Dense(3)(hidden)
    return compiled(keras.Model(inputs, outputs))


def sequential(with_input: bool = True) -> keras.Model:
    model = keras.Sequential([keras.Input((4,))] if with_input else [])
    with nb.cluster():
        with nb.stage(cluster="a"):
            model.add(layers.Dense(5))
        with nb.stage(cluster="b"):
            model.add(layers.Dense(3))
    return compiled(model)


def built_later() -> keras.Model:
    model = sequential(with_input=False)
    model(X)
    return model
