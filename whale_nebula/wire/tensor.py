"""Element types as numbered on the wire, and conversion of arrays to and from bytes."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from whale_nebula.errors import LocalProtocolError

Bytes = npt.NDArray[np.uint8]

# The position is the number on the wire: new types are only appended.
_TYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(each)
    for each in (
        np.bool_,
        np.int8,
        np.uint8,
        np.int16,
        np.uint16,
        np.int32,
        np.uint32,
        np.int64,
        np.uint64,
        np.float16,
        ml_dtypes.bfloat16,
        np.float32,
        np.float64,
        np.complex64,
        np.complex128,
    )
)
_CODES = {each.name: code for code, each in enumerate(_TYPES, start=1)}

DTYPE_NAMES = tuple(_CODES)


def find_dtype_code(name: str) -> int:
    """The number of an element type on the wire; types without one (strings, variants) are refused by name."""
    code = _CODES.get(name)
    if code is None:
        raise LocalProtocolError(
            f"cannot send a tensor of dtype '{name}' over a link",
            why=f"frames can only contain numbers and bools: {', '.join(DTYPE_NAMES)}",
            mend="keep strings and other objects inside one stage, and send their integer ids",
        )
    return code


def find_dtype(code: int) -> np.dtype[Any] | None:
    """The element type with this number; None if there is none."""
    return _TYPES[code - 1] if 1 <= code <= len(_TYPES) else None


def count_raw_bytes(code: int, dims: tuple[int, ...]) -> int:
    """The bytes of a tensor of this (known) element type and these sizes."""
    return math.prod(dims) * _TYPES[code - 1].itemsize


def encode_array(array: npt.NDArray[Any]) -> Bytes:
    """The elements of an array in row order, little end first, as one row of bytes: a view if possible."""
    find_dtype_code(array.dtype.name)
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8)


def decode_array(data: Bytes, code: int, dims: tuple[int, ...]) -> npt.NDArray[Any]:
    """A view of bytes as an array. The caller has checked the size."""
    return data.view(_TYPES[code - 1]).reshape(dims)
