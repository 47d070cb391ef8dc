"""The grammar: agreement, plurals, verbs and numbers as they are in Spanish and in English."""

import pytest

from whale_nebula.models.text.grammar import PATTERNS, Both, Pick, size, words
from whale_nebula.models.text.grammar import english as en
from whale_nebula.models.text.grammar import spanish as es
from whale_nebula.models.text.grammar.phrases import COUNTED, THIS, phrase
from whale_nebula.models.text.grammar.quantities import dates, times


@pytest.mark.parametrize(
    ("value", "alone", "before_m", "before_f"),
    [
        (1, "uno", "un", "una"),
        (16, "dieciséis", "dieciséis", "dieciséis"),
        (21, "veintiuno", "veintiún", "veintiuna"),
        (31, "treinta y uno", "treinta y un", "treinta y una"),
        (100, "cien", "cien", "cien"),
        (101, "ciento uno", "ciento un", "ciento una"),
        (500, "quinientos", "quinientos", "quinientas"),
        (721, "setecientos veintiuno", "setecientos veintiún", "setecientas veintiuna"),
    ],
)
def test_spanish_numbers_agree(value: int, alone: str, before_m: str, before_f: str) -> None:
    assert [es.number(value, gender) for gender in ("", "m", "f")] == [alone, before_m, before_f]


@pytest.mark.parametrize(
    ("value", "spanish", "english"),
    [
        (0, "cero", "zero"),
        (1000, "mil", "one thousand"),
        (1001, "mil uno", "one thousand and one"),
        (2100, "dos mil cien", "two thousand one hundred"),
        (21_000, "veintiún mil", "twenty-one thousand"),
        (31_415, "treinta y un mil cuatrocientos quince", "thirty-one thousand four hundred and fifteen"),
        (100_000, "cien mil", "one hundred thousand"),
        (999_999, "novecientos noventa y nueve mil novecientos noventa y nueve",
         "nine hundred and ninety-nine thousand nine hundred and ninety-nine"),
    ],
)  # fmt: skip
def test_large_numbers_are_spelled_in_both_languages(value: int, spanish: str, english: str) -> None:
    assert (es.number(value), en.number(value)) == (spanish, english)


def test_number_words_are_unique() -> None:
    for said in (es.number, en.number):
        assert len({said(value) for value in range(0, 100_000, 7)}) == len(range(0, 100_000, 7))
    assert len({en.year(value) for value in range(1900, 2100)}) == 200
    assert len({en.ordinal(value) for value in range(1, 32)}) == 31


@pytest.mark.parametrize(("verb", "tense", "forms"), [
    ("comprar", "present", "compro compras compra compramos compran"),
    ("vender", "past", "vendí vendiste vendió vendimos vendieron"),
    ("abrir", "present", "abro abres abre abrimos abren"),
    ("describir", "future", "describiré describirás describirá describiremos describirán"),
])  # fmt: skip
def test_verbs_are_conjugated(verb: str, tense: str, forms: str) -> None:
    assert [es.conjugate(verb, tense, person) for person in range(5)] == forms.split()


def test_phrase_agrees_and_orders_adjectives_by_language() -> None:
    suitcase = next(noun for noun in words.THINGS if noun.en == "suitcase")
    adjectives = [words.COLORS[0], words.ORIGINS[1]]
    many = next(way for way in COUNTED if way.en == "twenty-one")
    assert phrase(suitcase, many, adjectives)[:2] == (
        "veintiuna maletas rojas inglesas",
        "twenty-one English red suitcases",
    )
    assert phrase(suitcase, THIS[0], adjectives)[:2] == ("la maleta roja inglesa", "the English red suitcase")


def test_dates_have_the_correct_weekday() -> None:
    found = {dates(Pick(number)) for number in range(0, size(dates), size(dates) // 400)}
    assert all(" el " in each.es and " the " in each.en for each in found)
    first = dates(Pick(0))
    assert "lunes uno de enero de mil novecientos" in first.es  # the first of January 1900 was a Monday
    assert "Monday the first of January nineteen hundred" in first.en


def test_times_of_day_are_unique_phrases() -> None:
    every = [times(Pick(number)) for number in range(0, size(times), 5)]
    assert len({each.es for each in every}) == len({each.en for each in every}) == len(every)
    assert any("a la una menos cuarto" in each.es and "at a quarter to one" in each.en for each in every)
    assert any("a las tres y media" in each.es and "at half past three" in each.en for each in every)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
def test_pattern_uses_its_whole_number(pattern) -> None:  # type: ignore[no-untyped-def]
    spanish, english = (pattern.__doc__ or "").split(" / ")
    assert spanish and english
    first, last = pattern(Pick(0)), pattern(Pick(size(pattern) - 1))
    assert isinstance(first, Both)
    assert first.es != last.es
    assert first.en != last.en
    pick = Pick(size(pattern) - 1)
    pattern(pick)
    assert pick.rest == 0
