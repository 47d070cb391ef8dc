"""Masking: shares, special tokens, determinism by seed; and that a BERT learns from it."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.errors import OptionError
from whale_nebula.models.bert import Bert, BertSizes
from whale_nebula.models.masking import Masking, mask_batches, mask_rows, pretrain

PAD, START, END, MASK, VOCABULARY = 0, 2, 3, 4, 40
HOW = Masking(VOCABULARY, MASK, (PAD, START, END), seed=7)


def rows(count: int = 400, length: int = 40) -> np.ndarray:
    """Sentences of any length from 1 to all but two of the row."""
    random = np.random.default_rng(0)
    made = np.full((count, length), PAD, "int32")
    for row, words in zip(made, random.integers(1, length - 1, count), strict=True):
        row[: words + 2] = [START, *random.integers(5, VOCABULARY, words), END]
    return made


def hidden(tokens: np.ndarray, how: Masking = HOW, number: int = 0) -> tuple[np.ndarray, ...]:
    inputs, labels, weights = mask_rows(tf.constant(tokens), how, number)
    return inputs["tokens"].numpy(), inputs["places"].numpy(), labels.numpy(), weights.numpy()


def test_labels_restore_the_original_rows() -> None:
    tokens = rows()
    shown, places, labels, weights = hidden(tokens)
    np.testing.assert_array_equal(labels, np.take_along_axis(tokens, places, axis=1))
    restored = shown.copy()
    np.put_along_axis(restored, places, labels, axis=1)
    np.testing.assert_array_equal(restored, tokens)
    unweighted = np.take_along_axis(shown, places, axis=1)[weights == 0]
    np.testing.assert_array_equal(unweighted, labels[weights == 0])


def test_special_tokens_are_neither_hidden_nor_inserted() -> None:
    tokens = rows()
    shown, places, labels, weights = hidden(tokens)
    words = (~np.isin(tokens, HOW.special)).sum(axis=1)  # each row has its share hidden, and at least one
    np.testing.assert_array_equal(weights.sum(axis=1), np.maximum(1, np.round(0.15 * words)))
    assert not np.isin(labels[weights > 0], HOW.special).any()
    np.testing.assert_array_equal(np.isin(shown, HOW.special), np.isin(tokens, HOW.special))
    assert all(len(set(row)) == len(row) for row in places.tolist())


def test_hidden_tokens_are_masked_swapped_or_kept_by_share() -> None:
    shown, places, labels, weights = hidden(rows(4000))
    there = np.take_along_axis(shown, places, axis=1)[weights > 0]
    labels = labels[weights > 0]
    kinds = Counter(np.where(there == MASK, "masked", np.where(there == labels, "kept", "swapped")).tolist())
    shares = {kind: count / len(labels) for kind, count in kinds.items()}
    # of those swapped, one in 35 is swapped for itself
    assert shares == pytest.approx({"masked": 0.8, "swapped": 0.1, "kept": 0.1}, abs=0.01)


def test_row_without_words_has_zero_weight() -> None:
    shown, _, _, weights = hidden(np.array([[START, END, PAD, PAD], [START, 9, END, PAD]], "int32"))
    assert weights.tolist() == [[0.0], [1.0]]
    assert shown[0].tolist() == [START, END, PAD, PAD]


def test_masking_depends_on_seed_and_batch_number() -> None:
    tokens = rows(20)
    first = hidden(tokens)
    for again in (hidden(tokens), hidden(tokens, HOW, 0)):
        np.testing.assert_array_equal(again[0], first[0])
    other_seed = Masking(VOCABULARY, MASK, (PAD, START, END), seed=8)
    for other in (hidden(tokens, HOW, 1), hidden(tokens, other_seed)):
        assert (other[0] != first[0]).any()


def test_repeated_dataset_is_masked_anew() -> None:
    twice = tf.data.Dataset.from_tensor_slices(rows(8)).batch(4).repeat(2)
    once, again = ([inputs["tokens"].numpy() for inputs, _, _ in mask_batches(twice, HOW)] for _ in range(2))
    np.testing.assert_array_equal(once, again)
    assert (once[0] != once[2]).any()


def test_number_of_masked_places_follows_row_length() -> None:
    both = [rows(2, length) for length in (10, 40)]
    shapes = tf.TensorSpec((None, None), tf.int32)
    dataset = tf.data.Dataset.from_generator(lambda: both, output_signature=shapes)
    found = [inputs["places"].shape[1] for inputs, _, _ in mask_batches(dataset, HOW)]
    assert found == [2, 6]


def test_masking_reads_special_tokens_from_the_tokenizer() -> None:
    tokenizer = SimpleNamespace(size=10, pad=0, start=1, end=2, mask=3)
    assert Masking.of(tokenizer, share=0.3) == Masking(10, 3, (0, 1, 2), share=0.3)


@pytest.mark.parametrize(
    "wrong", [{"share": 0.0}, {"share": 1.5}, {"masked": 0.9, "swapped": 0.2}, {"special": tuple(range(VOCABULARY))}]
)
def test_invalid_masking_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        Masking(**{"vocabulary": VOCABULARY, "mask": MASK, "special": (0,), **wrong})
    assert caught.value.mend != OptionError.usual_mend


@pytest.mark.grid
def test_pretrain_reduces_the_masked_loss() -> None:
    """Each row is one word all over: what is hidden stands beside it. In every run, the example pretrains:
    tests/examples/test_translate.py.
    """
    words = np.random.default_rng(0).integers(5, 13, (64, 1), dtype="int32")
    tokens = np.concatenate([np.full((64, 1), START), words.repeat(8, 1), np.full((64, 1), END)], axis=1)
    bert = Bert(BertSizes(vocabulary=13, length=10, width=16, heads=2, layers=1, inner=32, dropout=0.0, spread=0.1))
    dataset = tf.data.Dataset.from_tensor_slices(tokens.astype("int32")).batch(32)
    how = Masking(13, MASK, (PAD, START, END))
    history = pretrain(bert, dataset, how, steps=120, learning_rate=0.02, epochs=3, verbose=0).history
    assert len(history["loss"]) == 3
    by_chance = np.log(8)  # of the eight words
    assert history["loss"][-1] < 0.4 * by_chance < history["loss"][0]
