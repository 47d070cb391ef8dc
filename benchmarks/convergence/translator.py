"""A small pre-normalised translator: an encoder in one cluster, a decoder in the other, and the boundary between."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from language import LONGEST, VOCABULARY

import whale_nebula as nb

WIDTH, HEADS, LAYERS = 128, 4, 2


def _embed(tokens: Any, name: str) -> Any:
    words = keras.layers.Embedding(VOCABULARY, WIDTH, name=f"{name}_words")(tokens)
    return Positions(name=f"{name}_positions")(words)


def _make_sinusoids(shape: Any, dtype: Any = None) -> np.ndarray:
    """Sinusoidal initial positions: neighbours are similar from the first step on."""
    speeds = 100.0 ** -(np.arange(shape[1] // 2) / (shape[1] // 2))
    angles = np.arange(shape[0])[:, None] * speeds
    return 0.1 * np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype("float32")


@keras.saving.register_keras_serializable("convergence")
class Positions(keras.layers.Layer):
    """Adds a learned vector to each position."""

    def build(self, shape: Any) -> None:
        """Create a row for each position."""
        self.table = self.add_weight(shape=(LONGEST, shape[-1]), initializer=_make_sinusoids, name="table")

    def call(self, hidden: Any) -> Any:
        """Add the positions, the same for every sentence."""
        return hidden + self.table


def _attend(hidden: Any, name: str, *, to: Any = None, marks: Any = None, causal: bool = False) -> Any:
    normal = keras.layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm")(hidden)
    attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=name)
    read = normal if to is None else to
    return hidden + attention(normal, read, attention_mask=marks, use_causal_mask=causal)


def _feed_forward(hidden: Any, name: str) -> Any:
    normal = keras.layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm")(hidden)
    wide = keras.layers.Dense(2 * WIDTH, activation="gelu", name=f"{name}_wide")(normal)
    return hidden + keras.layers.Dense(WIDTH, name=f"{name}_narrow")(wide)


def encoder(source: Any, marks: Any) -> Any:
    """The encoding of a sentence, word by word."""
    hidden = _embed(source, "source")
    for layer in range(LAYERS):
        hidden = _attend(hidden, f"encoder{layer}_attention", marks=marks)
        hidden = _feed_forward(hidden, f"encoder{layer}_inner")
    return hidden


def decoder(encoded: Any, shown: Any, marks: Any) -> Any:
    """The logits of the next word of the other language."""
    read = keras.layers.LayerNormalization(epsilon=1e-5, name="read_norm")(encoded)
    hidden = _embed(shown, "shown")
    for layer in range(LAYERS):
        hidden = _attend(hidden, f"decoder{layer}_attention", causal=True)
        hidden = _attend(hidden, f"decoder{layer}_reading", to=read, marks=marks)
        hidden = _feed_forward(hidden, f"decoder{layer}_inner")
    normal = keras.layers.LayerNormalization(epsilon=1e-5, name="output_norm")(hidden)
    return keras.layers.Dense(VOCABULARY, name="output")(normal)


def translator(options: dict[str, Any] | None) -> keras.Model:
    """Encoder and decoder; `options` are those of `nb.compress` (None: no codec)."""
    source = keras.Input((LONGEST,), dtype="int32", name="source")
    shown = keras.Input((LONGEST,), dtype="int32", name="shown")
    marks = keras.Input((LONGEST,), dtype="bool", name="marks")
    ids = keras.Input((), dtype="int64", name="ids")
    with nb.cluster():
        with nb.stage(cluster="left"):
            if options is None:
                hidden = encoder(source, marks[:, None, :])
            else:
                with nb.compress(**options):
                    hidden = encoder(source, marks[:, None, :])
        with nb.stage(cluster="right"):
            logits = decoder(hidden, shown, marks[:, None, :])
    return keras.Model({"source": source, "shown": shown, "marks": marks, "ids": ids}, logits)
