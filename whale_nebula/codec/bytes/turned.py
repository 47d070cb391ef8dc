"""Integers of few bits, and blocks of them turned back by numpy: as `whale_nebula.codec.turned` says they lie."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from whale_nebula.codec.turned import MOST, PLANES, block_of

_BITS = np.frombuffer(hashlib.sha256(b"whale_nebula turned").digest(), np.uint8)
_SIGNS = 1 - 2 * np.unpackbits(_BITS)[:MOST].astype(np.int8)
"""Of the numbers of a block before they are turned: without them one of equal numbers would be a number and zeros."""


@cache
def turner(block: int) -> npt.NDArray[np.int8]:
    """The matrix that a block's rows are multiplied by, [block, block]; with its transpose it gives `block` times one.

    >>> h = turner(8).astype(int)
    >>> bool((h @ h.T == 8 * np.eye(8)).all())
    True
    """
    return _SIGNS[:block, None] * unsigned(block)


@cache
def unsigned(block: int) -> npt.NDArray[np.int8]:
    """The same for blocks whose signs were changed before."""
    made = np.ones((1, 1), np.int8)
    while len(made) < block:
        made = np.block([[made, made], [made, -made]])
    return made


def apart(packed: npt.NDArray[Any], bits: int) -> npt.NDArray[np.int8]:
    """The odd integers of rows. The first part of a row of a plane lies in the lowest bits, the last in the highest.

    >>> apart(np.array([[0b11100100, 0b00011011]], np.uint8), 2).tolist()
    [[-3, 3, -1, 1, 1, -1, 3, -3]]
    """
    numbers = packed.shape[1] * 8 // bits
    codes = np.zeros((len(packed), numbers), np.uint8)
    start, below = 0, 0
    for width in PLANES[bits]:
        size = numbers * width // 8
        plane = packed[:, start : start + size]
        pieces = [plane >> shift & (1 << width) - 1 for shift in range(0, 8, width)]
        codes |= np.concatenate(pieces, axis=1) << below
        start, below = start + size, below + width
    return 2 * codes.astype(np.int8) - np.int8(2**bits - 1)


def turned_back(packed: npt.NDArray[Any], columns: int, bits: int, most: int) -> npt.NDArray[np.int16]:
    """The integers of which, with its scale, each number of the rows is a multiple: `columns` of them in a row.

    >>> turned_back(np.array([[0b10101010, 0b10101010]], np.uint8), 3, 2, 64).shape
    (1, 3)
    """
    block = block_of(columns, bits, most)
    single = apart(packed, bits).astype(np.float32)
    blocks = single.reshape(-1, block) @ turner(block).T.astype(np.float32)  # whole numbers below 2^11: they are exact
    return blocks.astype(np.int16).reshape(single.shape)[:, :columns]


def spread(scales: npt.NDArray[Any], columns: int, bits: int, most: int) -> npt.NDArray[Any]:
    """A scale for each of so many columns.

    >>> spread(np.array([[1, 2]]), 9, 2, 8).tolist()
    [[1, 1, 1, 1, 1, 1, 1, 1, 2]]
    """
    return np.repeat(scales, block_of(columns, bits, most), axis=1)[:, :columns]
