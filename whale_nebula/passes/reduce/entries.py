"""Small tensors of known numbers and counts, of any rank: ops that only move their entries keep each one's state.

So the widths of a padding are known after they were sliced out of a table of widths, and the sizes of a tiled tensor
after they were stacked and transposed: this is how TensorFlow computes the gradients of `Pad`, `Slice` and `Tile`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from whale_nebula.passes.reduce.algebra import packed
from whale_nebula.passes.reduce.registry import Site
from whale_nebula.passes.reduce.state import ROWS, WHOLE, Fold, whole

_MANY = 64
Numbers = npt.NDArray[np.int64]
Move = Callable[[Site, Sequence[Numbers]], Numbers | None]


def entries(site: Site, place: int) -> tuple[Fold, ...] | None:
    """The states of the entries of an input in row-major order; None where they cannot be told apart."""
    fold, shape = site.folds[place], site.spec(place).shape
    if fold.kind == ROWS or shape is None or None in shape:
        return None
    if len(shape) <= 1:
        return site.parts(place) if shape else (fold,)
    count = prod(size for size in shape if size is not None)
    if fold.literal is not None and len(fold.literal) == count:
        return tuple(whole(number) for number in fold.literal)
    if fold.parts is not None and len(fold.parts) == count:
        return fold.parts
    return (whole(),) * count if fold.kind == WHOLE and 0 < count <= _MANY else None


def moved(site: Site, data: Sequence[int], move: Move) -> Fold | None:
    """The state of what an op makes that moves the entries of its inputs `data`; None where they cannot be followed."""
    lanes = [entries(site, place) for place in data]
    known: list[Fold] = []
    numbered: list[Numbers] = []
    for place, lane in zip(data, lanes, strict=True):
        if lane is None:
            return None
        shape = [size or 0 for size in site.spec(place).shape or ()]
        numbered.append(np.arange(len(known), len(known) + len(lane)).reshape(shape))
        known.extend(lane)
    places = move(site, numbered)
    if places is None or not places.size:
        return None
    found = tuple(known[place] for place in places.ravel())
    return found[0] if places.ndim == 0 else packed(site, found)


def transposed(site: Site, data: Sequence[Numbers]) -> Numbers | None:
    """By a known order of axes."""
    order = site.ints(1)
    return None if order is None else np.transpose(data[0], order)


def reshaped(site: Site, data: Sequence[Numbers]) -> Numbers | None:
    """To a shape that is known without running."""
    shape: Any = site.op.outputs[0].shape
    return None if shape is None or None in shape else data[0].reshape(shape)


def sliced(site: Site, data: Sequence[Numbers]) -> Numbers | None:
    """By a known `begin` and `size`."""
    begin, size = site.ints(1), site.ints(2)
    if begin is None or size is None:
        return None
    return data[0][tuple(slice(b, None if s < 0 else b + s) for b, s in zip(begin, size, strict=True))]


def stacked(site: Site, data: Sequence[Numbers]) -> Numbers | None:
    """Along a new axis."""
    return np.stack(data, site.number("axis", 0)) if len({each.shape for each in data}) == 1 else None


def concatenated(axis: int | None) -> Move:
    """Along a known axis."""
    return lambda site, data: None if axis is None else np.concatenate(data, axis)
