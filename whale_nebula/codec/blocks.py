"""Numbers as small integers, block by block: what the parts are, and what a block of numbers becomes.

A tensor [..., n] is a matrix of m rows and n columns. Each row is cut into blocks of neighbours; the last may be
shorter. A block has one scale, and its numbers are whole multiples of it, from -Q to Q with Q = 2^(bits - 1) - 1.

Scales are bfloat16 and not float16, though both take two bytes: gradients of a mean over a batch lie around 1e-8,
where a float16 scale (1e-8 / 127) is zero, and values above 8e6 would find no scale at all. The bits that bfloat16
lacks make a scale up to 0.8 % too large, and the error 1 % larger.
"""

from __future__ import annotations

import math

from whale_nebula.codec.parts import Part

SCALE = "bfloat16"


def levels(bits: int) -> int:
    """The largest multiple: the number of levels, 2 * levels + 1, is odd, so that zero is one and no sign is favoured.

    >>> levels(8), levels(4)
    (127, 7)
    """
    return int(2 ** (bits - 1) - 1)


def rows_and_columns(dims: tuple[int, ...]) -> tuple[int, int]:
    """The matrix as which a tensor is seen.

    >>> rows_and_columns((4, 16, 768)), rows_and_columns((768,)), rows_and_columns(())
    ((64, 768), (1, 768), (1, 1))
    """
    return math.prod(dims[:-1]), dims[-1] if dims else 1


def parts(dims: tuple[int, ...], bits: int, block: int) -> tuple[Part, ...]:
    """The scales, then the integers: as int8, or two in a byte, where a row of n takes half of n, rounded up.

    >>> parts((64, 100), 8, 64)
    (Part(dtype='bfloat16', dims=(64, 2)), Part(dtype='int8', dims=(64, 100)))
    >>> parts((64, 99), 4, 32)
    (Part(dtype='bfloat16', dims=(64, 4)), Part(dtype='uint8', dims=(64, 50)))
    """
    rows, columns = rows_and_columns(dims)
    integers = Part("int8", (rows, columns)) if bits == 8 else Part("uint8", (rows, -(-columns // 2)))
    return Part(SCALE, (rows, -(-columns // block))), integers
