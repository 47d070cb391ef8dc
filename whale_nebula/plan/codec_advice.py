"""Judge whether a codec saves time, by simulating a step with and without it.

A codec whose computing overlaps with transfers causes no warning; one that costs more time than the transfers it
saves does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from whale_nebula.codec.objects import Cost
from whale_nebula.codec.packing import Dims
from whale_nebula.codec.precisions import FP16
from whale_nebula.codec.sizes import cost, payload_bytes, renewing, used_codec
from whale_nebula.codec.way import NONE, has_open_size, parse_way
from whale_nebula.config import Links
from whale_nebula.plan.timing import duration
from whale_nebula.spec import Spec
from whale_nebula.wire.frame import wire_bytes

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan


@dataclass(frozen=True)
class Direction:
    """How a boundary's tensor, or its gradient, crosses: sizes, lines and codec.

    `way` is the text of its encoding, `counts` are the rows of each micro-batch, and `lines` those that carry it. For a
    gradient, `forward` is the encoding of the tensor itself.
    """

    spec: Spec
    way: str
    counts: Sequence[int]
    lines: Sequence[tuple[str, str]]
    forward: str | None = None
    links: Links = field(default_factory=Links)

    @property
    def each(self) -> list[int | None]:
        """Bytes of each micro-batch; None if known only in a step."""
        return [self._payload(self.way, rows) for rows in self.counts]

    def _payload(self, way: str, rows: int) -> int | None:
        shape = self.spec.shape
        open_size = shape is None or None in shape[1:]
        return None if open_size else payload_bytes(way, self.spec.dtype, self.spec.sized(rows), self.forward)

    @property
    def used(self) -> str:
        """The encoding used for a micro-batch: if the codec would not make it smaller, its precision alone, or none."""
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
        """Bytes of the first micro-batch on each rung of a ramp but the last, to which all other numbers refer; empty
        without a ramp, or if known only in a step.
        """
        way = parse_way(self.way)
        if not way.ladder or way.auto or not self.counts:
            return ()
        ways = (str(replace(way, codec=codec)) for codec in way.rungs[:-1])
        sizes = [self._payload(each, self.counts[0]) for each in ways]
        return tuple(size for size in sizes if size is not None) if None not in sizes else ()

    @property
    def total(self) -> int | None:
        """Bytes that a step puts on lines."""
        known = [size for size in self.each if size is not None]
        return sum(known) * len(self.lines) if len(known) == len(self.counts) else None

    @property
    def seconds(self) -> float | None:
        """Seconds a step on the slowest line; None without a rate."""
        if self.total is None:
            return None
        held: dict[tuple[str, str], list[int]] = {}
        for line in self.lines:
            held.setdefault(line, []).extend(size for size in self.each if size is not None)
        return slowest(holds(self.links, *line, sizes) for line, sizes in held.items())

    @cached_property
    def cost(self) -> Cost | None:
        """Seconds a step of one core, to encode and to decode; None if nothing crosses or costs are unknown."""
        if not self.lines or self.total is None or parse_way(self.way).auto:
            return None
        by_rows = {rows: self._cost(self.spec.sized(rows)) for rows in set(self.counts)}
        known = [each for rows in self.counts if (each := by_rows[rows]) is not None]
        if len(known) < len(self.counts):
            return None
        encoded, renewed = 1 if self.forward is None else len(self.lines), 0.0
        if self.forward is None and self.counts:  # a structure is renewed once a step, with the first micro-batch
            dims = self.spec.sized(self.counts[0])
            renewed = renewing(used_codec(parse_way(self.way), self.spec.dtype, dims), dims)
        decoded = len(self.lines) * sum(one.decode for one in known)
        return Cost(encoded * sum(one.encode for one in known) + renewed, decoded)

    @property
    def codec_seconds(self) -> float | None:
        """Seconds a step to encode and decode; None if unknown, or without a codec."""
        return None if self.cost is None or parse_way(self.way).plain else self.cost.seconds

    @property
    def encode_seconds(self) -> float | None:
        """The sender's part of `codec_seconds`."""
        return None if self.codec_seconds is None or self.cost is None else self.cost.encode

    def fields(self) -> dict[str, object]:
        """The plan's fields of a boundary for this direction, by name."""
        return {
            "codec": self.way,
            "bytes": self.each[0],
            "step_bytes": self.total,
            "seconds": self.seconds,
            "codec_seconds": self.codec_seconds,
            "encode_seconds": self.encode_seconds,
            "used": self.used if self.used != self.way else "",
            "rungs": self.rungs,
        }

    def crossing_by(self, way: str) -> Direction:
        """The same tensors with another codec."""
        return replace(self, way=way, forward=None if self.forward is None else way)

    def _cost(self, dims: Dims) -> Cost | None:
        way, forward = parse_way(self.way), None if self.forward is None else parse_way(self.forward)
        used = way.codec if way.lossless else used_codec(way, self.spec.dtype, dims, forward)
        return cost(used, dims, back=forward is not None, delta=way.delta is not None and forward is None)


def holds(links: Links, a: str, b: str, sizes: Sequence[int]) -> float | None:
    """Seconds for which tensors of this size occupy the line from a to b; None without a rate."""
    rate = links.between(a, b).rate
    return sum(8 * wire_bytes(size) for size in sizes) / rate if rate else None


def slowest(seconds: Iterable[float | None]) -> float | None:
    """The maximum of the known numbers."""
    return max((each for each in seconds if each is not None), default=None)


Step = Callable[[Sequence[Direction]], float]
"""A function from the encodings of a boundary to the seconds of a step."""

_ROUNDING = 1e-9
_LITTLE = 0.02  # the least share of a step by which an advised codec is faster


class CodecAdvice(NamedTuple):
    """Advice on a codec that makes a step longer: the codec, the change, and its effect.

    `taken` are the seconds of one core that the change would save, `saved` those on the line that the codec saves.
    """

    what: str
    mend: str
    beside: str
    taken: float
    saved: float
    step: float
    other: float

    @property
    def lost(self) -> float:
        """Seconds that a step takes longer."""
        return self.step - self.other

    def text(self, names: Sequence[str], where: str) -> str:
        """The warning for all boundaries of one line of the script; its numbers are those of the first.

        >>> found = CodecAdvice("'int8'", "leave nb.compress out", "", 1.0, 0.5, 2.5, 2.0)
        >>> found.text(["b0, gpu to npu"], "t.py:3").partition(": ")[2][:56]
        "b0, gpu to npu: 'int8' takes one core 1 s a step, to enc"
        """
        one = "" if _AND in self.what else "s"
        taken = f"take{one} one core {duration(self.taken)} a step, to encode and to decode"
        saved = f"save{one} {duration(max(self.saved, 0.0))} of the line{self.beside}"
        steps = f"a step takes {duration(self.step)} instead of {duration(self.other)}"
        others = ", ".join(name.partition(",")[0] for name in names[1:])
        mend = f"{self.mend}{f', {where}' if where else ''}{f' (for {others}, too)' if others else ''}"
        return f"warning: {names[0]}: {self.what} {taken}, and {saved}, so {steps}: {mend}"


class _Change(NamedTuple):
    """An alternative codec: the reason, its option, and the least share of a step that it has to save."""

    what: str
    mend: str
    others: Sequence[Direction]
    beside: str = ""
    least: float = _ROUNDING


_AND = " and, of its gradient, "


def judge_codecs(ways: Sequence[Direction], step: Step) -> CodecAdvice | None:
    """Advice on codecs that make a step longer; of several alternatives the one with the shortest step.

    `ways` are those of the tensor and, if it crosses back, of its gradient. A codec whose saving depends on values (a
    mask) is not compared with none.
    """
    found = [each for change in _changes(ways) if (each := _judge(ways, change, step)) is not None]
    return max(found, key=lambda each: each.lost, default=None)


def _changes(ways: Sequence[Direction]) -> Iterator[_Change]:
    """The alternatives: no codec, a cheaper one for the gradient, and no structure."""
    if not has_open_size(ways[0].way):
        names = dict.fromkeys(f"'{each.way}'" for each in ways if not parse_way(each.way).plain)
        yield _Change(_AND.join(names), "leave nb.compress out", [each.crossing_by(NONE) for each in ways])
        for back in ways[1:]:
            way = parse_way(back.way)
            if way.precision is not None and way.structure is None and not way.precision.casts:
                half = replace(back, way=str(replace(way, codec=FP16(), ladder=())))
                mend = 'nb.compress(..., backward="fp16")'
                yield _Change(f"'{back.way}' of its gradient", mend, [ways[0], half], " beside fp16", _LITTLE)
    way = parse_way(ways[0].way)
    if way.structure is not None and way.structure.shrinks:
        beside = f" beside {way.precision} alone" if way.precision is not None else ""
        others = [each.crossing_by(_drop_structure(each.way)) for each in ways]
        yield _Change(str(way.structure), f"leave {way.structure.name} out", others, beside)


def _judge(ways: Sequence[Direction], change: _Change, step: Step) -> CodecAdvice | None:
    """Compare the costs of these encodings with an alternative; None if a step does not become longer, or
    if that is unknown.
    """
    taken = saved = 0.0
    for way, other in zip(ways, change.others, strict=True):
        if way.way != other.way:
            if way.seconds is None or other.seconds is None or way.cost is None or other.cost is None:
                return None
            taken += way.cost.seconds - other.cost.seconds
            saved += other.seconds - way.seconds
    found = CodecAdvice(*change[:2], change.beside, taken, saved, step(ways), step(change.others))
    return found if found.lost > change.least * found.step else None


def _drop_structure(way: str) -> str:
    """The way without its codec's structure."""
    given = parse_way(way)
    return str(replace(given, codec=given.precision, ladder=given.ladder if given.precision is not None else ()))


def fallbacks(plan: Plan) -> Iterator[str]:
    """A sentence for each boundary or gradient that does not use the requested codec, as that would
    increase its size.
    """
    for each in plan.boundaries:
        dims = [plan.rows[0] if size is None else size for size in each.shape or ()]
        ways = ("", each.used, each.codec), (" gradient", each.backward_used, each.backward_codec)
        for what, used, asked in ways:
            if used:
                codec = parse_way(used).codec
                how = f"as {codec}" if codec is not None else "as it is"
                yield f"{each.name}{what} {dims} crosses {how}: {parse_way(asked).codec} would not be fewer bytes"
