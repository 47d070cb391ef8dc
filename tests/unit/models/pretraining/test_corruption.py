"""Corruption: the share of each half, determinism by a row's number, and sampling by the logits."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.models.pretraining.small_pretraining import END, HOW, LENGTH, MASK, PAD, START, VOCABULARY, rows
from whale_nebula.errors import OptionError
from whale_nebula.models.pretraining import Corruption, corrupt, fill_in, hide_tokens, put_back

COUNT = 200
ROWS = rows(COUNT)
NUMBERS = np.arange(COUNT, dtype=np.int32)


@pytest.fixture(scope="module")
def hidden() -> Any:
    return hide_tokens(tf.constant(ROWS), tf.constant(NUMBERS), HOW)


def list_word_places(row: np.ndarray) -> list[np.ndarray]:
    """The places of words in each sentence of a row."""
    ends = np.flatnonzero(row == END)
    starts = [0, *ends[:-1]]
    return [np.arange(start + 1, end) for start, end in zip(starts, ends, strict=True)]


def test_share_of_each_sentence_is_hidden_without_special_tokens(hidden: Any) -> None:
    chosen = hidden.chosen.numpy()
    assert not chosen[np.isin(ROWS, (PAD, START, END))].any()
    for row, marks in zip(ROWS, chosen, strict=True):
        for places in list_word_places(row):
            assert marks[places].sum() == max(1, int(np.floor(HOW.share * len(places) + 0.5)))
    assert {len(list_word_places(row)) for row in ROWS} == {1, 2}


def test_hidden_rows_record_places_and_originals(hidden: Any) -> None:
    chosen = hidden.chosen.numpy()
    assert (hidden.shown.numpy() == np.where(chosen, MASK, ROWS)).all()
    for row, marks, places, originals, weights in zip(
        ROWS, chosen, *(each.numpy() for each in hidden[2:]), strict=True
    ):
        hidden_places = np.flatnonzero(marks)
        assert places[: len(hidden_places)].tolist() == hidden_places.tolist()
        assert weights.tolist() == [1.0] * len(hidden_places) + [0.0] * (len(weights) - len(hidden_places))
        assert (originals == row[places]).all()


def test_places_are_hidden_uniformly(hidden: Any) -> None:
    row = np.tile(ROWS[1], (4000, 1))
    chosen = hide_tokens(tf.constant(row), tf.range(4000), HOW).chosen.numpy().mean(0)
    for places in list_word_places(ROWS[1]):
        assert np.ptp(chosen[places]) < 0.08


def test_hidden_tokens_depend_only_on_the_row_number(hidden: Any) -> None:
    for first, last in ((0, 7), (7, 8), (100, 200)):
        part = slice(first, last)
        found = hide_tokens(tf.constant(ROWS[part]), tf.constant(NUMBERS[part]), HOW)
        assert (found.chosen.numpy() == hidden.chosen.numpy()[part]).all()


@pytest.mark.parametrize("heat", [1.0, 2.0])
def test_replacements_are_sampled_from_the_softmax(heat: float) -> None:
    how = Corruption(mask=MASK, end=END, special=(PAD, START, END), share=0.1, heat=heat, seed=9)
    count, row = 4000, ROWS[:1]
    tokens, numbers = tf.constant(np.tile(row, (count, 1))), tf.range(count)
    hidden = hide_tokens(tokens, numbers, how)
    logits = np.random.default_rng(0).normal(0, 1.5, VOCABULARY).astype(np.float32)
    scores = tf.broadcast_to(logits, (count, how.count(LENGTH), VOCABULARY))
    ids = fill_in(tokens, numbers, hidden, scores, how).numpy()
    drawn = np.bincount(ids[hidden.chosen.numpy()], minlength=VOCABULARY) / count
    expected = np.exp(logits / heat) / np.exp(logits / heat).sum()
    assert np.abs(drawn - expected).max() < 4 * np.sqrt(0.25 / count)
    assert (fill_in(tokens, numbers, hidden, scores, how).numpy() == ids).all()


@pytest.mark.parametrize("originals", [True, False])
def test_receiver_restores_the_originals(hidden: Any, originals: bool) -> None:
    tokens = tf.constant(ROWS)
    scores = tf.random.stateless_normal((COUNT, HOW.count(LENGTH), VOCABULARY), (1, 2))
    ids = fill_in(tokens, tf.constant(NUMBERS), hidden, scores, HOW)
    sent = corrupt(tokens, hidden, ids, originals=originals)
    if originals:
        assert (put_back(sent.ids, sent.marked, sent.originals).numpy() == ROWS).all()
    else:
        assert sent.originals is None
        assert (sent.marked.numpy() == (ids.numpy() != ROWS)).all()
        assert 0 < sent.marked.numpy().sum() < hidden.chosen.numpy().sum()


@pytest.mark.parametrize(("options", "said"), [({"share": 1.0}, "share=1.0"), ({"heat": 0.0}, "heat=0.0")])
def test_invalid_corruption_option_is_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Corruption(mask=MASK, end=END, special=(PAD,), **options)
