"""The generated corpus: the same everywhere, disjoint splits, and correct."""

import re
from collections import defaultdict

import pytest

from whale_nebula.errors import OptionError
from whale_nebula.models.text import Pairs, generated, monolingual

COUNT = 3000


@pytest.fixture(scope="module")
def splits() -> dict[str, Pairs]:
    return {split: generated(split, count) for split, count in (("train", COUNT), ("val", 400), ("test", 400))}


def test_generated_text_is_stable() -> None:
    """Measurements on it can be compared as long as this does not change."""
    pairs = generated("test", 2, seed=1)
    assert pairs.source == [
        "¿Cuántas abejas rojas fuertes hay en el teatro?", "¿Dónde estaban estos plátanos morados nuevos?"
    ]  # fmt: skip
    assert pairs.target == [
        "How many strong red bees are there at the theatre?",
        "Where were these new purple bananas?",
    ]


def test_single_side_equals_that_side_of_the_pairs(splits: dict[str, Pairs]) -> None:
    alone = generated("train", 100, sides=["target"])
    assert alone == Pairs(target=splits["train"].of("target")[:100])


@pytest.mark.parametrize("side", ["source", "target"])
def test_splits_are_disjoint(splits: dict[str, Pairs], side: str) -> None:
    language = {"source": "es", "target": "en"}[side]
    texts = [set(pairs.of(side)) for pairs in splits.values()]  # type: ignore[arg-type]
    texts += [set(generated("train", COUNT, seed=7).of(side)) - texts[0]]  # type: ignore[arg-type]
    texts += [set(monolingual(language, COUNT))]  # type: ignore[arg-type]
    assert sum(map(len, texts)) == len(set.union(*texts))


def test_monolingual_sentences_are_not_in_the_pairs(splits: dict[str, Pairs]) -> None:
    translated = dict(zip(*(splits["train"].of(side) for side in ("source", "target")), strict=True))  # type: ignore[arg-type]
    spanish, english = set(monolingual("es", 500)), set(monolingual("en", 500))
    assert not spanish & set(translated)
    assert not english & set(translated.values())


def test_sentences_have_one_translation_in_both_directions(splits: dict[str, Pairs]) -> None:
    english, spanish = defaultdict(set), defaultdict(set)
    for pairs in splits.values():
        for es, en in zip(pairs.of("source"), pairs.of("target"), strict=True):
            english[es].add(en)
            spanish[en].add(es)
    assert {es: found for es, found in english.items() if len(found) > 1} == {}
    assert {en: found for en, found in spanish.items() if len(found) > 1} == {}


def test_generated_text_has_hundreds_of_words_and_few_duplicates(splits: dict[str, Pairs]) -> None:
    for sentences in (splits["train"].of("source"), splits["train"].of("target")):
        words = {word for line in sentences for word in re.findall(r"[^\W\d]+", line.lower())}
        assert 400 < len(words) < 1500
        assert len(set(sentences)) > 0.95 * COUNT


def test_generated_sentences_are_well_formed(splits: dict[str, Pairs]) -> None:
    for side in ("source", "target"):
        for line in splits["train"].of(side):  # type: ignore[arg-type]
            assert re.fullmatch(r"¿?[A-ZÁÉÍÓÚ].*[.?]", line), line
            assert "  " not in line
            assert " de el " not in line


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: generated("dev", 3), "'dev' is not a generated split"),
        (lambda: generated("mono-es", 3), "'mono-es' is not a generated split"),
        (lambda: generated("train", 0), "count=0"),
        (lambda: generated("train", 3, target="fr"), "'fr' is not a generated language"),  # type: ignore[arg-type]
        (lambda: monolingual("fr", 3), "'fr' is not a generated language"),  # type: ignore[arg-type]
        (lambda: generated("train", 1, forms=["agse"]), "'ages'"),
        (lambda: generated("train", 1, forms=[]), "no sentence forms"),
    ],
)
def test_invalid_generated_arguments_are_refused(call, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(OptionError, match=said):
        call()


class TestForms:
    def test_forms_restrict_the_sentences(self) -> None:
        asked = ["costs", "times"]
        for sentence in generated("train", 40, forms=asked).target:
            assert "cost" in sentence or " at " in sentence or "past" in sentence or " to " in sentence

    def test_splits_with_different_forms_are_disjoint(self) -> None:
        some = set(generated("train", 300, forms=["ages"]).source)
        assert not some & set(generated("test", 300).source)
