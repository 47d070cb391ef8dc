"""Padding is not sent: of a matrix only the rows that a mask marks, and zeros where it marks none."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from whale_nebula.codec.bytes import bits
from whale_nebula.errors import LocalProtocolError, RemoteProtocolError
from whale_nebula.wire.tensor import Bytes

Mask = npt.NDArray[np.bool_]
"""For each row of a matrix, whether it is sent."""


def pack_mask(mask: Mask) -> Bytes:
    """A mask, one bit a row.

    >>> pack_mask(np.array([True, True, False])).tolist()
    [3]
    """
    return bits.pack(_checked(mask))


def unpack_mask(data: Bytes, rows: int) -> Mask:
    """The mask of so many rows that these bytes are.

    >>> unpack_mask(np.array([3], np.uint8), 3).tolist()
    [True, True, False]
    """
    return bits.unpack(data, "bool", (rows,))


def keep(matrix: npt.NDArray[Any], mask: Mask) -> npt.NDArray[Any]:
    """The rows that are sent, in their order; the matrix itself if these are all.

    >>> keep(np.arange(6).reshape(3, 2), np.array([True, False, True])).tolist()
    [[0, 1], [4, 5]]
    """
    if _checked(mask).shape != matrix.shape[:1]:
        raise LocalProtocolError(f"a mask of {mask.size} rows over a matrix of sizes {matrix.shape}")
    return matrix if mask.all() else matrix[mask]


def put_back(rows: npt.NDArray[Any], mask: Mask) -> npt.NDArray[Any]:
    """The matrix that the sent rows are of.

    >>> put_back(np.array([[0, 1], [4, 5]]), np.array([True, False, True])).tolist()
    [[0, 1], [0, 0], [4, 5]]
    """
    sent = int(np.count_nonzero(_checked(mask)))
    if rows.shape[:1] != (sent,):
        raise RemoteProtocolError(f"rows of sizes {rows.shape} came under a mask that marks {sent}")
    if sent == mask.size:
        return rows
    matrix = np.zeros((mask.size, *rows.shape[1:]), rows.dtype)
    matrix[mask] = rows
    return matrix


def _checked(mask: Mask) -> Mask:
    if mask.dtype != np.bool_ or mask.ndim != 1:
        raise LocalProtocolError(f"a mask of {mask.dtype}{list(mask.shape)}", why="a mask is one bool for each row")
    return mask
