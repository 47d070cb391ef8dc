"""Generated parallel corpora: Spanish and English, or four languages, seeded, without downloads.

A sentence is a form and a number that selects its words. All forms together have far more sentences than any training
needs. Each belongs to one split by its content, for any seed: test sentences are never in the training set. As no
sentence has two translations, that applies to both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from whale_nebula.errors import OptionError
from whale_nebula.errors.text import did_you_mean

from .corpus import SIDES, Pairs, Side
from .grammar import PATTERNS, Both, Pick, four, size

Language = Literal["es", "en"]
# The share of all sentences in each split, in percent. The monolingual ones have no sentence in common either: the two
# sides for pretraining are not translations of each other.
_SHARES = {"train": 40, "val": 5, "test": 5, "mono-es": 25, "mono-en": 25}
_SPLITS = tuple(split for split, share in _SHARES.items() for _ in range(share))
_SIZES = {pattern.__name__: size(pattern) for pattern in PATTERNS}
_FORMS = {pattern.__name__: pattern for pattern in PATTERNS}
FORMS = tuple(_FORMS)
"""The forms of sentences: `described`, `felt`, `placed` ... `numbers`, `rooms`, `how_many`, `how_much`."""


def generated(
    split: str,
    count: int,
    *,
    seed: int = 0,
    source: Language = "es",
    target: Language = "en",
    sides: Sequence[Side] = SIDES,
    forms: Sequence[str] = FORMS,
) -> Pairs:
    """Generate the first `count` pairs of a split.

    Each pair depends only on split, seed and place, so that clusters that generate one side each get matching sides.

    Args:
        split: "train", "val" or "test".
        count: number of pairs.
        seed: seed of the pairs.
        source: language of the source side, "es" or "en".
        target: language of the target side.
        sides: sides to generate.
        forms: forms of sentences, for example without numbers in words or times of day.

    >>> generated("val", 2).target == generated("val", 9, sides=["target"]).first(2).target
    True
    """
    check_name(split, ("train", "val", "test"), count)
    for language in (source, target):
        check_name(language, ("es", "en"), count, what="language")
    known = _check_forms(forms)
    made = [_make_sentence(split, seed, place, known) for place in range(count)]
    languages = {"source": source, "target": target}
    return Pairs(**{side: [getattr(each, languages[side]) for each in made] for side in SIDES if side in sides})


def monolingual(language: Language, count: int, *, seed: int = 0, forms: Sequence[str] = FORMS) -> list[str]:
    """Generate sentences of one language for pretraining. None of them is in any pair, and none is a translation of a
    sentence of the other language.

    >>> len(monolingual("es", 3))
    3
    """
    check_name(language, ("es", "en"), count, what="language")
    known = _check_forms(forms)
    return [getattr(_make_sentence(f"mono-{language}", seed, place, known), language) for place in range(count)]


def check_name(name: str, known: Sequence[str], count: int, *, what: str = "split") -> None:
    """Refuse a name of a split (or `what`) that is not known, and a number of sentences less than one."""
    if name not in known:
        raise OptionError(f"{name!r} is not a generated {what}", mend=did_you_mean(name, known))
    if count < 1:
        raise OptionError(f"count={count!r} is less than 1", mend="count=1, or more")


def _check_forms(forms: Sequence[str]) -> tuple[str, ...]:
    unknown = [form for form in forms if form not in _FORMS]
    if unknown or not forms:
        what = f"{unknown[0]!r} is not a form of sentences" if unknown else "no sentence forms were given"
        raise OptionError(
            what, mend=did_you_mean(unknown[0], FORMS) if unknown else 'pass at least one form: forms=["described"]'
        )
    return tuple(forms)


def _make_sentence(split: str, seed: int, place: int, forms: Sequence[str]) -> Both:
    """Draw sentences of these forms until one belongs to the split."""
    attempt = 0
    while True:
        number, which = divmod(digest_text(f"{split}/{seed}/{place}/{attempt}"), len(forms))
        made = _FORMS[forms[which]](Pick(number % _SIZES[forms[which]]))
        if _find_split(made.es, _SPLITS) == split:
            return made
        attempt += 1


def _find_split(text: str, splits: Sequence[str]) -> str:
    """The split to which a sentence belongs, by a hash of its content."""
    return splits[digest_text(text) % len(splits)]


def digest_text(text: str) -> int:
    """A hash of a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=12).digest(), "little")


LANGUAGES = four.LANGUAGES
"""The languages of the corpus: English and German (Germanic), Spanish and French (Romance)."""
_SHARES_OF_FOUR = {"train": 30, "val": 5, "test": 5, **{f"mono-{language}": 15 for language in LANGUAGES}}
_SPLITS_OF_FOUR = tuple(split for split, share in _SHARES_OF_FOUR.items() for _ in range(share))
_SIZES_OF_FOUR = {form: four.size(form) for form in four.FORMS}


class Choices(NamedTuple):
    """Sentences, their translations, wrong translations, and the kind of the error in each of these."""

    sentences: list[str]
    right: list[str]
    wrong: list[str]
    kinds: list[str]


def aligned(split: str, count: int, *, languages: Sequence[str] = LANGUAGES, seed: int = 0) -> dict[str, list[str]]:
    """Generate the first `count` sentences of `train`, `val` or `test` in each language, aligned by row.

    >>> [lines[0] for lines in aligned("val", 1, languages=["en", "es"]).values()]
    ['The grey cows are older than the black cows.', 'Las vacas grises son más viejas que las vacas negras.']
    """
    check_name(split, ("train", "val", "test"), count)
    for language in languages:
        check_name(language, LANGUAGES, count, what="language")
    meanings = [_draw_meaning(split, seed, place) for place in range(count)]
    return {language: [meaning.write(language) for meaning in meanings] for language in languages}


def alone(language: str, count: int, *, seed: int = 0) -> list[str]:
    """Generate sentences of one language for pretraining. None of them is in any pair, and none is a translation of a
    sentence of another language.

    >>> len(alone("fr", 3))
    3
    """
    check_name(language, LANGUAGES, count, what="language")
    return [_draw_meaning(f"mono-{language}", seed, place).write(language) for place in range(count)]


def choices(split: str, count: int, first: str, second: str, *, seed: int = 0) -> Choices:
    """Generate sentences with a right and a wrong translation, which has another number, colour or thing, is negated,
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
        meaning = _draw_meaning(split, seed, place)
        number = digest_text(f"choice/{split}/{seed}/{place}")
        kind = meaning.list_changes()[number % len(meaning.list_changes())]
        wrong = meaning.change(kind, number // 7)
        made.sentences.append(meaning.write(first))
        made.right.append(meaning.write(second))
        made.wrong.append(wrong.write(second))
        made.kinds.append(kind)
    return made


def _draw_meaning(split: str, seed: int, place: int) -> four.Meaning:
    """Draw meanings until one belongs to the split, and does not compare a thing with itself."""
    attempt = 0
    while True:
        number, which = divmod(digest_text(f"{split}/{seed}/{place}/{attempt}"), len(four.FORMS))
        form = four.FORMS[which]
        made = four.meaning(form, number % _SIZES_OF_FOUR[form])
        other = made.change("order", 0) if form == "compared" else None
        if other != made and _find_split(made.write("en"), _SPLITS_OF_FOUR) == split:
            return made
        attempt += 1
