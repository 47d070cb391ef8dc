"""From the last hidden states of a decoder to a score for each word of its vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras

from .embedding import TokenEmbedding
from .masked_lm import Bias


@dataclass(frozen=True, slots=True)
class Scores:
    """Some layers; then, if there is a `table` of words, how near each word of it is, and the word's bias."""

    layers: tuple[keras.layers.Layer, ...]
    table: TokenEmbedding | None = None
    bias: Bias | None = None

    def __call__(self, hidden: Any) -> Any:
        """The scores of a batch of hidden states."""
        for layer in self.layers:
            hidden = layer(hidden)
        scores = hidden if self.table is None else self.table(hidden, reverse=True)
        return scores if self.bias is None else self.bias(scores)
