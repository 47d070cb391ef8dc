"""Mask-predict: lengths, rounds, words that are hidden again, and the choice of the candidate."""

import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.errors import OptionError
from whale_nebula.models.decoding import MaskPredict, mask_predict

START, END, MASK, WORDS = 1, 2, 3, 9


def search(**options) -> MaskPredict:
    return MaskPredict(
        **{"start": START, "end": END, "mask": MASK, "longest": 4, "candidates": 1, "rounds": 2, **options}
    )


def lengths(*words: int) -> tf.Tensor:
    """Logits of numbers of words, the first of these the likeliest."""
    return tf.constant([[9.0 - words.index(n) if n in words else 0.0 for n in range(5)]])


def predict_by_place(strength: list[float]):
    """In place p stands word p + 3, the surer the stronger."""

    def predict(ids):
        return tf.one_hot(tf.range(6) + 3, WORDS) * tf.constant(strength)[:, None] + tf.zeros((len(ids), 1, 1))

    return predict


def test_sentence_has_the_predicted_length() -> None:
    for words in (1, 3, 4):
        found = mask_predict(predict_by_place([5.0] * 6), lengths(words), search())
        assert found.best.numpy().tolist() == [[START, *range(4, 4 + words), END] + [0] * (4 - words)]


def test_sentences_have_at_least_one_word() -> None:
    logits = tf.constant([[99.0, 0.0, 1.0, 0.0, 0.0]])
    assert mask_predict(predict_by_place([5.0] * 6), logits, search()).best.numpy().tolist() == [
        [START, 4, 5, END, 0, 0]
    ]


def test_special_words_are_never_predicted() -> None:
    def predict(ids):
        return tf.zeros((len(ids), 6, 1)) + tf.constant([9.0, 8.0, 7.0, 6.0, 1.0, 2.0, 0.0, 0.0, 0.0])

    found = mask_predict(predict, lengths(4), search(never=(0, 5)))
    assert found.best.numpy().tolist() == [[START, 4, 4, 4, 4, END]]


def test_each_round_masks_fewer_unlikely_words() -> None:
    shown = []

    def predict(ids):
        shown.append(ids[0].numpy().tolist())
        return predict_by_place([0.0, 4.0, 1.0, 3.0, 2.0, 0.0])(ids)

    mask_predict(predict, lengths(4), search(rounds=4))
    assert shown == [
        [START, MASK, MASK, MASK, MASK, END],
        [START, 4, MASK, MASK, MASK, END],
        [START, 4, MASK, 6, MASK, END],
        [START, 4, MASK, 6, 7, END],
    ]


def test_best_candidate_is_the_likeliest_sentence() -> None:
    """Words in places 3 and 4 are unsure, so two words are likelier than four, whatever the length's own score."""
    predict = predict_by_place([5.0, 5.0, 5.0, 0.5, 0.5, 0.5])
    found = mask_predict(predict, lengths(4, 2, 3), search(candidates=3))
    assert found.ids[0].numpy().tolist() == [
        [START, 4, 5, END, 0, 0], [START, 4, 5, 6, END, 0], [START, 4, 5, 6, 7, END]
    ]  # fmt: skip
    assert (np.diff(found.scores[0]) < 0).all()


def test_score_is_the_mean_log_likelihood_of_words() -> None:
    found = mask_predict(predict_by_place([0.0, 4.0, 1.0, 0.0, 0.0, 0.0]), lengths(2), search(rounds=1))
    allowed = 5  # of nine words, four are never predicted
    expected = np.mean([s - np.log(np.exp(s) + allowed - 1) for s in (4.0, 1.0)])
    assert float(found.scores[0, 0]) == pytest.approx(expected, rel=1e-5)


def test_rows_are_searched_independently() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 5])])
    def both(logits):
        def predict(ids):
            return tf.one_hot(tf.range(6) + 3, WORDS) * 5.0 + tf.zeros((tf.shape(ids)[0], 1, 1))

        return mask_predict(predict, logits, search(candidates=2))

    together = both(tf.concat([lengths(1, 2), lengths(4, 3)], axis=0))
    apart = [both(lengths(1, 2)), both(lengths(4, 3))]
    assert together.ids.shape == (2, 2, 6)
    np.testing.assert_array_equal(together.ids, tf.concat([each.ids for each in apart], axis=0))


@pytest.mark.parametrize("wrong", [{"candidates": 0}, {"candidates": 5}, {"rounds": 0}])
def test_invalid_mask_predict_is_refused_with_a_fix(wrong: dict) -> None:
    with pytest.raises(OptionError) as caught:
        search(**wrong)
    assert caught.value.mend
