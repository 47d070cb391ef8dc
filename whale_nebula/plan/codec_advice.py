"""Whether a codec is worth its time: a step with it beside one without, as the simulator has them.

So a codec that computes while the line is busy anyway is none to warn of, and one that the line would have hidden
without is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from whale_nebula.codec.precisions import BF16, FP16
from whale_nebula.codec.said import bounded
from whale_nebula.codec.way import NONE, parse_way
from whale_nebula.plan.directions import Direction
from whale_nebula.plan.timing import duration

Step = Callable[[Sequence[Direction]], float]
"""Seconds of a step in which a boundary crosses in these ways."""

_ROUNDING = 1e-9
_LITTLE = 0.02  # another codec in its place is worth a word from this share of a step on
_HALF = 'nb.compress(..., backward="fp16")'


class Loss(NamedTuple):
    """What ways take one core more than others, what they save of the line, and the steps with these and with those."""

    taken: float
    saved: float
    step: float
    other: float

    @property
    def lost(self) -> float:
        """Seconds that a step takes longer."""
        return self.step - self.other

    def told(self, beside: str = "", *, several: bool = False) -> str:
        """In words."""
        taken = f"take{'s' * (not several)} one core {duration(self.taken)} a step, to encode and to decode"
        saved = f"save{'s' * (not several)} {duration(max(self.saved, 0.0))} of the line{beside}"
        return f"{taken}, and {saved}, so a step takes {duration(self.step)} instead of {duration(self.other)}"


class Warned(NamedTuple):
    """What is wrong with the ways of a boundary, the change after which a step is the shortest, and what is lost."""

    what: str
    mend: str
    lost: float


def advice(name: str, ways: Sequence[Direction], where: str, step: Step) -> Iterator[str]:
    """A warning for one boundary, which is called `name`, with the line to change: see `warned`."""
    found = warned(ways, step)
    if found is not None:
        yield said([name], found, where)


def said(names: Sequence[str], found: Warned, where: str) -> str:
    """A warning for boundaries that one line of the script is about; what it says is true of the first.

    >>> said(["b0, gpu to npu", "b1, gpu to npu"], Warned("'int8' takes long", "leave nb.compress out", 1.0), "t.py:3")
    "warning: b0, gpu to npu: 'int8' takes long: leave nb.compress out, t.py:3 (for b1, too)"
    """
    others = [name.partition(",")[0] for name in names[1:]]
    too = f" (for {', '.join(others)}, too)" if others else ""
    return f"warning: {names[0]}: {found.what}: {found.mend}{f', {where}' if where else ''}{too}"


def warned(ways: Sequence[Direction], step: Step) -> Warned | None:
    """What to change of a codec with which a step takes longer, or with whose structure it does, or with that of its
    gradient. Of several it is the one without which a step is the shortest.

    `ways` are those of the tensor and, if it returns, of its gradient. What saves more than sizes tell (a mask) may be
    worth it in ways that are not known before.
    """
    found = [] if bounded(ways[0].way) else [*_without_codec(ways, step), *_milder(ways, step)]
    found += _without_structure(ways, step)
    return max(found, key=lambda each: each.lost, default=None)


def _without_structure(ways: Sequence[Direction], step: Step) -> Iterator[Warned]:
    way = parse_way(ways[0].way)
    if way.structure is None or not way.structure.shrinks:
        return
    loss = _loss(ways, [each.crossing_by(_without(each.way)) for each in ways], step)
    if loss is not None:
        beside = f" beside {way.precision} alone" if way.precision is not None else ""
        yield Warned(f"{way.structure} {loss.told(beside)}", f"leave {way.structure.name} out", loss.lost)


def _milder(ways: Sequence[Direction], step: Step) -> Iterator[Warned]:
    """The same with a gradient that costs less: a cast takes hardly any time."""
    for back in ways[1:]:
        way = parse_way(back.way)
        if way.precision is None or way.structure is not None or isinstance(way.precision, FP16 | BF16):
            continue
        half = replace(back, way=str(replace(way, codec=FP16(), ladder=())))
        loss = _loss(ways, [ways[0], half], step)
        if loss is not None and loss.lost > _LITTLE * loss.step:
            yield Warned(f"'{back.way}' of its gradient {loss.told(' beside fp16')}", _HALF, loss.lost)


def _without_codec(ways: Sequence[Direction], step: Step) -> Iterator[Warned]:
    loss = _loss(ways, [each.crossing_by(NONE) for each in ways], step)
    if loss is not None:
        names = list(dict.fromkeys(each.way for each in ways if not parse_way(each.way).plain))
        both = f"'{names[0]}' and, of its gradient, '{names[-1]}'" if len(names) > 1 else f"'{names[0]}'"
        yield Warned(f"{both} {loss.told(several=len(names) > 1)}", "leave nb.compress out", loss.lost)


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
