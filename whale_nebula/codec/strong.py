"""A structure for gradients: the rows of the largest norms, which are few that hold nearly all.

Tokens that a model knows already have gradients that are nearly zero, so half of the rows of a language model's
gradient hold more than nine tenths of its energy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whale_nebula.codec.objects import Dims, Reduced, Structure
from whale_nebula.codec.parts import Part
from whale_nebula.codec.ranks import kept
from whale_nebula.codec.structures import check_share, matrix, reshaped


@dataclass(frozen=True)
class Rows(Structure):
    """The `fraction` of all rows whose norms are largest; the others arrive as zeros. It is meant for gradients.

    >>> from whale_nebula.codec import INT2
    >>> str(Rows(0.5) >> INT2())
    'rows(0.5) >> int2'
    """

    name = "rows"
    fraction: float

    def __post_init__(self) -> None:
        check_share("Rows", "fraction", self.fraction)

    def numbers(self, dims: Dims) -> tuple[Dims, ...] | None:
        """The kept rows."""
        m, n = matrix(dims)
        return ((self._kept(m), n),) if self._kept(m) < m else None

    def extras(self, dims: Dims) -> tuple[Part, ...]:
        """A bit for each row: whether it is kept."""
        return (Part("uint8", (-(-matrix(dims)[0] // 8),)),)

    def reduce(self, state: Any, x: Any) -> Reduced:
        """The rows, and which they are."""
        from whale_nebula.codec.bytes.rows import pack_mask
        from whale_nebula.codec.graph.strong import strongest, taken

        m, n = matrix(x.shape)
        rows = reshaped(x, (m, n))
        marks = strongest(rows, self._kept(m))
        return Reduced((taken(rows, marks),), (pack_mask(marks),))

    def expand(self, state: Any, numbers: Sequence[Any], extras: Sequence[Any], dims: Dims) -> tuple[Any, Any]:
        """Zeros but for them."""
        from whale_nebula.codec.bytes.rows import unpack_mask
        from whale_nebula.codec.graph.strong import placed

        return reshaped(placed(numbers[0], unpack_mask(extras[0], matrix(dims)[0])), dims), None

    def _kept(self, m: int) -> int:
        return kept(m, self.fraction)
