"""Seconds that codecs take one core: what each says of itself is made of these."""

from __future__ import annotations

from typing import NamedTuple

CALL, CAST = 0.6e-3, 0.15e-3
"""Seconds for each call of an encoder or a decoder, however small the tensor is; casts are one operation."""

SPEED = 110e9
"""Floating-point operations a second in products of matrices."""

EIGEN = 0.18e-9
"""Seconds for the eigenvectors of an n x n matrix, by n^3."""

COPY = 0.9e-9
"""Seconds a number, to write what a product makes."""

_GRAM_PASSES = 4  # over the running Gram matrix in a step: to let it fade, add to it and look for NaN


class Cost(NamedTuple):
    """Seconds, at the side that sends and at the side that takes.

    >>> Cost(0.25, 0.5) + Cost(1, 1)
    Cost(encode=1.25, decode=1.5)
    """

    encode: float = 0.0
    decode: float = 0.0

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.encode + self.decode

    def times(self, count: float) -> Cost:
        """So many times as much."""
        return Cost(self.encode * count, self.decode * count)

    def __add__(self, other: object) -> Cost:
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(self.encode + other.encode, self.decode + other.decode)


def gram_seconds(rows: int, n: int) -> float:
    """Seconds a step to keep the running Gram matrix [n, n] of so many rows."""
    return 2.0 * rows * n * n / SPEED + _GRAM_PASSES * COPY * n * n
