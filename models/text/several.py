"""A corpus of four languages made by rule: aligned or each language alone, seeded, with nothing to download.

As in `generated`, each meaning belongs to one split for good, whatever the seed: what is tested was never trained on,
and the sentences that a language has alone are no translations of another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .generated import check_name, digest
from .grammar import four

LANGUAGES = four.LANGUAGES
"""Of the corpus: English and German, which are Germanic, Spanish and French, which are Romance."""
_SHARES = {"train": 30, "val": 5, "test": 5, **{f"mono-{language}": 15 for language in LANGUAGES}}
_SPLITS = tuple(split for split, share in _SHARES.items() for _ in range(share))
_SIZES = {form: four.size(form) for form in four.FORMS}


class Choices(NamedTuple):
    """Sentences, their translations, and sentences that are none: the same but for what `kinds` says."""

    sentences: list[str]
    right: list[str]
    wrong: list[str]
    kinds: list[str]


def aligned(split: str, count: int, *, languages: Sequence[str] = LANGUAGES, seed: int = 0) -> dict[str, list[str]]:
    """The first `count` sentences of `train`, `val` or `test` in each language: row n of one translates row n of all.

    >>> [lines[0] for lines in aligned("val", 1, languages=["en", "es"]).values()]
    ['The grey cows are older than the black cows.', 'Las vacas grises son más viejas que las vacas negras.']
    """
    check_name(split, ("train", "val", "test"), count)
    for language in languages:
        check_name(language, LANGUAGES, count, what="language")
    meanings = [_drawn(split, seed, place) for place in range(count)]
    return {language: [meaning.said(language) for meaning in meanings] for language in languages}


def alone(language: str, count: int, *, seed: int = 0) -> list[str]:
    """Sentences of one language, to pretrain on: none of them is in any pair, nor translated in another's.

    >>> len(alone("fr", 3))
    3
    """
    check_name(language, LANGUAGES, count, what="language")
    return [_drawn(f"mono-{language}", seed, place).said(language) for place in range(count)]


def choices(split: str, count: int, first: str, second: str, *, seed: int = 0) -> Choices:
    """Which of two sentences is the translation? The wrong one has another number, colour or thing, says the opposite,
    or compares in the other order.

    >>> found = choices("test", 40, "en", "fr")
    >>> sorted(set(found.kinds))
    ['colour', 'negation', 'number', 'order', 'quality', 'thing']
    """
    check_name(split, ("train", "val", "test"), count)
    for language in (first, second):
        check_name(language, LANGUAGES, count, what="language")
    made = Choices([], [], [], [])
    for place in range(count):
        meaning = _drawn(split, seed, place)
        number = digest(f"choice/{split}/{seed}/{place}")
        kind = meaning.changes()[number % len(meaning.changes())]
        wrong = meaning.changed(kind, number // 7)
        made.sentences.append(meaning.said(first))
        made.right.append(meaning.said(second))
        made.wrong.append(wrong.said(second))
        made.kinds.append(kind)
    return made


def _drawn(split: str, seed: int, place: int) -> four.Meaning:
    """Draw until what is drawn belongs to the split, and compares no thing with itself."""
    attempt = 0
    while True:
        number, which = divmod(digest(f"{split}/{seed}/{place}/{attempt}"), len(four.FORMS))
        form = four.FORMS[which]
        made = four.meaning(form, number % _SIZES[form])
        other = made.changed("order", 0) if form == "compared" else None
        if other != made and _SPLITS[digest(made.said("en")) % len(_SPLITS)] == split:
            return made
        attempt += 1
