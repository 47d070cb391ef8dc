"""The predicted schedule of a plan, from stated assumptions about speeds that were not measured.

The time of a message is known if a link has a rate or a delay; that of a stage is not. If some link is slow, stages are
assumed to compute their FLOPs at `SPEED`, and each call to cost `CALL`; if all links are free a stage takes one unit.
The seconds of codecs on one core are known (`codec.sizes.cost`), and count if transfers take time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

from whale_nebula.ir.routing import count_turns, row_name
from whale_nebula.plan.records import PlanStage
from whale_nebula.schedule.lines import Hop, Line, Work, compute_pace
from whale_nebula.schedule.schedules import choose_delays, limits
from whale_nebula.schedule.simulate import Span, Timeline, simulate
from whale_nebula.wire.frame import count_wire_bytes

if TYPE_CHECKING:
    from whale_nebula.plan.plan import Plan


class Coding(NamedTuple):
    """Seconds of one core to encode and decode a micro-batch, for a stage's forward and for its backward."""

    forward: float = 0.0
    backward: float = 0.0


def list_codec_seconds(plan: Plan, names: Sequence[str]) -> dict[str, Coding]:
    """Seconds of encoding and decoding a micro-batch by stage, of those with these names; 0 for unknown costs."""
    found = dict.fromkeys(names, Coding())

    def add(name: str, forward: float, backward: float) -> None:
        found[name] = Coding(found[name].forward + forward, found[name].backward + backward)

    for each in plan.boundaries:
        cluster = {name: plan.stages[name].cluster for name in (each.source, *each.destinations)}
        away = [name for name in each.destinations if name in names and cluster[name] != cluster[each.source]]
        if not away or each.source not in names:
            continue
        sent, sent_back = ((way or 0.0) / len(plan.rows) for way in (each.encode_seconds, each.backward_encode_seconds))
        both, both_back = ((way or 0.0) / len(plan.rows) for way in (each.codec_seconds, each.backward_codec_seconds))
        add(each.source, sent, max(both_back - sent_back, 0.0))
        first = {cluster[name]: name for name in reversed(away)}.values()  # a cluster decodes a tensor once
        for name in first:
            add(name, max(both - sent, 0.0) / len(first), 0.0)
        for name in away:
            add(name, 0.0, sent_back / len(away))
    return found


SPEED = 1e12
"""Floating-point operations per second of an accelerator with small batches."""

CALL = 0.5e-3
"""The fixed seconds for calling a forward or a backward."""

_BACKWARD = 2.0
"""The assumed ratio of a backward to its forward without known FLOPs: a product has two gradients."""


def describe_assumptions(timed: bool) -> str:
    """The assumptions of a drawn schedule, in words: `timed` if it is in seconds, else in units, as links are free."""
    if timed:
        return f"assuming that stages compute at {SPEED / 1e12:g} TFLOP/s, plus {duration(CALL)} for each call"
    return f"assuming equal stages: forward 1, backward {_BACKWARD:.0f}, transfers 0"


class Row(NamedTuple):
    """A row of the drawn schedule: of a replica of a stage, or of a link."""

    name: str
    stage: PlanStage | None
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class PhaseTimes:
    """The timeline of one phase, with the stages that take part. By stage, `limits` are those of micro-batches in
    flight, and `delays` the number of backwards by which deferred gradients of weights come later.
    """

    phase: int
    stages: tuple[PlanStage, ...]
    timeline: Timeline
    limits: tuple[int, ...]
    delays: tuple[int, ...] = ()

    def rows(self, *, lines: bool) -> list[Row]:
        """The rows of the drawing: one for each replica of a stage and, on request, for each link."""
        found = [
            Row(row_name(stage.name, stage.replicas, replica), stage, self.timeline.spans_of(place, replica))
            for place, stage in enumerate(self.stages)
            for replica in self.timeline.replicas(place)
        ]
        shown = self.timeline.lines if lines else ()
        return [*found, *(Row(line, None, self.timeline.spans_of(line)) for line in shown)]


@dataclass(frozen=True)
class Times:
    """The timelines of all phases of a step, for its first micro-batches; `timed` if they are in seconds, as some link
    is slow, else in units.
    """

    timed: bool
    micro_batches: int
    phases: tuple[PhaseTimes, ...]

    @property
    def seconds(self) -> float:
        """The sum of the phases' durations, without parts that run once per step."""
        return sum(phase.timeline.seconds for phase in self.phases)


def step_text(plan: Plan) -> str:
    """A sentence on the estimated step time, with the exchange between clusters."""
    pipeline = predict_times(plan).seconds
    codecs = any(map(any, list_codec_seconds(plan, list(plan.stages)).values()))
    if not plan.exchange_seconds:
        return f"estimated step time: {duration(pipeline)}{' with codecs' * codecs}, plus updates"
    parts = f"{duration(pipeline)} {'with codecs' if codecs else 'as drawn'}"
    parts += f", {duration(plan.exchange_seconds)} for exchanges once per step"
    return f"estimated step time: {duration(pipeline + plan.exchange_seconds)} ({parts}), plus updates"


def takes_time(plan: Plan) -> bool:
    """Whether the transfer of a micro-batch takes time on any link."""
    every = [stage.name for stage in plan.stages.values() if any(stage.runs)]
    ways = [
        way
        for hop in _hops(plan, every).values()
        for way in ((hop.forward_line, hop.forward), (hop.backward_line, hop.backward))
    ]
    return any(line is not None and size and line.delay + line.seconds(size) for line, size in ways)


def predict_times(plan: Plan, *, most: int | None = None) -> Times:
    """Simulate a plan's schedule, by the assumptions of this module; `most` limits the micro-batches."""
    timed = takes_time(plan)
    count = len(plan.rows) if most is None else min(len(plan.rows), most)
    found = (_predict_phase(plan, phase, count, timed) for phase in range(count_phases(plan)))
    return Times(timed, count, tuple(each for each in found if each.stages))


def count_held(plan: Plan) -> dict[str, int]:
    """The number of micro-batches that each stage holds at a time: those in flight in the replica with the largest
    share; none without a backward, one if forward and backward are one function. Micro-batches with pending gradients
    of weights count.
    """
    found = dict.fromkeys(plan.stages, 0)
    for phase in predict_times(plan).phases:
        for stage, limit, later in zip(phase.stages, phase.limits, phase.delays, strict=True):
            runs = stage.runs[phase.phase]
            held = int("B" in runs)
            if held and (stage is not phase.stages[-1] or "W" in runs):
                own = (1 if stage is phase.stages[-1] else limit) + later * ("W" in runs)
                period = len(stage.order) or stage.replicas
                held = ceil(min(own, len(plan.rows)) * max(count_turns(stage.order, stage.replicas, period)) / period)
            found[stage.name] = max(found[stage.name], held)
    return found


def fill_in_flight(plan: Plan) -> Plan:
    """The plan with `in_flight` of its stages filled in."""
    held = count_held(plan)
    return replace(plan, stages={name: replace(s, in_flight=held[name]) for name, s in plan.stages.items()})


def count_phases(plan: Plan) -> int:
    """The number of a step's phases."""
    return max((len(stage.runs) for stage in plan.stages.values()), default=0)


def _predict_phase(plan: Plan, phase: int, count: int, timed: bool) -> PhaseTimes:
    stages = tuple(stage for stage in plan.stages.values() if stage.runs[phase])
    if not stages:
        return PhaseTimes(phase, (), Timeline(0, ()), ())
    works = list(_works(plan, stages, phase, timed))
    hops = _hops(plan, [stage.name for stage in stages])
    if not timed:
        hops = {pair: Hop(None, None, 0.0, None if hop.backward is None else 0.0) for pair, hop in hops.items()}
    timeline = simulate(works, hops, count, name=plan.schedule, in_flight=plan.in_flight, recompute=plan.recompute)
    pace, last = compute_pace(works, hops), len(stages) - 1
    chosen = limits(
        plan.schedule, len(stages), len(plan.rows), pace=pace, in_flight=plan.in_flight,
        replicas=[work.replicas for work in works], orders=[work.order for work in works],
    )  # fmt: skip
    fused = [place == last for place in range(len(stages))]
    later = choose_delays(chosen, len(plan.rows), fused, pace=pace, in_flight=plan.in_flight, recompute=plan.recompute)
    return PhaseTimes(phase, stages, timeline, chosen, later)


# ---------------------------------------------------------------------- the simulator's input
def _works(plan: Plan, stages: Sequence[PlanStage], phase: int, timed: bool) -> Iterator[Work]:
    """The work of the stages for a micro-batch, in their fastest replicas: in seconds, or in units unless `timed`."""
    codecs = list_codec_seconds(plan, [stage.name for stage in stages]) if timed else {}
    for stage in stages:
        taken = {"F": 1.0, "B": _BACKWARD, "W": _BACKWARD / 2}
        if timed:
            taken = _divide_flops(stage, phase, len(plan.rows))
        forward, backward, weights = (taken[letter] if letter in stage.runs[phase] else 0.0 for letter in "FBW")
        slowness = tuple(max(stage.speeds) / speed for speed in stage.speeds)
        yield Work(
            forward, backward - weights if backward else None, 0.0, *codecs.get(stage.name, Coding()),
            replicas=stage.replicas, order=stage.order, slowness=slowness, weights=weights or None,
        )  # fmt: skip


def _divide_flops(stage: PlanStage, phase: int, micro_batches: int) -> dict[str, float]:
    """Seconds of a micro-batch's part of a stage's FLOPs, forward and backward: equal parts if it runs in several
    phases. The second part of a divided backward is a separate call.
    """
    flops = {"F": stage.forward_flops, "B": stage.backward_flops, "W": stage.weights_flops}
    parts = {letter: micro_batches * max(sum(letter in runs for runs in stage.runs), 1) for letter in flops}
    taken = {letter: CALL + count / (parts[letter] * SPEED) for letter, count in flops.items()}
    return taken | {"B": taken["B"] + CALL * ("W" in stage.runs[phase])}


def _hops(plan: Plan, names: Sequence[str]) -> dict[tuple[int, int], Hop]:
    """The hops of the simulation: one for each pair of stages that a boundary connects."""
    found: dict[tuple[int, int], Hop] = {}
    reached: set[tuple[str, str]] = set()
    for each in plan.boundaries:
        for name in each.destinations:
            if each.source not in names or name not in names or name == each.source:
                continue
            pair, cluster = (names.index(each.source), names.index(name)), plan.stages[name].cluster
            there = 0 if (each.name, cluster) in reached else count_wire_bytes(each.bytes or 0)
            reached.add((each.name, cluster))
            hop = found.get(pair) or Hop(_line(plan, each.source, name), _line(plan, name, each.source), 0.0, None)
            back = hop.backward
            if each.backward:
                back = (back or 0.0) + count_wire_bytes(each.backward_bytes or 0)
            found[pair] = replace(hop, forward=hop.forward + there, backward=back)
    return found


def _line(plan: Plan, a: str, b: str) -> Line | None:
    """The link between the clusters of two stages; none inside a cluster."""
    clusters = plan.stages[a].cluster, plan.stages[b].cluster
    if clusters[0] == clusters[1]:
        return None
    link = plan.links.get("->".join(clusters))
    rate = link.rate / 8 if link is not None and link.rate else inf
    return Line("->".join(clusters), rate, link.delay if link is not None else 0.0)


def duration(seconds: float) -> str:
    """Seconds in a readable unit.

    >>> duration(0.0123), duration(2.5), duration(0.00004), duration(75)
    ('12.3 ms', '2.5 s', '40 µs', '75 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            return f"{seconds / size:.3g} {unit}"
    return ""
