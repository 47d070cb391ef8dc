"""ABNet's adapters: small trainable layers after each sub-layer of a frozen BERT.

An adapter's output is added to its input and is near zero at first, so that the BERT initially works as before.
"""

from __future__ import annotations

from typing import Any

import keras

from .attention import Cache, near_zero
from .layers import CrossAttention, FeedForward

NEARLY_NOTHING = 1e-3


@keras.saving.register_keras_serializable("whale_nebula")
class EncoderAdapter(FeedForward):
    """Adapter of the source side: a norm, a dense layer of width `inner`, ReLU, a dense layer back to `width`, and the
    sum with the input.

    >>> import numpy as np
    >>> hidden = np.random.default_rng(0).normal(size=(1, 5, 8)).astype("float32")
    >>> float(abs(EncoderAdapter(width=8, inner=32)(hidden) - hidden).numpy().max()) < 0.1
    True
    """

    def __init__(self, width: int, inner: int = 512, *, dropout: float = 0.0, **kwargs: Any) -> None:
        super().__init__(width, inner, **{**_ADAPTED, **kwargs}, dropout=dropout)
        self.narrow.kernel_initializer = near_zero(NEARLY_NOTHING)


@keras.saving.register_keras_serializable("whale_nebula")
class DecoderAdapter(CrossAttention):
    """Adapter of the target side: cross-attention to the source's hidden states, then an `EncoderAdapter`.

    >>> import numpy as np
    >>> adapter = DecoderAdapter(width=8, heads=2, inner=32)
    >>> adapter(np.zeros((1, 3, 8)), np.zeros((1, 5, 12)), np.ones((1, 5), bool)).shape
    TensorShape([1, 3, 8])
    """

    def __init__(self, width: int, heads: int, inner: int = 512, *, dropout: float = 0.0, **kwargs: Any) -> None:
        super().__init__(width, heads, **{**_PRE, **kwargs}, dropout=dropout)
        self._options = {**self._options, "inner": inner}
        self.attention.out.kernel_initializer = near_zero(NEARLY_NOTHING)
        self.inner = EncoderAdapter(width, inner, dropout=dropout, dtype=self.dtype_policy, name="inner")

    def build(self, hidden_shape: Any, source_shape: Any) -> None:
        """Make the weights of all parts."""
        super().build(hidden_shape, source_shape)
        self.inner.build(hidden_shape)

    def attend_cache(self, hidden: Any, cache: Cache, allowed: Any = None, training: bool | None = None) -> Any:
        """Apply the adapter with a cache of the source."""
        return self.inner(super().attend_cache(hidden, cache, allowed, training), training=training)


_PRE = {"norm": "pre"}
_ADAPTED = {**_PRE, "activation": "relu"}
