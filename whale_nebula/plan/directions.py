"""One direction of a boundary as a plan counts it: bytes, seconds of lines, seconds of its codec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from whale_nebula.codec.costs import Cost, cost, renewing
from whale_nebula.codec.objects import Dims
from whale_nebula.codec.precisions import Bits
from whale_nebula.codec.sizes import payload_bytes, used_codec
from whale_nebula.codec.way import parse_way
from whale_nebula.config import Links
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
        if not way.coded or way.auto or isinstance(way.codec, Bits) or not self.counts:
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
        used = way.codec if isinstance(way.codec, Bits) else used_codec(way, self.spec.dtype, dims, forward)
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
