"""A fingerprint of a batch: two clusters that train on different rows must notice before the first update."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import google_crc32c
import numpy as np

from whale_nebula.feed.missing import Missing
from whale_nebula.ir.program import Leaf


def fingerprints(
    leaves: Sequence[Leaf], tensors: Sequence[Any], only: Collection[str] = (), secret: Collection[str] = ()
) -> dict[str, int]:
    """A checksum of every input that is here by its name, or of those named in `only`; never of one in `secret`.

    >>> leaf = Leaf(0, "x", None)
    >>> fingerprints([leaf], [np.zeros(2)]) == fingerprints([leaf], [np.zeros(2)])
    True
    >>> fingerprints([leaf], [np.zeros(2)]) == fingerprints([leaf], [np.ones(2)])
    False
    """
    here = [(leaf, t) for leaf, t in zip(leaves, tensors, strict=True) if not isinstance(t, Missing)]
    chosen = [(leaf, t) for leaf, t in here if leaf.name not in secret and (not only or leaf.name in only)]
    return {leaf.name: _checksum(np.asarray(tensor)) for leaf, tensor in chosen}


def _checksum(array: np.ndarray) -> int:
    if array.dtype == object:
        return google_crc32c.value(repr(array.tolist()).encode())
    return google_crc32c.value(np.ascontiguousarray(array).view(np.uint8).reshape(-1))
