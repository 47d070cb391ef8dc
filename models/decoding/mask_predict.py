"""Mask-predict: predict all words of a sentence at once, then the least certain ones again, for a few rounds.

Sentences of several lengths are decoded in parallel, and the most likely one is kept. The search is one `tf.while_loop`
over plain tensors, so it belongs to the stage in which it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from whale_nebula.errors import OptionError

from .search_result import NEVER, Found, log_probabilities

Predict = Callable[[tf.Tensor], tf.Tensor]
"""Shown ids [rows · candidates, longest + 2] to logits [rows · candidates, longest + 2, vocabulary]."""


@dataclass(frozen=True, slots=True)
class MaskPredict:
    """Options of mask-predict, for models that fill in hidden words.

    Args:
        start: id of the start token.
        end: id of the end token.
        mask: id of a hidden word.
        longest: maximum number of words.
        candidates: number of sentence lengths that are tried for each sentence.
        rounds: number of predictions.
        never: ids that are never produced.
    """

    start: int
    end: int
    mask: int
    longest: int
    candidates: int = 5
    rounds: int = 4
    never: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not 1 <= self.candidates <= self.longest or self.rounds < 1:
            options = f"candidates={self.candidates}, longest={self.longest}, rounds={self.rounds}"
            why = "at most `longest` lengths can be candidates, and a sentence needs at least one round"
            raise OptionError(f"mask-predict cannot run with {options}", why=why, mend="candidates=5, rounds=4")


class _Draft(NamedTuple):
    """The state of a search: the number of finished rounds, ids, the log-likelihood of each word when it was predicted,
    and which words are hidden.
    """

    round: tf.Tensor
    ids: tf.Tensor
    likelihood: tf.Tensor
    hidden: tf.Tensor


def mask_predict(predict: Predict, lengths: tf.Tensor, search: MaskPredict) -> Found:
    """Decode sentences of the likeliest lengths; `lengths` are logits [rows, longest + 1] of the number of words.

    The ids are the start, the words, the end, then zeros; scores are the mean log-probability of the words.

    >>> def predict(ids):  # in place 1 stands word 4, in place 2 word 5, and so on
    ...     return tf.one_hot([range(3, 9)], 9) * 5.0
    >>> search = MaskPredict(start=1, end=2, mask=3, longest=4, candidates=1)
    >>> mask_predict(predict, tf.constant([[0.0, 0.0, 0.0, 9.0, 0.0]]), search).best.numpy().tolist()
    [[1, 4, 5, 6, 2, 0]]
    """
    words = _choose_lengths(lengths, search)
    first = _begin_draft(tf.reshape(words, [-1]), search)
    places = first.hidden  # the places of words, all hidden at first

    def body(*draft: tf.Tensor) -> _Draft:
        return _mask_unlikely(_predict_hidden(predict, _Draft(*draft), search), places, search)

    def should_continue(*draft: tf.Tensor) -> tf.Tensor:
        return _Draft(*draft).round < search.rounds

    last = _Draft(*tf.while_loop(should_continue, body, first))
    return _sort_by_score(last, places, search)


def _choose_lengths(lengths: tf.Tensor, search: MaskPredict) -> tf.Tensor:
    """The most likely lengths of each row, from 1 to `longest`."""
    return tf.math.top_k(lengths[:, 1 : search.longest + 1], search.candidates).indices + 1


def _begin_draft(words: tf.Tensor, search: MaskPredict) -> _Draft:
    place = tf.range(search.longest + 2)
    hidden = (place >= 1) & (place <= words[:, None])
    ids = tf.where(hidden, search.mask, tf.where(place == 0, search.start, 0))
    ids = tf.where(place == words[:, None] + 1, search.end, ids)
    return _Draft(tf.constant(0), ids, tf.zeros_like(ids, tf.float32), hidden)


def _predict_hidden(predict: Predict, draft: _Draft, search: MaskPredict) -> _Draft:
    """Replace each hidden word by the likeliest one; others are unchanged."""
    never = (*search.never, search.start, search.end, search.mask)
    likely = log_probabilities(predict(draft.ids), never)
    word = tf.argmax(likely, axis=-1, output_type=draft.ids.dtype)
    ids = tf.where(draft.hidden, word, draft.ids)
    return draft._replace(ids=ids, likelihood=tf.where(draft.hidden, tf.reduce_max(likely, -1), draft.likelihood))


def _mask_unlikely(draft: _Draft, places: tf.Tensor, search: MaskPredict) -> _Draft:
    """Hide the least likely words again: fewer each round, none after the last."""
    done = draft.round + 1
    words = tf.reduce_sum(tf.cast(places, tf.int32), axis=1, keepdims=True)
    count = words * (search.rounds - done) // search.rounds
    order = tf.argsort(tf.where(places, draft.likelihood, -NEVER), stable=True)
    hidden = (tf.argsort(order) < count) & places
    return _Draft(done, tf.where(hidden, search.mask, draft.ids), draft.likelihood, hidden)


def _sort_by_score(draft: _Draft, places: tf.Tensor, search: MaskPredict) -> Found:
    counted = tf.cast(places, tf.float32)
    mean = tf.reduce_sum(draft.likelihood * counted, axis=1) / tf.reduce_sum(counted, axis=1)
    scores, order = tf.math.top_k(tf.reshape(mean, [-1, search.candidates]), search.candidates)
    ids = tf.reshape(draft.ids, [-1, search.candidates, search.longest + 2])
    return Found(tf.gather(ids, order, batch_dims=1), scores)
