"""The corpus of four languages: correct in each, the same everywhere, with disjoint splits."""

import pytest

from whale_nebula.errors import OptionError
from whale_nebula.models.text.generated import LANGUAGES, aligned, alone, choices
from whale_nebula.models.text.grammar import four

COUNT = 1500


def test_four_language_text_is_stable() -> None:
    """Measurements on it can be compared as long as this does not change."""
    assert {language: lines[1] for language, lines in aligned("train", 2).items()} == {
        "en": "The brown shoes are stronger than the blue horses.",
        "de": "Die braunen Schuhe sind stärker als die blauen Pferde.",
        "es": "Los zapatos marrones son más fuertes que los caballos azules.",
        "fr": "Les chaussures brunes sont plus fortes que les chevaux bleus.",
    }


def test_meaning_is_written_in_four_languages() -> None:
    meaning = four.Meaning("does", (0, 1, 6, 3, 0, 3, 0))
    assert [meaning.write(language) for language in LANGUAGES] == [
        "Ana does not wash the five red houses in the garden.",
        "Ana wäscht die fünf roten Häuser im Garten nicht.",
        "Ana no lava las cinco casas rojas en el jardín.",
        "Ana ne lave pas les cinq maisons rouges dans le jardin.",
    ]
    assert meaning.change("negation", 5).write("en") == "Ana washes the five red houses in the garden."


def test_sentences_have_one_translation_per_language() -> None:
    found = aligned("train", COUNT)
    for language in LANGUAGES:
        pairs = set(zip(found["en"], found[language], strict=True))
        assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs})


def test_four_language_splits_are_disjoint() -> None:
    for language in LANGUAGES:
        parts = [set(aligned(split, 400, languages=[language])[language]) for split in ("train", "val", "test")]
        parts.append(set(alone(language, 400)))
        assert sum(map(len, parts)) == len(set.union(*parts))


def test_monolingual_text_contains_no_translations() -> None:
    translated = dict(zip(*aligned("train", COUNT, languages=["en", "fr"]).values(), strict=True))
    french = set(alone("fr", 500))
    assert not french & set(translated.values())
    assert not {translated.get(line) for line in alone("en", 500)} & french


def test_wrong_choices_differ_and_cover_every_kind() -> None:
    found = choices("test", 300, "es", "de")
    assert all(right != wrong for right, wrong in zip(found.right, found.wrong, strict=True))
    assert set(found.kinds) == {"number", "colour", "thing", "negation", "order", "quality"}
    assert found.right == aligned("test", 300, languages=["de"])["de"]


@pytest.mark.parametrize(
    ("call", "mend"),
    [
        (lambda: aligned("trian", 1), "train"),
        (lambda: alone("ed", 1), "de"),
        (lambda: choices("test", 0, "en", "fr"), "count=1"),
        (lambda: aligned("val", 1, languages=["it"]), "'it' is not a generated language"),
    ],
)
def test_invalid_four_language_arguments_are_refused_with_a_fix(call: object, mend: str) -> None:
    with pytest.raises(OptionError, match=mend):
        call()  # type: ignore[operator]
