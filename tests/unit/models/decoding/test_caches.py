"""Decoding with caches equals decoding without."""

import numpy as np
import pytest
import tensorflow as tf

from tests.unit.models.small_translators import END, LENGTH, MASK, MODELS, PAD, START, randomize_weights, sources
from whale_nebula.errors import OptionError
from whale_nebula.models.decoding import Beam, MaskPredict, beam_search

NEVER = (PAD, START, MASK)


def build_model(name: str):
    model = MODELS[name]()
    randomize_weights(model)
    return model


def score_next_word(model, source: np.ndarray, ids) -> tf.Tensor:
    """Scores of the word after these. What is behind it changes nothing; of a single word, Keras would warn."""
    return model({"source": tf.constant(source), "target": tf.pad(ids, [[0, 0], [0, 1]])})[:, -2]


def decode_greedily(model, source: np.ndarray, longest: int) -> np.ndarray:
    """Each word in turn, the whole sentence computed anew for it."""
    ids = np.full((len(source), 1), START, np.int32)
    for place in range(longest):
        logits = score_next_word(model, source, ids).numpy()
        logits[:, list(NEVER)] = -np.inf
        words = np.full(len(source), END) if place == longest - 1 else logits.argmax(axis=1)
        ended = (ids == END).any(axis=1)
        ids = np.concatenate([ids, np.where(ended, PAD, words)[:, None].astype(np.int32)], axis=1)
    return ids[:, 1:]


@pytest.mark.parametrize("name", ["causal", pytest.param("translator", marks=pytest.mark.grid)])
def test_beam_of_one_equals_greedy_decoding_without_caches(name: str) -> None:
    model, source = build_model(name), sources(6)
    found = model(source, search=Beam(START, END, longest=5, width=1, never=NEVER))
    np.testing.assert_array_equal(found.best, decode_greedily(model, source, 5))


@pytest.mark.parametrize("name", [pytest.param("causal", marks=pytest.mark.grid), "translator"])
def test_cached_beam_search_equals_uncached_search(name: str) -> None:
    """The same search, where each step computes all that was written so far, from a source that is repeated."""
    model, source = build_model(name), sources(4)
    beam = Beam(START, END, longest=4, width=3, never=NEVER)
    repeated = np.repeat(source, beam.width, axis=0)

    def step(words, position, before):
        before = tf.concat([before, words[:, None]], axis=1)
        return score_next_word(model, repeated, before), before

    expected = beam_search(step, tf.zeros([12, 0], tf.int32), 4, beam)
    found = model(source, search=beam)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4)


def test_mask_predict_uses_lengths_predicted_from_the_source() -> None:
    model, source = build_model("cmlm"), sources(6)
    found = model(source, search=MaskPredict(START, END, MASK, longest=LENGTH - 2, candidates=2, rounds=3))
    likeliest = tf.math.top_k(model.lengths(*model.sides.encoder(source))[:, 1:], 2).indices + 1
    words = tf.reduce_sum(tf.cast(found.ids > MASK, tf.int32), axis=2)
    np.testing.assert_array_equal(np.sort(words, axis=1), np.sort(likeliest, axis=1))
    assert ((found.ids == START).numpy().sum(axis=2) == 1).all() and ((found.ids == END).numpy().sum(axis=2) == 1).all()


@pytest.mark.parametrize("name", [pytest.param("causal", marks=pytest.mark.grid), "cmlm"])
def test_source_padding_does_not_change_translations(name: str) -> None:
    model, source = build_model(name), sources(1)
    fill = MaskPredict(START, END, MASK, longest=4, candidates=2)
    search = fill if name == "cmlm" else Beam(START, END, longest=4, width=2, never=NEVER)
    words = int((source > PAD).sum())
    np.testing.assert_array_equal(model(source, search=search).ids, model(source[:, :words], search=search).ids)


@pytest.mark.parametrize(("name", "room"), [("causal", LENGTH), ("cmlm", LENGTH - 2)])
def test_too_long_search_is_refused_with_the_maximum(name: str, room: int) -> None:
    fill = MaskPredict(START, END, MASK, longest=room + 1)
    with pytest.raises(OptionError) as caught:
        MODELS[name]()(sources(1), search=fill if name == "cmlm" else Beam(START, END, longest=room + 1))
    assert caught.value.mend == f"longest={room}"


def test_wrong_kind_of_search_is_refused_with_the_right_one() -> None:
    with pytest.raises(OptionError) as caught:
        MODELS["cmlm"]()(sources(1), search=Beam(START, END, longest=4))
    assert "MaskPredict" in caught.value.mend
