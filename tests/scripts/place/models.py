"""Models without any knowledge of clusters, each with a map that places its layers and training data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.parity.zoo import build_sgd, fit
from tests.parity_harness import Case, Cut, Outcome, data
from whale_nebula.strategies import by_parameters, halves

layers = keras.layers
BOTH = ["gpu", "npu"]
Map = Mapping[str, Any]


@dataclass(frozen=True)
class PlacedModel:
    """How a case is run: a builder, a map (or what makes one of a model), and the arguments of `fit`."""

    build: Callable[[], Any]
    places: Map | Callable[[Any], Map]
    x: np.ndarray
    y: np.ndarray

    def model(self) -> Any:
        """A new model, the same each time."""
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        return self.build()

    def placed(self, micro_batches: int) -> Any:
        """A new model with its layers on two clusters."""
        model = self.model()
        with nb.cluster(), nb.pipeline(micro_batches):
            nb.place(model, self.places(model) if callable(self.places) else self.places)
        return model

    def __call__(self, cut: Cut) -> Outcome:
        model = self.placed(cut.micro_batches) if cut.stages else self.model()
        return fit(model, cut, self.x, self.y, epochs=1, batch_size=12)


def nested() -> keras.Model:
    """A functional model in a functional one, an operator between them that is not a layer, and a layer not named."""
    inside = keras.Input((16,))
    hidden = layers.Dense(16, activation="tanh", name="wide")(inside)
    encoder = keras.Model(inside, layers.LayerNormalization(name="norm")(hidden) + inside, name="encoder")
    inputs = keras.Input((8,))
    first = encoder(layers.Dense(16, name="entry")(inputs))
    outputs = layers.Dense(3, name="head")(first * 2.0 + layers.Dense(16, name="between")(first))
    model = keras.Model(inputs, outputs)
    model.compile(build_sgd(global_clipnorm=0.5), "mse", metrics=["mae"])
    return model


def chain() -> keras.Model:
    """A Sequential that is built by its first step."""
    model = keras.Sequential(
        [layers.Dense(8, activation="relu"), layers.Dropout(0.0), layers.Dense(8), layers.Dense(3)]
    )
    model.compile(build_sgd(), "mse")
    return model


class Encoder(layers.Layer):
    """Attention and two layers of one name, of which the attention makes its own when it is built."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.attention = layers.MultiHeadAttention(1, 8, name="attention")
        self.both = [layers.Dense(8, name="dense", activation="tanh"), layers.Dense(8, name="dense")]

    def call(self, x: Any) -> Any:
        for dense in self.both:
            x = dense(x)
        return self.attention(x, x) + x


class Reader(keras.Model):
    """Embedding, encoder, GRU: subclassed, and built by its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = layers.Embedding(20, 8, name="embedding")
        self.encoder = Encoder(name="encoder")
        self.gru = layers.GRU(8, name="gru")
        self.head = layers.Dense(3, name="head")

    def call(self, tokens: Any) -> Any:
        return self.head(self.gru(self.encoder(self.embedding(tokens))))


def reader() -> keras.Model:
    model = Reader()
    model.compile(build_sgd(), "mse")
    return model


class HalfLayer(layers.Layer):
    """A layer of its own behind one that it shares."""

    def __init__(self, shared: Any, **options: Any) -> None:
        super().__init__(**options)
        self.shared, self.own = shared, layers.Dense(8, name="own")

    def call(self, x: Any) -> Any:
        return self.own(self.shared(x))


def tied() -> keras.Model:
    """One layer that stands in two others."""
    shared, inputs = layers.Dense(8, activation="tanh", name="shared"), keras.Input((8,))
    hidden = HalfLayer(shared, name="encoder")(inputs)
    hidden = HalfLayer(shared, name="decoder")(hidden)
    model = keras.Model(inputs, layers.Dense(3, name="head")(hidden))
    model.compile(build_sgd(), "mse")
    return model


class Pair(keras.Model):
    """Two parts that its own `train_step` calls: the model itself is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.front = keras.Sequential([layers.Dense(8, activation="tanh", name="a")], name="front")
        self.back = keras.Sequential([layers.Dense(3, name="b")], name="back")

    def train_step(self, batch: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.back(self.front(x)) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def pair() -> keras.Model:
    model = Pair()
    model.front.build((None, 8))
    model.back.build((None, 8))
    model.compile(build_sgd())
    return model


TOKENS = np.random.default_rng(5).integers(0, 20, (29, 5))
ROWS = data(29, 8), data(29, 3, seed=1)

PLACED = {
    "nested": PlacedModel(nested, {"encoder(/.*)?": "gpu", "head": "npu"}, *ROWS),
    "parts of a nested one": PlacedModel(nested, {"entry|encoder/wide": "gpu", "encoder/norm": "npu"}, *ROWS),
    "sequential": PlacedModel(chain, lambda model: halves(model, BOTH), *ROWS),
    "subclassed": PlacedModel(reader, lambda model: halves(model, BOTH), TOKENS, ROWS[1]),
    "inside attention": PlacedModel(
        reader,
        {"embedding|encoder/dense.*": "gpu", "encoder/attention/(query|key|value)": "gpu", "gru": "npu"},
        TOKENS,
        ROWS[1],
    ),
    "tied": PlacedModel(tied, {"encoder/.*": "gpu", "decoder/.*": "npu"}, *ROWS),
    "tied in one place": PlacedModel(tied, {"encoder/own": "gpu", "decoder/.*": "npu"}, *ROWS),
    "called by its train_step": PlacedModel(pair, {"front/.*": "gpu", "back": "npu"}, *ROWS),
    "by parameters": PlacedModel(pair, lambda model: by_parameters(model, BOTH), *ROWS),
}

WHOLE = ("parts of a nested one", "inside attention", "tied in one place", "by parameters")
"""These run with the whole batch alone."""
CASES = {
    name: Case(run, (2,), (1,) if name in WHOLE else (1, 3), steps=3, grid_only=name == "inside attention")
    for name, run in PLACED.items()
}
