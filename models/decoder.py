"""The target side of a translator: its layers, for complete sentences or word by word.

A search decodes several sentences for each row of the source. Their words attend to the source in parallel, so that it
is stored only once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
from keras import ops

from .attention import Cache, expand_mask
from .bert import Visible
from .embedding import TokenEmbedding
from .encoder import Source
from .layers import CrossAttention, SelfAttention
from .masked_lm import Bias


@dataclass(frozen=True, slots=True)
class Scores:
    """Layers that compute logits; with a `table` of words as products with the words' vectors, plus biases."""

    layers: tuple[keras.layers.Layer, ...]
    table: TokenEmbedding | None = None
    bias: Bias | None = None

    def __call__(self, hidden: Any) -> Any:
        """The logits of a batch of hidden states."""
        for layer in self.layers:
            hidden = layer(hidden)
        scores = hidden if self.table is None else self.table(hidden, reverse=True)
        return scores if self.bias is None else self.bias(scores)


class Memory(NamedTuple):
    """The caches of the source, one for each layer with cross-attention, and the mask of its places."""

    caches: tuple[Cache, ...]
    allowed: Any


@dataclass(frozen=True, slots=True)
class Decoder:
    """The layers of the target side in order, followed by `scores`.

    Attention is causal, or, with `visible`, bidirectional over the words that it marks.
    """

    embedding: TokenEmbedding
    sub_layers: tuple[keras.layers.Layer, ...]
    scores: Scores
    visible: Visible | None = None

    def __call__(self, shown: Any, source: Source) -> Any:
        """Logits (rows, length, vocabulary) of the words that are shown (rows, length)."""
        return self._run_layers(shown, lambda layer, hidden: layer(hidden, *source))

    def make_cache(self, source: Source) -> Memory:
        """The cache of a source for a search."""
        layers = (layer for layer in self.sub_layers if isinstance(layer, CrossAttention))
        return Memory(tuple(layer.make_cache(source.hidden) for layer in layers), expand_mask(source.visible))

    def make_caches(self, sentences: Any, length: int) -> tuple[Cache, ...]:
        """The empty caches of self-attention for this number of sentences, with room for `length` words."""
        layers = (layer for layer in self.sub_layers if isinstance(layer, SelfAttention))
        return tuple(layer.empty(sentences, length) for layer in layers)

    def score_next_word(
        self, words: Any, position: Any, caches: tuple[Cache, ...], memory: Memory
    ) -> tuple[Any, tuple[Cache, ...]]:
        """Decode the words (sentences) at a position: logits (sentences, vocabulary) of the next ones, and the new
        caches.
        """
        hidden = self.embedding(words[:, None], position=position)
        previous, memories, new_caches = iter(caches), iter(memory.caches), []
        for layer in self.sub_layers:
            if isinstance(layer, SelfAttention):
                hidden, cache = layer(hidden, cache=next(previous), position=position)
                new_caches.append(cache)
            elif isinstance(layer, CrossAttention):
                hidden = _attend_beams(layer, hidden, next(memories), memory.allowed)
            else:
                hidden = layer(hidden)
        return self.scores(hidden)[:, 0], tuple(new_caches)

    def score_sentences(self, shown: Any, memory: Memory) -> Any:
        """Like a call, but with a cache of the source, and any number of sentences for each of its rows."""
        memories = iter(memory.caches)
        return self._run_layers(
            shown, lambda layer, hidden: _attend_beams(layer, hidden, next(memories), memory.allowed)
        )

    def _run_layers(self, shown: Any, attend: Callable[[Any, Any], Any]) -> Any:
        hidden, visible = self.embedding(shown), None if self.visible is None else self.visible(shown)
        for layer in self.sub_layers:
            if isinstance(layer, SelfAttention):
                hidden = layer(hidden, visible, causal=visible is None)
            else:
                hidden = attend(layer, hidden) if isinstance(layer, CrossAttention) else layer(hidden)
        return self.scores(hidden)


def _attend_beams(layer: CrossAttention, hidden: Any, cache: Cache, allowed: Any) -> Any:
    """Attend with all sentences of a row of the source at once, so that its cache is not repeated."""
    rows, sizes = ops.shape(cache.keys)[0], ops.shape(hidden)
    together = ops.reshape(hidden, (rows, -1, sizes[-1]))
    return ops.reshape(layer.attend_cache(together, cache, allowed), sizes)
