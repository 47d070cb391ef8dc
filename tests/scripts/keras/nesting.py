"""Models in models, and layers that are called twice."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from tests.parity_harness import Cut
from tests.scripts.keras.script import momentum, numbers, rows, script


def _compiled(inputs: Any, outputs: Any) -> Any:
    model = keras.Model(inputs, outputs)
    model.compile(momentum(), "mse", metrics=["mae"])
    return model


@script(rows(), stages=(1, 2, 3))
def nested_spanning(cut: Cut) -> Any:
    """A functional model whose own layers lie in two stages."""
    inner = keras.Input((6,))
    with cut.program():
        with cut.at(0):
            hidden = layers.Dense(8, activation="tanh")(inner)
        with cut.at(1):
            hidden = layers.Dense(8, activation="gelu")(hidden)
    encoder = keras.Model(inner, hidden, name="encoder")
    inputs = keras.Input((6,))
    hidden = encoder(inputs)
    with cut.program(), cut.at(2):
        outputs = layers.Dense(3)(hidden)
    return _compiled(inputs, outputs)


@script(rows())
def nested_twice(cut: Cut) -> Any:
    """A model in a model in a model."""

    def block(width: int, name: str, third: int) -> Any:
        inner = keras.Input((width,))
        with cut.program(), cut.at(third):
            hidden = layers.Dense(width, activation="tanh")(inner)
        return keras.Model(inner, hidden, name=name)

    inner = keras.Input((6,))
    middle = keras.Model(inner, block(6, "second", 1)(block(6, "first", 0)(inner)), name="middle")
    inputs = keras.Input((6,))
    hidden = middle(inputs)
    with cut.program(), cut.at(2):
        outputs = layers.Dense(3)(hidden)
    return _compiled(inputs, outputs)


@script(rows())
def sequential_in_functional(cut: Cut) -> Any:
    """A Sequential in each stage, and one that spans them."""
    inputs = keras.Input((6,))
    spanning = keras.Sequential()
    with cut.program():
        with cut.at(0):
            hidden = keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(7)])(inputs)
            spanning.add(layers.Dense(8, activation="gelu"))
        with cut.at(1):
            spanning.add(layers.Dense(8))
    hidden = spanning(hidden)
    with cut.program(), cut.at(2):
        outputs = layers.Dense(3)(hidden)
    return _compiled(inputs, outputs)


class Block(layers.Layer):
    """A residual block that enters scopes in its `call`, if it is told to."""

    def __init__(self, cut: Cut | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.cut = cut or Cut(0)
        self.first, self.second = layers.Dense(8, activation="tanh"), layers.Dense(8)

    def call(self, x: Any) -> Any:
        with self.cut.program():
            with self.cut.at(0):
                hidden = self.first(x)
            with self.cut.at(1):
                return ops.add(hidden, self.second(hidden))


@script(rows())
def subclassed_in_functional(cut: Cut) -> Any:
    """A layer with scopes in its own `call`, and one without that lies in a stage."""
    inputs = keras.Input((6,))
    hidden = Block(cut)(inputs)
    with cut.program(), cut.at(2):
        outputs = layers.Dense(3)(Block()(hidden))
    return _compiled(inputs, outputs)


class Tower(keras.Model):
    """A subclassed model around a functional and a Sequential one."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        inner = keras.Input((6,))
        self.functional = keras.Model(inner, layers.Dense(8, activation="tanh")(inner))
        self.sequential = keras.Sequential([layers.Dense(8, activation="gelu"), layers.Dense(3)])

    def call(self, x: Any, training: bool = False) -> Any:
        with self.cut.program():
            with self.cut.at(0):
                hidden = self.functional(x)
            with self.cut.at(1):
                return self.sequential(hidden, training=training)


@script(rows())
def functional_in_subclassed(cut: Cut) -> Any:
    """Built lazily: `fit` comes first."""
    model = Tower(cut)
    model.compile(momentum(), "mse", metrics=["mae"])
    return model


@script(rows(), stages=(1, 2, 3))
def shared_over_stages(cut: Cut) -> Any:
    """The same layer called in every stage: its weights are tied."""
    inputs = keras.Input((6,))
    shared = layers.Dense(6, activation="tanh")
    with cut.program():
        with cut.at(0):
            hidden = shared(inputs)
        with cut.at(1):
            hidden = shared(hidden)
        with cut.at(2):
            outputs = layers.Dense(3)(shared(hidden))
    return _compiled(inputs, outputs)


@script(lambda: {"x": {"left": numbers(6), "right": numbers(6, seed=2)}, "y": numbers(1, seed=1)})
def shared_model(cut: Cut) -> Any:
    """Two towers of one model and one layer, the inputs in a dict."""
    inner = keras.Input((6,))
    tower, last = keras.Model(inner, layers.Dense(5, activation="tanh")(inner)), layers.Dense(4)
    inputs = {"left": keras.Input((6,), name="left"), "right": keras.Input((6,), name="right")}
    with cut.program():
        with cut.at(0):
            left = last(tower(inputs["left"]))
        with cut.at(1):
            right = last(tower(inputs["right"]))
            outputs = layers.Dense(1)(ops.abs(left - right))
    return _compiled(inputs, outputs)


@script(rows(), stages=(1, 2, 3), grid_only=True)
def from_the_middle(cut: Cut) -> Any:
    """A model that begins at a tensor inside of another one: Keras copies the calls of its layers."""
    inputs = keras.Input((6,))
    with cut.program():
        hidden = middle = layers.Dense(6)(inputs)
        for stage in range(3):
            with cut.at(stage):
                hidden = layers.Dense(8, activation="tanh")(hidden)
        outputs = layers.Dense(3)(hidden)
    keras.Model(inputs, outputs)
    return _compiled(middle, outputs)


@script(rows())
def ops_between_stages(cut: Cut) -> Any:
    """`keras.ops`, operators and a Lambda on symbolic tensors, in scopes and outside of them."""
    inputs = keras.Input((6,))
    with cut.program(), cut.at(0):
        first = layers.Dense(8, activation="tanh")(inputs)
        second = layers.Lambda(lambda t: t * 0.5)(first) + 1.0
    hidden = ops.concatenate([first, ops.square(second)], axis=-1)
    with cut.program(), cut.at(1):
        outputs = layers.Dense(3)(hidden[:, 2:])
    return _compiled(inputs, outputs)
