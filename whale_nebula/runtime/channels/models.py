"""Which programs are of one model: those that share a variable. What codecs remember belongs to a model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Models:
    """The models of a run, numbered as their first programs come, which is the same order in every process.

    >>> class Variable: ...
    >>> models, ours, theirs = Models(), [Variable(), Variable()], [Variable()]
    >>> models.number(ours), models.number(theirs), models.number(ours[1:])
    (0, 1, 0)
    """

    _known: list[list[weakref.ref[Any]]] = field(default_factory=list)

    def number(self, variables: Iterable[Any]) -> int:
        """The model of a program with these variables."""
        given = list(variables)
        for number, refs in enumerate(self._known):
            if any(ref() is each for ref in refs for each in given):
                refs.extend(weakref.ref(each) for each in given if all(ref() is not each for ref in refs))
                return number
        self._known.append([weakref.ref(each) for each in given])
        return len(self._known) - 1

    def gone(self) -> set[int]:
        """The models of which nothing is left."""
        return {number for number, refs in enumerate(self._known) if refs and all(ref() is None for ref in refs)}
