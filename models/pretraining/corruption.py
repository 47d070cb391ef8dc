"""Corruption of rows of tokens: hide some, fill them in by a generator, and restore them from the originals.

A row is one sentence, `[CLS] a [SEP]`, or a pair of translations, `[CLS] a [SEP] b [SEP]`, with the same share hidden
in both halves. A `Corrupted` is sent to the discriminator: ids, one bit per token, and, if the objective needs them,
the original ids at the hidden places.

Random numbers depend only on a seed, a row's number and a place. A row is therefore corrupted in the same way in any
batch, micro-batch or cluster, and a distributed run is bit-identical to the uncut one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from whale_nebula.codec import blocks
from whale_nebula.errors import OptionError

HIDE, FILL = 1, 2
"""Purposes of random numbers: places to hide, and tokens to fill in."""
_LEAST = 2.0**-25


def draw_uniform(seed: int, purpose: int, numbers: Any, count: int) -> Any:
    """`count` numbers in (0, 1) for each row, by the rows' own numbers (int32): (rows, count).

    >>> first = draw_uniform(7, HIDE, tf.constant([3, 4]), 2)
    >>> bool(tf.reduce_all(first[1] == draw_uniform(7, HIDE, tf.constant([4]), 2)[0]))
    True
    """
    base = tf.constant((seed * 0x9E3779B1 + purpose * 0x85EBCA77) % 2**32, tf.uint32)
    key = (base, tf.bitcast(numbers, tf.uint32)[:, None])
    return blocks.random_uniform(key, tf.bitcast(tf.range(count), tf.uint32)[None, :]) + _LEAST


def draw_gumbel(seed: int, purpose: int, numbers: Any, shape: tuple[int, int]) -> Any:
    """Gumbel noise for each row: (rows, *shape). The largest of scores plus noise is a sample of their softmax."""
    drawn = draw_uniform(seed, purpose, numbers, shape[0] * shape[1])
    return tf.reshape(-tf.math.log(-tf.math.log(drawn)), (-1, *shape))


@dataclass(frozen=True, slots=True)
class Corruption:
    """Options of corruption.

    Args:
        mask: id of a hidden token.
        end: id of the token that ends each half of a row.
        special: ids that are never hidden.
        share: share of the tokens that is hidden.
        heat: temperature of sampling: the generator's logits are divided by it.
        seed: seed of the corruption.

    >>> Corruption(mask=4, end=3, special=(0, 2, 3)).count(20)
    4
    """

    mask: int
    end: int
    special: Sequence[int]
    share: float = 0.15
    heat: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise OptionError(f"share={self.share!r} is not a valid share of tokens to mask", mend="share=0.15")
        if self.heat <= 0:
            raise OptionError(f"heat={self.heat!r} is not a positive temperature", mend="heat=1.0")

    @classmethod
    def of(cls, words: Any, **options: Any) -> Corruption:
        """The corruption for a tokenizer's vocabulary."""
        return cls(words.mask, words.end, (words.pad, words.start, words.end), **options)

    def count(self, length: int) -> int:
        """The number of places that are predicted in each row of this length, at least as many as are hidden."""
        return max(2, int(self.share * length) + 1)


class HiddenTokens(NamedTuple):
    """Rows with hidden tokens: the visible ids, which tokens are `chosen` (bool), their places, the original ids there,
    and which of the places count (float; rows may have fewer than others).
    """

    shown: Any
    chosen: Any
    places: Any
    originals: Any
    weights: Any


class Corrupted(NamedTuple):
    """The input of a discriminator. `marked` are the replaced tokens; or, if there are `originals`, the hidden ones, as
    the replaced ones follow from these.
    """

    ids: Any
    marked: Any
    originals: Any = None


def hide_tokens(tokens: Any, numbers: Any, how: Corruption) -> HiddenTokens:
    """Hide tokens of rows (rows, length). `numbers` (rows,) identify the rows uniquely within a training."""
    length = int(tokens.shape[1])
    chosen = _choose(tokens, draw_uniform(how.seed, HIDE, numbers, length), how)
    places = find_places(chosen, how.count(length))
    originals = tf.gather(tokens, places, batch_dims=1)
    weights = tf.cast(tf.gather(chosen, places, batch_dims=1), tf.float32)
    return HiddenTokens(tf.where(chosen, how.mask, tokens), chosen, places, originals, weights)


def find_places(chosen: Any, count: int) -> Any:
    """The chosen places from left to right, padded with others to `count` in each row.

    >>> find_places(tf.constant([[False, True, False, True]]), 3).numpy().tolist()
    [[1, 3, 0]]
    """
    return tf.math.top_k(tf.cast(chosen, tf.int32), count, index_type=tf.int32).indices


def fill_in(tokens: Any, numbers: Any, hidden: HiddenTokens, scores: Any, how: Corruption) -> Any:
    """Fill in hidden tokens by sampling from the generator's logits (rows, places, vocabulary)."""
    count, vocabulary = how.count(int(tokens.shape[1])), int(scores.shape[-1])
    gumbel = draw_gumbel(how.seed, FILL, numbers, (count, vocabulary))
    sampled = tf.argmax(tf.cast(scores, tf.float32) / how.heat + gumbel, axis=-1, output_type=tf.int32)
    return put_back(tokens, hidden.chosen, sampled)


def put_back(ids: Any, chosen: Any, values: Any) -> Any:
    """Write values, from left to right, to the chosen places of rows.

    >>> put_back(tf.constant([[7, 8, 9]]), tf.constant([[False, True, True]]), tf.constant([[1, 2]])).numpy().tolist()
    [[7, 1, 2]]
    """
    ranks = tf.cumsum(tf.cast(chosen, tf.int32), axis=1, exclusive=True)
    ranks = tf.minimum(ranks, int(values.shape[1]) - 1)
    return tf.where(chosen, tf.gather(values, ranks, batch_dims=1), ids)


def corrupt(tokens: Any, hidden: HiddenTokens, ids: Any, *, originals: bool) -> Corrupted:
    """What is sent to the discriminator for rows that were filled in (`ids`): with the original ids at hidden places,
    or with only a bit a token.
    """
    return Corrupted(ids, hidden.chosen, hidden.originals) if originals else Corrupted(ids, tf.not_equal(ids, tokens))


def _choose(tokens: Any, drawn: Any, how: Corruption) -> Any:
    """Which tokens to hide: in each half of a row a share of those that may be hidden, and at least one; those with
    the largest of the `drawn` numbers (rows, length).
    """
    hideable = tf.reduce_all(tokens[..., None] != tf.constant(sorted(how.special), tokens.dtype), axis=-1)
    ends = tf.cast(tokens == how.end, tf.int32)
    half = tf.cumsum(ends, axis=1, exclusive=True)
    mates = (half[:, :, None] == half[:, None, :]) & hideable[:, None, :]
    larger = mates & (drawn[:, None, :] > drawn[:, :, None])
    rank = tf.reduce_sum(tf.cast(larger, tf.float32), axis=2)
    count = tf.reduce_sum(tf.cast(mates, tf.float32), axis=2)
    return hideable & (rank < tf.maximum(1.0, tf.floor(how.share * count + 0.5)))
