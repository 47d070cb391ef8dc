"""The benchmark transformer: embedding, pre-normalised blocks, output; a causal language model.

It is a functional Keras model whose layers form a sequence: `embedding`, `block0`, `block1`, ..., `output`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import keras

from whale_nebula.errors import OptionError

from .attention import Configured
from .sides import nowhere

Around = Callable[[int], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a `transformer`.

    Args:
        vocabulary: number of tokens.
        length: number of tokens in a row.
        width: size of the hidden states; a multiple of `heads`.
        heads: number of attention heads.
        blocks: number of blocks.
        inner: width inside the feed-forward parts; 4 × `width` if None.
        dropout: dropout rate.

    >>> Sizes(width=256).feed_forward
    1024
    """

    vocabulary: int = 1000
    length: int = 64
    width: int = 128
    heads: int = 4
    blocks: int = 4
    inner: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name not in ("inner", "dropout") and value < 1:
                raise OptionError(f"{name}={value!r} is less than 1", mend=f"{name}=1, or more")
        if self.width % self.heads:
            raise OptionError(
                f"a width of {self.width} does not divide into {self.heads} heads",
                why="heads have equal parts of the width",
                mend=f"width={self.width + self.heads - self.width % self.heads}",
            )

    @property
    def feed_forward(self) -> int:
        """The width inside a block's feed-forward part."""
        return 4 * self.width if self.inner is None else self.inner


class Embedding(Configured):
    """Embeddings of tokens plus those of positions."""

    def __init__(self, vocabulary: int, length: int, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._options = {"vocabulary": vocabulary, "length": length, "width": width}
        self.tokens = keras.layers.Embedding(vocabulary, width, name="tokens")
        self.positions = keras.layers.Embedding(length, width, name="positions")

    def build(self, shape: Any) -> None:
        """Create both tables."""
        self.tokens.build(shape)
        self.positions.build(shape[1:])

    def call(self, tokens: Any) -> Any:
        """The vectors of a batch of rows of tokens."""
        return self.tokens(tokens) + self.positions(keras.ops.arange(keras.ops.shape(tokens)[1]))


class Block(Configured):
    """Causal self-attention, then a feed-forward part; each normalises its input and adds to it."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._options = {"width": width, "heads": heads, "inner": inner, "dropout": dropout}
        self.attention_norm = keras.layers.LayerNormalization(epsilon=1e-5, name="attention_norm")
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads, dropout=dropout, name="attention")
        self.inner_norm = keras.layers.LayerNormalization(epsilon=1e-5, name="inner_norm")
        self.wide = keras.layers.Dense(inner, activation="gelu", name="wide")
        self.narrow = keras.layers.Dense(width, name="narrow")
        self.dropout = keras.layers.Dropout(dropout, name="dropout")

    def build(self, shape: Any) -> None:
        """Create the weights of all parts."""
        for part in (self.attention_norm, self.inner_norm, self.wide):
            part.build(shape)
        self.attention.build(shape, shape)
        self.narrow.build((*shape[:-1], self._options["inner"]))

    def call(self, hidden: Any, training: bool | None = None) -> Any:
        """Apply the block."""
        normal = self.attention_norm(hidden)
        attended = self.attention(normal, normal, use_causal_mask=True, training=training)
        hidden = hidden + self.dropout(attended, training=training)
        inner = self.narrow(self.wide(self.inner_norm(hidden)))
        return hidden + self.dropout(inner, training=training)


def transformer(sizes: Sizes | None = None, *, around: Around = nowhere, shorter: bool = False) -> keras.Model:
    """Build the benchmark transformer, a causal language model: int32 tokens (rows, length) in, logits (rows, length,
    vocabulary) out.

    Args:
        sizes: the sizes; `Sizes()` if None.
        around: called with the number of each block; returns the scope to build it in, such as `nb.stage`. The
            embedding belongs to the first block, the output to the last. Enter scopes above stages (`nb.cluster`,
            `nb.pipeline`) around the call of `transformer`.
        shorter: whether rows may be shorter than `length`.

    >>> import whale_nebula as nb
    >>> small = Sizes(vocabulary=11, length=4, width=8, heads=2, blocks=2)
    >>> with nb.cluster():
    ...     model = transformer(small, around=lambda block: nb.stage(cluster=("gpu", "npu")[block]))
    >>> model.output.shape, [layer.name for layer in model.layers[1:]]
    ((None, 4, 11), ['embedding', 'block0', 'block1', 'norm', 'output'])
    """
    s = sizes or Sizes()
    tokens = keras.Input((None if shorter else s.length,), dtype="int32", name="tokens")
    with around(0):
        hidden = Embedding(s.vocabulary, s.length, s.width, name="embedding")(tokens)
    for block in range(s.blocks):
        with around(block):
            hidden = Block(s.width, s.heads, s.feed_forward, s.dropout, name=f"block{block}")(hidden)
    with around(s.blocks - 1):
        normal = keras.layers.LayerNormalization(epsilon=1e-5, name="norm")(hidden)
        logits = keras.layers.Dense(s.vocabulary, name="output")(normal)
    return keras.Model(tokens, logits, name="transformer")
