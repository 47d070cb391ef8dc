"""Masks that cross boundaries."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.parity_harness import Cut
from tests.scripts.keras.script import ROWS, FitArguments, add, classes, momentum, numbers, script, two_parts

WORDS, TIME = 20, 5


def tokens() -> np.ndarray:
    """Token numbers, padded with zeros behind."""
    found = np.random.default_rng(0).integers(1, WORDS, (ROWS, TIME))
    lengths = np.random.default_rng(1).integers(1, TIME + 1, ROWS)
    return np.where(np.arange(TIME) < lengths[:, None], found, 0)


def sentences(**more: Any) -> FitArguments:
    """A sentence and its class."""
    return {"x": tokens(), "y": classes(4, seed=1), **more}


def _tagged() -> FitArguments:
    return {"x": tokens(), "y": classes(4, TIME, seed=1)}


def _reader(name: str, layer: Any, *, tags: bool = False, **options: Any) -> None:
    """An embedding with a mask in the first stage, a layer that reads the mask in the second."""

    def build(cut: Cut) -> Any:
        inputs = keras.Input((TIME,), dtype="int32")
        with cut.program():
            with cut.at(0):
                hidden = layers.Embedding(WORDS, 6, mask_zero=True)(inputs)
            with cut.at(1):
                hidden = layer()(hidden)
            with cut.at(2):
                outputs = layers.Dense(4)(hidden)
        model = keras.Model(inputs, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(momentum(), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
        return model

    add(f"mask_{name}", build, _tagged if tags else sentences, stages=(1, 2, 3), **options)


_reader("lstm", lambda: layers.LSTM(5))
_reader("gru", lambda: layers.GRU(5, return_sequences=True), tags=True)
_reader("bidirectional", lambda: layers.Bidirectional(layers.GRU(4)))
_reader("pooling", layers.GlobalAveragePooling1D)
_reader("time_distributed", lambda: layers.TimeDistributed(layers.Dense(5, activation="tanh")), tags=True)
_reader("into_the_loss", lambda: layers.Dense(5, activation="tanh"), tags=True)


@script(_tagged, stages=(1, 2, 3))
def mask_attention(cut: Cut) -> Any:
    """Attention in another stage than the embedding; the residual and the norm pass the mask on to the loss."""
    inputs = keras.Input((TIME,), dtype="int32")
    with cut.program():
        with cut.at(0):
            hidden = layers.Embedding(WORDS, 8, mask_zero=True)(inputs)
        with cut.at(1):
            seen = layers.MultiHeadAttention(2, 4)(hidden, hidden)
            hidden = layers.LayerNormalization()(layers.Add()([hidden, seen]))
        with cut.at(2):
            outputs = layers.Dense(4)(layers.Dropout(0.0)(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(momentum(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class WordsAndPlaces(layers.Layer):
    """Keras's translation example: words plus places, and `compute_mask` of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.words, self.places = layers.Embedding(WORDS, 8), layers.Embedding(TIME, 8)

    def call(self, inputs: Any) -> Any:
        return self.words(inputs) + self.places(ops.arange(ops.shape(inputs)[-1]))

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        return ops.not_equal(inputs, 0)


class Encoder(layers.Layer):
    """A transformer's encoder that asks for the mask and builds an attention mask of it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.attention, self.dense = layers.MultiHeadAttention(2, 4), layers.Dense(8, activation="gelu")
        self.norm = layers.LayerNormalization()
        self.supports_masking = True

    def call(self, inputs: Any, mask: Any = None) -> Any:
        padding = None if mask is None else ops.cast(mask[:, None, :], "int32")
        hidden = self.norm(inputs + self.attention(inputs, inputs, attention_mask=padding))
        return hidden + self.dense(hidden)


@script(lambda: {"x": {"source": tokens(), "target": np.flip(tokens(), 0)}, "y": classes(4, TIME, seed=1)})
def mask_translator(cut: Cut) -> Any:
    """Encoder and decoder, two embeddings, explicit masks, causal attention over the boundary."""
    source = keras.Input((TIME,), dtype="int32", name="source")
    target = keras.Input((TIME,), dtype="int32", name="target")
    with cut.program():
        with cut.at(0):
            encoded = Encoder()(WordsAndPlaces()(source))
        with cut.at(1):
            hidden = WordsAndPlaces()(target)
            hidden = hidden + layers.MultiHeadAttention(2, 4)(hidden, hidden, use_causal_mask=True)
            hidden = hidden + layers.MultiHeadAttention(2, 4)(hidden, encoded)
            outputs = layers.Dense(4)(hidden)
    model = keras.Model({"source": source, "target": target}, outputs)
    model.compile(
        momentum(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), weighted_metrics=["accuracy"]
    )
    return model


@script(lambda: {"x": numbers(TIME, 3) * (tokens() > 0)[..., None], "y": numbers(2, seed=1)})
def mask_masking(cut: Cut) -> Any:
    """A Masking layer in front, an LSTM over both stages."""

    def first(x: Any) -> Any:
        return layers.LSTM(4, return_sequences=True)(layers.Masking(0.0)(x))

    return two_parts(cut, keras.Input((TIME, 3)), first, lambda x: layers.Dense(2)(layers.LSTM(4)(x)))


class Reader(keras.Model):
    """Subclassed: masks travel on tensors, not over nodes."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self.embedding = layers.Embedding(WORDS, 6, mask_zero=True)
        self.lstm, self.head = layers.LSTM(5), layers.Dense(4)

    def call(self, x: Any) -> Any:
        with self.cut.program():
            with self.cut.at(0):
                hidden = self.embedding(x)
            with self.cut.at(1):
                return self.head(self.lstm(hidden))


@script(sentences)
def mask_subclassed(cut: Cut) -> Any:
    """The mask crosses between two scopes of one `call`."""
    model = Reader(cut)
    model.compile(momentum(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model
