"""Estimate the pace of a program from measured steps, for in-flight limits and predictions."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from whale_nebula.codec.sizes import payload_bytes
from whale_nebula.codec.way import has_open_size
from whale_nebula.config import Links
from whale_nebula.ir.cut import Boundary, Cut, Exchange, PhasePlan, StagePhase
from whale_nebula.ir.program import Flow
from whale_nebula.ir.sizes import Exchanged
from whale_nebula.passes.batch import divides
from whale_nebula.report.prediction import Basis, Carried, Numbers, PhaseBasis
from whale_nebula.report.records import LinkReport, Span
from whale_nebula.runtime.exchange.auto import Outlook
from whale_nebula.runtime.step.clock import CODING, Clocks
from whale_nebula.schedule.lines import Hop, Line, Work, pace
from whale_nebula.schedule.schedules import Pace
from whale_nebula.spec import Spec, Value
from whale_nebula.wire.frame import frame_count, wire_bytes


class Message(NamedTuple):
    """A tensor that goes from a stage to a host, in one direction.

    `numbers` is how many floating-point numbers it holds that a codec can make smaller: no scalar, nothing complex.
    `bounded` says that there may be fewer bytes, because values decide what its codec makes of it.
    """

    source: int
    destination: int
    payload: int
    raw: int
    phase: int = 0
    numbers: int = 0
    bounded: bool = False


def messages(cut: Cut, hosts: Sequence[str], rows: int) -> Iterator[Message]:
    """What crosses between hosts for a micro-batch of `rows` rows; sizes that only a step knows are left out."""
    ways = {b.value: (b.backward_codec, b.codec) for b in cut.boundaries}
    for boundary in cut.boundaries:
        for destination in _once(boundary.source, boundary.destinations, hosts):
            ends = boundary.source, destination, boundary.phase
            yield from _message(cut, boundary.value, boundary.codec, ends, rows)
    for phase, flow in _flows(cut):
        target = cut.program.labels.get(flow.boundary.op, 0)
        for destination in _once(flow.stage, (target,), hosts):
            codec, forward = ways.get(flow.boundary, ("none", "none"))
            yield from _message(cut, flow.gradient, codec, (flow.stage, destination, phase), rows, forward)


def all_sized(cut: Cut, exchanged: Exchanged, counts: Sequence[int]) -> bool:
    """Whether the size of all that crosses is known before a step, given its rows."""
    crossing = [*(b.value for b in cut.boundaries), *(flow.gradient for _, flow in _flows(cut))]
    sized = all(_bytes(cut.program.graph.spec(value), 1) is not None for value in crossing)
    return sized and all(exchanged.nbytes(each, counts) is not None for each in cut.exchange)


def _flows(cut: Cut) -> Iterator[tuple[int, Flow]]:
    """The gradients that cross, each with its phase."""
    phases = {request: phase.index for phase in cut.phases for request in phase.requests}
    return ((phases[r.index], flow) for r in cut.program.requests for flow in r.flows)


def _once(source: int, destinations: Sequence[int], hosts: Sequence[str]) -> list[int]:
    """One destination for each host that is not the source's."""
    first: dict[str, int] = {}
    for destination in destinations:
        if hosts[destination] != hosts[source]:
            first.setdefault(hosts[destination], destination)
    return list(first.values())


def _message(
    cut: Cut, value: Value, codec: str, ends: tuple[int, int, int], rows: int, forward: str | None = None
) -> Iterator[Message]:
    spec = cut.program.graph.spec(value)
    raw = _bytes(spec, rows)
    if raw is not None:
        payload = payload_bytes(codec, spec.dtype, spec.sized(rows), forward)
        source, destination, phase = ends
        coded = spec.floating and not spec.scalar and not spec.dtype.startswith("complex")
        yield Message(
            source, destination, payload, raw, phase, raw // _width(spec) if coded else 0, has_open_size(codec)
        )


def _bytes(spec: Spec, rows: int) -> int | None:
    """Bytes of a tensor whose first axis is the batch; None where another axis is unknown."""
    if spec.shape is None or None in spec.shape[1:]:
        return None
    return spec.nbytes(unknown=rows)


def _width(spec: Spec) -> int:
    return Spec(spec.dtype, ()).nbytes()


def bounded_links(
    cut: Cut, hosts: Sequence[str], clusters: Sequence[str] = (), exchanged: Exchanged | None = None
) -> frozenset[str]:
    """The links of which it is known only at most how much they carry, because values in the batch decide it."""
    names, exchanged = clusters or hosts, exchanged or Exchanged(cut)
    sent = (each for each in messages(cut, hosts, 1) if each.bounded)
    found = {f"{names[each.source]}->{names[each.destination]}" for each in sent}
    return frozenset(found | {f"{each.source}->{each.destination}" for each in cut.exchange if exchanged.at_most(each)})


def link_reports(
    cut: Cut,
    hosts: Sequence[str],
    counts: Sequence[int],
    clusters: Sequence[str] = (),
    exchanged: Exchanged | None = None,
) -> Mapping[str, LinkReport]:
    """What each link carries in a step whose micro-batches have `counts` rows; `clusters` name the hosts' links,
    `exchanged` knows the sizes of what is sent once a step.
    """
    found: dict[str, LinkReport] = {}
    names = clusters or hosts
    for rows in counts:
        for message in messages(cut, hosts, rows):
            name = f"{names[message.source]}->{names[message.destination]}"
            frames = frame_count(message.payload)
            link = LinkReport(message.payload, wire_bytes(message.payload), message.raw, frames)
            found[name] = found.get(name, LinkReport()) + link
    exchanged = exchanged or Exchanged(cut)
    for each in cut.exchange:
        name, size = f"{each.source}->{each.destination}", exchanged.nbytes(each, counts)
        if size is not None:
            link = LinkReport(size, wire_bytes(size), size, frame_count(size))
            found[name] = found.get(name, LinkReport()) + link
    return found


_SKIP = 1  # the first step also pays for TensorFlow's own warming up
_KEPT = 64

_Pair = tuple[int, int]
_Crossing = tuple[dict[_Pair, Hop], dict[_Pair, tuple[Numbers, Numbers]]]
Medians = Mapping[str, float]
"""Seconds of a piece for a micro-batch, by "phase.stage.kind", and of its codecs, by "phase.stage.kind.codec"; "once"
is what runs once a step.
"""
_CODEC, _WAYS = ".codec", ("forward", "backward")


@dataclass
class Measured:
    """Median seconds of each stage's forward and backward of a micro-batch, over the last steps.

    `hosts` are what stages run on, as links name them; `clusters` what lines join, where that is not the same;
    `slowness` says of stages whose replicas are not equally fast how long each computes beside what is measured here.
    """

    cut: Cut
    hosts: Sequence[str]
    links: Links
    clusters: Sequence[str] = ()
    paced: bool = True
    slowness: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    steps: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    _crossed: Cut | None = None
    _at_most: tuple[str, ...] | None = None
    _bytes: dict[tuple[int, ...], Mapping[str, int]] = field(default_factory=dict)
    _crossing: dict[tuple[int, int], _Crossing] = field(default_factory=dict)
    _exchanges: dict[tuple[int, ...], tuple[tuple[Carried, ...], ...]] = field(default_factory=dict)

    def add(self, clocks: Clocks) -> None:
        """Take in what a step took."""
        self.steps += 1
        if self.steps <= _SKIP:
            return
        for (stage, _), clock in clocks.stages.items():
            for phase, piece, seconds in _pieces(clock.spans):
                self._keep(f"{phase}.{stage}.{piece}", seconds)
        self._keep("once", clocks.once.compute - clocks.once.waiting)

    def _keep(self, what: str, seconds: float) -> None:
        kept = self.seconds.setdefault(what, [])
        kept.append(seconds)
        del kept[:-_KEPT]

    def uses(self, boundaries: tuple[Boundary, ...]) -> None:
        """How boundaries cross now, where that changes in a run."""
        if boundaries is not self._sizes.boundaries and boundaries != self._sizes.boundaries:
            self._crossed = replace(self.cut, boundaries=boundaries)
            self._bytes.clear()
            self._at_most = None
            self._crossing.clear()
            self.seconds = {what: kept for what, kept in self.seconds.items() if not what.endswith(_CODEC)}

    @property
    def _sizes(self) -> Cut:
        """The plan by which sizes are known."""
        return self._crossed or self.cut

    def medians(self) -> Medians:
        """What was measured here; nothing before the second step."""
        return {what: sorted(kept)[len(kept) // 2] for what, kept in self.seconds.items()}

    def basis(self, counts: Sequence[int], medians: Medians) -> Basis | None:
        """What the simulator is told of a step whose micro-batches have `counts` rows; None while a pace or the size
        of a crossing is not known.
        """
        phases = self.phases(counts[0], medians)
        if not phases or not all_sized(self.cut, self._exchange, counts):
            return None
        pipeline = self.cut.program.pipeline
        return Basis(
            stages=tuple(stage.key for stage in self.cut.program.stages),
            phases=phases,
            micro_batches=len(counts),
            rows=min(counts),
            schedule=pipeline.schedule,
            in_flight=pipeline.in_flight,
            paced=self.paced,
            once=medians.get("once", 0.0),
            exchange=self._exchange_rounds(tuple(counts)),
            bytes=self._carried(tuple(counts)),
            at_most=self._bounded,
            divides=self._divides,
        )

    def phases(self, rows: int, medians: Medians) -> tuple[PhaseBasis, ...]:
        """Each phase for a micro-batch of `rows` rows; none before all of them were measured. What crosses in a size
        that only a step knows is left out.
        """
        phases = [self._phase(phase, rows, medians) for phase in self.cut.phases]
        known = tuple(phase for phase in phases if phase is not None)
        return known if len(known) == len(phases) else ()

    @property
    def _bounded(self) -> tuple[str, ...]:
        if self._at_most is None:
            self._at_most = tuple(sorted(bounded_links(self._sizes, self.hosts, self._clusters, self._exchange)))
        return self._at_most

    def _carried(self, counts: tuple[int, ...]) -> Mapping[str, int]:
        if counts not in self._bytes:
            reports = link_reports(self._sizes, self.hosts, counts, self._clusters, self._exchange)
            self._bytes[counts] = {name: link.bytes for name, link in reports.items()}
        return self._bytes[counts]

    def _exchange_rounds(self, counts: tuple[int, ...]) -> tuple[tuple[Carried, ...], ...]:
        """What clusters exchange once in a step of such micro-batches, round after round."""
        if counts not in self._exchanges:
            rounds: defaultdict[tuple[int, int], defaultdict[tuple[str, str], list[Exchange]]]
            rounds = defaultdict(lambda: defaultdict(list))
            for each in self.cut.exchange:
                rounds[each.phase, each.round][each.source, each.destination].append(each)
            self._exchanges[counts] = tuple(
                tuple(self._sent_once(ends, each, counts) for ends, each in together.items())
                for together in rounds.values()
            )
        return self._exchanges[counts]

    def _sent_once(self, ends: tuple[str, str], together: Sequence[Exchange], counts: tuple[int, ...]) -> Carried:
        sizes = (self._exchange.nbytes(each, counts) for each in together)
        what = tuple(dict.fromkeys(each.what for each in together))
        return Carried(self._joining(*ends), sum(wire_bytes(size or 0) for size in sizes), what)

    def _phase(self, phase: PhasePlan, rows: int, medians: Medians) -> PhaseBasis | None:
        plans = {plan.stage: plan for plan in phase.stages}
        stages = enumerate(self.cut.program.stages)
        works = [self._work(plans.get(number), medians, number, stage.replicas) for number, stage in stages]
        known = tuple(work for work in works if work is not None)
        if len(known) < len(works):
            return None
        fused = tuple(stage in plans and plans[stage].fused for stage in range(len(works)))
        return PhaseBasis(known, fused, *self._hops(phase.index, rows))

    def _work(self, plan: StagePhase | None, medians: Medians, number: int, replicas: int) -> Work | None:
        work = _work(plan, medians, replicas)
        order = self.cut.orders[number] if self.cut.orders else ()
        slowness = self.slowness.get(number, ())
        return replace(work, order=order, slowness=slowness) if work is not None and (order or slowness) else work

    def _hops(self, phase: int, rows: int) -> _Crossing:
        """What crosses between stages for a micro-batch, over which lines, and how much of it are numbers."""
        if (phase, rows) not in self._crossing:
            sizes: dict[_Pair, float] = {}
            numbers: defaultdict[_Pair, Numbers] = defaultdict(Numbers)
            for message in messages(self._sizes, self.hosts, rows):
                if message.phase == phase:
                    key = (message.source, message.destination)
                    sizes[key] = sizes.get(key, 0.0) + wire_bytes(message.payload)
                    numbers[key] += _numbers(message)
            pairs = sorted({(a, b) if a < b else (b, a) for a, b in sizes})
            hops = {(a, b): self._hop(a, b, sizes) for a, b in pairs}
            self._crossing[phase, rows] = hops, {(a, b): (numbers[a, b], numbers[b, a]) for a, b in pairs}
        return self._crossing[phase, rows]

    @cached_property
    def _divides(self) -> bool:
        return divides(self.cut.program)

    @cached_property
    def _exchange(self) -> Exchanged:
        return Exchanged(self.cut)

    @cached_property
    def _clusters(self) -> Sequence[str]:
        return self.clusters or self.hosts

    def _hop(self, a: int, b: int, sizes: Mapping[tuple[int, int], float]) -> Hop:
        return Hop(self._line(a, b), self._line(b, a), sizes.get((a, b), 0.0), sizes.get((b, a)))

    def _line(self, a: int, b: int) -> Line | None:
        if self.hosts[a] == self.hosts[b]:
            return None
        return self._joining(self._clusters[a], self._clusters[b])

    def _joining(self, here: str, there: str) -> Line:
        line = self.links.between(here, there)
        return Line(f"{here}->{there}", line.rate / 8 if line.rate else float("inf"), line.delay)


def paces(phases: Sequence[PhaseBasis]) -> list[Pace]:
    """The pace of each phase, which sets its in-flight limits."""
    return [pace(phase.works, phase.hops) for phase in phases]


def _work(plan: StagePhase | None, medians: Medians, replicas: int) -> Work | None:
    """What a stage computes for a micro-batch in a phase: None where that is not known yet."""
    if plan is None:
        return Work(0.0)
    pieces = [piece for piece in (plan.forward, plan.backward) if piece is not None]
    found = {piece.kind: medians.get(f"{plan.phase}.{plan.stage}.{piece.kind}") for piece in pieces}
    if None in found.values():
        return None
    backward = found.get("fused") if plan.fused else found.get("backward")
    coding, coding_back = (medians.get(f"{plan.phase}.{plan.stage}.{way}{_CODEC}", 0.0) for way in _WAYS)
    return Work(found.get("forward") or 0.0, backward, coding=coding, coding_back=coding_back, replicas=replicas)


def _pieces(spans: Iterable[Span]) -> Iterator[tuple[int, str, float]]:
    """The phase, what it was and its seconds: of each piece of computing, and of the codecs of each micro-batch."""
    coded: defaultdict[tuple[int, str, int | None], float] = defaultdict(float)
    for span in spans:
        kind, *way = span.what.split()
        if kind in CODING:
            coded[span.phase, f"{way[0]}{_CODEC}", span.micro_batch] += span.end - span.start
        else:
            yield span.phase, kind, span.end - span.start
    yield from ((phase, what, seconds) for (phase, what, _), seconds in coded.items())


def _numbers(message: Message) -> Numbers:
    return Numbers(message.payload, message.numbers) if message.numbers else Numbers()


_RECENT = 10  # steps
LARGE = 1 << 18
"""Bytes whose writing says something of a real line: what is less, the system's buffers take at once."""
CLOSE = 0.5e-3
"""Seconds between two messages that are written one right after the other: the second waited for the first."""


@dataclass
class LineRates:
    """What the links from here, by their names, have carried in the last steps, and how long that held them.

    On emulated lines that is `exact`. On a real one a rate is told only by many bytes that were written one right after
    the other, in one message or in several that waited for each other: for bytes to leave, and not for a delay. The
    last that was told stays until others are sent; as some of them go into buffers, too, what the config says is
    believed where it is less. Where none was told the config is all there is.

    >>> seen = LineRates(("gpu->npu",), Links(), exact=True)
    >>> seen.add([Span("gpu->npu", "forward 0", 0.0, 0.5, 0, 0, 3_000_000)])
    >>> seen.outlook([8, 8], {"0.0.forward": 0.25}).rates
    {'gpu->npu': 6000000.0}
    """

    names: Sequence[str]
    lines: Links
    exact: bool = False
    _carried: Mapping[str, int] = field(default_factory=dict)
    _told: dict[str, deque[Span]] = field(default_factory=dict)

    def add(self, spans: Sequence[Span]) -> None:
        """A step has ended in which these messages held their lines."""
        sent = {name: [span for span in spans if span.lane == name] for name in self.names}
        self._carried = {name: sum(span.bytes or 0 for span in own) for name, own in sent.items()}
        for name, own in sent.items():
            runs = own if self.exact else map(_whole, _runs(own))
            telling = [run for run in runs if self.exact or (run.bytes or 0) >= LARGE]
            if telling:
                self._told.setdefault(name, deque(maxlen=_RECENT)).append(_together(telling))

    def outlook(self, rows: Sequence[int], medians: Medians) -> Outlook:
        """Before a step whose micro-batches have these rows."""
        rates = {name: rate for name in self.names if (rate := self._rate(name))}
        unseen = {name for name, size in self._carried.items() if size and name not in self._told}
        return Outlook(rows, slowest(medians, len(rows)), rates, self._carried, frozenset(unseen))

    def _rate(self, name: str) -> float | None:
        """Bytes a second; None where nothing is known, or the line is as fast as memory."""
        told = _together(self._told.get(name, ()))
        written = (told.bytes or 0) / told.end if told.end else None
        if written is not None and self.exact:
            return written
        bits = self.lines.between(*name.split("->")).rate
        return min((rate for rate in (written, bits / 8 if bits else None) if rate), default=None)


def _runs(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Messages of a line that were written one right after the other."""
    run: list[Span] = []
    for span in sorted(spans, key=lambda each: each.start):
        if run and span.start - run[-1].end > CLOSE:
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _whole(run: Sequence[Span]) -> Span:
    """One message in place of several."""
    return Span("", "", run[0].start, run[-1].end, bytes=sum(span.bytes or 0 for span in run))


def _together(spans: Iterable[Span]) -> Span:
    """One message that takes as long, and is as large, as these."""
    found = [(span.end - span.start, span.bytes or 0) for span in spans]
    return Span("", "", 0.0, sum(took for took, _ in found), bytes=sum(size for _, size in found))


def slowest(medians: Medians, micro_batches: int) -> float | None:
    """Seconds that the slowest stage computes a step; None before anything was measured.

    >>> slowest({"0.0.forward": 0.25, "0.0.backward": 0.5, "0.1.fused": 0.5, "once": 9.0}, micro_batches=4)
    3.0
    """
    found: defaultdict[str, float] = defaultdict(float)
    for what, seconds in medians.items():
        parts = what.split(".")
        if len(parts) == 3:
            found[parts[1]] += micro_batches * seconds
    return max(found.values(), default=None)
