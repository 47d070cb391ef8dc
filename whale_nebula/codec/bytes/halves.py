"""Two integers in a byte, taken apart by numpy: as `whale_nebula.codec.blocks` lays four bits a number."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def apart(pairs: npt.NDArray[Any], columns: int) -> npt.NDArray[np.int8]:
    """The integers of rows of so many columns: the left half of a row lies in the lower bits, the right in the upper.

    >>> apart(np.array([[0x9F, 0x01]], np.uint8), 3).tolist()
    [[7, -7, 1]]
    """
    left, right = pairs & 15, pairs >> 4
    single = np.concatenate([left, right[:, : columns - left.shape[1]]], axis=1).astype(np.int8)
    return single - np.int8(8)
