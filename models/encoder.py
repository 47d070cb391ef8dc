"""The source side of a translator: its layers and their result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras

from .bert import Visible
from .embedding import TokenEmbedding
from .layers import SelfAttention


class Source(NamedTuple):
    """The output of the source's side: hidden states (rows, length, width), and the mask of words."""

    hidden: Any
    visible: Any


@keras.saving.register_keras_serializable("whale_nebula")
class Marked(keras.layers.Layer):
    """Attaches the mask of words to hidden states as Keras's mask, so that under `nb.compress(mask=True)` only words
    are sent.

    Other positions are set to zero: no query attends to them, and codecs compress zeros best.

    >>> import numpy as np
    >>> Marked()((np.ones((1, 3, 1), "float32"), np.array([[True, True, False]]))).numpy().ravel().tolist()
    [1.0, 1.0, 0.0]
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, hidden_and_visible: Any) -> Any:
        """The hidden states with masked ones set to zero."""
        hidden, visible = hidden_and_visible
        return keras.ops.where(visible[:, :, None], hidden, keras.ops.cast(0, hidden.dtype))

    def compute_mask(self, hidden_and_visible: Any, previous_mask: Any = None) -> Any:
        """The mask of words."""
        return hidden_and_visible[1]


@dataclass(frozen=True, slots=True)
class Encoder:
    """The layers of the source side, in order."""

    visible: Visible
    embedding: TokenEmbedding
    sub_layers: tuple[keras.layers.Layer, ...]
    ending: keras.layers.Layer | None = None
    marked: Marked = field(default_factory=Marked)

    def __call__(self, ids: Any) -> Source:
        """Encode ids (rows, length): hidden states, zero at padding, and the mask of words."""
        visible, hidden = self.visible(ids), self.embedding(ids)
        for layer in self.sub_layers:
            hidden = layer(hidden, visible) if isinstance(layer, SelfAttention) else layer(hidden)
        hidden = hidden if self.ending is None else self.ending(hidden)
        return Source(self.marked((hidden, visible)), visible)
