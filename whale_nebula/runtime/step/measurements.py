"""Measure the pieces of a step, latencies between stages and rates of lines, for in-flight limits and predictions.

No process measures a complete round trip, and processes have no common clock. However, a stage measures how long its
first micro-batch is away (from the end of its forward to the start of its backward), the next stage measures how long
it keeps it, and the difference is the round trip. Only the first micro-batch is used: stages are idle then, so no queue
is included.

Every process reports its measurements with each step, so that all derive the same in-flight limits.

The speed of this process's replicas is measured periodically, for the shares of all replicas.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from statistics import median
from types import MappingProxyType
from typing import Any

from whale_nebula.config import Links
from whale_nebula.ir.cut import Boundary, Cut, PhasePlan, StagePhase
from whale_nebula.ir.routing import Order, Routing, compute_share_times, compute_shares, count_turns, order_by_shares
from whale_nebula.passes.batch import is_divisible
from whale_nebula.passes.codec_options import list_state_notes
from whale_nebula.report.prediction import Basis, PhaseBasis
from whale_nebula.report.records import Span, StageReport, busiest
from whale_nebula.runtime.exchange.auto import StepEstimate
from whale_nebula.runtime.step.clock import CODING, Clocks
from whale_nebula.runtime.step.traffic import Traffic
from whale_nebula.schedule.lines import Work
from whale_nebula.schedule.schedules import Pace

Medians = Mapping[str, float]
"""Seconds by name. For a micro-batch: of a piece by "phase.stage.kind", of its codecs by "phase.stage.kind.codec".
For the first one by "phase.stage.first.kind": how long it was "away" and "kept", and "held" the busiest line of the
stage's process. "once" is the time of parts that run once a step, "step" the total. "line gpu->npu" are the seconds of
a MiB on a line, if measured.
"""
_SKIPPED_STEPS = 1  # the first step includes TensorFlow's own warm-up
_KEPT_STEPS, _KEPT_FIRST_STEPS = 64, 16  # steps
_CODEC_SUFFIX, _DIRECTIONS = ".codec", ("forward", "backward")
_FIRST_INFIX = ".first."


@dataclass
class StageMeasurements:
    """Measured seconds of the last steps, by the names of `Medians`: of each stage's pieces for a micro-batch, and of
    the first micro-batch of each step.

    `hosts` are those of stages, as named by links; with `paced`, predictions have in-flight limits by the actual pace.
    `slowness` has, for stages whose replicas are not equally fast, the computing time of each relative to the slowest.
    """

    cut: Cut
    hosts: Sequence[str]
    links: Links
    paced: bool = True
    slowness: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    steps: int = 0
    seconds: dict[str, deque[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.traffic = Traffic(self.cut, self.hosts, self.links)

    def add(self, clocks: Clocks) -> None:
        """Record the measurements of a step."""
        self.steps += 1
        if self.steps <= _SKIPPED_STEPS:
            return
        for (stage, _), clock in clocks.stages.items():
            for phase, piece, seconds in _list_pieces(clock.spans):
                self._record(f"{phase}.{stage}.{piece}", seconds)
            for phase, what, seconds in _measure_first(clock.spans):
                self._record(f"{phase}.{stage}{_FIRST_INFIX}{what}", seconds, _KEPT_FIRST_STEPS)
        for phase, seconds in _sum_line_seconds(clocks.lines.spans):
            stage = min((seat.stage for seat in clocks.stages), default=0)
            self._record(f"{phase}.{stage}{_FIRST_INFIX}held", seconds, _KEPT_FIRST_STEPS)
        self._record("once", clocks.whole_batch.compute_seconds - clocks.whole_batch.wait_seconds)
        self._record("step", clocks.seconds())

    def _record(self, what: str, seconds: float, most: int = _KEPT_STEPS) -> None:
        self.seconds.setdefault(what, deque(maxlen=most)).append(seconds)

    def set_boundaries(self, boundaries: tuple[Boundary, ...]) -> None:
        """Set the current encodings of boundaries, which may change during a run."""
        if boundaries != self.traffic.cut.boundaries:
            self.traffic = Traffic(replace(self.cut, boundaries=boundaries), self.hosts, self.links)
            self.seconds = {what: kept for what, kept in self.seconds.items() if not what.endswith(_CODEC_SUFFIX)}

    def set_cut(self, cut: Cut) -> None:
        """Reset the measurements of the first micro-batch: the assignment of micro-batches to replicas changes."""
        self.cut = cut
        self.seconds = {what: kept for what, kept in self.seconds.items() if _FIRST_INFIX not in what}

    def medians(self) -> Medians:
        """The medians of this process's measurements; empty before the second step."""
        return {what: median(kept) for what, kept in self.seconds.items()}

    def basis(self, counts: Sequence[int], medians: Medians) -> Basis | None:
        """The simulator's input for a step whose micro-batches have `counts` rows; None while a pace or a crossing's
        size is unknown.
        """
        phases, traffic, rows = self.phases(counts[0], medians), self.traffic, tuple(counts)
        if not phases or not traffic.is_known(rows):
            return None
        pipeline = self.cut.program.pipeline
        return Basis(
            stages=tuple(stage.key for stage in self.cut.program.stages),
            phases=phases,
            micro_batches=len(counts),
            rows=min(counts),
            schedule=pipeline.schedule,
            in_flight=pipeline.in_flight,
            recompute=pipeline.recompute,
            paced=self.paced,
            once=medians.get("once", 0.0),
            exchange=traffic.rounds(rows),
            bytes=traffic.link_bytes(rows),
            at_most=traffic.at_most,
            divides=self._divides_batch,
        )

    def phases(self, rows: int, medians: Medians) -> tuple[PhaseBasis, ...]:
        """The simulator's input for each phase, for a micro-batch of `rows` rows; empty before all were measured.
        Crossings with a size known only in a step are omitted.
        """
        phases = [self._make_phase(phase, rows, medians) for phase in self.cut.phases]
        known = tuple(phase for phase in phases if phase is not None)
        return known if len(known) == len(phases) else ()

    def _make_phase(self, phase: PhasePlan, rows: int, medians: Medians) -> PhaseBasis | None:
        plans = {plan.stage: plan for plan in phase.stages}
        stages = range(len(self.cut.program.stages))
        known = tuple(
            work for stage in stages if (work := self._make_work(plans.get(stage), medians, stage)) is not None
        )
        if len(known) < len(stages):
            return None
        fused = tuple(stage in plans and plans[stage].fused for stage in stages)
        return PhaseBasis(known, fused, *self.traffic.hops(phase.index, rows))

    def _make_work(self, plan: StagePhase | None, medians: Medians, stage: int) -> Work | None:
        """A stage's work for a micro-batch in a phase; None if unknown yet."""
        if plan is None:
            return Work(0.0)
        found = {piece.kind: medians.get(f"{plan.phase}.{stage}.{piece.kind}") for piece in plan.fragments}
        if None in found.values():
            return None
        backward = found.get("fused") if plan.fused else found.get("backward")
        coding, coding_back = (medians.get(f"{plan.phase}.{stage}.{way}{_CODEC_SUFFIX}", 0.0) for way in _DIRECTIONS)
        return Work(
            found.get("forward") or 0.0,
            backward,
            coding=coding,
            coding_back=coding_back,
            replicas=self.cut.program.stages[stage].replicas,
            order=self.cut.orders[stage] if self.cut.orders else (),
            slowness=self.slowness.get(stage, ()),
            weights=found.get("weights"),
        )

    @cached_property
    def _divides_batch(self) -> bool:
        return is_divisible(self.cut.program)


def _list_pieces(spans: Iterable[Span]) -> Iterator[tuple[int, str, float]]:
    """Phase, kind and seconds of each piece of computing, and of each micro-batch's encoding and decoding."""
    coded: defaultdict[tuple[int, str, int | None], float] = defaultdict(float)
    for span in spans:
        kind, *way = span.what.split()
        if kind in CODING:
            coded[span.phase, f"{way[0]}{_CODEC_SUFFIX}", span.micro_batch] += span.end - span.start
        else:
            yield span.phase, kind, span.end - span.start
    yield from ((phase, what, seconds) for (phase, what, _), seconds in coded.items())


def _measure_first(spans: Sequence[Span]) -> Iterator[tuple[int, str, float]]:
    """Phase, "kept" or "away", and seconds: how long a stage kept the first micro-batch, and how long that was away.
    Deferred gradients of weights are not included.
    """
    by_phase: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.micro_batch == 0 and not span.what.startswith((*CODING, "weights")):
            by_phase[span.phase].append(span)
    for phase, own in by_phase.items():
        yield phase, "kept", own[-1].end - own[0].start
        if len(own) > 1:
            yield phase, "away", own[-1].start - own[0].end


def _sum_line_seconds(spans: Sequence[Span]) -> Iterator[tuple[int, float]]:
    """Seconds for which a micro-batch occupied the busiest line, by phase."""
    seconds: defaultdict[tuple[int, str, int], float] = defaultdict(float)
    for span in spans:
        if span.micro_batch is not None:
            seconds[span.phase, span.lane, span.micro_batch] += span.end - span.start
    lines: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for (phase, lane, _), each in seconds.items():
        lines[phase, lane].append(each)
    busiest: defaultdict[int, float] = defaultdict(float)
    for (phase, _), many in lines.items():
        busiest[phase] = max(busiest[phase], median(many))
    yield from busiest.items()


def compute_paces(cut: Cut, medians: Medians) -> list[Pace]:
    """The pace of each phase from round trips; empty before all were measured."""
    found = [_compute_pace(phase, len(cut.program.stages), medians) for phase in cut.phases]
    known = [pace for pace in found if pace is not None]
    return known if len(known) == len(found) else []


def _compute_pace(phase: PhasePlan, stages: int, medians: Medians) -> Pace | None:
    kinds = ("forward", "backward", "fused", "weights")
    compute = max(sum(medians.get(f"{phase.index}.{stage}.{kind}", 0.0) for kind in kinds) for stage in range(stages))
    if compute <= 0.0:
        return None

    def first(stage: int, what: str) -> float:
        return medians.get(f"{phase.index}.{stage}{_FIRST_INFIX}{what}", 0.0)

    trips = tuple(first(stage, "away") - first(stage + 1, "kept") for stage in range(stages - 1))
    held = max(first(stage, "held") for stage in range(stages))
    return Pace(compute, trips, held).conservative


_KEPT_RATES = 10  # steps
LINE, MIB = "line ", 1 << 20
MIN_MEASURED_BYTES = 1 << 18
"""The minimum bytes whose writing measures a real link: the system's buffers take fewer bytes immediately."""
MAX_PAUSE = 0.5e-3
"""The maximum seconds between two messages where the second one waited for the first."""


@dataclass
class LineRates:
    """Rates of the links `names` in the last steps: bytes that they have transferred, and the seconds for which they
    were occupied. `lines` are the configured ones. On emulated links these are `exact`. On a real link, a rate is
    measured only from many bytes that were written without a pause, in one message or in several that waited for each
    other: these waited for bytes to be sent, not for a delay. The last measurement is kept until the next one. Because
    some bytes only fill buffers, the configured rate is used if it is lower, or if nothing was measured.

    >>> seen = LineRates(("gpu->npu",), Links(), exact=True)
    >>> seen.add([Span("gpu->npu", "forward 0", 0.0, 0.5, 0, 0, 3_000_000)])
    >>> seen.make_estimate([8, 8], {"0.0.forward": 0.25}, [2]).rates
    {'gpu->npu': 6000000.0}
    """

    names: Sequence[str]
    lines: Links
    exact: bool = False
    _carried_bytes: Mapping[str, int] = field(default_factory=dict)
    _recent: dict[str, deque[Span]] = field(default_factory=dict)

    def add(self, spans: Sequence[Span]) -> None:
        """Record a step in which these messages occupied their lines."""
        sent = {name: [span for span in spans if span.lane == name] for name in self.names}
        self._carried_bytes = {name: sum(span.bytes or 0 for span in own) for name, own in sent.items()}
        for name, own in sent.items():
            runs = own if self.exact else map(_join_spans, _group_messages(own))
            large = [run for run in runs if self.exact or (run.bytes or 0) >= MIN_MEASURED_BYTES]
            if large:
                self._recent.setdefault(name, deque(maxlen=_KEPT_RATES)).append(_add_spans(large))

    def seconds(self) -> Medians:
        """Seconds for each MiB written to a link, by "line gpu->npu", for links with measurements."""
        return {f"{LINE}{name}": MIB / rate for name in self._recent if (rate := self._find_rate(name))}

    def make_estimate(self, rows: Sequence[int], medians: Medians, turns: Sequence[float]) -> StepEstimate:
        """The estimates before a step whose micro-batches have these rows; for `turns` see `find_slowest_seconds`."""
        rates = {name: rate for name in self.names if (rate := self._find_rate(name))}
        unmeasured = {name for name, size in self._carried_bytes.items() if size and name not in self._recent}
        return StepEstimate(
            rows, find_slowest_seconds(medians, turns), rates, self._carried_bytes, frozenset(unmeasured)
        )

    def _find_rate(self, name: str) -> float | None:
        """Bytes a second; None if the rate is neither measured nor configured."""
        total = _add_spans(self._recent.get(name, ()))
        written = (total.bytes or 0) / total.end if total.end else None
        if written is not None and self.exact:
            return written
        bits = self.lines.between(*name.split("->")).rate
        return min((rate for rate in (written, bits / 8 if bits else None) if rate), default=None)


def _group_messages(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Groups of messages of a line that were written without a pause; those to different workers may overlap."""
    run: list[Span] = []
    end = 0.0
    for span in sorted(spans, key=lambda each: each.start):
        if run and span.start - end > MAX_PAUSE:
            yield run
            run = []
        run.append(span)
        end = max(end, span.end)
    if run:
        yield run


def _join_spans(run: Sequence[Span]) -> Span:
    """The span of several messages as one."""
    return Span("", "", run[0].start, max(span.end for span in run), bytes=sum(span.bytes or 0 for span in run))


def _add_spans(spans: Iterable[Span]) -> Span:
    """One message with the total duration and bytes of these."""
    found = [(span.end - span.start, span.bytes or 0) for span in spans]
    return Span("", "", 0.0, sum(took for took, _ in found), bytes=sum(size for _, size in found))


def find_slowest_seconds(medians: Medians, turns: Sequence[float]) -> float | None:
    """Seconds that the slowest stage computes in a step, with its number of micro-batches in `turns`, by stage; None
    before anything was measured.

    >>> find_slowest_seconds({"0.0.forward": 0.25, "0.0.backward": 0.5, "0.1.fused": 0.5, "once": 9.0}, turns=[4, 4])
    3.0
    """
    factors, found = {str(stage): count for stage, count in enumerate(turns)}, defaultdict[str, float](float)
    for what, seconds in medians.items():
        parts = what.split(".")
        if len(parts) == 3 and not what.startswith(LINE) and parts[1] in factors:
            found[parts[1]] += factors[parts[1]] * seconds
    return max(found.values(), default=None)


def count_busiest_turns(
    routing: Routing, micro_batches: int, slowness: Mapping[int, Sequence[float]] = MappingProxyType({})
) -> list[float]:
    """By stage, how many micro-batches its busiest replica runs in a step, in units of the slowest replica's time for
    one. Replicas on one worker run one after the other, those of a single process at the same time.

    >>> count_busiest_turns(Routing((("gpu/0",), ("npu/0", "npu/1", "npu/0"))), 6)
    [6.0, 4.0]
    """
    found = []
    for stage, hosts in enumerate(routing.hosts):
        turns = count_turns(routing.orders[stage] if routing.orders else (), len(hosts), micro_batches)
        loads: defaultdict[str | int, float] = defaultdict(float)
        for replica, host in enumerate(hosts):
            factor = slowness[stage][replica] if stage in slowness else 1.0
            loads[host if routing.replicated else replica] += factor * turns[replica]
        found.append(max(loads.values()))
    return found


SAMPLE_EVERY = 100
"""The interval of measurements, in steps."""
_SAMPLE_STEPS = 3
"""The steps of a measurement, after one for warm-up."""

MIN_GAIN = 0.1
"""The minimum saving of a stage's time, as a share, for which orders change; less is noise."""

Speeds = Mapping[int, Mapping[str, float]]
"""Seconds that each process takes for a micro-batch: by stage, and then by worker."""


def is_sampled(steps: int) -> bool:
    """Whether a step, by its number, is part of a measurement of replicas' speeds, or its warm-up.

    >>> [step for step in range(150) if is_sampled(step)]
    [0, 1, 2, 3, 100, 101, 102, 103]
    """
    return steps % SAMPLE_EVERY <= _SAMPLE_STEPS


@dataclass
class SpeedSampler:
    """Measurement of the speeds of this process's replicas; `seconds` are those for a micro-batch in the last complete
    measurement, by the number of the stage as text.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    _samples: defaultdict[tuple[int, int, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, steps: int, clocks: Clocks) -> None:
        """Record a step by its number."""
        if steps % SAMPLE_EVERY == 0:
            self._samples.clear()
        elif is_sampled(steps):
            for key, took in _list_sampled_pieces(clocks):
                self._samples[key].append(took)
        if steps % SAMPLE_EVERY == _SAMPLE_STEPS:
            found: defaultdict[int, float] = defaultdict(float)
            for (stage, _, _), many in self._samples.items():  # the total for a micro-batch over all phases
                found[stage] += median(many)
            self.seconds = {str(stage): round(took, 6) for stage, took in sorted(found.items())}


def _list_sampled_pieces(clocks: Clocks) -> Iterator[tuple[tuple[int, int, str], float]]:
    """Stage, phase, kind and seconds of each piece."""
    for (stage, _), clock in clocks.stages.items():
        for span in clock.spans:
            kind = span.what.split()[0]
            if kind not in CODING:
                yield (stage, span.phase, kind), span.end - span.start


def parse_speeds(cut: Cut, sheets: Mapping[str, Mapping[str, Any]]) -> Speeds:
    """Parse the speeds reported by all processes, for stages whose replicas are all known; invalid ones are dropped."""
    found = {}
    for stage in sorted(cut.routing.replicated):
        received = {worker: sheets.get(worker, {}).get("speeds") for worker in cut.routing.hosts_of(stage)}
        known = {
            worker: _read_seconds(each.get(str(stage))) for worker, each in received.items() if isinstance(each, dict)
        }
        if len(known) == len(received) and all(known.values()):
            found[stage] = known
    return found


def _read_seconds(value: Any) -> float:
    """A valid number of seconds, otherwise 0."""
    return value if isinstance(value, float) and isfinite(value) and value > 0.0 else 0.0


def improve_orders(cut: Cut, seconds: Speeds) -> tuple[Order, ...]:
    """The orders of replicas that are clearly better than a plan's; otherwise the plan's own.

    Speeds in the config take precedence. Measurements do not change stages with codec states, which depend on the
    micro-batches between two workers.
    """
    stages, count = cut.program.stages, cut.program.pipeline.micro_batch
    found = list(cut.orders or [()] * len(stages))
    for number in seconds.keys() - _find_stateful_stages(cut):
        speeds, now = _compute_speeds(cut, seconds, number), count_turns(found[number], stages[number].replicas, count)
        better = compute_shares(speeds, count)
        gain = 1.0 - max(compute_share_times(better, speeds)) / max(compute_share_times(now, speeds))
        if gain > MIN_GAIN and not stages[number].speeds:
            found[number] = order_by_shares(better)
    return tuple(found) if any(found) else ()


def _find_stateful_stages(cut: Cut) -> set[int]:
    """The stages at a boundary with a stateful codec."""
    boundaries = (each for each in cut.boundaries if any(list_state_notes(cut.program, [each], cut.workers)))
    return {stage for each in boundaries for stage in (each.source, *each.destinations)}


def _compute_speeds(cut: Cut, seconds: Speeds, stage: int) -> list[float]:
    """Micro-batches a second of each replica; replicas on one worker share its speed."""
    hosts = cut.routing.hosts[stage]
    return [1.0 / (seconds[stage][host] * hosts.count(host)) for host in hosts]


def describe_order_changes(before: Cut, after: Cut) -> Iterator[str]:
    """A text for each stage whose replicas take other numbers of micro-batches."""
    count = before.program.pipeline.micro_batch
    for number, stage in enumerate(before.program.stages):
        was, now = (count_turns(_find_order(cut, number), stage.replicas, count) for cut in (before, after))
        if was != now:
            new, old = (" : ".join(map(str, turns)) for turns in (now, was))
            yield f"the replicas of {stage.key} now take {new} micro-batches instead of {old}"


def _find_order(cut: Cut, stage: int) -> Order:
    return cut.orders[stage] if cut.orders else ()


def compute_slowness(seconds: Speeds, cut: Cut) -> dict[int, tuple[float, ...]]:
    """The computing time of each replica relative to the slowest."""
    return {
        stage: tuple(own[host] / max(own.values()) for host in cut.routing.hosts[stage])
        for stage, own in seconds.items()
    }


def report_replicas(cut: Cut, seconds: Speeds, count: int) -> dict[str, StageReport]:
    """By stage, the computing seconds of its replicas in a step of `count` micro-batches, by the last measurement."""
    found = {}
    for number, own in seconds.items():
        stage = cut.program.stages[number]
        hosts = zip(
            cut.routing.hosts[number], count_turns(_find_order(cut, number), stage.replicas, count), strict=True
        )
        found[stage.key] = busiest([StageReport(share * own[host], cluster=stage.cluster) for host, share in hosts])
    return found
