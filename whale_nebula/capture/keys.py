"""What tells one form of a step's arguments from another, where they are no tensors."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Hashable
from typing import Any

_VALUES = (int, float, complex, str, bytes, enum.Enum, type)


class Same:
    """An object as a key: it equals itself alone. It is not kept alive, and once it is gone it equals nothing.

    An id would not do: Python gives it to another object, which would then be taken for this one.

    >>> class Model: ...
    >>> model = Model()
    >>> Same(model) == Same(model), Same(model) == Same(Model())
    (True, False)
    """

    def __init__(self, thing: Any) -> None:
        self._hash = id(thing)
        try:
            self._found: Any = weakref.ref(thing)
        except TypeError:  # what cannot be referred to weakly is kept
            self._found = lambda: thing

    @property
    def alive(self) -> bool:
        """Whether the object is still there."""
        return self._found() is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.alive and self._found() is other._found()

    def __hash__(self) -> int:
        return self._hash


def key_of(leaf: Any) -> Hashable:
    """A value is told apart by its type and what it equals, everything else by being the same object.

    >>> key_of(1) == key_of(True), key_of("a") == key_of("a"), key_of(None)
    (False, True, None)
    """
    if leaf is None:
        return None
    return (type(leaf), leaf) if isinstance(leaf, _VALUES) else Same(leaf)


def alive(keys: tuple[Hashable, ...]) -> bool:
    """Whether a call with these keys can still come.

    >>> alive((key_of(1), key_of([])))
    True
    """
    return all(key.alive for key in keys if isinstance(key, Same))
