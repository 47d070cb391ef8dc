"""Planned traffic in bytes: of each micro-batch between stages, and of a step on each link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from whale_nebula.codec.encoding import NONE, has_open_size
from whale_nebula.codec.sizes import payload_bytes
from whale_nebula.config import Links
from whale_nebula.ir.cut import Cut, Exchange
from whale_nebula.ir.routing import Routing
from whale_nebula.ir.sizes import ExchangeSizes
from whale_nebula.report.prediction import ExchangeTransfer, Numbers
from whale_nebula.report.records import LinkReport
from whale_nebula.runtime.exchange.crossing import Crossings
from whale_nebula.schedule.lines import Hop, Line
from whale_nebula.spec import Spec
from whale_nebula.wire.frame import count_frames, count_wire_bytes


class Message(NamedTuple):
    """A tensor of a micro-batch that a stage (`source`) sends to the host of another one (`destination`, the first that
    reads it there), with the bytes of its `payload` and of the tensor itself (`raw`).

    `numbers` is the number of its floating-point elements that a codec can compress: not scalar, not complex. With
    `bounded`, the bytes are an upper bound, because the codec's output depends on values.
    """

    source: int
    destination: int
    payload: int
    raw: int
    phase: int = 0
    numbers: int = 0
    bounded: bool = False


def list_messages(cut: Cut, hosts: Sequence[str], rows: int) -> Iterator[Message]:
    """The messages between hosts for a micro-batch of `rows` rows, without those of a size that is known only in a
    step.
    """
    for each in Crossings(cut, Routing.from_hosts(hosts)).by_value.values():
        spec, boundary = each.spec, each.boundary
        if not _is_sized(spec):
            continue
        raw, codec, forward = spec.nbytes(unknown=rows), NONE, None if not each.is_gradient else NONE
        if boundary is not None:
            codec = boundary.backward_codec if each.is_gradient else boundary.codec
            forward = boundary.codec if each.is_gradient else None
        payload = payload_bytes(codec, spec.dtype, spec.fill_shape(rows), forward)
        coded = spec.floating and not spec.scalar and not spec.dtype.startswith("complex")
        numbers = raw // Spec(spec.dtype, ()).nbytes() if coded else 0
        readers: dict[str, int] = {}  # the first reader of each host
        for reader in each.readers:
            if hosts[reader] != hosts[each.source]:
                readers.setdefault(hosts[reader], reader)
        for reader in readers.values():
            yield Message(each.source, reader, payload, raw, each.phase, numbers, has_open_size(codec))


def _is_sized(spec: Spec) -> bool:
    """Whether the size of a tensor is known, given the rows of its first axis."""
    return spec.shape is not None and None not in spec.shape[1:]


def find_bounded_links(cut: Cut, hosts: Sequence[str], exchange_sizes: ExchangeSizes) -> frozenset[str]:
    """The links for which only an upper bound of bytes is known, because the bytes depend on values in the batch."""
    found = {
        f"{hosts[each.source]}->{hosts[each.destination]}" for each in list_messages(cut, hosts, 1) if each.bounded
    }
    return frozenset(
        found | {f"{each.source}->{each.destination}" for each in cut.exchanges if exchange_sizes.is_upper_bound(each)}
    )


def plan_link_reports(
    cut: Cut, hosts: Sequence[str], counts: Sequence[int], exchange_sizes: ExchangeSizes
) -> Mapping[str, LinkReport]:
    """The planned load of each link in a step whose micro-batches have `counts` rows, without messages of a size that
    is known only in a step; `exchange_sizes` has the sizes of exchanges once a step.
    """
    found: dict[str, LinkReport] = {}

    def add(source: str, destination: str, size: int, raw: int) -> None:
        link = LinkReport(size, count_wire_bytes(size), raw, count_frames(size))
        name = f"{source}->{destination}"
        found[name] = found.get(name, LinkReport()) + link

    for rows in counts:
        for message in list_messages(cut, hosts, rows):
            add(hosts[message.source], hosts[message.destination], message.payload, message.raw)
    for each in cut.exchanges:
        size = exchange_sizes.nbytes(each, counts)
        if size is not None:
            add(each.source, each.destination, size, size)
    return found


_StagePair = tuple[int, int]
_RoundKey = tuple[int, int]  # a phase, and a round of its exchange
_PhaseTraffic = tuple[dict[_StagePair, Hop], dict[_StagePair, tuple[Numbers, Numbers]]]


@dataclass
class Traffic:
    """Planned traffic in bytes, by link. `hosts` are those of the stages, `shapes` those of a batch's leaves, if known.
    Other arguments named `counts` are the rows of a step's micro-batches.
    """

    cut: Cut
    hosts: Sequence[str]
    lines: Links
    shapes: Sequence[tuple[int, ...]] = ()
    _bytes: dict[tuple[int, ...], Mapping[str, int]] = field(default_factory=dict)
    _hops: dict[tuple[int, int], _PhaseTraffic] = field(default_factory=dict)
    _rounds: dict[tuple[int, ...], tuple[tuple[ExchangeTransfer, ...], ...]] = field(default_factory=dict)
    _known_by_counts: dict[tuple[int, ...], bool] = field(default_factory=dict)

    @cached_property
    def exchange_sizes(self) -> ExchangeSizes:
        """The sizes of exchanges once a step."""
        return ExchangeSizes(self.cut, self.shapes)

    @cached_property
    def at_most(self) -> tuple[str, ...]:
        """The links whose bytes are upper bounds."""
        return tuple(sorted(find_bounded_links(self.cut, self.hosts, self.exchange_sizes)))

    def is_known(self, counts: tuple[int, ...]) -> bool:
        """Whether the sizes of all crossings are known before a step, given its rows."""
        if counts not in self._known_by_counts:
            crossing = Crossings(self.cut, Routing.from_hosts(self.hosts)).by_value.values()
            once = (self.exchange_sizes.nbytes(each, counts) is not None for each in self.cut.exchanges)
            self._known_by_counts[counts] = all(_is_sized(each.spec) for each in crossing) and all(once)
        return self._known_by_counts[counts]

    def link_bytes(self, counts: tuple[int, ...]) -> Mapping[str, int]:
        """The bytes on each link in a step, with headers."""
        if counts not in self._bytes:
            reports = plan_link_reports(self.cut, self.hosts, counts, self.exchange_sizes)
            self._bytes[counts] = {name: link.bytes for name, link in reports.items()}
        return self._bytes[counts]

    def rounds(self, counts: tuple[int, ...]) -> tuple[tuple[ExchangeTransfer, ...], ...]:
        """The exchange between clusters once a step, round by round."""
        if counts not in self._rounds:
            rounds: defaultdict[_RoundKey, defaultdict[tuple[str, str], list[Exchange]]]
            rounds = defaultdict(lambda: defaultdict(list))
            for each in self.cut.exchanges:
                rounds[each.phase, each.round][each.source, each.destination].append(each)
            self._rounds[counts] = tuple(
                tuple(self._sum_round(*ends, each, counts) for ends, each in together.items())
                for together in rounds.values()
            )
        return self._rounds[counts]

    def _sum_round(
        self, here: str, there: str, together: Sequence[Exchange], counts: tuple[int, ...]
    ) -> ExchangeTransfer:
        sizes = (self.exchange_sizes.nbytes(each, counts) for each in together)
        what = tuple(dict.fromkeys(each.what for each in together))
        return ExchangeTransfer(self._find_line(here, there), sum(count_wire_bytes(size or 0) for size in sizes), what)

    def hops(self, phase: int, rows: int) -> _PhaseTraffic:
        """The traffic of a micro-batch between each two stages, the lower number first, and the part of it that is
        numbers, in both directions.
        """
        if (phase, rows) not in self._hops:
            sizes: dict[_StagePair, float] = {}
            numbers: defaultdict[_StagePair, Numbers] = defaultdict(Numbers)
            for message in list_messages(self.cut, self.hosts, rows):
                if message.phase == phase:
                    key = (message.source, message.destination)
                    sizes[key] = sizes.get(key, 0.0) + count_wire_bytes(message.payload)
                    numbers[key] += Numbers(message.payload, message.numbers) if message.numbers else Numbers()
            hops = {}
            for a, b in sorted({(a, b) if a < b else (b, a) for a, b in sizes}):
                there, back = (
                    self._find_line(self.hosts[a], self.hosts[b]),
                    self._find_line(self.hosts[b], self.hosts[a]),
                )
                hops[a, b] = Hop(there, back, sizes.get((a, b), 0.0), sizes.get((b, a)))
            self._hops[phase, rows] = hops, {(a, b): (numbers[a, b], numbers[b, a]) for a, b in hops}
        return self._hops[phase, rows]

    def _find_line(self, here: str, there: str) -> Line:
        line = self.lines.between(here, there)
        return Line(f"{here}->{there}", line.rate / 8 if line.rate else float("inf"), line.delay)
