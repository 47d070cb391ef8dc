"""Tensor specifications: element type and shape."""

from __future__ import annotations

from typing import NamedTuple

_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip

_FLOATING = frozenset({"float16", "bfloat16", "float32", "float64", "complex64", "complex128"})


class Spec(NamedTuple):
    """An element type and a shape; None in a shape is a size that is known only at run time.

    >>> str(Spec("float32", (None, 64)))
    'float32[?,64]'
    """

    dtype: str
    shape: tuple[int | None, ...] | None

    @property
    def rank(self) -> int | None:
        """Number of axes; None if unknown."""
        return None if self.shape is None else len(self.shape)

    @property
    def floating(self) -> bool:
        """Whether a gradient can flow through such a tensor."""
        return self.dtype in _FLOATING

    @property
    def scalar(self) -> bool:
        """Whether this is a single number."""
        return self.shape == ()

    def nbytes(self, unknown: int = 32) -> int:
        """Bytes of one such tensor, with `unknown` in place of each unknown size; of one element without a rank.

        >>> Spec("float16", (None, 10)).nbytes(unknown=4)
        80
        """
        size = _BYTES.get(self.dtype, 8)
        for axis in self.shape or ():
            size *= unknown if axis is None else axis
        return size

    def fill_shape(self, unknown: int) -> tuple[int, ...]:
        """The sizes of one such tensor, with `unknown` in place of each unknown one; empty if the rank is unknown.

        >>> Spec("float16", (None, 10)).fill_shape(4)
        (4, 10)
        """
        return tuple(unknown if axis is None else axis for axis in self.shape or ())

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype}[*]"
        return f"{self.dtype}[{','.join('?' if axis is None else str(axis) for axis in self.shape)}]"


class Value(NamedTuple):
    """One output of one op: `Value(3, 0)` is the first output of the op with index 3.

    >>> str(Value(3)), str(Value(3, 1))
    ('%3', '%3:1')
    """

    op: int
    out: int = 0

    def __str__(self) -> str:
        return f"%{self.op}:{self.out}" if self.out else f"%{self.op}"
