"""Suggestions for misspelt words ("did you mean ...?")."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn, TypeVar

Value = TypeVar("Value")


class Named(dict[str, Value]):
    """Things by their names. Asking for one that there is not says which there are.

    >>> stages = Named(gpu=1, npu=2)
    >>> stages["gpuu"]
    Traceback (most recent call last):
    KeyError: "there is no 'gpuu' here: did you mean 'gpu'?"
    """

    def __missing__(self, name: object) -> NoReturn:
        raise KeyError(f"there is no {name!r} here: {did_you_mean(name, self)}")


def closest(word: object, known: Iterable[str], near: float = 0.6) -> str | None:
    """The known word that `word` was probably meant to be, or None. `near`, up to 1, says how like they have to be.

    >>> closest("micro_batchs", ["micro_batch", "schedule"]), closest("x", ["schedule"])
    ('micro_batch', None)
    >>> closest("npu", ["gpu"]), closest("npu", ["gpu"], near=0.75), closest("gpuu", ["gpu"], near=0.75)
    ('gpu', None, 'gpu')
    """
    spelled = {name.lower(): name for name in known}
    found = difflib.get_close_matches(str(word).lower(), list(spelled), n=1, cutoff=near)
    return spelled[found[0]] if found else None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """A mend for a word that is not known: the one that was meant, or all there are.

    >>> did_you_mean("1f1B", ["gpipe", "1f1b"])
    "did you mean '1f1b'?"
    >>> did_you_mean("x", ["gpipe", "1f1b"])
    "choose one of 'gpipe', '1f1b'"
    >>> did_you_mean("x", [])
    'leave it out: nothing is known here'
    """
    names = list(known)
    meant = closest(word, names)
    if meant is not None:
        return f"did you mean {meant!r}?"
    if not names:
        return "leave it out: nothing is known here"
    return f"choose one of {list_names(names)}"


def list_names(names: Iterable[str]) -> str:
    """Names as a message says them.

    >>> list_names(["gpu", "npu"])
    "'gpu', 'npu'"
    """
    return ", ".join(repr(name) for name in names)
