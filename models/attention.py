"""Multi-head attention as Keras layers, with caches for decoding.

`SelfAttention` of BERT uses it with its own input as memory, cross-attention of a decoder with the source's hidden
states. The four projections are plain Dense layers, so that weights of other libraries map to them one to one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
from keras import ops

from whale_nebula.errors import OptionError

FAR_BELOW = -1e9  # becomes 0 in softmax; finite, so that rows without visible keys give no NaN


class Cache(NamedTuple):
    """Keys and values of a memory, each (rows, heads, length, width of a head). Loops can carry it."""

    keys: Any
    values: Any


def near_zero(spread: float) -> keras.initializers.Initializer:
    """BERT's initializer: normal with this standard deviation, truncated at twice that. An instance always draws the
    same values, so each weight needs its own.
    """
    return keras.initializers.TruncatedNormal(stddev=spread)


def causal(length: Any) -> Any:
    """The causal mask (queries, keys): each position sees itself and those before it.

    >>> causal(3).numpy().astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    places = ops.arange(length)
    return places[:, None] >= places[None, :]


def expand_mask(visible: Any) -> Any:
    """Expand `visible` (rows, keys) to (rows, 1, 1, keys), a mask for all heads and queries."""
    return visible[:, None, None, :]


class Configured(keras.layers.Layer):
    """A layer whose config has the options that it was created with: its `_options`."""

    _options: dict[str, Any]

    def get_config(self) -> dict[str, Any]:
        """The options to recreate it."""
        return {**super().get_config(), **self._options}


@keras.saving.register_keras_serializable("whale_nebula")
class Attention(Configured):
    """Multi-head attention with its own query, key, value and output projections.

    >>> import numpy as np
    >>> attention = Attention(width=8, heads=2)
    >>> queries, memory = np.zeros((1, 3, 8)), np.zeros((1, 5, 8))
    >>> attention(queries, memory).shape
    TensorShape([1, 3, 8])

    To decode token by token, project a memory once (`make_cache`) and attend to it repeatedly (`attend_cache`).
    """

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0, spread: float = 0.02, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_heads(width, heads)
        self._options = {"width": width, "heads": heads, "dropout": dropout, "spread": spread}
        self.width, self.heads = width, heads
        self.query, self.key, self.value, self.out = (
            keras.layers.Dense(width, kernel_initializer=near_zero(spread), dtype=self.dtype_policy, name=name)
            for name in ("query", "key", "value", "out")
        )
        self.drop = keras.layers.Dropout(dropout, dtype=self.dtype_policy, name="drop")
        self.supports_masking = True

    def build(self, hidden_shape: Any, memory_shape: Any = None) -> None:
        """Create the four projections."""
        self.query.build(hidden_shape)
        for part in (self.key, self.value):
            part.build(hidden_shape if memory_shape is None else memory_shape)
        self.out.build((*hidden_shape[:-1], self.width))

    def call(self, hidden: Any, memory: Any = None, allowed: Any = None, training: bool | None = None) -> Any:
        """Attention of each position of `hidden` to `memory` (to `hidden` itself if None).

        `allowed` is a bool mask that broadcasts to (rows, heads, queries, keys): `expand_mask(visible)`,
        `causal(length)`, or both combined by `&`.
        """
        return self.attend_cache(hidden, self.make_cache(hidden if memory is None else memory), allowed, training)

    def make_cache(self, memory: Any) -> Cache:
        """The keys and values of a memory (rows, length, width)."""
        return Cache(self._split_heads(self.key(memory)), self._split_heads(self.value(memory)))

    def attend_cache(self, hidden: Any, cache: Cache, allowed: Any = None, training: bool | None = None) -> Any:
        """Attention of each position of `hidden` to a cache."""
        size = self.width // self.heads
        queries = self._split_heads(self.query(hidden)) * ops.cast(size**-0.5, self.compute_dtype)
        scores = self._widen_scores(ops.einsum("bhqd,bhkd->bhqk", queries, cache.keys))
        if allowed is not None:
            scores = ops.where(allowed, scores, ops.cast(FAR_BELOW, scores.dtype))
        shares = ops.cast(ops.softmax(scores), self.compute_dtype)
        taken = ops.einsum("bhqk,bhkd->bhqd", self.drop(shares, training=training), cache.values)
        return self.out(self._join_heads(taken))

    def _widen_scores(self, scores: Any) -> Any:
        """Cast scores of half precision to float32 for the softmax."""
        return ops.cast(scores, "float32") if self.compute_dtype in ("float16", "bfloat16") else scores

    def _split_heads(self, projected: Any) -> Any:
        rows, length, _ = ops.shape(projected)
        parts = ops.reshape(projected, (rows, length, self.heads, self.width // self.heads))
        return ops.transpose(parts, (0, 2, 1, 3))

    def _join_heads(self, parts: Any) -> Any:
        rows, _, length, _ = ops.shape(parts)
        return ops.reshape(ops.transpose(parts, (0, 2, 1, 3)), (rows, length, self.width))


def check_heads(width: int, heads: int) -> None:
    """Refuse a width that is not a multiple of the number of heads.

    >>> check_heads(8, 2)
    """
    if heads < 1 or width % heads:
        raise OptionError(
            f"the width {width} is not divisible by {heads} heads",
            why="each head uses an equal part of the width",
            mend=f"width={-(-width // max(heads, 1)) * max(heads, 1)}, or another number of heads",
        )
