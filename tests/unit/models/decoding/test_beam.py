"""Beam search: equal to exhaustive search, to greedy decoding with a beam of one, and terminating."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.errors import OptionError
from whale_nebula.models.decoding import Beam, beam_search

START, END, WORDS, LONGEST = 1, 2, 5, 4


def model(seed: int, rows: int) -> np.ndarray:
    """Logits of the next word, by row, place and the two words before it: no greedy choice gets that right."""
    return np.random.default_rng(seed).normal(0, 2, (rows, LONGEST, WORDS, WORDS, WORDS)).astype("float32")


def run_beam_search(logits: np.ndarray, beam: Beam):
    """The state of a beginning is its row, and the word before its last."""
    rows = len(logits)

    @tf.function
    def search():
        def step(words, position, state):
            row, before = state
            place = tf.fill(tf.shape(words), position)
            return tf.gather_nd(logits, tf.stack([row, place, before, words], axis=1)), (row, words)

        state = (tf.repeat(tf.range(rows), beam.width), tf.fill([rows * beam.width], START))
        return beam_search(step, state, rows, beam)

    return search()


def log_probabilities(logits: np.ndarray, beam: Beam) -> np.ndarray:
    kept = np.where(np.isin(np.arange(WORDS), beam.never), -np.inf, logits).astype("float64")
    return kept - np.log(np.exp(kept).sum(-1, keepdims=True))


def search_exhaustively(logits: np.ndarray, beam: Beam) -> list[tuple[float, list[int]]]:
    """All sentences of one row, best first. What stands in the last place can only be the end, and is certain to be."""
    likelihoods, found = log_probabilities(logits, beam), []
    for words in range(beam.longest):
        for sentence in itertools.product([w for w in range(WORDS) if w not in (END, *beam.never)], repeat=words):
            ids, total = [START, START, *sentence, END], 0.0
            for place, word in enumerate(ids[2:]):
                total += likelihoods[place, ids[place], ids[place + 1], word]
            found.append((total / ((5 + words + 1) / 6) ** beam.penalty, [*sentence, END]))
    return sorted(found, reverse=True)


@pytest.mark.parametrize(
    "penalty", [pytest.param(0.0, marks=pytest.mark.grid), 0.6, pytest.param(2.0, marks=pytest.mark.grid)]
)
def test_wide_beam_equals_exhaustive_search(penalty: float) -> None:
    logits, beam = model(0, rows=16), Beam(START, END, LONGEST, width=12, penalty=penalty, never=(0, START))
    found = run_beam_search(logits, beam)
    for row in range(16):
        score, sentence = search_exhaustively(logits[row], beam)[0]
        assert found.ids[row, 0].numpy().tolist() == sentence + [0] * (LONGEST - len(sentence))
        assert float(found.scores[row, 0]) == pytest.approx(score, rel=1e-5)


def test_beam_search_never_writes_excluded_words() -> None:
    logits = model(1, rows=8)
    logits[..., 3] = 9.0
    assert (run_beam_search(logits, Beam(START, END, LONGEST, never=(0, START, 3))).ids != 3).numpy().all()


def test_beam_search_stops_early() -> None:
    """The end is all but certain after the first word: fifty places are not looked at."""
    step_count = tf.Variable(0)

    def step(words, position, state):
        step_count.assign_add(1)
        return tf.tile([[0.0, 0.0, 20.0, 0.0]], [tf.shape(words)[0], 1]), state

    beam_search(step, (), 2, Beam(START, END, longest=50, width=2))
    assert step_count.numpy() == 1


def test_beam_search_accepts_an_unknown_number_of_rows() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, WORDS])])
    def search(logits):
        def step(words, position, state):
            return tf.repeat(logits, 2, axis=0), state

        return beam_search(step, (), tf.shape(logits)[0], Beam(START, END, longest=3, width=2))

    for rows in (1, 3):
        assert search(tf.zeros([rows, WORDS])).ids.shape == (rows, 2, 3)


@pytest.mark.parametrize("options", [{"width": 0}, {"longest": 0}, {"penalty": -1.0}, {"never": (0, END)}])
def test_invalid_beam_is_refused_with_a_fix(options: dict) -> None:
    with pytest.raises(OptionError) as caught:
        Beam(**{"start": START, "end": END, "longest": 4, **options})
    assert caught.value.mend
