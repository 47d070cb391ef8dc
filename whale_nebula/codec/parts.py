"""What an encoded tensor is made of: arrays that both sides know beforehand. Without numpy, for plans and scopes."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """An array that both sides know to come: its element type and its sizes.

    >>> Part("bfloat16", (3, 2)).nbytes
    12
    """

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        from whale_nebula.wire.tensor import dtype_code, raw_bytes

        return raw_bytes(dtype_code(self.dtype), self.dims)
