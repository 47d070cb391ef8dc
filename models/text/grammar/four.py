"""A small grammar of English, German, Spanish and French: each meaning has one sentence in each of the four.

All nouns are in the plural, so that few forms are needed and every sentence is natural. The content of a sentence is a
`Meaning`; a wrong translation has a meaning with one changed part.
"""

from __future__ import annotations

from typing import NamedTuple

from . import english, spanish
from .pick import Pick, words

LANGUAGES = ("en", "de", "es", "fr")


class Word(NamedTuple):
    """A word in the four languages; `feminine` names those of Spanish and French in which a noun is feminine. Spanish
    nouns and adjectives are in the singular, all others as they are written with plurals.
    """

    en: str
    de: str
    es: str
    fr: str
    feminine: str = ""


def _parse_words(text: str) -> tuple[Word, ...]:
    """Parse entries `en=de=es=fr`, or `en=de=es=fr=es fr` for a noun that is feminine in Spanish and French."""
    return tuple(Word(*entry.strip().split("=")) for entry in text.split(","))


NOUNS = _parse_words(
    "cats=Katzen=gato=chats, dogs=Hunde=perro=chiens, horses=Pferde=caballo=chevaux, houses=Häuser=casa=maisons=es fr, "
    "books=Bücher=libro=livres, tables=Tische=mesa=tables=es fr, chairs=Stühle=silla=chaises=es fr, "
    "cars=Autos=coche=voitures=fr, flowers=Blumen=flor=fleurs=es fr, birds=Vögel=pájaro=oiseaux, "
    "cows=Kühe=vaca=vaches=es fr, apples=Äpfel=manzana=pommes=es fr, shirts=Hemden=camisa=chemises=es fr, "
    "shoes=Schuhe=zapato=chaussures=fr, bottles=Flaschen=botella=bouteilles=es fr, keys=Schlüssel=llave=clés=es fr, "
    "boats=Boote=barco=bateaux, letters=Briefe=carta=lettres=es fr, hats=Hüte=sombrero=chapeaux, "
    "ducks=Enten=pato=canards"
)
COLOURS = _parse_words(
    "red=rot=rojo=rouges/rouges, blue=blau=azul=bleus/bleues, green=grün=verde=verts/vertes, "
    "black=schwarz=negro=noirs/noires, white=weiß=blanco=blancs/blanches, yellow=gelb=amarillo=jaunes/jaunes, "
    "grey=grau=gris=gris/grises, brown=braun=marrón=bruns/brunes"
)
QUALITIES = _parse_words(
    "smaller=kleiner=pequeño=petits/petites, bigger=größer=grande=grands/grandes, older=älter=viejo=vieux/vieilles, "
    "prettier=schöner=bonito=jolis/jolies, heavier=schwerer=pesado=lourds/lourdes, stronger=stärker=fuerte=forts/fortes"
)
NUMBERS = _parse_words(
    "two=zwei=dos=deux, three=drei=tres=trois, four=vier=cuatro=quatre, five=fünf=cinco=cinq, six=sechs=seis=six, "
    "seven=sieben=siete=sept, eight=acht=ocho=huit, nine=neun=nueve=neuf, ten=zehn=diez=dix, eleven=elf=once=onze"
)
PLACES = _parse_words(
    "in the garden=im Garten=en el jardín=dans le jardin, in the kitchen=in der Küche=en la cocina=dans la cuisine, "
    "at the market=auf dem Markt=en el mercado=au marché, in the street=auf der Straße=en la calle=dans la rue, "
    "in the school=in der Schule=en la escuela=dans l'école, on the beach=am Strand=en la playa=sur la plage, "
    "in the forest=im Wald=en el bosque=dans la forêt, in the harbour=im Hafen=en el puerto=dans le port"
)
VERBS = _parse_words(
    "see=sieht=ve=voit, sell=verkauft=vende=vend, paint=bemalt=pinta=peint, hide=versteckt=esconde=cache, "
    "lose=verliert=pierde=perd, carry=trägt=lleva=porte, wash=wäscht=lava=lave, find=findet=encuentra=trouve"
)
NAMES = words("Ana Marta Elena Rosa Pedro Luis Carlos Miguel")
_PARTS: dict[str, tuple[tuple[object, ...], ...]] = {
    "there": (NUMBERS, COLOURS, NOUNS, PLACES),
    "does": (NAMES, (True, False), VERBS, NUMBERS, COLOURS, NOUNS, PLACES),
    "compared": (COLOURS, NOUNS, QUALITIES, COLOURS, NOUNS),
}
FORMS = tuple(_PARTS)
"""The forms: existence of things at a place, an action or its negation, and a comparison."""
_CHANGES: dict[str, dict[str, tuple[int, ...]]] = {
    "there": {"number": (0,), "colour": (1,), "thing": (2,)},
    "does": {"number": (3,), "negation": (1,), "colour": (4,)},
    "compared": {"order": (), "quality": (2,)},
}


class Meaning(NamedTuple):
    """The content of a sentence: its form, and the number of the word for each of its parts.

    >>> [Meaning("compared", (0, 1, 0, 3, 0)).write(language) for language in ("en", "fr")]
    ['The red dogs are smaller than the black cats.', 'Les chiens rouges sont plus petits que les chats noirs.']
    """

    form: str
    parts: tuple[int, ...]

    def write(self, language: str) -> str:
        """The meaning as a sentence."""
        options = _PARTS[self.form]
        words = [options[place][which] for place, which in enumerate(self.parts)]
        return _end_sentence(_WRITERS[self.form](language, words))

    def list_changes(self) -> tuple[str, ...]:
        """What `change` can change: number, negation, order, ..."""
        return tuple(_CHANGES[self.form])

    def change(self, what: str, by: int) -> Meaning:
        """A meaning that differs in `what`: with another word, which `by` selects, negated, or with the compared things
        swapped ("order").

        >>> Meaning("there", (1, 0, 0, 0)).change("number", 2).write("en")
        'There are six red cats in the garden.'
        """
        if what == "order":
            return Meaning(self.form, (*self.parts[3:], self.parts[2], *self.parts[:2]))
        (place,) = _CHANGES[self.form][what]
        count = len(_PARTS[self.form][place])
        parts = list(self.parts)
        parts[place] = (parts[place] + 1 + by % (count - 1)) % count
        return Meaning(self.form, tuple(parts))


def meaning(form: str, number: int) -> Meaning:
    """The meaning of a form with this number, below `size(form)`."""
    pick = Pick(number)
    return Meaning(form, tuple(pick(range(len(options))) for options in _PARTS[form]))


def size(form: str) -> int:
    """The number of meanings of a form.

    >>> size("there")
    12800
    """
    pick = Pick(0)
    for options in _PARTS[form]:
        pick(options)
    return pick.size


def _write_things(language: str, colour: Word, noun: Word, *, number: Word | None = None, the: bool = False) -> str:
    """A noun phrase: black cats; three black cats; the three black cats."""
    count = "" if number is None else f"{getattr(number, language)} "
    things, adjective, feminine = getattr(noun, language), getattr(colour, language), language in noun.feminine
    if language == "en":
        return f"{'the ' if the else ''}{count}{adjective} {things}"
    if language == "de":
        return f"{'die ' if the else ''}{count}{adjective}{'en' if the else 'e'} {things}"
    if language == "es":
        article = ("las " if feminine else "los ") if the else ""
        return f"{article}{count}{spanish.plural(things)} {spanish.inflect(adjective, feminine, True)}"
    return f"{'les ' if the else ''}{count}{things} {adjective.split('/')[feminine]}"


def _write_existence(language: str, parts: list[object]) -> str:
    number, colour, noun, place = parts
    there_are = {"en": "there are", "de": "es gibt", "es": "hay", "fr": "il y a"}[language]
    return f"{there_are} {_write_things(language, colour, noun, number=number)} {getattr(place, language)}"  # type: ignore[arg-type]


def _write_action(language: str, parts: list[object]) -> str:
    name, true, verb, number, colour, noun, place = parts
    things = _write_things(language, colour, noun, number=number, the=True)  # type: ignore[arg-type]
    does, where = getattr(verb, language), getattr(place, language)
    if language == "en":
        return f"{name} {english.third_person(does) if true else f'does not {does}'} {things} {where}"
    if language == "de":
        return f"{name} {does} {things} {where}{'' if true else ' nicht'}"
    if language == "es":
        return f"{name} {'' if true else 'no '}{does} {things} {where}"
    return f"{name} {does if true else f'ne {does} pas'} {things} {where}"


def _write_comparison(language: str, parts: list[object]) -> str:
    colour, noun, quality, other_colour, other = parts
    first = _write_things(language, colour, noun, the=True)  # type: ignore[arg-type]
    second = _write_things(language, other_colour, other, the=True)  # type: ignore[arg-type]
    more = getattr(quality, language)
    if language == "en":
        return f"{first} are {more} than {second}"
    if language == "de":
        return f"{first} sind {more} als {second}"
    feminine = language in noun.feminine  # type: ignore[attr-defined]
    if language == "es":
        return f"{first} son más {spanish.inflect(more, feminine, True)} que {second}"
    return f"{first} sont plus {more.split('/')[feminine]} que {second}"


_WRITERS = {"there": _write_existence, "does": _write_action, "compared": _write_comparison}


def _end_sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
