"""The choice of the translation: rows, the model's score, tuning; and the generated text."""

from pathlib import Path

import keras
import numpy as np
import pytest

from tests.unit.models.pretraining.small_pretraining import LENGTH, SIZES, rows
from whale_nebula.errors import OptionError
from whale_nebula.models import Bert, text
from whale_nebula.models.pretraining import (
    Corpus,
    check_families,
    choice_accuracy,
    choice_model,
    encode_alone,
    encode_choices,
    encode_with_pivot,
    tune_choice,
)

WORDS = text.Tokenizer(text.Vocabulary((*text.SPECIAL, *"abcdefgh")))


def test_choice_score_is_the_mean_over_real_tokens() -> None:
    bert, ids = Bert(SIZES, name="b"), rows(6)
    model = choice_model(bert)
    each = model.get_layer("score")(model.get_layer("dense")(bert(ids)))[..., 0]
    there = ids != SIZES.padding
    assert np.allclose(model(ids), (np.asarray(each) * there).sum(1) / there.sum(1), atol=1e-6)


@pytest.mark.grid
def test_tuned_choice_model_is_accurate() -> None:
    keras.utils.set_random_seed(1)
    model = choice_model(Bert(SIZES, name="b"))
    right, wrong = rows(64, 1, pairs=False), rows(64, 2, pairs=False)
    right[:, 1], wrong[:, 1] = 7, 8
    both = np.stack([right, wrong], axis=1)
    losses = tune_choice(model, both, steps=60, batch=16, rate=0.01)
    assert losses[0] == pytest.approx(np.log(2), abs=0.1) and losses[-1] < 0.2
    assert choice_accuracy(model, both) > 0.95
    assert choice_accuracy(model, both[:, ::-1]) < 0.05
    assert choice_accuracy(model, np.stack([right, right], axis=1)) == 0.5


def test_tuning_without_rows_is_refused() -> None:
    with pytest.raises(OptionError, match="tune_choice got no rows"):
        tune_choice(choice_model(Bert(SIZES, name="b")), np.zeros((0, 2, LENGTH), np.int32), steps=1)


def test_encoded_choices_put_the_right_sentence_first() -> None:
    found = encode_choices(WORDS, ["a b"], ["c"], ["d"], 8)
    assert found.tolist() == [[[2, 5, 6, 3, 7, 3, 0, 0], [2, 5, 6, 3, 8, 3, 0, 0]]]


class TestCorpus:
    """Text made by rule, and that of a folder."""

    def test_pairs_have_a_family_language_and_the_pivot(self) -> None:
        corpus = Corpus.by_rule(["en", "de", "fr"], 20)
        words = text.Tokenizer(text.learn_vocabulary(corpus.lines(), 256, fill=True))
        assert list(encode_with_pivot(corpus, words, ["en"], "en", LENGTH)) == ["en-de", "en-fr"]
        assert list(encode_with_pivot(corpus, words, ["de", "fr"], "en", LENGTH)) == ["de-en", "fr-en"]
        assert {name: each.shape for name, each in encode_alone(corpus, words, ["de"], LENGTH).items()} == {
            "de": (20, LENGTH)
        }

    def test_wrong_choices_have_a_similar_length(self, tmp_path: Path) -> None:
        for split in ("train", "val"):
            for language in ("en", "de", "cs"):
                lines = [f"{language} {'x' * number}" for number in (3, 1, 2, 5)]
                (tmp_path / f"{split}.{language}").write_text("\n".join(lines) + "\n")
        corpus = Corpus.of_folder(tmp_path, ["en", "de", "cs"], 4)
        found = corpus.choices("test", "en", "cs", 4)
        assert found.right == ["cs xxx", "cs x", "cs xx", "cs xxxxx"]
        assert found.wrong == ["cs xxxxx", "cs xx", "cs xxx", "cs x"]

    def test_language_in_two_families_is_refused(self) -> None:
        with pytest.raises(OptionError, match="the families contain en, en"):
            check_families({"a": ["en"], "b": ["en"]}, ["en", "de"])

    def test_missing_language_is_refused(self, tmp_path: Path) -> None:
        lines = {"en": ["a b"], "de": ["c d"]}
        corpus = Corpus(lines, lines, lines)
        with pytest.raises(OptionError, match="the corpus has no text in fr"):
            encode_alone(corpus, WORDS, ["en", "fr"], 8)
        with pytest.raises(OptionError, match="the corpus has no text in fr"):
            encode_with_pivot(corpus, WORDS, ["de"], "fr", 8)
        with pytest.raises(OptionError, match="has a single language"):
            Corpus.of_folder(tmp_path, ["en"], 1)

    def test_choices_of_a_single_sentence_are_refused(self) -> None:
        lines = {"en": ["a b"], "de": ["c d"]}
        with pytest.raises(OptionError, match="1 sentences in 'de' for test, but choices need at least 2"):
            Corpus(lines, lines, lines).choices("test", "en", "de", 4)
