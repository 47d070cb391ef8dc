"""Judge whether a codec saves time, by simulating a step with and without it.

So a codec that computes while the line is busy anyway is none to warn of, and one that the line would have hidden
without is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from whale_nebula.codec.packing import Dims
from whale_nebula.codec.precisions import FP16
from whale_nebula.codec.sizes import Cost, cost, payload_bytes, renewing, used_codec
from whale_nebula.codec.way import NONE, Way, has_open_size, parse_way
from whale_nebula.config import Links
from whale_nebula.ir.cut import Boundary, Cut
from whale_nebula.plan.timing import duration
from whale_nebula.spec import Spec
from whale_nebula.wire.frame import wire_bytes


@dataclass(frozen=True)
class Direction:
    """What a boundary's tensor, or its gradient, is on its way.

    `way` is the text of how it crosses, `counts` are the rows of each micro-batch, and `lines` those that carry it. Of
    a gradient `forward` is the way of the tensor itself.
    """

    spec: Spec
    way: str
    counts: Sequence[int]
    lines: Sequence[tuple[str, str]]
    forward: str | None = None
    links: Links = field(default_factory=Links)

    @property
    def each(self) -> list[int | None]:
        """Bytes of each micro-batch; None where only a step knows."""
        return [payload(self.spec, self.way, rows, self.forward) for rows in self.counts]

    @property
    def used(self) -> str:
        """The way as a micro-batch takes it: of a codec that would not make it smaller the precision, or none."""
        way, shape = parse_way(self.way), self.spec.shape
        if not way.coded or way.auto or way.lossless or not self.counts:
            return self.way
        if not shape or None in shape[1:]:
            return self.way
        forward = None if self.forward is None else parse_way(self.forward)
        used = used_codec(way, self.spec.dtype, self.spec.sized(self.counts[0]), forward)
        if used == way.codec:
            return self.way
        return str(replace(way, codec=used) if used is not None else replace(way, codec=None, ladder=(), start=0))

    @property
    def rungs(self) -> tuple[int, ...]:
        """Bytes of the first micro-batch on each rung of a ramp but the last, which all else here is counted for; none
        where there is no ramp, or only a step knows.
        """
        way = parse_way(self.way)
        if not way.ladder or way.auto or not self.counts:
            return ()
        ways = (str(replace(way, codec=codec)) for codec in way.rungs[:-1])
        sizes = [payload(self.spec, each, self.counts[0], self.forward) for each in ways]
        return tuple(size for size in sizes if size is not None) if None not in sizes else ()

    @property
    def total(self) -> int | None:
        """Bytes that a step puts on lines."""
        known = [size for size in self.each if size is not None]
        return sum(known) * len(self.lines) if len(known) == len(self.counts) else None

    @property
    def seconds(self) -> float | None:
        """For how long a step holds the slowest of the lines; None where there is no rate."""
        if self.total is None:
            return None
        held: dict[tuple[str, str], list[int]] = {}
        for line in self.lines:
            held.setdefault(line, []).extend(size for size in self.each if size is not None)
        return slowest(holds(self.links, *line, sizes) for line, sizes in held.items())

    @cached_property
    def cost(self) -> Cost | None:
        """Seconds a step of one core, to encode and to decode; None where nothing crosses or that is not known."""
        if not self.lines or self.total is None or parse_way(self.way).auto:
            return None
        by_rows = {rows: self._cost(self.spec.sized(rows)) for rows in set(self.counts)}
        known = [each for rows in self.counts if (each := by_rows[rows]) is not None]
        if len(known) < len(self.counts):
            return None
        encoded = 1 if self.forward is None else len(self.lines)
        each = Cost(encoded * sum(one.encode for one in known), len(self.lines) * sum(one.decode for one in known))
        return each + Cost(self._renewing)

    @property
    def _renewing(self) -> float:
        """What a structure does once a step, with the first micro-batch."""
        if self.forward is not None or not self.counts:
            return 0.0
        dims = self.spec.sized(self.counts[0])
        return renewing(used_codec(parse_way(self.way), self.spec.dtype, dims), dims)

    @property
    def codec_seconds(self) -> float | None:
        """Both together; None also for what crosses as it is."""
        return None if self.cost is None or parse_way(self.way).plain else self.cost.seconds

    @property
    def encode_seconds(self) -> float | None:
        """What of `codec_seconds` the side takes that sends."""
        return None if self.codec_seconds is None or self.cost is None else self.cost.encode

    def crossing_by(self, way: str) -> Direction:
        """The same tensors, crossing otherwise."""
        return replace(self, way=way, forward=None if self.forward is None else way)

    def _cost(self, dims: Dims) -> Cost | None:
        way, forward = parse_way(self.way), None if self.forward is None else parse_way(self.forward)
        used = way.codec if way.lossless else used_codec(way, self.spec.dtype, dims, forward)
        return cost(used, dims, back=forward is not None, delta=way.delta is not None and forward is None)


def payload(spec: Spec, way: str, rows: int, forward: str | None = None) -> int | None:
    """Bytes of a boundary's tensor as its codec makes it; None where more than the rows is unknown.

    >>> payload(Spec("float32", (None, 10)), "fp16", rows=4), payload(Spec("float32", None), "none", rows=4)
    (80, None)
    """
    if spec.shape is None or None in spec.shape[1:]:
        return None
    return payload_bytes(way, spec.dtype, spec.sized(rows), forward)


def holds(links: Links, a: str, b: str, sizes: Sequence[int]) -> float | None:
    """Seconds for which tensors of so many bytes hold the line from a to b; None where it has no rate."""
    rate = links.between(a, b).rate
    return sum(8 * wire_bytes(size) for size in sizes) / rate if rate else None


def slowest(seconds: Iterable[float | None]) -> float | None:
    """The most of those that are known."""
    return max((each for each in seconds if each is not None), default=None)


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
    found = warn_of_codecs(ways, step)
    if found is not None:
        yield advice_text([name], found, where)


def advice_text(names: Sequence[str], found: Warned, where: str) -> str:
    """A warning for boundaries that one line of the script is about; what it says is true of the first.

    >>> found = Warned("'int8' takes long", "leave nb.compress out", 1.0)
    >>> advice_text(["b0, gpu to npu", "b1, gpu to npu"], found, "t.py:3")
    "warning: b0, gpu to npu: 'int8' takes long: leave nb.compress out, t.py:3 (for b1, too)"
    """
    others = [name.partition(",")[0] for name in names[1:]]
    too = f" (for {', '.join(others)}, too)" if others else ""
    return f"warning: {names[0]}: {found.what}: {found.mend}{f', {where}' if where else ''}{too}"


def warn_of_codecs(ways: Sequence[Direction], step: Step) -> Warned | None:
    """What to change of a codec with which a step takes longer, or with whose structure it does, or with that of its
    gradient. Of several it is the one without which a step is the shortest.

    `ways` are those of the tensor and, if it returns, of its gradient. What saves more than sizes tell (a mask) may be
    worth it in ways that are not known before.
    """
    found = [] if has_open_size(ways[0].way) else [*_without_codec(ways, step), *_milder(ways, step)]
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
        if way.precision is None or way.structure is not None or way.precision.casts:
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


def fallbacks(cut: Cut, rows: Sequence[int]) -> Iterator[str]:
    """A sentence for each such boundary and gradient, with the sizes of the largest micro-batch."""
    for boundary in cut.boundaries:
        spec = cut.program.graph.spec(boundary.value)
        if spec.shape and None not in spec.shape[1:]:
            yield from _of(boundary, spec, max(rows) if boundary.layout == "rows" else 1)


def _of(boundary: Boundary, spec: Spec, rows: int) -> Iterator[str]:
    dims, forward = spec.sized(rows), parse_way(boundary.codec)
    directions: list[tuple[str, Way, Way | None]] = [("", forward, None)]
    directions += [(" gradient", parse_way(boundary.backward_codec), forward)] * boundary.backward
    for what, way, of in directions:
        used = used_codec(way, spec.dtype, dims, of)
        if way.coded and used != way.codec and not way.lossless:
            how = f"as {used}" if used is not None else "as it is"
            yield f"b{boundary.slot}{what} {list(dims)} crosses {how}: {way.codec} would not be fewer bytes"
