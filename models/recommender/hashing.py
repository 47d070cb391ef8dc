"""Hashes of 64-bit ids, random numbers by id, and a hash index of ids: the same on every machine."""

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
    array = np.asarray(values)
    mixed = np.atleast_1d(array.astype(np.uint64))  # a copy, as an array, since overflows of scalars warn
    mixed += _STEP
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= factor
    mixed ^= mixed >> np.uint64(31)
    return mixed.reshape(array.shape)


def id_of(field: ArrayLike, value: ArrayLike) -> np.ndarray:
    """The 64-bit id of a value of a field: fields share one space of ids, without systematic collisions.

    >>> id_of(0, [1, 2]).dtype, bool(id_of(0, 1) == id_of(1, 1))
    (dtype('int64'), False)
    """
    return np.asarray(mix(mix(np.asarray(field)) ^ np.asarray(value).astype(np.uint64)).view(np.int64))


def draw_uniform(ids: np.ndarray, width: int, seed: int) -> np.ndarray:
    """`width` uniform numbers in [0, 1) for each id, float32; they depend on id and seed alone."""
    keys = mix(ids.astype(np.int64).view(np.uint64) ^ mix(np.uint64(seed)))[:, None]
    columns, drawn = np.arange(width, dtype=np.uint64)[None, :], np.empty((len(ids), width), np.float32)
    block = max(1, _BLOCK // width)
    for at in range(0, len(ids), block):  # in blocks that fit into a CPU's cache
        drawn[at : at + block] = mix(keys[at : at + block] + columns) >> np.uint64(40)
    drawn *= np.float32(2.0**-24)
    return drawn


def cross_fields(ids: np.ndarray, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """The ids [rows, fields] with an additional field for each pair of fields, whose id depends on both values.

    >>> cross_fields(np.array([[1, 2, 3]]), [(0, 2)]).shape
    (1, 4)
    """
    known = range(ids.shape[1])
    wrong = [pair for pair in pairs if np.shape(pair) != (2,) or not all(each in known for each in pair)]
    if wrong:
        raise OptionError(
            f"the fields {wrong[0]} cannot be crossed: there are only {ids.shape[1]} fields",
            mend=f"pass pairs of field indices from 0 to {ids.shape[1] - 1}: [(0, 1)]",
        )
    crossed = [
        id_of(ids.shape[1] + at, mix(ids[:, one]) ^ ids[:, other].view(np.uint64))
        for at, (one, other) in enumerate(pairs)
    ]
    return np.concatenate([ids, *(each[:, None] for each in crossed)], axis=1)


_ABSENT = -1
_MOVED = 1 << 18


class IdIndex:
    """A hash index with open addressing and linear probing, at most half full; it doubles as needed."""

    def __init__(self) -> None:
        self._count = 0
        self._ids = np.zeros(64, np.int64)
        self._rows = np.full(64, _ABSENT, np.int32)

    def __len__(self) -> int:
        return self._count

    @staticmethod
    def bytes_of(count: int) -> int:
        """The bytes of an index of so many ids, for each of which there are two slots or more."""
        slots = max(64, 1 << (2 * count - 1).bit_length() if count else 0)
        return slots * (8 + (4 if slots <= 1 << 31 else 8))

    def find(self, ids: np.ndarray) -> np.ndarray:
        """The row of each id, or -1."""
        found = np.full(len(ids), _ABSENT, np.int64)
        slots, pending = self._first_slots(ids), np.arange(len(ids))
        while len(pending):
            at = slots[pending]
            rows = self._rows[at]
            hit = (rows != _ABSENT) & (self._ids[at] == ids[pending])
            found[pending[hit]] = rows[hit]
            pending = pending[(rows != _ABSENT) & ~hit]
            slots[pending] = (slots[pending] + 1) & (len(self._ids) - 1)
        return found

    def add(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Assign rows to new ids; ids and rows are distinct."""
        if 2 * (self._count + len(ids)) > len(self._ids):
            size, before = 1 << (2 * (self._count + len(ids))).bit_length(), (self._ids, self._rows)
            self._ids = np.zeros(size, np.int64)
            self._rows = np.full(size, _ABSENT, np.int32 if size <= 1 << 31 else np.int64)
            self._count = 0
            for at in range(0, len(before[0]), _MOVED):  # in blocks, to limit temporary memory
                held_ids, held_rows = (each[at : at + _MOVED] for each in before)
                held = held_rows != _ABSENT
                self.add(held_ids[held], held_rows[held])
        slots, pending = self._first_slots(ids), np.arange(len(ids))
        while len(pending):
            free = pending[self._rows[slots[pending]] == _ABSENT]
            self._rows[slots[free]] = rows[free]  # of several for one slot the last one wins
            got = free[self._rows[slots[free]] == rows[free]]
            self._ids[slots[got]] = ids[got]
            pending = pending[self._rows[slots[pending]] != rows[pending]]
            slots[pending] = (slots[pending] + 1) & (len(self._ids) - 1)
        self._count += len(ids)

    def _first_slots(self, ids: np.ndarray) -> np.ndarray:
        return (mix(ids) & np.uint64(len(self._ids) - 1)).astype(np.int64)
