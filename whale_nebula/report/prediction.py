"""Predictions of a step to compare with measurements: simulated by stage and link, and by the planner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from whale_nebula.ir.routing import count_turns
from whale_nebula.report.records import PredictionGap, duration, size
from whale_nebula.schedule.lines import Hop, Hops, Line, Work, compute_pace
from whale_nebula.schedule.simulate import Timeline, simulate

Pair = tuple[int, int]
CodecCost = Callable[[float], tuple[float, float]]
"""A function from a number of elements to the seconds to encode and to decode them."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The floating-point part of a hop's bytes, which a codec can compress, and its number of elements."""

    bytes: float = 0.0
    count: float = 0.0

    def __add__(self, other: Numbers) -> Numbers:
        return Numbers(self.bytes + other.bytes, self.count + other.count)

    def divide(self, parts: int) -> Numbers:
        """One of `parts` equal parts."""
        return Numbers(self.bytes / parts, self.count / parts)

    def count_saved_bytes(self, width: float) -> float:
        """Bytes that are saved if each number is sent in `width` bytes; never negative.

        >>> Numbers(bytes=4000, count=1000).count_saved_bytes(1), Numbers(bytes=2000, count=1000).count_saved_bytes(2)
        (3000, 0)
        """
        return max(self.bytes - width * self.count, 0)


@dataclass(frozen=True, slots=True)
class ExchangeTransfer:
    """An exchange between clusters once per step, over one link: its bytes, and a description of its content."""

    line: Line
    bytes: float
    what: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds from sending to arrival."""
        return self.line.seconds(self.bytes) + self.line.delay


@dataclass(frozen=True)
class PhaseBasis:
    """One phase for one micro-batch: each stage's work, and the hops between stages.

    `fused` is, by stage, whether forward and backward are one function; `numbers` belong to `hops`, for both
    directions.
    """

    works: tuple[Work, ...]
    fused: tuple[bool, ...]
    hops: Hops
    numbers: Mapping[Pair, tuple[Numbers, Numbers]] = field(default_factory=dict)


@dataclass(frozen=True)
class Basis:
    """A step as input of the simulator.

    With `paced` in-flight limits follow the actual pace (in one process), not a cautious one; `once` are the seconds of
    what runs once per step, and `exchange` its transfers, round by round (without codecs). `rows` are those of a
    micro-batch, `bytes` the load of each link, and `at_most` the links that may carry less, depending on values in the
    batch. `divides` is whether more micro-batches would give the same step, as no row depends on another. With
    `recompute` forwards are computed again.
    """

    stages: tuple[str, ...]
    phases: tuple[PhaseBasis, ...]
    micro_batches: int
    rows: int
    schedule: str
    in_flight: int | None = None
    paced: bool = True
    once: float = 0.0
    exchange: tuple[tuple[ExchangeTransfer, ...], ...] = ()
    bytes: Mapping[str, int] = field(default_factory=dict)
    divides: bool = True
    at_most: tuple[str, ...] = ()
    recompute: bool = False

    @property
    def exchange_seconds(self) -> float:
        """A lower bound of the seconds that updates wait for one another."""
        return rounds_seconds(self.exchange)

    @property
    def lines(self) -> frozenset[str]:
        """The names of all links in use; transfers inside a cluster have none."""
        lines = (
            line
            for phase in self.phases
            for hop in phase.hops.values()
            for line in (hop.forward_line, hop.backward_line)
        )
        crossed = {line.name for line in lines if line is not None}
        exchanged = (each.line.name for together in self.exchange for each in together)
        return frozenset(crossed | {name for name in exchanged if len(set(name.split("->"))) == 2})

    def narrow_numbers(self, width: float, back: float | None = None) -> Basis:
        """The step with all numbers sent in `width` bytes (2 for fp16), those of gradients in `back`."""
        widths = width, width if back is None else back
        return self._change_phases(lambda phase: replace(phase, hops=_narrow_hops(phase, *widths)))

    def add_codec_seconds(self, there: CodecCost, back: CodecCost, before: Basis) -> Basis:
        """The step with the seconds of encoding and decoding at each boundary that has fewer bytes than in `before`.
        Those of codecs that are replaced are not subtracted.
        """
        pairs = zip(self.phases, before.phases, strict=True)
        return replace(
            self, phases=tuple(replace(p, works=_add_codec_time(p, old.hops, there, back)) for p, old in pairs)
        )

    def change_lines(self, change: Callable[[Line], Line]) -> Basis:
        """The step with changed links."""

        def change_hop(hop: Hop) -> Hop:
            there, back = (None if line is None else change(line) for line in (hop.forward_line, hop.backward_line))
            return replace(hop, forward_line=there, backward_line=back)

        rounds = tuple(tuple(replace(one, line=change(one.line)) for one in together) for together in self.exchange)
        changed = self._change_phases(
            lambda phase: replace(phase, hops={pair: change_hop(hop) for pair, hop in phase.hops.items()})
        )
        return replace(changed, exchange=rounds)

    def divide(self, parts: int) -> Basis:
        """The step with each micro-batch divided further, if computing divides as evenly as bytes do."""
        smaller = self._change_phases(lambda phase: _divide_phase(phase, parts))
        return replace(smaller, micro_batches=self.micro_batches * parts, rows=self.rows // parts)

    def _change_phases(self, change: Callable[[PhaseBasis], PhaseBasis]) -> Basis:
        return replace(self, phases=tuple(map(change, self.phases)))


def rounds_seconds(rounds: Iterable[Iterable[ExchangeTransfer]]) -> float:
    """Seconds of exchanges between clusters, round by round; each round is as long as its slowest link."""
    return sum(max(each.seconds for each in together) for together in rounds)


def free_line(line: Line) -> Line:
    """The link with unlimited rate and no delay."""
    return Line(line.name)


def lift_rate_limit(line: Line) -> Line:
    """The link with unlimited rate and the same delay."""
    return Line(line.name, delay=line.delay)


def _narrow_hops(phase: PhaseBasis, width: float, back_width: float) -> Hops:
    found = {}
    for pair, hop in phase.hops.items():
        there, back = phase.numbers.get(pair, (Numbers(), Numbers()))
        backward = None if hop.backward is None else hop.backward - back.count_saved_bytes(back_width)
        found[pair] = replace(hop, forward=hop.forward - there.count_saved_bytes(width), backward=backward)
    return found


def _add_codec_time(phase: PhaseBasis, old: Hops, there: CodecCost, back: CodecCost) -> tuple[Work, ...]:
    works = list(phase.works)
    for (a, b), hop in phase.hops.items():
        numbers = phase.numbers.get((a, b), (Numbers(), Numbers()))
        if hop.forward < old[a, b].forward:
            encode, decode = there(numbers[0].count)
            works[a] = replace(works[a], coding=works[a].coding + encode)
            works[b] = replace(works[b], coding=works[b].coding + decode)
        if (hop.backward or 0.0) < (old[a, b].backward or 0.0):
            encode, decode = back(numbers[1].count)
            works[b] = replace(works[b], coding_back=works[b].coding_back + encode)
            works[a] = replace(works[a], coding_back=works[a].coding_back + decode)
    return tuple(works)


def _divide_phase(phase: PhaseBasis, parts: int) -> PhaseBasis:
    works = tuple(work.times(1 / parts, 1 / parts) for work in phase.works)
    hops = {
        pair: replace(hop, forward=hop.forward / parts, backward=None if hop.backward is None else hop.backward / parts)
        for pair, hop in phase.hops.items()
    }
    numbers = {pair: (there.divide(parts), back.divide(parts)) for pair, (there, back) in phase.numbers.items()}
    return PhaseBasis(works, phase.fused, hops, numbers)


@dataclass(frozen=True)
class StagePrediction:
    """Predicted seconds of a stage: computing, waiting for others before its last micro-batch is done, and coding."""

    compute_seconds: float
    wait_seconds: float
    codec_seconds: float = 0.0


@dataclass(frozen=True)
class LinkPrediction:
    """Predicted load of a link: bytes, and seconds for which they occupy the link. With `at_most` they are upper
    bounds, as they depend on values in the batch.
    """

    bytes: int
    seconds: float
    at_most: bool = False


@dataclass(frozen=True)
class Prediction:
    """A predicted step: its seconds (once-a-step parts included), its stages and its links."""

    seconds: float
    stages: Mapping[str, StagePrediction]
    links: Mapping[str, LinkPrediction]


def predict(basis: Basis) -> Prediction:
    """Simulate a step.

    >>> from whale_nebula.schedule.lines import Work, make_uniform_hops
    >>> phase = PhaseBasis((Work(1.0, 2.0), Work(0.0, 3.0)), (False, True), make_uniform_hops(2, seconds=3.0))
    >>> found = predict(Basis(("gpu", "npu"), (phase,), 16, 8, "eager-1f1b", once=1.0))
    >>> found.seconds, found.stages["gpu"], found.links["0->1"].seconds
    (58.0, StagePrediction(compute_seconds=48.0, wait_seconds=9.0, codec_seconds=0.0), 48.0)
    """
    timelines = list(_simulate_phases(basis))
    held: defaultdict[str, float] = defaultdict(float)
    for timeline in timelines:
        for line in timeline.lines:
            held[line] += timeline.busy(line)
    for each in chain.from_iterable(basis.exchange):
        held[each.line.name] += each.line.seconds(each.bytes)
    names = dict.fromkeys([*basis.bytes, *held])
    return Prediction(
        seconds=_sum_seconds(basis, timelines),
        stages={name: _predict_stage(basis, timelines, number) for number, name in enumerate(basis.stages)},
        links={name: LinkPrediction(basis.bytes.get(name, 0), held[name], name in basis.at_most) for name in names},
    )


def predict_seconds(basis: Basis) -> float:
    """The seconds of `predict`, without those of its stages and links."""
    return _sum_seconds(basis, _simulate_phases(basis))


def _sum_seconds(basis: Basis, timelines: Iterable[Timeline]) -> float:
    return basis.once + basis.exchange_seconds + sum(timeline.seconds for timeline in timelines)


def _simulate_phases(basis: Basis) -> Iterator[Timeline]:
    for phase in basis.phases:
        pace = compute_pace(phase.works, phase.hops)
        yield simulate(
            phase.works, phase.hops, basis.micro_batches, name=basis.schedule, in_flight=basis.in_flight,
            fused=phase.fused, pace=pace if basis.paced else pace.conservative, recompute=basis.recompute,
        )  # fmt: skip


def _predict_stage(basis: Basis, timelines: Sequence[Timeline], number: int) -> StagePrediction:
    """The sum of a stage's seconds in all phases; those of its codecs are not part of `compute_seconds`."""
    works = (phase.works[number] for phase in basis.phases)
    codecs = sum(max(count_turns(work.order, work.replicas, basis.micro_batches)) * work.codecs for work in works)
    busy = [timeline.busy(number) for timeline in timelines]
    ends = (max((span.end for span in timeline.spans_of(number)), default=0.0) for timeline in timelines)
    waits = sum(end - own for end, own in zip(ends, busy, strict=True))
    return StagePrediction(max(sum(busy) - codecs, 0.0), max(waits, 0.0), codecs)


MIN_REPORTED_SHARE = 0.2
"""A step that differs from the prediction by more than this share is reported."""
MIN_REPORTED_SECONDS = 5e-3
"""The least difference in seconds that is reported: the noise of a call on a busy machine is less."""
_MIN_NAMED_SHARE = 0.3
"""A term that explains less than this share of the difference is not named."""


@dataclass(frozen=True)
class PlannedReport:
    """A step of a plan by `nb.auto_parallel`: medians of the `steps` measured since it was compiled, and what the
    planner predicted.

    `stages` are the seconds that each computes in a step, `links` those for which a step occupies each link, `memory`
    the peak bytes of each worker's process, Python and TensorFlow included, and the bytes that the plan needs. `offer`
    describes a better plan, if the measurements show one. `found_on` is the date on which the plan was found, if that
    was before the run.
    """

    steps: int
    seconds: PredictionGap
    stages: Mapping[str, PredictionGap] = field(default_factory=dict)
    links: Mapping[str, PredictionGap] = field(default_factory=dict)
    memory: Mapping[str, PredictionGap] = field(default_factory=dict)
    offer: str = ""
    found_on: str = ""

    @property
    def off(self) -> float:
        """The share by which the step takes longer than predicted.

        >>> PlannedReport(8, PredictionGap(0.375, 0.25)).off
        0.5
        """
        return self.seconds.measured / self.seconds.predicted - 1.0 if self.seconds.predicted else 0.0

    @property
    def is_off(self) -> bool:
        """Whether the difference from the prediction is large enough to be reported."""
        return abs(self.off) > MIN_REPORTED_SHARE and abs(self.seconds.gap) > MIN_REPORTED_SECONDS

    @property
    def headline(self) -> str:
        """The measured and the predicted duration, in words.

        >>> PlannedReport(8, PredictionGap(0.375, 0.25)).headline
        '0.375 s, 50 % more than the 0.250 s that nb.auto_parallel predicted'
        """
        text = f"{duration(self.seconds.measured)}, {100 * abs(self.off):.0f} % {'more' if self.off > 0 else 'less'}"
        return f"{text} than the {duration(self.seconds.predicted or 0.0)} that nb.auto_parallel predicted"

    @property
    def cause(self) -> str:
        """A sentence on the term with the largest difference.

        >>> stages, links = {"gpu": PredictionGap(0.3, 0.2)}, {"gpu->npu": PredictionGap(0.1, 0.1)}
        >>> PlannedReport(8, PredictionGap(0.4, 0.3), stages, links).cause
        'stage gpu computes 0.300 s of it (predicted 0.200 s)'
        """
        terms = [(each, f"stage {name} computes") for name, each in self.stages.items()]
        terms += [(each, f"link {name} is busy for") for name, each in self.links.items()]
        term, verb = max(terms, key=lambda pair: abs(pair[0].gap), default=(PredictionGap(0.0), ""))
        if terms and abs(term.gap) >= _MIN_NAMED_SHARE * abs(self.seconds.gap):
            return f"{verb} {duration(term.measured)} of it (predicted {duration(term.predicted or 0.0)})"
        return "no single stage or link explains the difference: the rest is updates, calls and waiting"


def planned_lines(planned: PlannedReport) -> Iterator[str]:
    r"""The lines of a report that compare the step with its plan.

    >>> planned = PlannedReport(8, PredictionGap(0.4, 0.3), {"gpu": PredictionGap(0.3, 0.2)}, offer="...")
    >>> print("\n".join(planned_lines(planned)))
    planned: 0.400 s, 33 % more than the 0.300 s that nb.auto_parallel predicted (median of 8 steps)
      stage gpu: computes 0.300 s (predicted 0.200 s)
      better: ...
    """
    yield f"planned: {planned.headline} (median of {planned.steps} step{'s' * (planned.steps != 1)})"
    yield from (f"  stage {name}: computes {each.text(duration)}" for name, each in planned.stages.items())
    if not planned.stages:
        yield "  its stages run as one function here and are not timed separately"
    yield from (f"  link {name}: busy for {each.text(duration)}" for name, each in planned.links.items())
    for name, each in planned.memory.items():
        yield f"  worker {name}: peak memory of its process {each.text(size, ' for the plan')}"
    if planned.found_on:
        yield f"  planned in advance, on {planned.found_on}"
    if planned.offer:
        yield f"  better: {planned.offer}"
