"""Models of two layers in two stages, built in each way of Keras, and the warnings of their use."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import whale_nebula as nb
from whale_nebula.errors import NebulaWarning

layers = keras.layers
X, Y = np.ones((8, 4), "float32"), np.ones((8, 3), "float32")
PLAN = ("a", "b")


def compile_model(model: keras.Model, **options: Any) -> keras.Model:
    model.compile("sgd", "mse", **options)
    return model


def functional() -> keras.Model:
    with nb.cluster():
        return two_stages({"cluster": "a"}, {"cluster": "b"})


def two_stages(first: dict[str, Any], second: dict[str, Any], around: Any = None, **options: Any) -> keras.Model:
    """A functional model of two stages with these options, each in scopes that `around` gives by their number."""
    inputs = keras.Input((4,))
    with _open(around, 0), nb.stage(**first):
        hidden = layers.Dense(5)(inputs)
    with _open(around, 1), nb.stage(**second):
        outputs = layers.Dense(3)(hidden)
    return compile_model(keras.Model(inputs, outputs, **options))


def _open(around: Any, number: int) -> Any:
    return contextlib.nullcontext() if around is None else around(number)


def sequential(with_input: bool = True) -> keras.Model:
    model = keras.Sequential([keras.Input((4,))] if with_input else [])
    with nb.cluster():
        with nb.stage(cluster="a"):
            model.add(layers.Dense(5))
        with nb.stage(cluster="b"):
            model.add(layers.Dense(3))
    return compile_model(model)


def build_late() -> keras.Model:
    model = sequential(with_input=False)
    model(X)
    return model


def record_warnings(run: Callable[[], Any]) -> list[warnings.WarningMessage]:
    """The warnings of ours while something runs."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", NebulaWarning)
        run()
    return found


def list_messages(run: Callable[[], Any]) -> list[str]:
    """What they say."""
    return [str(each.message) for each in record_warnings(run)]
