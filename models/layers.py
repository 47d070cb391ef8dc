"""BERT's sub-layers as separate Keras layers, so that adapters can be inserted between any two of them.

`SelfAttention` and `FeedForward` add their result to their input. Post-normalised (`norm="post"`, BERT) they normalise
the sum; pre-normalised (`norm="pre"`) they normalise their input, but not the sum.
"""

from __future__ import annotations

from typing import Any, Literal

import keras
from keras import ops

from whale_nebula.errors import OptionError

from .attention import Attention, Cache, Configured, causal, expand_mask, near_zero

Norm = Literal["post", "pre"]
NORMS = ("post", "pre")


@keras.saving.register_keras_serializable("whale_nebula")
def gelu_new(x: Any) -> Any:
    """The tanh approximation of gelu, with which some BERTs were trained."""
    return keras.activations.gelu(x, approximate=True)


ACTIVATIONS = {"gelu": keras.activations.gelu, "gelu_new": gelu_new, "relu": keras.activations.relu}


class SubLayer(Configured):
    """Common base of the sub-layers: dropout, the sum with the input, and the position of the norm."""

    def __init__(self, norm: Norm, dropout: float, epsilon: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_choice("norm", norm, NORMS)
        self.pre = norm == "pre"
        self.norm = keras.layers.LayerNormalization(epsilon=epsilon, dtype=self.dtype_policy, name="norm")
        self.drop = keras.layers.Dropout(dropout, dtype=self.dtype_policy, name="drop")
        self.supports_masking = True
        self._options = {"norm": norm, "dropout": dropout, "epsilon": epsilon}

    def read(self, hidden: Any) -> Any:
        """The sub-layer's input, normalised if `norm` is "pre"."""
        return self.norm(hidden) if self.pre else hidden

    def add(self, hidden: Any, computed: Any, training: bool | None) -> Any:
        """Add the result to the input, with dropout and norm."""
        together = hidden + self.drop(computed, training=training)
        return together if self.pre else self.norm(together)

    def compute_output_spec(self, hidden: Any, *others: Any, **options: Any) -> Any:
        """The shape and type of the input, without tracing the layer."""
        return keras.KerasTensor(hidden.shape, self.compute_dtype)


class Attending(SubLayer):
    """Common base of self-attention and cross-attention: an `Attention` and its options."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        norm: Norm = "post",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        epsilon: float = 1e-12,
        spread: float = 0.02,
        **kwargs: Any,
    ) -> None:
        super().__init__(norm, dropout, epsilon, **kwargs)
        sizes = {"width": width, "heads": heads, "spread": spread}
        self._options = {**self._options, **sizes, "attention_dropout": attention_dropout}
        self.attention = Attention(
            width, heads, dropout=attention_dropout, spread=spread, dtype=self.dtype_policy, name="attention"
        )


@keras.saving.register_keras_serializable("whale_nebula")
class SelfAttention(Attending):
    """Self-attention over visible tokens; with `causal`, up to each token itself.

    `causal` is an argument of the call, so that layers of a trained encoder can serve as a decoder's.

    >>> import numpy as np
    >>> layer = SelfAttention(width=8, heads=2)
    >>> layer(np.zeros((1, 5, 8)), visible=np.array([[True, True, True, False, False]])).shape
    TensorShape([1, 5, 8])

    To decode token by token, begin with an empty cache; each step returns the next one.

    >>> cache = layer.empty(rows=1, length=5)
    >>> hidden, cache = layer(np.zeros((1, 1, 8)), cache=cache, position=0)
    >>> hidden.shape, cache.keys.shape
    (TensorShape([1, 1, 8]), TensorShape([1, 2, 5, 4]))
    """

    def build(self, shape: Any) -> None:
        """Make the weights of all parts."""
        self.attention.build(shape)
        self.norm.build(shape)

    def call(
        self,
        hidden: Any,
        visible: Any = None,
        *,
        causal: bool = False,
        cache: Cache | None = None,
        position: Any = None,
        training: bool | None = None,
    ) -> Any:
        """Apply the sub-layer. `visible` (rows, length) is the mask of tokens: all if None.

        With a `cache`, `hidden` is the one token at `position`: it is added to the cache and attends to the tokens up
        to there. The result is then (hidden, cache).
        """
        if cache is not None:
            return self._step(hidden, visible, cache, position, training)
        allowed = _combine_masks(visible, ops.shape(hidden)[1] if causal else None)
        return self.add(hidden, self.attention(self.read(hidden), allowed=allowed, training=training), training)

    def compute_output_spec(self, hidden: Any, *others: Any, cache: Any = None, **options: Any) -> Any:
        """The shape and type of the input; with a cache also the cache's."""
        spec = super().compute_output_spec(hidden)
        return spec if cache is None else (spec, cache)

    def empty(self, rows: Any, length: Any) -> Cache:
        """An empty cache for `length` tokens."""
        heads, size = self.attention.heads, self.attention.width // self.attention.heads
        nothing = ops.zeros((rows, heads, length, size), self.compute_dtype)
        return Cache(nothing, nothing)

    def _step(self, hidden: Any, visible: Any, cache: Cache, position: Any, training: bool | None) -> Any:
        read = self.read(hidden)
        places = ops.arange(ops.shape(cache.keys)[2])
        here = ops.equal(places, position)[:, None]
        now = self.attention.make_cache(read)
        cache = Cache(*(ops.where(here, new, old) for new, old in zip(now, cache, strict=True)))
        allowed = ops.less_equal(places, position)[None, None, None, :]
        allowed = allowed if visible is None else ops.logical_and(allowed, expand_mask(visible))
        return self.add(hidden, self.attention.attend_cache(read, cache, allowed, training), training), cache


@keras.saving.register_keras_serializable("whale_nebula")
class FeedForward(SubLayer):
    """The feed-forward sub-layer: two dense layers with an activation, for each token.

    >>> import numpy as np
    >>> FeedForward(width=8, inner=32)(np.zeros((1, 5, 8))).shape
    TensorShape([1, 5, 8])
    """

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        activation: str = "gelu",
        norm: Norm = "post",
        dropout: float = 0.0,
        epsilon: float = 1e-12,
        spread: float = 0.02,
        **kwargs: Any,
    ) -> None:
        super().__init__(norm, dropout, epsilon, **kwargs)
        sizes = {"width": width, "inner": inner, "activation": activation, "spread": spread}
        self._options = {**self._options, **sizes}
        self.wide = keras.layers.Dense(
            inner,
            activation=find_activation(activation),
            kernel_initializer=near_zero(spread),
            dtype=self.dtype_policy,
            name="wide",
        )
        self.narrow = keras.layers.Dense(
            width, kernel_initializer=near_zero(spread), dtype=self.dtype_policy, name="narrow"
        )

    def build(self, shape: Any) -> None:
        """Make the weights of all parts."""
        self.wide.build(shape)
        self.narrow.build((*shape[:-1], self._options["inner"]))
        self.norm.build(shape)

    def call(self, hidden: Any, training: bool | None = None) -> Any:
        """Apply the sub-layer."""
        return self.add(hidden, self.narrow(self.wide(self.read(hidden))), training)


def _combine_masks(visible: Any, causal_length: Any) -> Any:
    """Combine both masks; None if there is neither."""
    if causal_length is None:
        return None if visible is None else expand_mask(visible)
    return causal(causal_length) if visible is None else ops.logical_and(causal(causal_length), expand_mask(visible))


def find_activation(name: str) -> Any:
    """The activation function with this Hugging Face name.

    >>> round(float(find_activation("gelu")(-1.0)), 4), round(float(find_activation("gelu_new")(-1.0)), 4)
    (-0.1587, -0.1588)
    """
    check_choice("activation", name, tuple(ACTIVATIONS))
    return ACTIVATIONS[name]


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the choices.

    >>> check_choice("norm", "post", NORMS)
    """
    if value not in choices:
        one_of = " or ".join(repr(choice) for choice in choices)
        raise OptionError(
            f"{option}={value!r} is not a valid value", mend=f"{option}={choices[0]!r}; valid values are {one_of}"
        )


@keras.saving.register_keras_serializable("whale_nebula")
class CrossAttention(Attending):
    """Cross-attention to the visible places of the source; dropout, the sum with the input, and a norm.

    >>> import numpy as np
    >>> layer = CrossAttention(width=8, heads=2)
    >>> words, source = np.zeros((1, 3, 8)), np.zeros((1, 5, 12))
    >>> layer(words, source, np.array([[True, True, True, True, False]])).shape
    TensorShape([1, 3, 8])

    A search attends to one source repeatedly: `make_cache` computes its cache once, and `attend_cache` uses it.
    """

    def build(self, hidden_shape: Any, source_shape: Any) -> None:
        """Make the weights of all parts."""
        self.attention.build(hidden_shape, source_shape)
        self.norm.build(hidden_shape)

    def call(self, hidden: Any, source: Any, visible: Any = None, training: bool | None = None) -> Any:
        """Apply the sub-layer. `visible` (rows, length) is the mask of the source's places."""
        allowed = None if visible is None else expand_mask(visible)
        return self.attend_cache(hidden, self.make_cache(source), allowed, training)

    def make_cache(self, source: Any) -> Cache:
        """The cache of a source."""
        return self.attention.make_cache(source)

    def attend_cache(self, hidden: Any, cache: Cache, allowed: Any = None, training: bool | None = None) -> Any:
        """Apply the sub-layer with a cache of the source."""
        return self.add(hidden, self.attention.attend_cache(self.read(hidden), cache, allowed, training), training)
