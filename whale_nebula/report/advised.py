"""Codecs that a report may advise: the line to write, what a number then takes on its way, and to make it so."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from whale_nebula.codec.costs import cost
from whale_nebula.codec.objects import Precision
from whale_nebula.codec.precisions import FP16, INT4, INT8
from whale_nebula.report.basis import Basis

_DIMS = (1024, 1024)  # so many numbers that the scales of blocks count as they do in the end


def _width(precision: Precision) -> float:
    """Bytes a number, with its part of what else is sent."""
    rows, columns = _DIMS
    return sum(part.nbytes for part in precision.parts(_DIMS, "float32")) / (rows * columns)


@dataclass(frozen=True, slots=True)
class Advised:
    """What may stand in the line, and by which codec a number then crosses there and, as a gradient, back.

    >>> EACH_WAY[1].line, EACH_WAY[2].widths
    ('nb.compress(fp16=True)', (1.03125, 1.03125))
    """

    line: str
    there: Precision
    back: Precision

    @property
    def widths(self) -> tuple[float, float]:
        """Bytes a number, there and back."""
        return _width(self.there), _width(self.back)

    def applied(self, basis: Basis) -> Basis:
        """The step with every boundary sent so: fewer bytes, and what one core takes to make them fewer."""
        there, back = partial(self._taken, self.there, False), partial(self._taken, self.back, True)
        return basis.numbers_of(*self.widths).coded_by(there, back, basis)

    def _taken(self, precision: Precision, back: bool, count: float) -> tuple[float, float]:
        return cost(precision, (round(count),), back=back) or (0.0, 0.0)


_HALF, _EIGHT, _FOUR = FP16(), INT8(), INT4()

EACH_WAY = (
    Advised('nb.compress(fp16=True, backward="fp16")', _HALF, _HALF),
    Advised("nb.compress(fp16=True)", _HALF, _EIGHT),
    Advised("nb.compress(int8=True)", _EIGHT, _EIGHT),
    Advised("nb.compress(int4=True)", _FOUR, _EIGHT),
)
"""From the mildest on, where gradients come back: by default these are int8."""

THERE = (
    Advised("nb.compress(fp16=True)", _HALF, _HALF),
    Advised("nb.compress(int8=True)", _EIGHT, _EIGHT),
    Advised("nb.compress(int4=True)", _FOUR, _FOUR),
)
"""The same where nothing comes back."""


def advisable(basis: Basis) -> tuple[Advised, ...]:
    """The codecs that a step may get, from the mildest on."""
    back = any(hop.backward is not None for phase in basis.phases for hop in phase.hops.values())
    return EACH_WAY if back else THERE
