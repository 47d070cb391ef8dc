"""Whether a codec is worth its time: a step with it beside one without, as the simulator has them.

So a codec that computes while the line is busy anyway is none to warn of, and one that the line would have hidden
without is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from whale_nebula.codec.said import bounded
from whale_nebula.codec.way import NONE, parse_way
from whale_nebula.ir.direction import Direction
from whale_nebula.ir.timing import duration

Step = Callable[[Sequence[Direction]], float]
"""Seconds of a step in which a boundary crosses in these ways."""

_ROUNDING = 1e-9


class Loss(NamedTuple):
    """What ways take one core more than others, what they save of the line, and the steps with these and with those."""

    taken: float
    saved: float
    step: float
    other: float

    def told(self, beside: str = "") -> str:
        """In words."""
        taken = f"takes one core {duration(self.taken)} a step, to encode and to decode"
        saved = f"saves {duration(max(self.saved, 0.0))} of the line{beside}"
        return f"{taken}, and {saved}, so a step takes {duration(self.step)} instead of {duration(self.other)}"


def advice(name: str, ways: Sequence[Direction], where: str, step: Step) -> Iterator[str]:
    """A warning for a codec with which a step takes longer, or with whose structure it does, and the line to change.
    Of two it is the one without which a step is the shortest.

    `ways` are those of the tensor and, if it returns, of its gradient; `name` is what to call the boundary. What saves
    more than sizes tell (a mask) may be worth it in ways that are not known before.
    """
    at = f", {where}" if where else ""
    way = parse_way(ways[0].way)
    whole = None if bounded(ways[0].way) else _loss(ways, [each.crossing_by(NONE) for each in ways], step)
    part = None
    if way.structure is not None:
        part = _loss(ways, [each.crossing_by(_without(each.way)) for each in ways], step)
    if way.structure is not None and part is not None and (whole is None or part.other < whole.other):
        beside = f" beside {way.precision} alone" if way.precision is not None else ""
        yield f"warning: {name}: {way.structure} {part.told(beside)}: leave {way.structure.name} out{at}"
    elif whole is not None:
        yield f"warning: {name}: '{ways[0].way}' {whole.told()}: leave nb.compress out{at}"


def _loss(ways: Sequence[Direction], others: Sequence[Direction], step: Step) -> Loss | None:
    """What these ways cost beside others, where a step takes longer with them; None also where that is not known."""
    pairs = [_difference(way, other) for way, other in zip(ways, others, strict=True) if way.way != other.way]
    known = [pair for pair in pairs if pair is not None]
    if not known or len(known) < len(pairs):
        return None
    both = step(ways), step(others)
    taken, saved = sum(pair[0] for pair in known), sum(pair[1] for pair in known)
    return Loss(taken, saved, *both) if both[0] > both[1] * (1.0 + _ROUNDING) else None


def _difference(way: Direction, other: Direction) -> tuple[float, float] | None:
    """Seconds of computing that a way takes more than another, and seconds of the line that it saves."""
    if way.seconds is None or other.seconds is None or way.cost is None or other.cost is None:
        return None
    return way.cost.seconds - other.cost.seconds, other.seconds - way.seconds


def _without(way: str) -> str:
    """The same way without the structure of its codec."""
    given = parse_way(way)
    return str(replace(given, codec=given.precision, ladder=given.ladder if given.precision is not None else ()))
