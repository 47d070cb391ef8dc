"""Objects outside a step's graph that use memory where a variable is held, such as a table of rows, and the memory that
a planner counts for them.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol

_NAME = "_nebula_beside"
"""The attribute of a variable that has a weak reference to its object."""


class ExpectedMemory(NamedTuple):
    """The total bytes that an object is expected to use, and a phrase for the user that states the assumption."""

    bytes: float
    assumption: str


class HasMemory(Protocol):
    """The interface of an object with its own memory, which is not copied to other workers."""

    def expect_bytes(self) -> ExpectedMemory:
        """The memory that it will use."""


def attach_memory(variable: Any, owner: HasMemory) -> None:
    """Declare that an object is held by the workers that hold a TensorFlow variable."""
    setattr(variable, _NAME, weakref.ref(owner))


def find_expected_memory(variable: Any) -> ExpectedMemory | None:
    """The memory that the object of a variable is expected to use; None if it has no object."""
    found = getattr(variable, _NAME, None)
    owner = None if found is None else found()
    return None if owner is None else owner.expect_bytes()
