"""Hashes of 64-bit ids, and numbers drawn by them: the same in every process and on every machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from whale_nebula.errors import OptionError

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BLOCK = 1 << 15


def mix(values: ArrayLike) -> np.ndarray:
    """The hash of each value, by SplitMix64: a bijection of 64-bit numbers.

    >>> hex(int(mix(np.uint64(0))))
    '0xe220a8397b1dcdaf'
    """
    given = np.asarray(values)
    mixed = np.atleast_1d(given.astype(np.uint64))  # a copy; scalars would warn
    mixed += _STEP
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= factor
    mixed ^= mixed >> np.uint64(31)
    return mixed.reshape(given.shape)


def id_of(field: ArrayLike, value: ArrayLike) -> np.ndarray:
    """The 64-bit id of a value of a field: fields share one space of ids, and do not collide by their values.

    >>> id_of(0, [1, 2]).dtype, bool(id_of(0, 1) == id_of(1, 1))
    (dtype('int64'), False)
    """
    return np.asarray(mix(mix(np.asarray(field)) ^ np.asarray(value).astype(np.uint64)).view(np.int64))


def draw_uniform(ids: np.ndarray, width: int, seed: int) -> np.ndarray:
    """`width` numbers of [0, 1) for each id, float32; those of an id depend on id and seed alone."""
    keys = mix(ids.astype(np.int64).view(np.uint64) ^ mix(np.uint64(seed)))[:, None]
    columns, drawn = np.arange(width, dtype=np.uint64)[None, :], np.empty((len(ids), width), np.float32)
    block = max(1, _BLOCK // width)
    for at in range(0, len(ids), block):  # so many that they stay in a CPU's cache
        drawn[at : at + block] = mix(keys[at : at + block] + columns) >> np.uint64(40)
    drawn *= np.float32(2.0**-24)
    return drawn


def cross_fields(ids: np.ndarray, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """The ids with a field more for each pair of fields, whose id is that of the two values together.

    >>> cross_fields(np.array([[1, 2, 3]]), [(0, 2)]).shape
    (1, 4)
    """
    known = range(ids.shape[1])
    wrong = [pair for pair in pairs if np.shape(pair) != (2,) or not all(each in known for each in pair)]
    if wrong:
        raise OptionError(
            f"the fields {wrong[0]} cannot be crossed: there are {ids.shape[1]}",
            mend=f"pairs of numbers of fields from 0 to {ids.shape[1] - 1}: [(0, 1)]",
        )
    made = [
        id_of(ids.shape[1] + at, mix(ids[:, one]) ^ ids[:, other].view(np.uint64))
        for at, (one, other) in enumerate(pairs)
    ]
    return np.concatenate([ids, *(each[:, None] for each in made)], axis=1)
