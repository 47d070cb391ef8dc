"""Sentences about properties of things and people: ser and estar, hay, gustar, comparisons, ages."""

from __future__ import annotations

from . import english, spanish
from .phrases import COUNTED, MANY, ONE, THIS, phrase, sentence
from .pick import Both, Pick
from .words import (
    ALL,
    ANIMALS,
    CITIES,
    COLORS,
    COMPARED,
    FURNITURE,
    GOODS,
    JOBS,
    MEN,
    ORIGINS,
    PEOPLE,
    PLACES,
    PREPOSITIONS,
    QUALITIES,
    STATES,
    WOMEN,
)

_SER = (
    (Both("es", "is"), Both("son", "are")),
    (Both("era", "was"), Both("eran", "were")),
    (Both("será", "will be"), Both("serán", "will be")),
    (Both("no es", "is not"), Both("no son", "are not")),
)
_ESTAR = (
    (Both("está", "is"), Both("están", "are"), Both("hoy", "today")),
    (Both("estaba", "was"), Both("estaban", "were"), Both("ayer", "yesterday")),
    (Both("estará", "will be"), Both("estarán", "will be"), Both("mañana", "tomorrow")),
    (Both("no está", "is not"), Both("no están", "are not"), Both("ahora", "now")),
    (Both("ya no está", "is no longer"), Both("ya no están", "are no longer"), Both("", "")),
)
_DEGREES = (Both("", ""), Both("muy", "very"), Both("demasiado", "too"), Both("bastante", "quite"))


def described(pick: Pick) -> Both:
    """Las casas rojas son muy grandes. / The red houses are very big."""
    thing = phrase(pick(ALL), pick(THIS), [pick(COLORS)])
    verb = thing.does(*pick(_SER))
    degree, quality = pick(_DEGREES), pick(QUALITIES)
    return sentence(
        f"{thing.es} {verb.es} {degree.es} {thing.agree(quality.es)}", f"{thing.en} {verb.en} {degree.en} {quality.en}"
    )


def felt(pick: Pick) -> Both:
    """Mi hermana está cansada hoy en la oficina. / My sister is tired in the office today."""
    who = phrase(pick(PEOPLE), pick(THIS))
    one, many, when = pick(_ESTAR)
    verb, state, place = who.does(one, many), pick(STATES), pick(PLACES)
    return sentence(
        f"{when.es} {who.es} {verb.es} {who.agree(state.es)} {place.es}",
        f"{who.en} {verb.en} {state.en} {place.en} {when.en}",
    )


def placed(pick: Pick) -> Both:
    """Los libros viejos están sobre la mesa pequeña. / The old books are on the small table."""
    thing = phrase(pick(GOODS), pick(THIS), [pick(QUALITIES)])
    base = phrase(pick(FURNITURE), pick(ONE), [pick(COLORS)])
    one, many, _ = pick(_ESTAR[:1])
    verb, where = thing.does(one, many), pick(PREPOSITIONS)
    ground = spanish.after("de", base.es) if where.es.endswith(" de") else base.es
    return sentence(
        f"{thing.es} {verb.es} {where.es.removesuffix(' de')} {ground}", f"{thing.en} {verb.en} {where.en} {base.en}"
    )


def there_are(pick: Pick) -> Both:
    """Hay tres gatos negros en el jardín. / There are three black cats in the garden."""
    thing = phrase(pick(ALL), pick(COUNTED), [pick(COLORS)])
    place = pick(PLACES)
    hay = pick((Both("hay", "there are"), Both("había", "there were"), Both("no hay", "there are not")))
    return sentence(f"{hay.es} {thing.es} {place.es}", f"{hay.en} {thing.en} {place.en}")


def compared(pick: Pick) -> Both:
    """Esta mesa es más cara que la silla verde. / This table is more expensive than the green chair."""
    thing, other = phrase(pick(ALL), pick(THIS)), phrase(pick(ALL), pick(THIS), [pick(COLORS)])
    verb, how = thing.does(*pick(_SER)), pick(COMPARED)
    return sentence(
        f"{thing.es} {verb.es} más {thing.agree(how.es)} que {other.es}",
        f"{thing.en} {verb.en} {how.en} than {other.en}",
    )


_LIKING = (
    (Both("me", "I like"), Both("", "I do not like")),
    (Both("te", "you like"), Both("", "you do not like")),
    (Both("nos", "we like"), Both("", "we do not like")),
    *((Both(f"a {name} le", f"{name} likes"), Both("", f"{name} does not like")) for name in (*MEN, *WOMEN)),
)


def liked(pick: Pick) -> Both:
    """A Ana no le gustan estas flores amarillas. / Ana does not like these yellow flowers."""
    thing = phrase(pick(ALL), pick(THIS), [pick(COLORS)])
    does, does_not = pick(_LIKING)
    negated = pick((False, True))
    to, _, me = does.es.rpartition(" ")
    verb = f"{'no ' if negated else ''}{me} {'gustan' if thing.many else 'gusta'}"
    return sentence(f"{to} {verb} {thing.es}", f"{does_not.en if negated else does.en} {thing.en}")


def ages(pick: Pick) -> Both:
    """Mi abuela tiene ochenta y un años y vive en Roma. / My grandmother is eighty-one years old and lives in Rome."""
    who = phrase(pick(PEOPLE), pick(ONE))
    years, city = pick(range(2, 100)), pick(CITIES)
    return sentence(
        f"{who.es} tiene {spanish.number(years, 'm')} años y vive en {city.es}",
        f"{who.en} is {english.number(years)} years old and lives in {city.en}",
    )


def jobs(pick: Pick) -> Both:
    """Elena es una abogada francesa y trabaja en Praga. / Elena is a French lawyer and works in Prague."""
    name, job, origin, city = pick((*MEN, *WOMEN)), pick(JOBS), pick(ORIGINS), pick(CITIES)
    woman = name in WOMEN
    words = " ".join(spanish.inflect(each.es, woman, False) for each in (job, origin))
    what = english.add_article(f"{origin.en} {job.en}")
    return sentence(
        f"{name} es {'una' if woman else 'un'} {words} y trabaja en {city.es}",
        f"{name} is {what} and works in {city.en}",
    )


def where(pick: Pick) -> Both:
    """¿Dónde están nuestros perros negros? / Where are our black dogs?"""
    thing = phrase(pick(ANIMALS + GOODS), pick(MANY + ONE), [pick(COLORS), pick(QUALITIES)])
    one, many, _ = pick(_ESTAR[:2])
    verb = thing.does(one, many)
    return sentence(f"¿dónde {verb.es} {thing.es}?", f"where {verb.en} {thing.en}?")
