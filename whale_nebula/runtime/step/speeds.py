"""Measure the speed of this process's replicas periodically, and compute the shares of all replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Any

from whale_nebula.ir.cut import Cut
from whale_nebula.ir.routing import Order, order, shares, take_counts, times_of_shares
from whale_nebula.passes.codec_options import lane_notes
from whale_nebula.report.records import StageReport, busiest
from whale_nebula.runtime.step.clock import CODING, Clocks

EVERY = 100
"""The interval of measurements, in steps."""
_STEPS = 3
"""The steps of a measurement, after one for warm-up."""

WORTH = 0.1
"""The least saving of a stage's time, as a share, for which orders change; less is noise."""

Speeds = Mapping[int, Mapping[str, float]]
"""Seconds that each process takes for a micro-batch: by stage, and then by worker."""


def looked_at(steps: int) -> bool:
    """Whether a step, by its number, is part of a measurement of replicas' speeds, or its warm-up.

    >>> [step for step in range(150) if looked_at(step)]
    [0, 1, 2, 3, 100, 101, 102, 103]
    """
    return steps % EVERY <= _STEPS


@dataclass
class Look:
    """Measurement of the speeds of this process's replicas; `told` is the last complete one."""

    told: dict[str, float] = field(default_factory=dict)
    _seen: defaultdict[tuple[int, int, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, steps: int, clocks: Clocks) -> None:
        """Record a step by its number."""
        if steps % EVERY == 0:
            self._seen.clear()
        elif looked_at(steps):
            for key, took in _pieces(clocks):
                self._seen[key].append(took)
        if steps % EVERY == _STEPS:
            found: defaultdict[int, float] = defaultdict(float)
            for (stage, _, _), many in self._seen.items():  # the total for a micro-batch over all phases
                found[stage] += median(many)
            self.told = {str(stage): round(took, 6) for stage, took in sorted(found.items())}


def _pieces(clocks: Clocks) -> Iterator[tuple[tuple[int, int, str], float]]:
    """Stage, phase, kind and seconds of each piece."""
    for (stage, _), clock in clocks.stages.items():
        for span in clock.spans:
            kind = span.what.split()[0]
            if kind not in CODING:
                yield (stage, span.phase, kind), span.end - span.start


def hear(cut: Cut, sheets: Mapping[str, Mapping[str, Any]]) -> Speeds:
    """Parse the speeds reported by all processes, for stages whose replicas are all known; invalid ones are dropped."""
    found = {}
    for stage in sorted(cut.routing.replicated):
        told = {worker: sheets.get(worker, {}).get("speeds") for worker in cut.routing.of(stage)}
        known = {worker: _number(each.get(str(stage))) for worker, each in told.items() if isinstance(each, dict)}
        if len(known) == len(told) and all(known.values()):
            found[stage] = known
    return found


def _number(given: Any) -> float:
    """A valid number of seconds, otherwise 0."""
    return given if isinstance(given, float) and isfinite(given) and given > 0.0 else 0.0


def better_orders(cut: Cut, heard: Speeds) -> tuple[Order, ...]:
    """The orders of replicas that are clearly better than a plan's; otherwise the plan's own.

    Speeds in the config take precedence; and stages with codec states, which depend on the micro-batches between two
    workers, are not changed by measurements.
    """
    stages, count = cut.program.stages, cut.program.pipeline.micro_batch
    found = list(cut.orders or [()] * len(stages))
    for number in heard.keys() - _stages_with_memory(cut):
        speeds, now = _speeds(cut, heard, number), take_counts(found[number], stages[number].replicas, count)
        better = shares(speeds, count)
        gain = 1.0 - max(times_of_shares(better, speeds)) / max(times_of_shares(now, speeds))
        if gain > WORTH and not stages[number].speeds:
            found[number] = order(better)
    return tuple(found) if any(found) else ()


def _stages_with_memory(cut: Cut) -> set[int]:
    """The stages at a boundary with a stateful codec."""
    told = (each for each in cut.boundaries if any(lane_notes(cut.program, [each], cut.workers)))
    return {stage for each in told for stage in (each.source, *each.destinations)}


def _speeds(cut: Cut, heard: Speeds, stage: int) -> list[float]:
    """Micro-batches a second of each replica; replicas on one worker share its speed."""
    hosts = cut.routing.hosts[stage]
    return [1.0 / (heard[stage][host] * hosts.count(host)) for host in hosts]


def changes(before: Cut, after: Cut) -> Iterator[str]:
    """A description of changed orders."""
    count = before.program.pipeline.micro_batch
    for number, stage in enumerate(before.program.stages):
        was, now = (take_counts(_order(cut, number), stage.replicas, count) for cut in (before, after))
        if was != now:
            yield f"the replicas of {stage.key} take {_ratio(now)} micro-batches, and took {_ratio(was)}"


def _order(cut: Cut, stage: int) -> Order:
    return cut.orders[stage] if cut.orders else ()


def _ratio(numbers: Iterable[int]) -> str:
    return " : ".join(map(str, numbers))


def slowness(heard: Speeds, cut: Cut) -> dict[int, tuple[float, ...]]:
    """The computing time of each replica relative to the slowest."""
    return {
        stage: tuple(told[host] / max(told.values()) for host in cut.routing.hosts[stage])
        for stage, told in heard.items()
    }


def replicas(cut: Cut, heard: Speeds, count: int) -> dict[str, StageReport]:
    """The work of stages' replicas in a step with these micro-batches, by the last measurement."""
    found = {}
    for number, told in heard.items():
        stage = cut.program.stages[number]
        hosts = zip(cut.routing.hosts[number], take_counts(_order(cut, number), stage.replicas, count), strict=True)
        found[stage.key] = busiest([StageReport(share * told[host], cluster=stage.cluster) for host, share in hosts])
    return found
