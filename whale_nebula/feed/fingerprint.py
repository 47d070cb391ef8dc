"""A fingerprint of a batch: two clusters that train on different rows must notice before the first update."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

import google_crc32c
import numpy as np

from whale_nebula.feed.compared import Fingerprint
from whale_nebula.feed.feed import Rows
from whale_nebula.feed.missing import Missing
from whale_nebula.feed.rows_read import Mask
from whale_nebula.ir.program import Leaf


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
