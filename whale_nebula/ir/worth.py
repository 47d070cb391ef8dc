"""Whether a codec is worth its time: seconds of the line that it saves, beside those that it takes to compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from whale_nebula.codec.said import bounded
from whale_nebula.codec.way import NONE, parse_way
from whale_nebula.ir.direction import Direction
from whale_nebula.ir.timing import duration


def advice(name: str, ways: Sequence[Direction], where: str) -> Iterator[str]:
    """A warning for a codec that costs more time than it saves, or whose structure does, and the line to change.

    `ways` are those of the tensor and, if it returns, of its gradient; `name` is what to call the boundary. What saves
    more than sizes tell (a mask) may be worth it in ways that are not known before.
    """
    at = f", {where}" if where else ""
    whole = _loss(ways, [each.crossing_by(NONE) for each in ways])
    if whole is not None and not bounded(ways[0].way):
        yield f"warning: {name}: '{ways[0].way}' {_told(*whole)}: leave nb.compress out{at}"
        return
    structure = parse_way(ways[0].way).structure
    part = _loss(ways, [each.crossing_by(_without(each.way)) for each in ways])
    if structure is not None and part is not None:
        alone = parse_way(ways[0].way).precision
        beside = f" beside {alone} alone" if alone is not None else ""
        yield f"warning: {name}: {structure} {_told(*part)}{beside}: leave {structure.name} out{at}"


def _loss(ways: Sequence[Direction], others: Sequence[Direction]) -> tuple[float, float] | None:
    """Seconds a step that these ways take more than others and save, where they save less than they take."""
    pairs = [_difference(way, other) for way, other in zip(ways, others, strict=True) if way.way != other.way]
    known = [pair for pair in pairs if pair is not None]
    taken, saved = sum(pair[0] for pair in known), sum(pair[1] for pair in known)
    return (taken, saved) if known and len(known) == len(pairs) and taken > max(saved, 0.0) else None


def _difference(way: Direction, other: Direction) -> tuple[float, float] | None:
    """Seconds of computing that a way takes more than another, and seconds of the line that it saves."""
    if way.seconds is None or other.seconds is None or way.cost is None or other.cost is None:
        return None
    return way.cost.seconds - other.cost.seconds, other.seconds - way.seconds


def _told(taken: float, saved: float) -> str:
    return f"takes one core {duration(taken)} a step, to encode and to decode, and saves {duration(saved)} of the line"


def _without(way: str) -> str:
    """The same way without the structure of its codec."""
    given = parse_way(way)
    return str(replace(given, codec=given.precision, ladder=given.ladder if given.precision is not None else ()))
