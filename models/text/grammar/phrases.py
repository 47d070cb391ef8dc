"""Parts of sentences: nouns with articles and adjectives, subjects, and times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import english, spanish
from .pick import Both, Pick
from .words import MEN, PEOPLE, WEEKDAYS, WOMEN, Noun


class Way(NamedTuple):
    """A determiner of a noun: the four Spanish forms, the English word, and whether it is plural."""

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
        return spanish.agreed(adjective, self.feminine, self.many)

    def does(self, one: Both, many: Both) -> Both:
        """The singular or the plural form of a verb."""
        return many if self.many else one


class Subject(NamedTuple):
    """The subject of a sentence. `person`: yo, tú, él, nosotros, ellos; Spanish omits pronouns that verbs imply."""

    es: str
    en: str
    person: int


def _ways(text: str) -> tuple[Way, ...]:
    rows = [entry.strip().split() for entry in text.split(",")]
    return tuple(Way((row[0], row[1]), row[2], row[3] == "many") for row in rows)


THIS = _ways(
    "el la the one, los las the many, este esta this one, estos estas these many, ese esa that one, esos esas those "
    "many, mi mi my one, mis mis my many, tu tu your one, tus tus your many, nuestro nuestra our one, nuestros "
    "nuestras our many"
)
SOME = _ways("un una a one, unos unas some many")
COUNTED = tuple(
    Way((spanish.number(value, "m"), spanish.number(value, "f")), english.number(value), True) for value in range(2, 31)
)
ONE = tuple(way for way in THIS if not way.many)
MANY = tuple(way for way in THIS if way.many)


def phrase(noun: Noun, way: Way, adjectives: Sequence[Both] = ()) -> Phrase:
    """A noun with its article before it and its adjectives: after it in Spanish, before it in English.

    >>> from .words import COLORS, THINGS
    >>> phrase(THINGS[1], THIS[1], COLORS[:1])[:2]
    ('las casas rojas', 'the red houses')
    """
    es, en = noun.number(way.many)
    after = [spanish.agreed(each.es, noun.feminine, way.many) for each in adjectives]
    name = " ".join([*(each.en for each in reversed(adjectives)), en])
    whole = english.add_article(name) if way.en == "a" else f"{way.en} {name}"
    return Phrase(" ".join([way.es[noun.feminine], es, *after]), whole, noun.feminine, way.many)


_PEOPLE = tuple(
    Subject(*phrase(noun, way)[:2], 4 if way.many else 2) for noun in PEOPLE for way in (*THIS[:2], *THIS[6:])
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
    """Two to twelve of a unit of time, before or after now."""
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


def anyone(pick: Pick) -> Subject:
    """Pick a subject: often a pronoun, sometimes a name."""
    return pick(SUBJECTS)


def sentence(es: str, en: str) -> Both:
    """Both with a capital letter and a full stop.

    >>> sentence("  ¿dónde está?", "where is it?")
    Both(es='¿Dónde está?', en='Where is it?')
    """
    return Both(_end_sentence(es), _end_sentence(en))


def _end_sentence(text: str) -> str:
    words = " ".join(text.split())
    first = 1 if words.startswith("¿") else 0
    return words[:first] + words[first].upper() + words[first + 1 :] + ("" if words.endswith("?") else ".")
