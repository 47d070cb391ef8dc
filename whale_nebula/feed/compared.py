"""Whether two processes hold the same input, as far as both of them have it."""

from __future__ import annotations

from typing import TypeAlias

Fingerprint: TypeAlias = int | list[int | None]
"""A checksum of an input, or one of each micro-batch of it: None of those of which rows are not here."""


def same(own: Fingerprint, theirs: Fingerprint) -> bool:
    """Whether what both have is the same.

    >>> same(7, 7), same(7, 8), same([1, None, 3], [1, 2, None]), same([1, None], [2, None]), same([1], [1, 2])
    (True, False, True, False, False)
    """
    if isinstance(own, int) or isinstance(theirs, int):
        return own == theirs or isinstance(own, int) != isinstance(theirs, int)
    known = (a == b for a, b in zip(own, theirs, strict=False) if a is not None and b is not None)
    return len(own) == len(theirs) and all(known)
