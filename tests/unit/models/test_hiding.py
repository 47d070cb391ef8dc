"""Hidden words: their choice and number, the labels, and determinism for a batch."""

import numpy as np
import tensorflow as tf

from tests.unit.models.small_translators import END, MASK, PAD, START, pairs, sources
from whale_nebula.models.masking import Hiding

HIDING = Hiding(mask=MASK, special=(PAD, START, END), seed=3)


def test_hidden_words_become_labels() -> None:
    ids = sources(200)
    hidden = HIDING(ids, 0)
    shown, words = hidden.shown.numpy(), hidden.words.numpy()
    np.testing.assert_array_equal(shown == MASK, words > 0)
    np.testing.assert_array_equal(np.where(words > 0, words, shown), ids)
    assert not words[ids <= END].any() and (words > 0).any(axis=1).all()
    np.testing.assert_array_equal(hidden.length, (ids > END).sum(axis=1))


def test_hidden_counts_and_places_are_uniform() -> None:
    ids = np.tile(np.array([[START, 4, 5, 6, 7, END]], np.int32), (8000, 1))
    hidden = HIDING(ids, 0).words.numpy()[:, 1:5] > 0
    np.testing.assert_allclose(np.bincount(hidden.sum(axis=1), minlength=5)[1:] / 8000, 0.25, atol=0.02)
    np.testing.assert_allclose(hidden.mean(axis=0), 2.5 / 4, atol=0.02)


def test_hiding_depends_only_on_seed_and_batch_number() -> None:
    ids = sources(50)
    first = HIDING(ids, 7).shown
    np.testing.assert_array_equal(first, HIDING(ids, 7).shown)
    assert not np.array_equal(first, HIDING(ids, 8).shown)
    assert not np.array_equal(first, Hiding(MASK, HIDING.special, seed=4)(ids, 7).shown)


def test_sentence_without_words_hides_none() -> None:
    hidden = HIDING(np.array([[START, END, PAD]], np.int32), 0)
    assert hidden.shown.numpy().tolist() == [[START, END, PAD]] and hidden.length.numpy().tolist() == [0]


def test_of_batches_converts_causal_batches_to_masked_ones() -> None:
    inputs, labels = pairs(6)
    batches = HIDING.of_batches(tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(4))
    for number, (given, labels_batch) in enumerate(batches):
        rows = slice(4 * number, 4 * number + 4)
        whole = np.concatenate([inputs["target"][rows, :1], labels[rows]], axis=1)
        expected = HIDING(whole, number)
        np.testing.assert_array_equal(given["source"], inputs["source"][rows])
        np.testing.assert_array_equal(given["target"], expected.shown)
        np.testing.assert_array_equal(labels_batch["words"], expected.words)
        np.testing.assert_array_equal(labels_batch["length"], expected.length)


def test_of_batches_keeps_absent_sides_none() -> None:
    inputs, labels = pairs(6)
    here = tf.data.Dataset.from_tensor_slices(inputs["source"]).batch(4)
    without_target = here.map(lambda source: ({"source": source, "target": None}, None))
    ((given, labels_batch), *_) = HIDING.of_batches(without_target)
    assert given["target"] is None and labels_batch == {"words": None, "length": None}
    there = tf.data.Dataset.from_tensor_slices((inputs["target"], labels)).batch(4)
    without_source = there.map(lambda target, words: ({"source": None, "target": target}, words))
    ((given, labels_batch), *_) = HIDING.of_batches(without_source)
    assert given["source"] is None and labels_batch["words"].shape == (4, 8)
