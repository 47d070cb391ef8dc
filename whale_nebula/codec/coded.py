"""A precision that spends bits where they tell something: so many a number on average, known before to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from whale_nebula.codec.blocks import rows_and_columns
from whale_nebula.codec.objects import Dims, Precision
from whale_nebula.codec.parts import Part
from whale_nebula.errors import OptionError

MOST = 6
LARGEST = 3.38e38  # what bfloat16 can hold, too
LOOKED_AT = 1 << 15  # numbers, on which is tried how fine it may be
HEAD = 8  # bytes: the scale, and how many bytes those of the rows take
GROUPS = 8  # of neighbouring columns, which have a code of their own
_GROUP = 16  # bytes that one takes at least


@dataclass(frozen=True)
class Coded(Precision):
    """`bits` a number, all that crosses counted (more only where rows are short). Each row loses the same share of its
    norm, which `bits` and the numbers decide; where their frequencies differ it is less than integers of as many bits
    lose. A gradient is not rounded by chance, but comes a little longer, so that its own share of it is whole.

    After `Axes` the frequencies of most differ much: two bits a number lose there what else three to four lose.

    >>> str(Coded(2.3)), sum(part.nbytes for part in Coded(2).parts((64, 128), "float32"))
    ('coded(2.3)', 2048)
    """

    name = "coded"
    bits: float

    def __post_init__(self) -> None:
        number = isinstance(self.bits, int | float) and not isinstance(self.bits, bool)
        if not number or not 0 < self.bits <= MOST:
            raise OptionError(
                f"Coded({self.bits!r}) cannot be",
                why=f"it says how many bits a number gets: above 0 and at most {MOST}",
                mend="nb.codec.Coded(2.3)",
            )

    def parts(self, dims: Dims, dtype: str) -> tuple[Part, ...]:
        """Bytes, of which some at the end may be left over; so many at least that zeros fit."""
        rows, columns = rows_and_columns(dims)
        if not rows or not columns:
            return (Part("uint8", (0,)),)
        return (Part("uint8", (max(ceil(rows * columns * self.bits / 8), HEAD + 2 * rows + GROUPS * _GROUP),)),)

    def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
        """With the least error; with a key so that the tensor's own share of it is whole."""
        import numpy as np

        from whale_nebula.codec.bytes.coded import quantise

        dims = tuple(int(size) for size in x.shape)
        (size,) = self.parts(dims, x.dtype.name)[0].dims
        if not size:
            return (np.empty(0, np.uint8),)
        wide = np.asarray(x)
        if wide.dtype == np.float64:  # what float32 cannot hold becomes its largest; what is infinite stays so
            wide = np.where(np.isfinite(wide), np.clip(wide, -LARGEST, LARGEST), wide)
        matrix = wide.astype(np.float32).reshape(rows_and_columns(dims))
        return (quantise(matrix, size, whole=key is not None),)

    def decode(self, parts: Sequence[Any], dims: Dims, dtype: str) -> Any:
        """Whole numbers times scales, and not beyond what its type can hold."""
        import numpy as np

        from whale_nebula.codec.bytes.coded import dequantise
        from whale_nebula.codec.graph.casts import restore

        data = np.asarray(parts[0])
        made = dequantise(data, *rows_and_columns(dims)) if data.size else data.astype(np.float32)
        return restore(made.reshape(dims), dtype)
