"""A precision for gradients: two bits a number in the rows of the largest norms, one bit in all others.

Tokens that a model knows already have gradients near zero. To leave such rows out is what a model does not forgive, as
they are what keeps it from being too sure; but an error of six tenths of so little is little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whale_nebula.codec.objects import Dims, Precision
from whale_nebula.codec.parts import Part
from whale_nebula.codec.precisions import INT1, INT2
from whale_nebula.codec.ranks import kept
from whale_nebula.codec.structures import check_share, matrix, reshaped
from whale_nebula.errors import RemoteProtocolError


@dataclass(frozen=True)
class Mixed(Precision):
    """int2 for the `fraction` of all rows whose norms are largest, int1 for the others.

    >>> str(Mixed(0.4)), sum(part.nbytes for part in Mixed(0.5).parts((64, 128), "float32"))
    ('mixed(0.4)', 1688)
    """

    name = "mixed"
    fraction: float

    def __post_init__(self) -> None:
        check_share("Mixed", "fraction", self.fraction)

    def parts(self, dims: Dims, dtype: str) -> tuple[Part, ...]:
        """A bit for each row that says which it is, then the strong rows, then the others."""
        strong, weak = self._sizes(dims)
        marks = Part("uint8", (-(-(strong[0] + weak[0]) // 8),))
        return marks, *INT2().parts(strong, dtype), *INT1().parts(weak, dtype)

    def encode(self, x: Any, key: Any = None) -> tuple[Any, ...]:
        """Both by their own precision."""
        from whale_nebula.codec.bytes.rows import pack_mask
        from whale_nebula.codec.graph.strong import strongest, taken

        dims = tuple(int(size) for size in x.shape)
        rows = reshaped(x, matrix(dims))
        marks = strongest(rows, self._sizes(dims)[0][0])
        pieces = INT2().encode(taken(rows, marks), key), INT1().encode(taken(rows, ~marks), key)
        return pack_mask(marks), *pieces[0], *pieces[1]

    def decode(self, parts: Sequence[Any], dims: Dims, dtype: str) -> Any:
        """Each row in its place."""
        from whale_nebula.codec.bytes.rows import unpack_mask
        from whale_nebula.codec.graph.strong import mingled

        packed, *encoded = parts
        strong, weak = self._sizes(dims)
        marks = unpack_mask(packed, strong[0] + weak[0])
        if int(marks.sum()) != strong[0]:
            raise RemoteProtocolError(f"{int(marks.sum())} of {len(marks)} rows are marked, where {strong[0]} were due")
        rows = INT2().decode(encoded[:3], strong, dtype), INT1().decode(encoded[3:], weak, dtype)
        return reshaped(mingled(*rows, marks), dims)

    def _sizes(self, dims: Dims) -> tuple[Dims, Dims]:
        """Of the strong rows, and of the others."""
        rows, columns = matrix(dims)
        strong = kept(rows, self.fraction)
        return (strong, columns), (rows - strong, columns)
