"""Several arrays as one row of bytes and back: one after the other, in row order, little end first, no padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from whale_nebula.codec.parts import Part
from whale_nebula.errors import RemoteProtocolError
from whale_nebula.wire.tensor import Bytes, array_bytes, array_from, dtype_code

_BOOL = dtype_code("bool")


def join(arrays: Sequence[npt.NDArray[Any]]) -> Bytes:
    """All arrays in one buffer.

    >>> join([np.array([1, 2], "int16"), np.array(True)]).tolist()
    [1, 0, 2, 0, 1]
    """
    rows = [array_bytes(np.asarray(array)) for array in arrays]
    return np.concatenate(rows) if rows else np.empty(0, np.uint8)


def split(buffer: Bytes, parts: Sequence[Part]) -> list[npt.NDArray[Any]]:
    """The arrays that lie in a buffer, as views of it; it must have exactly their length.

    >>> buffer = join([np.arange(3), np.float32(0.5)])
    >>> [part.tolist() for part in split(buffer, [Part("int64", (3,)), Part("float32", ())])]
    [[0, 1, 2], 0.5]
    """
    sizes = [part.nbytes for part in parts]
    if buffer.size != sum(sizes):
        raise RemoteProtocolError(
            f"{buffer.size} bytes came where {sum(sizes)} were due",
            why=f"this codec makes {_told(parts)} of such a tensor",
        )
    found, place = [], 0
    for part, size in zip(parts, sizes, strict=True):
        found.append(_array(buffer[place : place + size], part))
        place += size
    return found


def _array(data: Bytes, part: Part) -> npt.NDArray[Any]:
    code = dtype_code(part.dtype)
    if code == _BOOL and data.size and data.max() > 1:
        raise RemoteProtocolError("a bool that is neither 0 nor 1")
    return array_from(data, code, part.dims)


def _told(parts: Sequence[Part]) -> str:
    return ", ".join(f"{part.dtype}{list(part.dims)}" for part in parts) or "nothing"
