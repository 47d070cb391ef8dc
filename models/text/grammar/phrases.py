"""Parts of sentences: nouns with articles and adjectives, subjects, and times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import english, spanish
from .pick import Both, Pick
from .words import MEN, PEOPLE, WEEKDAYS, WOMEN, Noun


class Determiner(NamedTuple):
    """A determiner: its masculine and feminine Spanish forms, the English word, and whether it is plural."""

    es: tuple[str, str]
    en: str
    many: bool


class Phrase(NamedTuple):
    """A noun phrase. English verbs agree with `many`, Spanish adjectives also with `feminine`."""

    es: str
    en: str
    feminine: bool
    many: bool

    def agree(self, adjective: str) -> str:
        """A Spanish adjective that agrees with this phrase."""
        return spanish.inflect(adjective, self.feminine, self.many)

    def does(self, one: Both, many: Both) -> Both:
        """The singular or the plural form of a verb."""
        return many if self.many else one


class Subject(NamedTuple):
    """The subject of a sentence; `person` as in `spanish.conjugate`. Spanish omits pronouns that verbs imply."""

    es: str
    en: str
    person: int


def _parse_determiners(text: str) -> tuple[Determiner, ...]:
    rows = [entry.strip().split() for entry in text.split(",")]
    return tuple(Determiner((row[0], row[1]), row[2], row[3] == "many") for row in rows)


THIS = _parse_determiners(
    "el la the one, los las the many, este esta this one, estos estas these many, ese esa that one, esos esas those "
    "many, mi mi my one, mis mis my many, tu tu your one, tus tus your many, nuestro nuestra our one, nuestros "
    "nuestras our many"
)
SOME = _parse_determiners("un una a one, unos unas some many")
COUNTED = tuple(
    Determiner((spanish.number(value, "m"), spanish.number(value, "f")), english.number(value), True)
    for value in range(2, 31)
)
ONE = tuple(determiner for determiner in THIS if not determiner.many)
MANY = tuple(determiner for determiner in THIS if determiner.many)


def phrase(noun: Noun, determiner: Determiner, adjectives: Sequence[Both] = ()) -> Phrase:
    """A noun with a determiner before it, and adjectives: after it in Spanish, in reverse order before it in English.

    >>> from .words import COLORS, THINGS
    >>> phrase(THINGS[1], THIS[1], COLORS[:1])[:2]
    ('las casas rojas', 'the red houses')
    """
    es, en = noun.number(determiner.many)
    after = [spanish.inflect(each.es, noun.feminine, determiner.many) for each in adjectives]
    name = " ".join([*(each.en for each in reversed(adjectives)), en])
    whole = english.add_article(name) if determiner.en == "a" else f"{determiner.en} {name}"
    return Phrase(" ".join([determiner.es[noun.feminine], es, *after]), whole, noun.feminine, determiner.many)


_PEOPLE = tuple(
    Subject(*phrase(noun, each)[:2], 4 if each.many else 2) for noun in PEOPLE for each in (*THIS[:2], *THIS[6:])
)
_NAMED = tuple(Subject(name, name, 2) for name in (*MEN, *WOMEN))
_SPOKEN = (
    Subject("", "I", 0),
    Subject("", "you", 1),
    Subject("él", "he", 2),
    Subject("ella", "she", 2),
    Subject("", "we", 3),
    Subject("ellos", "they", 4),
)
SUBJECTS = (*_SPOKEN * 12, *_NAMED * 3, *_PEOPLE)


def _times(unit: tuple[Both, Both], one: str, other: str) -> list[Both]:
    """Two to twelve of a unit of time: in Spanish after `one`, in English in the place of {} in `other`."""
    found = []
    for value in range(2, 13):
        es, en = unit[1]
        words = spanish.number(value, "f" if es == "semanas" else "m")
        found.append(Both(f"{one} {words} {es}", other.format(f"{english.number(value)} {en}")))
    return found


_UNITS = tuple(
    (Both(es, en), Both(spanish.plural(es), english.plural(en)))
    for es, en in (("día", "day"), ("semana", "week"), ("mes", "month"), ("año", "year"))
)
PAST = (
    Both("ayer", "yesterday"),
    Both("anoche", "last night"),
    *(Both(f"{'la' if u.es == 'semana' else 'el'} {u.es} {'pasada' if u.es == 'semana' else 'pasado'}", f"last {u.en}")
      for u, _ in _UNITS[1:]),
    *(Both(f"el {day.es} pasado", f"last {day.en}") for day in WEEKDAYS),
    *(time for unit in _UNITS for time in _times(unit, "hace", "{} ago")),
)  # fmt: skip
FUTURE = (
    Both("mañana", "tomorrow"),
    *(Both(f"{'la' if u.es == 'semana' else 'el'} {u.es} que viene", f"next {u.en}") for u, _ in _UNITS[1:]),
    *(Both(f"el {day.es} que viene", f"next {day.en}") for day in WEEKDAYS),
    *(time for unit in _UNITS for time in _times(unit, "dentro de", "in {}")),
)
PRESENT = (
    Both("todos los días", "every day"),
    Both("todas las semanas", "every week"),
    Both("todos los meses", "every month"),
    Both("a veces", "sometimes"),
    Both("a menudo", "often"),
    Both("con frecuencia", "frequently"),
    *(Both(f"los {day.es if day.es.endswith('s') else spanish.plural(day.es)}", f"on {english.plural(day.en)}")
      for day in WEEKDAYS),
)  # fmt: skip


def pick_subject(pick: Pick) -> Subject:
    """Pick a subject: a pronoun, a name or a noun phrase."""
    return pick(SUBJECTS)


def sentence(es: str, en: str) -> Both:
    """Both texts with a capital letter, and with a full stop unless they are questions.

    >>> sentence("  ¿dónde está?", "where is it?")
    Both(es='¿Dónde está?', en='Where is it?')
    """
    return Both(_end_sentence(es), _end_sentence(en))


def _end_sentence(text: str) -> str:
    words = " ".join(text.split())
    first = 1 if words.startswith("¿") else 0
    return words[:first] + words[first].upper() + words[first + 1 :] + ("" if words.endswith("?") else ".")
