"""English: plurals, a and an, verbs, numbers and years in words."""

from __future__ import annotations

from .pick import words

_SMALL = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = words("twenty thirty forty fifty sixty seventy eighty ninety")
_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
_ORDINALS["twelve"] = "twelfth"


def plural(word: str) -> str:
    """The plural of a regular noun; also the third person of a verb.

    >>> [plural(word) for word in ("cat", "box", "city", "key", "go")]
    ['cats', 'boxes', 'cities', 'keys', 'goes']
    """
    if word.endswith(("s", "x", "ch", "sh", "o")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"


def add_article(phrase: str) -> str:
    """A phrase with the indefinite article before it.

    >>> add_article("old house"), add_article("house")
    ('an old house', 'a house')
    """
    return f"an {phrase}" if phrase[0].lower() in "aeiou" else f"a {phrase}"


def third_person(verb: str) -> str:
    """The third person of a verb; only its first word changes.

    >>> third_person("look at"), third_person("carry"), third_person("have")
    ('looks at', 'carries', 'has')
    """
    head, _, rest = verb.partition(" ")
    return " ".join(part for part in ("has" if head == "have" else plural(head), rest) if part)


def number(value: int) -> str:
    """A number below a million in words.

    >>> number(21), number(1203), number(100_000)
    ('twenty-one', 'one thousand two hundred and three', 'one hundred thousand')
    """
    if value >= 1000:
        thousands, rest = divmod(value, 1000)
        tail = f" and {number(rest)}" if 0 < rest < 100 else f" {number(rest)}" if rest else ""
        return f"{number(thousands)} thousand{tail}"
    if value >= 100:
        hundreds, rest = divmod(value, 100)
        return f"{_SMALL[hundreds]} hundred" + (f" and {number(rest)}" if rest else "")
    if value < 20:
        return _SMALL[value]
    tens, rest = divmod(value, 10)
    return _TENS[tens - 2] + (f"-{_SMALL[rest]}" if rest else "")


def ordinal(value: int) -> str:
    """The ordinal of a number, in words.

    >>> ordinal(1), ordinal(12), ordinal(20), ordinal(31)
    ('first', 'twelfth', 'twentieth', 'thirty-first')
    """
    head, dash, last = number(value).rpartition("-")
    if last in _ORDINALS:
        return head + dash + _ORDINALS[last]
    return head + dash + (last[:-1] + "ieth" if last.endswith("y") else last + "th")


def year(value: int) -> str:
    """A year from 1900 to 2099 in words.

    >>> year(1900), year(1905), year(1999), year(2005), year(2021)
    ('nineteen hundred', 'nineteen oh five', 'nineteen ninety-nine', 'two thousand and five', 'twenty twenty-one')
    """
    century, rest = divmod(value, 100)
    if century == 20 and rest < 10:
        return number(value)
    if rest == 0:
        return f"{number(century)} hundred"
    return f"{number(century)} {'oh ' if rest < 10 else ''}{number(rest)}"
