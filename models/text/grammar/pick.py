"""Choices decoded from a number: every number below a pattern's size gives another sentence of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Both(NamedTuple):
    """A text in both languages."""

    es: str
    en: str


class Pick:
    """Returns one of some options at each call, by the mixed-radix digits of a number, whose bases are the numbers of
    options.

    >>> pick = Pick(7)
    >>> pick("ab"), pick(range(10)), pick.size
    ('b', 3, 20)
    """

    def __init__(self, number: int) -> None:
        self.rest, self.size = number, 1

    def __call__(self, options: Sequence[T]) -> T:
        """One of the options, by the next digit."""
        self.size *= len(options)
        self.rest, which = divmod(self.rest, len(options))
        return options[which]


def words(text: str) -> tuple[str, ...]:
    """The words of a text, for readable lists."""
    return tuple(text.split())


Pattern = Callable[[Pick], Both]


def size(pattern: Pattern) -> int:
    """The number of sentences of a pattern; numbers of options must not depend on earlier choices.

    >>> size(lambda pick: Both(pick(["uno", "dos"]), pick("abc")))
    6
    """
    pick = Pick(0)
    pattern(pick)
    return pick.size
