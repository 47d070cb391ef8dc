"""Models whose variables are sharded over a stage's devices, each written once and built with or without scopes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.parity.zoo import build_adam, fit
from tests.parity_harness import Cut, Outcome, data
from whale_nebula.models import SwitchFeedForward

layers = keras.layers
ROWS, BATCH, WORDS, LENGTH = 14, 7, 19, 7


@dataclass(frozen=True)
class Split:
    """A cut, and the number of devices over which the variables of its stages are split (0: none)."""

    cut: Cut
    count: int

    def split_along(self, axis: int) -> contextlib.AbstractContextManager[Any]:
        """A scope for layers whose variables are split along an axis."""
        return nb.split(self.count, axis=axis) if self.count else contextlib.nullcontext()


def build_sgd(**options: Any) -> keras.optimizers.Optimizer:
    """The optimizer of models that do not test optimizers."""
    return keras.optimizers.SGD(1e-2, momentum=0.9, **options)


def train_classifier(split: Split) -> Outcome:
    """A head by classes, with label smoothing and top-k accuracy; the body by columns, then by rows."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    with split.cut.program():
        with split.cut.at(0):
            with split.split_along(1):
                hidden = layers.Dense(10, activation="relu")(inputs)
            with split.split_along(0):
                hidden = layers.Dense(9)(hidden)
            hidden = layers.LayerNormalization()(hidden)
        with split.cut.at(1), split.split_along(-1):
            outputs = layers.Dense(WORDS)(hidden)
    model = keras.Model(inputs, outputs)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    metrics = ["accuracy", keras.metrics.TopKCategoricalAccuracy(3)]
    model.compile(build_adam(weight_decay=0.01, global_clipnorm=0.3), loss, metrics=metrics)
    y = np.eye(WORDS, dtype="float32")[np.random.default_rng(1).integers(0, WORDS, ROWS)]
    return fit(model, split.cut, data(ROWS, 6), y, batch_size=BATCH)


def train_translator(split: Split) -> Outcome:
    """A table by its rows, attention by heads, a wide layer by columns and back, tokens by classes."""
    keras.utils.set_random_seed(4)
    inputs = keras.Input((LENGTH,), dtype="int32")
    with split.cut.program():
        with split.cut.at(0):
            with split.split_along(0):
                hidden = layers.Embedding(WORDS, 16)(inputs)
            with split.split_along(1):
                attended = layers.MultiHeadAttention(4, 4)(hidden, hidden)
            hidden = layers.LayerNormalization()(hidden + attended)
        with split.cut.at(1):
            with split.split_along(1):
                wide = layers.Dense(32, activation="gelu")(hidden)
            with split.split_along(0):
                hidden = layers.LayerNormalization()(hidden + layers.Dense(16)(wide))
            with split.split_along(-1):
                outputs = layers.Dense(WORDS)(hidden)
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(build_sgd(global_clipnorm=0.5), loss, metrics=["accuracy"])
    draw = np.random.default_rng(2)
    x, y = (draw.integers(0, WORDS, (ROWS, LENGTH)) for _ in range(2))
    return fit(model, split.cut, x, y, batch_size=BATCH)


def train_pictures(split: Split) -> Outcome:
    """Convolutions by channels, one that has them in and one out, with an average of weights."""
    keras.utils.set_random_seed(5)
    inputs = keras.Input((8, 8, 3))
    with split.cut.program():
        with split.cut.at(0), split.split_along(-1):
            hidden = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
            hidden = layers.MaxPooling2D()(hidden)
        with split.cut.at(1):
            with split.split_along(2):
                hidden = layers.Conv2D(6, 2)(hidden)
            hidden = layers.GlobalAveragePooling2D()(layers.ReLU()(hidden))
            outputs = layers.Dense(5)(hidden)
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(build_adam(use_ema=True, ema_momentum=0.9, clipnorm=0.2), loss, metrics=["accuracy"])
    y = np.random.default_rng(1).integers(0, 5, ROWS)
    return fit(model, split.cut, data(ROWS, 8, 8, 3), y, batch_size=BATCH)


class Tied(keras.Model):
    """A table that is both the embedding and the output layer."""

    def __init__(self, split: Split) -> None:
        super().__init__()
        self.split = split
        self.table = layers.Embedding(WORDS, 12)
        self.hidden = layers.Dense(12, activation="tanh")

    def call(self, ids: Any) -> Any:
        with self.split.cut.program(), self.split.cut.at(0):
            with self.split.split_along(0):
                found = self.table(ids)
            found = self.hidden(found)
            with self.split.split_along(0):
                return tf.matmul(found, self.table.embeddings, transpose_b=True)


def train_tied(split: Split, make_optimizer: Callable[[], Any] = build_sgd) -> Outcome:
    """Tied embeddings with a split vocabulary, SGD with momentum."""
    keras.utils.set_random_seed(6)
    model = Tied(split)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make_optimizer(), loss, metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3)])
    draw = np.random.default_rng(2)
    x, y = (draw.integers(0, WORDS, (ROWS, LENGTH)) for _ in range(2))
    return fit(model, split.cut, x, y, batch_size=BATCH)


def train_tied_by_adam(split: Split) -> Outcome:
    """The same with Adam."""
    return train_tied(split, build_adam)


def train_words(split: Split, make_optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(1e-2)) -> Outcome:
    """A table by its rows and one by its columns, whose gradients are rows: SGD puts these into the tables."""
    keras.utils.set_random_seed(9)
    inputs = keras.Input((LENGTH,), dtype="int32")
    with split.cut.program():
        with split.cut.at(0):
            with split.split_along(0):
                first = layers.Embedding(97, 6)(inputs)
            with split.split_along(1):
                second = layers.Embedding(97, 6)(inputs)
        with split.cut.at(1):
            outputs = layers.Dense(4)(layers.Flatten()(first + second))
    model = keras.Model(inputs, outputs)
    model.compile(make_optimizer(), "mse", metrics=["mae"])
    x = np.random.default_rng(2).integers(0, 97, (ROWS, LENGTH))
    return fit(model, split.cut, x, data(ROWS, 4), batch_size=BATCH)


def train_words_by_adam(split: Split) -> Outcome:
    """The same with Adam, whose slots are in the same pieces."""
    return train_words(split, build_adam)


def train_with_dropout(split: Split) -> Outcome:
    """Sharded dropout with the draws of the uncut model, a table by its width, sharded batch normalisation."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input((LENGTH,), dtype="int32")
    with split.cut.program(), split.cut.at(0), split.split_along(-1):
        hidden = layers.Embedding(WORDS, 8)(inputs)
        hidden = layers.Dropout(0.4, seed=1)(hidden)
        hidden = layers.BatchNormalization()(layers.Dense(8, use_bias=False)(hidden))
        outputs = layers.Dense(4)(layers.GlobalAveragePooling1D()(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(build_sgd(), "mse", metrics=["mae"])
    x = np.random.default_rng(2).integers(0, WORDS, (ROWS, LENGTH))
    return fit(model, split.cut, x, data(ROWS, 4), batch_size=BATCH)


def train_normalized(split: Split) -> Outcome:
    """Synchronized moments of divided and of whole channels. In the last batch, of one row, a second replica has none;
    gradients of biases before a normalisation would be only rounding errors.
    """
    keras.utils.set_random_seed(10)
    inputs = keras.Input((6,))
    with split.cut.program():
        with split.cut.at(0):
            with split.split_along(-1):
                hidden = layers.Dense(10, use_bias=False)(inputs)
                hidden = layers.BatchNormalization(synchronized=True, momentum=0.7)(hidden)
            hidden = layers.Activation("tanh")(hidden)
            hidden = layers.Dense(5, use_bias=False)(hidden)
            hidden = layers.BatchNormalization(synchronized=True, momentum=0.5, scale=False)(hidden)
        with split.cut.at(1):
            outputs = layers.Dense(3)(layers.Activation("relu")(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(build_sgd(global_clipnorm=1.0), "mse", metrics=["mae"])
    return fit(model, split.cut, data(ROWS + 1, 6), data(ROWS + 1, 3), batch_size=BATCH)


def train_siblings(split: Split) -> Outcome:
    """Whale's second case as published: replicated features, a split classifier, and no stage."""
    keras.utils.set_random_seed(8)
    inputs = keras.Input((6,))
    scopes = bool(split.count)
    with nb.cluster(["c0"]) if scopes else contextlib.nullcontext():
        with nb.replica(split.count) if scopes else contextlib.nullcontext():
            hidden = layers.Dense(9)(layers.Dense(12, activation="relu")(inputs))
        with split.split_along(-1):
            outputs = layers.Dense(WORDS)(hidden)
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(build_adam(global_clipnorm=0.5), loss, metrics=["accuracy"])
    y = np.random.default_rng(1).integers(0, WORDS, ROWS)
    return fit(model, split.cut, data(ROWS, 6), y, batch_size=BATCH)


def build_switch(micro_batches: int) -> SwitchFeedForward:
    """Experts with too little capacity for all tokens, two for each; twelve groups of rows in a batch."""
    options: dict[str, Any] = {"k": 2, "capacity_factor": 0.6, "min_capacity": 1, "drop": "order", "aux": 0.1}
    return SwitchFeedForward(4, 12, seed=1, row_groups=12 // micro_batches, **options)


def fit_experts(split: Split, inputs: Any, outputs: Any) -> Outcome:
    """Train on batches of twelve rows; the gauges are in the history."""
    model = keras.Model(inputs, outputs)
    model.compile(build_sgd(global_clipnorm=0.5), "mse", metrics=["mae"])
    x = np.random.default_rng(2).integers(0, WORDS, (24, LENGTH))
    return fit(model, split.cut, x, data(24, 4), batch_size=12)


def train_experts(split: Split) -> Outcome:
    """Tokens that go to experts and back in groups of rows."""
    keras.utils.set_random_seed(9)
    inputs, cut = keras.Input((LENGTH,), dtype="int32"), replace(split.cut, coupled="allow")
    with cut.program():
        with cut.at(0):
            hidden = layers.Embedding(WORDS, 8)(inputs)
            with split.split_along(0):
                found = build_switch(cut.micro_batches)(hidden)
            hidden = layers.LayerNormalization()(hidden + found)
        with cut.at(1):
            outputs = layers.Dense(4)(layers.GlobalAveragePooling1D()(hidden))
    return fit_experts(split, inputs, outputs)


def train_sibling_experts(split: Split) -> Outcome:
    """The same next to replicas, which each have a micro-batch of the tokens, and some of the experts."""
    keras.utils.set_random_seed(9)
    inputs, copies = keras.Input((LENGTH,), dtype="int32"), max(1, split.count)
    with contextlib.ExitStack() as stack:
        for scope in (nb.cluster(["c0"]), nb.pipeline(copies, coupled="allow")) if split.count else ():
            stack.enter_context(scope)
        with nb.replica(copies) if split.count else contextlib.nullcontext():
            hidden = layers.Embedding(WORDS, 8)(inputs)
        with split.split_along(0):
            found = build_switch(copies)(hidden)
        hidden = layers.LayerNormalization()(hidden + found)
        outputs = layers.Dense(4)(layers.GlobalAveragePooling1D()(hidden))
    return fit_experts(split, inputs, outputs)


MODELS: Mapping[str, Callable[[Split], Outcome]] = {
    "classifier": train_classifier,
    "translator": train_translator,
    "pictures": train_pictures,
    "tied": train_tied,
    "dropping": train_with_dropout,
    "normalized": train_normalized,
    "siblings": train_siblings,
    "tied by Adam": train_tied_by_adam,
    "words": train_words,
    "words by Adam": train_words_by_adam,
    "experts": train_experts,
    "sibling experts": train_sibling_experts,
}
SIBLINGS = ("siblings", "sibling experts")
STAGES = {"tied": (1,), "tied by Adam": (1,), "dropping": (1,), **dict.fromkeys(SIBLINGS, (1,))}
WHOLE_BATCH = frozenset({"dropping", "normalized"})
"""Models whose rows depend on one another, so that the batch is not cut."""
