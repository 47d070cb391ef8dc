"""Batches: shares by temperature, rows for each generator, and text as rows of one length."""

import numpy as np
import pytest

from whale_nebula.errors import DataError, OptionError
from whale_nebula.models import text
from whale_nebula.models.pretraining import (
    Mixture,
    deal_rows,
    encode_pairs_in_rows,
    encode_sentences,
    mix_families,
    shares_by_temperature,
)


def make_source(ids: int, count: int) -> np.ndarray:
    return np.full((count, 4), ids, np.int32)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0, 100.0])
def test_shares_by_temperature_are_powers_of_text_shares(temperature: float) -> None:
    counts = {"en": 700, "fr": 250, "cs": 50}
    powers = np.array([0.7, 0.25, 0.05]) ** (1 / temperature)
    found = shares_by_temperature(counts, temperature)
    assert list(found) == list(counts)
    assert np.allclose(list(found.values()), powers / powers.sum())


@pytest.mark.parametrize("batch", [3, 4, 17, 64])
def test_deal_rows_gives_each_family_at_least_one_row(batch: int) -> None:
    shares = {"a": 0.9, "b": 0.09, "c": 0.01}
    found = deal_rows(batch, shares)
    assert sum(found.values()) == batch and min(found.values()) >= 1
    assert abs(found["a"] - 0.9 * batch) <= 2


def test_mixture_follows_its_shares_and_is_deterministic_per_step() -> None:
    mixture = Mixture(
        {"x": make_source(1, 3), "y": make_source(2, 900)}, {"x": 0.75, "y": 0.25}, 64, first=8, whole=100
    )
    drawn = np.concatenate([mixture.batch(step)[0][:, 0] for step in range(60)])
    assert np.mean(drawn == 1) == pytest.approx(0.75, abs=0.03)
    assert (mixture.batch(3)[0] == mixture.batch(3)[0]).all()
    assert not (mixture.batch(3)[0] == mixture.batch(4)[0]).all()


def test_mixed_families_number_rows_uniquely() -> None:
    families = {"one": {"en": make_source(1, 50)}, "two": {"es": make_source(2, 10), "fr": make_source(3, 10)}}
    mixtures = mix_families(families, batch=16, pairs={"two": {"es-en": make_source(4, 5)}}, of_pairs=0.5)
    numbers = np.concatenate([each.batch(step)[1] for step in range(20) for each in mixtures.values()])
    assert sorted(numbers) == list(range(320))
    assert sum(each.rows for each in mixtures.values()) == 16
    assert mixtures["two"].shares == {"es": 0.25, "fr": 0.25, "es-en": 0.5}
    assert mixtures["one"].shares == {"en": 1.0}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: shares_by_temperature({"en": 1}, 0.0), "temperature=0.0"),
        (lambda: shares_by_temperature({"en": 0}, 1.0), "shares of"),
        (lambda: deal_rows(1, {"a": 0.5, "b": 0.5}), "a batch of 1 rows"),
        (lambda: Mixture({"x": make_source(1, 2)}, {"y": 1.0}, 4), "shares of y"),
        (lambda: mix_families({"a": {"x": make_source(1, 2)}}, batch=4, of_pairs=2.0), "of_pairs=2.0"),
        (lambda: mix_families({"a": {"x": make_source(1, 2)}}, batch=4, pairs={"b": {}}), "pairs of b"),
    ],
)
def test_invalid_mixture_is_refused(call: object, said: str) -> None:
    with pytest.raises((OptionError, DataError), match=said):
        call()  # type: ignore[operator]


class TestRows:
    """Of the words a to h each is one token."""

    WORDS = text.Tokenizer(text.Vocabulary((*text.SPECIAL, *"abcdefgh")))

    def test_sentences_are_padded_or_truncated(self) -> None:
        found = encode_sentences(self.WORDS, ["a b", "a b c d e f"], 6)
        assert found.tolist() == [[2, 5, 6, 3, 0, 0], [2, 5, 6, 7, 8, 3]]

    def test_pairs_are_encoded_in_one_row(self) -> None:
        found = encode_pairs_in_rows(self.WORDS, ["a b", "a b c d e f", "a"], ["c", "g h", "b c d e f g h"], 8)
        assert found.tolist() == [[2, 5, 6, 3, 7, 3, 0, 0], [2, 5, 6, 7, 3, 11, 12, 3], [2, 5, 3, 6, 7, 8, 9, 3]]

    def test_unequal_numbers_of_sentences_are_refused(self) -> None:
        with pytest.raises(DataError, match="1 and 2 sentences do not form pairs"):
            encode_pairs_in_rows(self.WORDS, ["a"], ["a", "b"], 8)
