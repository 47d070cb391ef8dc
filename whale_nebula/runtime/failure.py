"""What the other processes learn of an error that ends this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from whale_nebula.errors import (
    AbsentInputError,
    CollectiveReadError,
    InputMismatchError,
    LocalProtocolError,
    NebulaError,
    NonFiniteError,
    NotYetError,
    PlanError,
    RemoteFailureError,
    ScopeError,
    StateError,
    TransportError,
)
from whale_nebula.errors.foreign_text import remove_folders

_WITHOUT_VALUES = (
    AbsentInputError,
    CollectiveReadError,
    InputMismatchError,
    NonFiniteError,
    NotYetError,
    PlanError,
    RemoteFailureError,
    ScopeError,
    StateError,
    TransportError,
)
"""Errors whose texts name parts of the program, workers and settings, and hold no value of the data or the weights."""


def failure_fields(failure: BaseException, *, private: bool = False) -> dict[str, str]:
    """The parts of an error as they are sent. Paths are names of files, without their folders.

    In a `private` run an error that may hold values goes as its type and its code alone: one that is not this
    library's, one that was raised because of such an error, and one that reads data or weights.

    >>> failure_fields(ValueError("row 7 is 'Ana'"), private=True)
    {'what': 'ValueError (its text stays where it was raised)'}
    """
    if private and not _is_free_of_values(failure):
        code = f", {failure.code}" if isinstance(failure, NebulaError) else ""
        return {"what": f"{type(failure).__name__}{code} (its text stays where it was raised)"}
    fields = {"what": f"{type(failure).__name__}: {failure}"}
    if isinstance(failure, NebulaError):
        fields = {part: getattr(failure, part) for part in ("code", "what", "where", "why", "mend")}
    return {part: remove_own_folders(text) for part, text in fields.items()}


def remove_own_folders(text: str) -> str:
    """A text without the folders of this host."""
    return remove_folders(text, [os.getcwd(), str(Path.home()), *sys.path])


def _is_free_of_values(failure: BaseException) -> bool:
    if isinstance(failure, TransportError) and not isinstance(failure, LocalProtocolError):
        return True  # what it was raised from is of a socket, or of what a peer sent
    return all(isinstance(each, _WITHOUT_VALUES) for each in _chain(failure))


def _chain(failure: BaseException) -> Iterator[BaseException]:
    """An error and all that it was raised from, or during."""
    due, known = [failure], set()
    while due:
        each = due.pop()
        if id(each) not in known:
            known.add(id(each))
            yield each
            due += [cause for cause in (each.__cause__, each.__context__) if cause is not None]
