"""Fingerprints of batches, by which clusters detect that they train on different rows before the first update."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import google_crc32c
import numpy as np

from whale_nebula.feed.absent import Missing
from whale_nebula.feed.rows import Mask, Rows
from whale_nebula.ir.program import Leaf

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


def fingerprints(
    leaves: Sequence[Leaf],
    tensors: Sequence[Any],
    only: Collection[str] = (),
    secret: Collection[str] = (),
    rows: Mapping[int, Rows] | None = None,
    counts: Sequence[int] = (),
) -> dict[str, Fingerprint]:
    """A checksum of every input that is here by its name, or of those named in `only`; never of one in `secret`. Of an
    input of which only some `rows` may be here it is one for each micro-batch of `counts` rows.

    >>> leaf = Leaf(0, "x", None)
    >>> fingerprints([leaf], [np.zeros(2)]) == fingerprints([leaf], [np.zeros(2)])
    True
    >>> fingerprints([leaf], [np.zeros(2)]) == fingerprints([leaf], [np.ones(2)])
    False
    """
    known = rows or {}
    here = [n for n, tensor in enumerate(tensors) if not isinstance(tensor, Missing)]
    chosen = [n for n in here if leaves[n].name not in secret and (not only or leaves[n].name in only)]
    arrays = {n: np.asarray(tensors[n]) for n in chosen}
    masks = {n: each.here for n, each in known.items() if leaves[n].batched}
    return {
        leaves[n].name: _by_parts(array, masks[n], counts) if n in masks else _checksum(array)
        for n, array in arrays.items()
    }


def _by_parts(array: np.ndarray, here: Mask, counts: Sequence[int]) -> list[int | None]:
    """A checksum for each micro-batch; None where rows of it are not here."""
    ends = list(accumulate(counts))
    parts = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return [_checksum(array[part]) if bool(here[part].all()) else None for part in parts]


def _checksum(array: np.ndarray) -> int:
    if array.dtype == object:
        return google_crc32c.value(repr(array.tolist()).encode())
    return google_crc32c.value(np.ascontiguousarray(array).view(np.uint8).reshape(-1))
