"""Data for masked language modelling: some tokens of each row are hidden, and the model predicts them.

Of the tokens, 15 % are predicted; of these 80 % are replaced by the mask, 10 % by a random token, and 10 % are
unchanged, so that the model cannot rely on visible tokens either. The choice depends only on the seed and the batch's
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

from whale_nebula.errors import OptionError

from .bert import Bert
from .masked_lm import MaskedLm, masked_lm


class Tokens(Protocol):
    """The part of a tokenizer that masking needs: the number of tokens, and the special ones."""

    @property
    def size(self) -> int:
        """The number of tokens."""

    @property
    def mask(self) -> int:
        """The id of a hidden token."""

    @property
    def pad(self) -> int:
        """The id of padding."""

    @property
    def start(self) -> int:
        """The first id of each row."""

    @property
    def end(self) -> int:
        """The last id of each row."""


@dataclass(frozen=True, slots=True)
class Masking:
    """Options of masking for masked language modelling.

    Args:
        vocabulary: number of tokens.
        mask: id of a hidden token.
        special: ids that are never hidden, and never replace another token.
        share: share of a row's tokens that are predicted.
        masked: share of these that are replaced by the mask.
        swapped: share of these that are replaced by a random token.
        seed: seed of the choice.

    >>> Masking(vocabulary=10, mask=4, special=(0, 2, 3)).words
    (1, 5, 6, 7, 8, 9)
    """

    vocabulary: int
    mask: int
    special: Sequence[int]
    share: float = 0.15
    masked: float = 0.8
    swapped: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise OptionError(f"share={self.share!r} is not a valid share of tokens to mask", mend="share=0.15")
        if min(self.masked, self.swapped) < 0 or self.masked + self.swapped > 1:
            raise OptionError(
                f"masked={self.masked!r} and swapped={self.swapped!r} are not shares with a sum of at most 1",
                mend="masked=0.8, swapped=0.1",
            )
        if not self.words:
            raise OptionError(
                f"all {self.vocabulary} tokens of the vocabulary are special", mend="remove words from special"
            )

    @classmethod
    def of(cls, tokens: Tokens, **options: Any) -> Masking:
        """The masking for a tokenizer's vocabulary."""
        return cls(tokens.size, tokens.mask, (tokens.pad, tokens.start, tokens.end), **options)

    @property
    def words(self) -> tuple[int, ...]:
        """The tokens that may replace another."""
        apart = {*self.special, self.mask}
        return tuple(token for token in range(self.vocabulary) if token not in apart)


Example = tuple[dict[str, tf.Tensor], tf.Tensor, tf.Tensor]
"""A batch for `masked_lm`: its inputs, the labels at the places to predict, and their weights."""


def mask_rows(tokens: tf.Tensor, how: Masking, number: Any) -> Example:
    """Mask the batch with this number (rows, length), which also seeds the choice.

    In each row the share, and at least one token, is hidden. Rows with fewer places are padded with weight 0.
    """
    hideable = _find_hideable(tokens, how)
    seeds = tf.unstack(tf.random.split((how.seed, number), 3))
    places, weights = _draw_places(hideable, how.share, seeds[0])
    labels = tf.gather(tokens, places, batch_dims=1)
    shown = tf.where(weights > 0, _replace_tokens(labels, how, seeds[1], seeds[2]), labels)
    rows = tf.broadcast_to(tf.range(tf.shape(tokens)[0])[:, None], tf.shape(places))
    hidden = tf.tensor_scatter_nd_update(tokens, tf.stack([rows, places], axis=-1), shown)
    return {"tokens": hidden, "places": places}, labels, weights


def mask_batches(batches: tf.data.Dataset, how: Masking) -> tf.data.Dataset:
    """Mask batches of rows of tokens. With `batches.repeat()` the choice differs in every epoch.

    >>> how = Masking(vocabulary=100, mask=4, special=(0, 2, 3))
    >>> rows = tf.data.Dataset.from_tensors([[2, 50, 60, 70, 3, 0]])
    >>> inputs, labels, weights = next(iter(mask_batches(rows, how)))
    >>> {name: value.shape[1] for name, value in inputs.items()}, labels.shape[1], weights.numpy().tolist()
    ({'tokens': 6, 'places': 1}, 1, [[1.0]])
    """
    numbered = batches.enumerate()
    return numbered.map(
        lambda number, tokens: mask_rows(tf.cast(tokens, tf.int32), how, number),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    ).prefetch(tf.data.AUTOTUNE)


def pretrain(
    bert: Bert | MaskedLm,
    batches: tf.data.Dataset,
    how: Masking,
    *,
    steps: int,
    learning_rate: float = 1e-3,
    warmup: float = 0.1,
    epochs: int = 1,
    **fit: Any,
) -> keras.callbacks.History:
    """Train a BERT in place by masked language modelling; returns the history of `fit`.

    The learning rate rises linearly during the share `warmup` of the steps and then falls to zero as a cosine; without
    warm-up it is constant. The history has one entry for each epoch.

    Args:
        bert: a `masked_lm`, whose head is trained too, or a `Bert`, which gets a temporary head.
        batches: batches of int32 tokens (rows, length), each with its own length; for one side of a text
            `text.batches(encoded, order).map(lambda inputs, labels: inputs["source"])`.
        how: options of masking, such as `Masking.of(tokenizer, seed=1)`.
        steps: total number of steps.
        learning_rate: maximum learning rate.
        warmup: share of the steps in which the learning rate rises.
        epochs: number of epochs into which the steps are divided.
        fit: further options of `fit`.
    """
    model = bert if isinstance(bert, MaskedLm) else masked_lm(bert)
    optimizer = _make_optimizer(learning_rate, steps, warmup)
    optimizer.build(model.trainable_variables)  # slots created during tracing would cause a second trace
    model.compile(optimizer, make_masked_loss(), jit_compile=False)  # jit would compile for every length of a batch
    examples = mask_batches(batches.repeat(), how)
    return model.fit(examples, epochs=epochs, steps_per_epoch=max(1, steps // epochs), shuffle=False, **fit)


def make_masked_loss() -> keras.losses.Loss:
    """The mean loss over hidden tokens."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")


def _make_optimizer(peak: float, steps: int, warmup: float) -> keras.optimizers.Optimizer:
    """Adam with weight decay, except for biases and norms; after the warm-up its rate falls to zero as a cosine."""
    rising = round(steps * warmup)
    rate = keras.optimizers.schedules.CosineDecay(0.0, max(1, steps - rising), warmup_target=peak, warmup_steps=rising)
    adam = keras.optimizers.AdamW(rate if rising else peak, weight_decay=0.01, global_clipnorm=1.0)
    adam.exclude_from_weight_decay(var_names=["bias", "norm"])
    return adam


def _find_hideable(tokens: tf.Tensor, how: Masking) -> tf.Tensor:
    special = tf.constant(sorted(how.special), tokens.dtype)
    return tf.reduce_all(tokens[..., None] != special, axis=-1)


def _draw_places(hideable: tf.Tensor, share: float, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Random places of each row to predict (rows, places), and their weights: 1, or 0 for places that only pad."""
    length = tf.cast(tf.shape(hideable)[1], tf.float32)
    most = tf.cast(tf.maximum(1.0, tf.round(share * length)), tf.int32)
    scores = tf.where(hideable, tf.random.stateless_uniform(tf.shape(hideable), seed), -1.0)
    drawn, places = tf.math.top_k(scores, most)
    counts = tf.reduce_sum(tf.cast(hideable, tf.float32), axis=1, keepdims=True)
    wanted = tf.maximum(1.0, tf.round(share * counts))
    counted = (tf.range(tf.cast(most, tf.float32)) < wanted) & (drawn >= 0)
    return places, tf.cast(counted, tf.float32)


def _replace_tokens(labels: tf.Tensor, how: Masking, seed: tf.Tensor, other_seed: tf.Tensor) -> tf.Tensor:
    """The replacements of the tokens to predict."""
    words = tf.constant(np.array(how.words), labels.dtype)
    draw = tf.random.stateless_uniform(tf.shape(labels), seed)
    index = tf.random.stateless_uniform(tf.shape(labels), other_seed, maxval=len(how.words), dtype=tf.int32)
    others = tf.where(draw < how.masked + how.swapped, tf.gather(words, index), labels)
    return tf.where(draw < how.masked, tf.cast(how.mask, labels.dtype), others)


class HiddenWords(NamedTuple):
    """Ids with hidden words, and the two labels: the hidden words (padding elsewhere), and the number of words."""

    shown: tf.Tensor
    words: tf.Tensor
    length: tf.Tensor


@dataclass(frozen=True, slots=True)
class Hiding:
    """Hides words of each sentence for a `MaskedABNet`: from one to all of them, uniformly distributed.

    Start, end and padding are always visible. The choice depends only on the seed and the batch's number.

    >>> hiding = Hiding(mask=4, special=(0, 2, 3))
    >>> hidden = hiding(tf.constant([[2, 7, 8, 9, 3, 0]]), number=1)
    >>> hidden.length.numpy().tolist(), bool(tf.reduce_all((hidden.shown == 4) == (hidden.words > 0)))
    ([3], True)
    """

    mask: int
    special: tuple[int, ...] = (0,)
    seed: int = 0

    def __call__(self, ids: Any, number: Any) -> HiddenWords:
        """Hide words of complete sentences (rows, length), with start and end, for this batch."""
        is_word = tf.reduce_all(ids[:, :, None] != tf.constant(self.special, ids.dtype), axis=2)
        words = tf.reduce_sum(tf.cast(is_word, tf.int32), axis=1)
        seeds = tf.random.split(tf.stack([self.seed, tf.cast(number, tf.int32)]), 2)
        share = tf.random.stateless_uniform(tf.shape(words), seeds[0])
        count = 1 + tf.cast(share * tf.cast(words, tf.float32), tf.int32)
        draw = tf.where(is_word, tf.random.stateless_uniform(tf.shape(ids), seeds[1]), 2.0)
        hidden = is_word & (tf.argsort(tf.argsort(draw)) < count[:, None])
        return HiddenWords(tf.where(hidden, self.mask, ids), tf.where(hidden, ids, 0), words)

    def of_batches(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Convert batches for a causal model to those for a `MaskedABNet`.

        ({"source", "target": all but the last word}, all but the first) becomes ({"source", "target": shown}, {"words",
        "length"}). A missing side (None) remains None.
        """

        def hide(number: Any, batch: tuple[Any, ...]) -> tuple[Any, Any]:
            inputs, labels = batch[0], batch[1]
            if inputs["target"] is None or labels is None:
                return {**inputs, "target": None}, {"words": None, "length": None}
            hidden = self(tf.concat([inputs["target"][:, :1], labels], axis=1), number)
            return {**inputs, "target": hidden.shown}, {"words": hidden.words, "length": hidden.length}

        return batches.enumerate().map(hide, num_parallel_calls=tf.data.AUTOTUNE)
