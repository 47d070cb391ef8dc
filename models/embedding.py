"""The embedding of tokens, whose table also scores hidden vectors."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from whale_nebula.errors import OptionError

from .attention import Configured, near_zero


@keras.saving.register_keras_serializable("whale_nebula")
class TokenEmbedding(Configured):
    """The sum of the embeddings of token, position and type; then a norm (if `norm`) and dropout.

    >>> import numpy as np
    >>> layer = TokenEmbedding(vocabulary=11, length=6, width=8)
    >>> hidden = layer(np.array([[2, 5, 3, 0]]))
    >>> hidden.shape, layer(hidden, reverse=True).shape
    (TensorShape([1, 4, 8]), TensorShape([1, 4, 11]))
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        width: int,
        *,
        types: int = 2,
        norm: bool = True,
        dropout: float = 0.0,
        epsilon: float = 1e-12,
        spread: float = 0.02,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        sizes = {"vocabulary": vocabulary, "length": length, "width": width, "types": types}
        self._options = {**sizes, "norm": norm, "dropout": dropout, "epsilon": epsilon, "spread": spread}
        self.vocabulary, self.length, self.width = vocabulary, length, width
        self.tokens, self.positions, self.types = (
            keras.layers.Embedding(rows, width, near_zero(spread), dtype=self.dtype_policy, name=name)
            for name, rows in (("tokens", vocabulary), ("positions", length), ("types", types))
        )
        normal = keras.layers.LayerNormalization(epsilon=epsilon, dtype=self.dtype_policy, name="norm")
        self.norm = normal if norm else None
        self.drop = keras.layers.Dropout(dropout, dtype=self.dtype_policy, name="drop")
        self.supports_masking = True

    def build(self, shape: Any) -> None:
        """Create the tables."""
        for table in (self.tokens, self.positions, self.types):
            table.build(shape)
        if self.norm is not None:
            self.norm.build((*shape[:2], self.width))

    def call(
        self,
        tokens: Any,
        types: Any = None,
        *,
        position: Any = 0,
        reverse: bool = False,
        training: bool | None = None,
    ) -> Any:
        """The vectors of rows of tokens, the first of which is at `position`; all of type 0 if `types` is None.

        With `reverse` the input is hidden vectors, and the result the logit of every token of the vocabulary.
        """
        if reverse:
            table = ops.cast(self.tokens.embeddings, self.compute_dtype)
            return ops.matmul(tokens, ops.transpose(table))
        self._check_length(tokens)
        kind = self.types(ops.zeros((1, 1), "int32") if types is None else types)
        places = self.positions(position + ops.arange(ops.shape(tokens)[1]))
        summed = self.tokens(tokens) + places + kind
        return self.drop(summed if self.norm is None else self.norm(summed), training=training)

    def compute_output_spec(self, tokens: Any, *others: Any, reverse: bool = False, **options: Any) -> Any:
        """The output's shape and type, without tracing the layer."""
        if not reverse:
            self._check_length(tokens)
        last = self.vocabulary if reverse else self.width
        return keras.KerasTensor((*tokens.shape[:2], last), self.compute_dtype)

    def _check_length(self, tokens: Any) -> None:
        length = tokens.shape[1]
        if length is not None and length > self.length:
            raise OptionError(
                f"rows of {length} tokens exceed the {self.length} positions of {self.name!r}",
                why="the number of positions is fixed when the model is created",
                mend=f"truncate the text to {self.length} tokens, or create the model with length={length}",
            )
