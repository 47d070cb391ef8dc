"""How a decoder looks at its source: a sub-layer like those of BERT, whose memory is another sequence."""

from __future__ import annotations

from typing import Any

import keras

from .attention import Cache, expand_mask
from .layers import Attending


@keras.saving.register_keras_serializable("whale_nebula")
class CrossAttention(Attending):
    """Every word looks at every visible place of the source; dropout, the sum with its input, and a norm.

    >>> import numpy as np
    >>> layer = CrossAttention(width=8, heads=2)
    >>> words, source = np.zeros((1, 3, 8)), np.zeros((1, 5, 12))
    >>> layer(words, source, np.array([[True, True, True, True, False]])).shape
    TensorShape([1, 3, 8])

    A search looks often at the same source: what is `remember`ed of it once can be asked again and again (`recall`).
    """

    def build(self, hidden_shape: Any, source_shape: Any) -> None:
        """Make the weights of all parts."""
        self.attention.build(hidden_shape, source_shape)
        self.norm.build(hidden_shape)

    def call(self, hidden: Any, source: Any, visible: Any = None, training: bool | None = None) -> Any:
        """One sub-layer up. `visible` (rows, length) marks the places of the source that may be looked at."""
        allowed = None if visible is None else expand_mask(visible)
        return self.recall(hidden, self.remember(source), allowed, training)

    def remember(self, source: Any) -> Cache:
        """What there is to know of a source."""
        return self.attention.remember(source)

    def recall(self, hidden: Any, cache: Cache, allowed: Any = None, training: bool | None = None) -> Any:
        """One sub-layer up, from what is remembered of the source."""
        return self.add(hidden, self.attention.recall(self.read(hidden), cache, allowed, training), training)
