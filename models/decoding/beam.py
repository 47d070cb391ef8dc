"""Beam search: decoding from left to right with the most likely prefixes in parallel.

The search is one `tf.while_loop` over plain tensors, so it belongs to the stage in which it is called, if any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from whale_nebula.errors import OptionError

from .search_result import NEVER, Found, log_probabilities

Step = Callable[[tf.Tensor, tf.Tensor, Any], tuple[tf.Tensor, Any]]
"""(last words [rows · width], position [], state) to (logits [rows · width, vocabulary], state).

`state` is any nest of tensors whose first axis is rows · width: a model's cache for each prefix.
"""


@dataclass(frozen=True, slots=True)
class Beam:
    """Options of beam search, for causal models.

    Args:
        start: id of the start token.
        end: id of the end token.
        longest: maximum number of words, including the end token.
        width: number of prefixes that are kept for each sentence.
        penalty: length penalty: scores are divided by ((5 + words) / 6) ** penalty. Zero prefers short sentences.
        never: ids that are never produced.
    """

    start: int
    end: int
    longest: int
    width: int = 5
    penalty: float = 0.6
    never: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if self.width < 1 or self.longest < 1:
            said = f"width={self.width}, longest={self.longest}"
            raise OptionError(f"a beam search needs positive sizes: {said}", mend="width=5, longest=64")
        if self.penalty < 0:
            why = "shorter sentences are already more likely, and a negative penalty would favour them further"
            raise OptionError(f"penalty={self.penalty!r} is negative", why=why, mend="penalty=0.6")
        if self.end in self.never:
            why = "no sentence could be completed"
            raise OptionError(f"never={self.never} contains the end token, {self.end}", why=why, mend="never=(0,)")


class _Search(NamedTuple):
    """The state of a search: prefixes with their log-likelihood, finished sentences with their scores, best first, and
    the state of the model for the prefixes.
    """

    position: tf.Tensor
    alive: tf.Tensor
    likelihood: tf.Tensor
    done: tf.Tensor
    scores: tf.Tensor
    state: Any


class _Candidates(NamedTuple):
    """Prefixes extended by one word: for each row the 2 · `width` likeliest, and the prefix that each extends."""

    likelihood: tf.Tensor
    beams: tf.Tensor
    words: tf.Tensor


def beam_search(step: Step, state: Any, rows: Any, beam: Beam) -> Found:
    """Search for the most likely sentences by `step`, for `rows` rows at once.

    The ids are those after the start, with the end, then zeros. The search ends when no prefix of any row can become
    better than the best finished sentence. The word in place `longest` must be the end.

    >>> likely = tf.math.log([[0.0, 0.1, 0.1, 0.8], [0.0, 0.1, 0.8, 0.1], [0.0, 0.1, 0.9, 0.0], [0.0, 0.5, 0.25, 0.25]])
    >>> def after(words, position, state):
    ...     return tf.gather(likely, words), state
    >>> found = beam_search(after, (), 1, Beam(start=0, end=2, longest=3, width=2, penalty=0.0))
    >>> found.ids.numpy().tolist(), [[round(float(tf.exp(score)), 2) for score in found.scores[0]]]
    ([[[3, 1, 2], [3, 2, 0]]], [[0.32, 0.2]])
    """
    first = _begin_search(state, rows, beam)

    def body(*search: Any) -> _Search:
        return _extend(step, _Search(*search), beam)

    def should_continue(*search: Any) -> tf.Tensor:
        return _can_improve(_Search(*search), beam)

    last = _Search(*tf.while_loop(should_continue, body, first))
    return Found(last.done[:, :, 1:], last.scores)


def _begin_search(state: Any, rows: Any, beam: Beam) -> _Search:
    """The initial state: one prefix for each row, the start; the other places of the beam have probability 0."""
    ids = tf.fill([rows, beam.width, beam.longest + 1], 0)
    alive = tf.concat([tf.fill([rows, beam.width, 1], beam.start), ids[:, :, 1:]], axis=2)
    nothing = tf.fill([rows, beam.width], NEVER)
    likelihood = tf.concat([tf.zeros([rows, 1]), nothing[:, 1:]], axis=1)
    return _Search(tf.constant(0), alive, likelihood, ids, nothing, state)


def _extend(step: Step, search: _Search, beam: Beam) -> _Search:
    """Extend every prefix by the likeliest words; those that end are finished sentences."""
    words = tf.gather(search.alive, search.position, axis=2)
    logits, state = step(tf.reshape(words, [-1]), search.position, search.state)
    found = _choose_candidates(_force_end(log_probabilities(logits, beam.never), search.position, beam), search, beam)
    ids = _write_words(tf.gather(search.alive, found.beams, batch_dims=1), found.words, search.position + 1)
    ended = found.words == beam.end
    counts = ended & (tf.range(2 * beam.width) < beam.width)  # candidates beyond the width do not end either
    finished = tf.where(counts, found.likelihood / _compute_penalty(search.position + 1, beam), NEVER)
    scores, best = _take_best(tf.concat([search.scores, finished], axis=1), beam.width)
    done = tf.gather(tf.concat([search.done, ids], axis=1), best, batch_dims=1)
    likelihood, kept = _take_best(tf.where(ended, NEVER, found.likelihood), beam.width)
    alive = tf.gather(ids, kept, batch_dims=1)
    state = _reorder_state(state, tf.gather(found.beams, kept, batch_dims=1), beam.width)
    return _Search(search.position + 1, alive, likelihood, done, scores, state)


def _can_improve(search: _Search, beam: Beam) -> tf.Tensor:
    """Whether in any row a prefix could beat the best sentence if all its further words were certain."""
    bound = search.likelihood[:, 0] / _compute_penalty(tf.constant(beam.longest), beam)
    return (search.position < beam.longest) & tf.reduce_any(bound > search.scores[:, 0])


def _force_end(likely: tf.Tensor, position: tf.Tensor, beam: Beam) -> tf.Tensor:
    """Allow only the end in the last place."""
    is_end = tf.range(tf.shape(likely)[-1]) == beam.end
    return tf.where((position < beam.longest - 1) | is_end, likely, NEVER)


def _choose_candidates(likely: tf.Tensor, search: _Search, beam: Beam) -> _Candidates:
    """Choose twice the width: even if half of them end, enough are left."""
    words = tf.shape(likely)[-1]
    each = search.likelihood[:, :, None] + tf.reshape(likely, [-1, beam.width, words])
    likelihood, places = _take_best(tf.reshape(each, [-1, beam.width * words]), 2 * beam.width)
    return _Candidates(likelihood, places // words, places % words)


def _take_best(scores: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    best: tuple[tf.Tensor, tf.Tensor] = tf.math.top_k(scores, count)
    return best


def _write_words(ids: tf.Tensor, words: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    here = tf.range(tf.shape(ids)[2]) == place
    return tf.where(here, words[:, :, None], ids)


def _reorder_state(state: Any, beams: tf.Tensor, width: int) -> Any:
    """Move the caches of prefixes to their new places."""
    rows = tf.range(tf.shape(beams)[0])[:, None] * width
    places = tf.reshape(rows + beams, [-1])
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, places), state)


def _compute_penalty(words: tf.Tensor, beam: Beam) -> tf.Tensor:
    return ((5.0 + tf.cast(words, tf.float32)) / 6.0) ** beam.penalty
