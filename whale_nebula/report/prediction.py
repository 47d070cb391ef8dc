"""What the simulator says of a step, stage by stage and link by link, beside what was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from whale_nebula.ir.shares import taken
from whale_nebula.report.basis import Basis, PhaseBasis
from whale_nebula.schedule.lines import pace
from whale_nebula.schedule.schedules import limits, schedule
from whale_nebula.schedule.simulate import run_lists
from whale_nebula.schedule.timeline import Timeline


@dataclass(frozen=True)
class StagePrediction:
    """What a stage is going to compute, to wait for others before it has done its last micro-batch, and to encode and
    decode.
    """

    compute_seconds: float
    wait_seconds: float
    codec_seconds: float = 0.0


@dataclass(frozen=True)
class LinkPrediction:
    """What a link is going to carry, and how long its line is held by that. `at_most` says that both may be less,
    because values in the batch decide it.
    """

    bytes: int
    seconds: float
    at_most: bool = False


@dataclass(frozen=True)
class Prediction:
    """A step as it should go: its seconds (once-a-step parts included), its stages and its links."""

    seconds: float
    stages: Mapping[str, StagePrediction]
    links: Mapping[str, LinkPrediction]


def predict(basis: Basis) -> Prediction:
    """Let the simulator run a step.

    >>> from whale_nebula.schedule.lines import Work, uniform
    >>> phase = PhaseBasis((Work(1.0, 2.0), Work(0.0, 3.0)), (False, True), uniform(2, seconds=3.0))
    >>> found = predict(Basis(("gpu", "npu"), (phase,), 16, 8, "eager-1f1b", once=1.0))
    >>> found.seconds, found.stages["gpu"], found.links["0->1"].seconds
    (58.0, StagePrediction(compute_seconds=48.0, wait_seconds=9.0, codec_seconds=0.0), 48.0)
    """
    timelines = list(_timelines(basis))
    held: defaultdict[str, float] = defaultdict(float)
    for timeline in timelines:
        for line in timeline.lines:
            held[line] += timeline.busy(line)
    for each in chain.from_iterable(basis.exchange):
        held[each.line.name] += each.line.seconds(each.bytes)
    names = dict.fromkeys([*basis.bytes, *held])
    return Prediction(
        seconds=_whole(basis, timelines),
        stages={name: _stage(timelines, number, _codecs(basis, number)) for number, name in enumerate(basis.stages)},
        links={name: LinkPrediction(basis.bytes.get(name, 0), held[name], name in basis.at_most) for name in names},
    )


def seconds(basis: Basis) -> float:
    """Only how long the step is going to take."""
    return _whole(basis, _timelines(basis))


def _whole(basis: Basis, timelines: Iterable[Timeline]) -> float:
    return basis.once + basis.exchange_seconds + sum(timeline.seconds for timeline in timelines)


def _timelines(basis: Basis) -> Iterator[Timeline]:
    for phase in basis.phases:
        yield _timeline(basis, phase)


def _timeline(basis: Basis, phase: PhaseBasis) -> Timeline:
    count, many = len(phase.works), basis.micro_batches
    found = pace(phase.works, phase.hops)
    chosen = limits(
        basis.schedule, count, many, pace=found if basis.paced else found.cautious, in_flight=basis.in_flight,
        replicas=[work.replicas for work in phase.works], orders=[work.order for work in phase.works],
    )  # fmt: skip
    generate = schedule(basis.schedule).generate
    lists = [
        tuple(generate(stage, count, many, chosen[stage], backward=work.has_backward, fused=fused))
        for stage, (work, fused) in enumerate(zip(phase.works, phase.fused, strict=True))
    ]
    return run_lists(lists, phase.works, phase.hops)


def _codecs(basis: Basis, number: int) -> float:
    """Seconds a step that a stage encodes and decodes."""
    works = (phase.works[number] for phase in basis.phases)
    return sum(max(taken(work.order, work.replicas, basis.micro_batches)) * work.codecs for work in works)


def _stage(timelines: list[Timeline], number: int, codecs: float) -> StagePrediction:
    computes, waits = 0.0, 0.0
    for timeline in timelines:
        busy = timeline.busy(number)
        computes += busy
        waits += max((span.end for span in timeline.of(number)), default=0.0) - busy
    return StagePrediction(max(computes - codecs, 0.0), max(waits, 0.0), codecs)
