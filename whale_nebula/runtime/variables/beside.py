"""Objects beside a step's graph that take memory where a variable is held, such as a table of rows: how much a planner
counts for them.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol

_NAME = "_nebula_beside"
"""The attribute of a variable with its object, as a weak reference."""


class Expected(NamedTuple):
    """The bytes that an object is expected to take in all, and a phrase that says what was assumed."""

    bytes: float
    said: str


class Beside(Protocol):
    """An object with memory of its own, of which no worker has a copy."""

    def expect_bytes(self) -> Expected:
        """The bytes that it will take."""


def put_beside(variable: Any, held: Beside) -> None:
    """Declare that an object is held by the workers that hold a variable of TensorFlow."""
    setattr(variable, _NAME, weakref.ref(held))


def expect_beside(variable: Any) -> Expected | None:
    """What the object of a variable is expected to take; None if it has none."""
    found = getattr(variable, _NAME, None)
    held = None if found is None else found()
    return None if held is None else held.expect_bytes()
