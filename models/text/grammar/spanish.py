"""Spanish: plurals, agreement, regular verbs, contractions, numbers in words."""

from __future__ import annotations

from .pick import words

_PLAIN = str.maketrans("áéíóú", "aeiou")
_ENDINGS = {
    "present": {"ar": "o as a amos an", "er": "o es e emos en", "ir": "o es e imos en"},
    "past": {"ar": "é aste ó amos aron", "er": "í iste ió imos ieron", "ir": "í iste ió imos ieron"},
    "future": dict.fromkeys(("ar", "er", "ir"), "é ás á emos án"),
}
_SMALL = words(
    "cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince dieciséis diecisiete "
    "dieciocho diecinueve veinte veintiuno veintidós veintitrés veinticuatro veinticinco veintiséis veintisiete "
    "veintiocho veintinueve"
)
_TENS = words("treinta cuarenta cincuenta sesenta setenta ochenta noventa")
_HUNDREDS = words(
    "ciento doscientos trescientos cuatrocientos quinientos seiscientos setecientos ochocientos novecientos"
)


def plural(word: str) -> str:
    """The plural of a noun or an adjective.

    >>> [plural(word) for word in ("casa", "azul", "ratón", "lápiz", "inglés", "sofá")]
    ['casas', 'azules', 'ratones', 'lápices', 'ingleses', 'sofás']
    """
    if word[-1] in "aeiouáé":
        return word + "s"
    if word[-1] == "z":
        return word[:-1] + "ces"
    return (word[:-2] + word[-2:].translate(_PLAIN) if word[-1] in "ns" else word) + "es"


def inflect(adjective: str, feminine: bool, many: bool) -> str:
    """An adjective that agrees with its noun; one that is written with + takes an -a despite its consonant.

    >>> inflect("rojo", True, True), inflect("azul", True, False), inflect("inglés+", True, False)
    ('rojas', 'azul', 'inglesa')
    """
    word = adjective.removesuffix("+")
    if feminine and word.endswith("o"):
        word = word[:-1] + "a"
    elif feminine and adjective.endswith("+"):
        word = word[:-2] + word[-2:].translate(_PLAIN) + "a"
    return plural(word) if many else word


def conjugate(infinitive: str, tense: str, person: int) -> str:
    """A form of a regular verb in the tense "present", "past" or "future"; persons 0 to 4 are yo, tú, él, nosotros and
    ellos.

    >>> [conjugate("vender", tense, 2) for tense in ("present", "past", "future")]
    ['vende', 'vendió', 'venderá']
    """
    stem = infinitive if tense == "future" else infinitive[:-2]
    return stem + _ENDINGS[tense][infinitive[-2:]].split()[person]


def after(preposition: str, phrase: str) -> str:
    """A phrase after `a` or `de`, which contract with `el`.

    >>> after("de", "el gato"), after("a", "la casa")
    ('del gato', 'a la casa')
    """
    return preposition + phrase[1:] if phrase.startswith("el ") else f"{preposition} {phrase}"


def number(value: int, gender: str = "") -> str:
    """A number below a million in words; before a noun of gender m or f, or without one.

    >>> [number(21, gender) for gender in ("", "m", "f")]
    ['veintiuno', 'veintiún', 'veintiuna']
    >>> number(1999), number(201, "f")
    ('mil novecientos noventa y nueve', 'doscientas una')
    """
    thousands, rest = divmod(value, 1000)
    head = [] if thousands == 0 else ["mil"] if thousands == 1 else [_hundreds(thousands, "m"), "mil"]
    return " ".join([*head, *([_hundreds(rest, gender)] if rest or not head else [])])


def _hundreds(value: int, gender: str) -> str:
    hundreds, rest = divmod(value, 100)
    if value == 100:
        return "cien"
    head = _HUNDREDS[hundreds - 1] if hundreds else ""
    head = head[:-2] + "as" if gender == "f" and head.endswith("os") else head
    return " ".join(part for part in (head, _tens(rest, gender) if rest or not hundreds else "") if part)


def _tens(value: int, gender: str) -> str:
    if value < 30:
        return _one(_SMALL[value], gender)
    tens, rest = divmod(value, 10)
    return _TENS[tens - 3] + (f" y {_one(_SMALL[rest], gender)}" if rest else "")


def _one(word: str, gender: str) -> str:
    if not gender or not word.endswith("uno"):
        return word
    if gender == "f":
        return word[:-1] + "a"
    return "veintiún" if word == "veintiuno" else word[:-1]
