"""Predicted costs of a candidate: simulated seconds of a step, memory by worker, bytes by link, and the bottleneck."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, fsum

import numpy as np

from whale_nebula.planner.costs import Costs
from whale_nebula.planner.problem import Array, Bottleneck, Candidate, Excess, Part, Problem, Shape
from whale_nebula.schedule.lines import Hop, Hops, Line, Work, compute_pace
from whale_nebula.schedule.schedules import SPLIT_BACKWARD, Pace, choose_delays, eager_limit, find_limit, limits
from whale_nebula.schedule.simulate import Timeline, simulate

Crossing = tuple[float, float, Array]
"""Bytes of a micro-batch there and back, and the seconds of its four coding operations; see `CodecCosts`."""
CLEARLY = 0.98
"""The share of the earlier schedules' time below which a later schedule is chosen."""


def score(problem: Problem, shape: Shape, costs: Costs | None = None, *, simulated: bool = True) -> Candidate | Excess:
    """The costs of a candidate under the best of the allowed schedules, or the excess if no schedule fits into memory.

    If not `simulated` it is estimated by the formula of the search (see `search`).
    """
    costs = costs or Costs(problem, shape.micro_batches, shape.recompute)
    first, *others = problem.options.schedules
    best = _score(problem, shape, costs, first, simulated)
    for schedule in others if simulated else ():
        if isinstance(best, Candidate) and _least_seconds(shape, costs, best) >= CLEARLY * best.seconds:
            return best
        each = _score(problem, shape, costs, schedule, simulated)
        if isinstance(each, Candidate) and (isinstance(best, Excess) or each.seconds < CLEARLY * best.seconds):
            best = each
    return best


def _least_seconds(shape: Shape, costs: Costs, known: Candidate) -> float:
    """A lower bound of a step's seconds under any schedule: the computing time of the busiest stage, and an update."""
    pairs = zip(shape.parts, known.compute, strict=True)
    busy = max(ceil(shape.micro_batches / part.replicas) * seconds for part, seconds in pairs)
    return busy + max(map(costs.part_update, shape.parts))


def _score(problem: Problem, shape: Shape, costs: Costs, schedule: str, simulated: bool) -> Candidate | Excess:
    parts, count = shape.parts, shape.micro_batches
    crossing = [costs.size_crossing(one, other) for one, other in pairwise(parts)]
    works = [_build_work(costs, part, schedule in SPLIT_BACKWARD) for part in parts]
    compute = tuple(work.seconds for work in works)
    works = [_add_coding(work, crossing, place, costs.part_handling(parts[place])) for place, work in enumerate(works)]
    hops = {
        (n, n + 1): _build_hop(problem, parts, n, there, back, costs) for n, (there, back, _) in enumerate(crossing)
    }
    sharing = _find_sharing(problem, parts)
    copies = [min(part.replicas, problem.clusters[part.cluster].workers) for part in parts]
    holding = _HoldingCounter(schedule, works, copies, compute_pace(works, hops).conservative, count, shape.recompute)
    fit = _fit_in_memory(problem, shape, costs, holding, sharing)
    if isinstance(fit, Excess):
        return fit
    in_flight, memory = fit
    once = [costs.part_update(part) for part in parts]
    tied = max((_tied_seconds(problem, one, other) for one, other in pairwise(parts)), default=0.0)
    rest = max(once) + tied + max(problem.clusters[part.cluster].step for part in parts)
    if simulated:
        timeline = simulate(works, hops, count, name=schedule, in_flight=in_flight, recompute=shape.recompute)
        busy = _measure_busy(timeline)
        seconds = timeline.seconds + rest
    else:
        busy = {Bottleneck("stage", place): ceil(count / w.replicas) * w.seconds for place, w in enumerate(works)}
        seconds = _estimate(works, hops, count, in_flight, once) + rest - max(once)
    alone = [
        ceil(count * part.shards / len(own)) * work.seconds
        for part, own, work in zip(parts, sharing, works, strict=True)
    ]
    if (shared := _sum_shared(alone, sharing)) != [ceil(count / work.replicas) * work.seconds for work in works]:
        seconds = max(seconds, max(shared) + rest)
    binds = max(busy, key=lambda each: busy[each])
    if busy[binds] <= 0.7 * seconds:
        updates = max(once) > (0.5 * seconds if hops else busy[binds])
        binds = Bottleneck("updates") if updates else Bottleneck("latency") if hops else binds
    return Candidate(
        shape, schedule, in_flight, seconds, compute, tuple(memory),
        _sum_link_bytes(problem, shape, crossing), binds,
    )  # fmt: skip


def _measure_busy(timeline: Timeline) -> dict[Bottleneck, float]:
    """Seconds of the busiest replica of each stage, and of each line."""
    found: dict[tuple[int | str, int], float] = defaultdict(float)
    for span in timeline.spans:
        found[span.place, span.replica] += span.seconds
    busy: dict[Bottleneck, float] = {}
    for (place, _), seconds in found.items():
        what = Bottleneck("line", line=place) if isinstance(place, str) else Bottleneck("stage", place)
        busy[what] = max(busy.get(what, 0.0), seconds)
    return busy


def _estimate(works: Sequence[Work], hops: Hops, count: int, in_flight: int | None, once: Sequence[float]) -> float:
    """Approximate seconds from the first stage on, by the formula of `search`."""
    step = single = 0.0
    for place in reversed(range(len(works))):
        work = works[place]
        own = ceil(count / work.replicas) * work.seconds + once[place]
        hop = hops.get((place, place + 1))
        if hop is not None:
            held = max(
                _holding_seconds(hop.forward_line, hop.forward),
                _holding_seconds(hop.backward_line, hop.backward or 0.0),
            )
            single += hop.round_trip
            step = max(step + hop.round_trip, single + (count - 1) * held)
        step, single = max(own, work.seconds + step), single + work.seconds
        if in_flight is not None and hop is not None:
            step = max(step, count / min(in_flight, count) * single)
    return step


def _holding_seconds(line: Line | None, size: float) -> float:
    return 0.0 if line is None else line.seconds(size)


def _build_work(costs: Costs, part: Part, parted: bool) -> Work:
    """The simulated work of a stage; the second part of a divided backward is a separate call."""
    forward, backward = costs.part_seconds(part)
    later = costs.part_deferred_seconds(part) if parted else 0.0
    if not later:
        return Work(forward, backward or None, replicas=part.replicas)
    call = costs.problem.clusters[part.cluster].call
    return Work(forward, backward - later, replicas=part.replicas, weights=later + call)


def _add_coding(work: Work, crossing: Sequence[Crossing], place: int, handling: tuple[float, float]) -> Work:
    """Add the seconds of encoding, decoding and handling the tensors that cross at both ends of a stage."""
    none = np.zeros(4)
    before = crossing[place - 1][2] if place else none
    after = crossing[place][2] if place < len(crossing) else none
    there, back = float(before[1] + after[0]) + handling[0], float(before[2] + after[3]) + handling[1]
    return replace(work, coding=there, coding_back=back)


def _build_hop(problem: Problem, parts: Sequence[Part], place: int, size: float, size_back: float, costs: Costs) -> Hop:
    """The hop between two consecutive stages; within a cluster each pair of stages has its own link."""
    one, other = parts[place : place + 2]
    back_size = size_back if costs.has_backward else None
    if one.cluster == other.cluster and problem.line(one.cluster, one.cluster) == Line():
        return Hop(None, None, 0.0, None if back_size is None else 0.0)
    there, back = problem.line(one.cluster, other.cluster), problem.line(other.cluster, one.cluster)
    a, b = (problem.clusters[part.cluster].name for part in (one, other))
    if a == b:
        a, b = f"{a}.{place}", f"{b}.{place + 1}"
    lines = replace(there, name=f"{a}->{b}"), replace(back, name=f"{b}->{a}")
    return Hop(*lines, size, back_size)


@dataclass(frozen=True)
class _HoldingCounter:
    """Number of micro-batches that each replica of a stage holds under a schedule."""

    schedule: str
    works: Sequence[Work]
    copies: Sequence[int]
    pace: Pace
    count: int
    recompute: bool

    def count_held(self, in_flight: int | None) -> list[tuple[int, int]]:
        """For each stage: the maximum number of micro-batches held with `in_flight` as limit (or the schedule's own),
        and the maximum number whose gradients of weights are pending.
        """
        stages, replicas = len(self.works), [work.replicas for work in self.works]
        own = limits(
            self.schedule, stages, self.count, pace=self.pace, in_flight=in_flight, replicas=replicas,
            orders=[()] * stages,
        )  # fmt: skip
        whole = [place == stages - 1 for place in range(stages)]
        later = choose_delays(own, self.count, whole, pace=self.pace, in_flight=in_flight, recompute=self.recompute)
        return [
            (ceil((1 if last else limit) / copies), ceil(delay * (work.weights is not None) / copies))
            for limit, delay, work, copies, last in zip(own, later, self.works, self.copies, whole, strict=True)
        ]


def _find_sharing(problem: Problem, parts: Sequence[Part]) -> list[list[list[int]]]:
    """For each stage and each of its workers: the stages that this worker runs."""
    workers = problem.workers_of(parts)
    runs: dict[tuple[int, int], list[int]] = {}
    for place, own in enumerate(workers):
        for worker in own:
            runs.setdefault(worker, []).append(place)
    return [[runs[worker] for worker in own] for own in workers]


def _sum_shared(values: Sequence[float], sharing: Sequence[Sequence[Sequence[int]]]) -> list[float]:
    """Sum a value over the stages that share a worker; for each stage the maximum over its workers."""
    return [max(fsum(values[place] for place in places) for places in own) for own in sharing]


def _fit_in_memory(
    problem: Problem, shape: Shape, costs: Costs, holding: _HoldingCounter, sharing: Sequence[Sequence[Sequence[int]]]
) -> tuple[int | None, list[float]] | Excess:
    """The limit of micro-batches in flight that memory or the user imposes, with the bytes of each stage's workers; no
    limit if the schedule's own demand fits, even if round trips take longer than predicted.
    """
    requested, count = problem.options.in_flight, shape.micro_batches
    allowed = [problem.clusters[part.cluster].memory for part in shape.parts]

    def needed(in_flight: int | None) -> tuple[bool, list[float]]:
        held = holding.count_held(in_flight)
        came = [0, *(number * copies for (number, _), copies in zip(held, holding.copies, strict=True))]
        own = [
            costs.part_bytes(part, number, ceil(came[n] / holding.copies[n]), later)
            for n, (part, (number, later)) in enumerate(zip(shape.parts, held, strict=True))
        ]
        memory = _sum_shared(own, sharing)
        return all(has >= needs for has, needs in zip(allowed, memory, strict=True)), memory

    fits, memory = needed(requested)
    if fits and (requested or find_limit(holding.schedule) is not eager_limit or needed(count)[0]):
        return requested, memory
    limit = bisect_left(range(1, min(requested or count, count) + 1), True, key=lambda limit: not needed(limit)[0])
    fits, memory = needed(max(limit, 1))
    if fits:
        return limit, memory
    place = max(range(len(memory)), key=lambda n: memory[n] / allowed[n] if allowed[n] else 0.0)
    part = shape.parts[place]
    return Excess(problem.clusters[part.cluster].name, memory[place], allowed[place], part.begin, part.end)


def _tied_seconds(problem: Problem, one: Part, other: Part) -> float:
    """Seconds to exchange tied weights between the stages that share them, once per step."""
    size = float(problem.chain.tied_bytes[other.begin])
    if not size or one.cluster == other.cluster:
        return 0.0
    line = problem.line(one.cluster, other.cluster)
    return line.seconds(size) + line.delay


def _sum_link_bytes(problem: Problem, shape: Shape, crossing: Sequence[Crossing]) -> dict[str, float]:
    """Bytes of a step by link."""
    found: dict[str, float] = {}
    for (one, other), (there, back, _) in zip(pairwise(shape.parts), crossing, strict=True):
        if one.cluster == other.cluster:
            continue
        names = [problem.clusters[part.cluster].name for part in (one, other)]
        tied = float(problem.chain.tied_bytes[other.begin])
        for line, size in (("->".join(names), there), ("->".join(reversed(names)), back)):
            found[line] = found.get(line, 0.0) + size * shape.micro_batches + tied
    return found


def scale_rate(problem: Problem, factor: float) -> Problem:
    """The problem with the rates of links between clusters multiplied by a factor."""
    lines = {pair: replace(line, rate=line.rate * factor) for pair, line in problem.lines.items()}
    return replace(problem, lines=lines)
