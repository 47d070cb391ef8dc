"""How long messages are on their way between stages of several processes, and the pace that follows from it.

No process sees a way there and back, and no two have one clock. But a stage sees how long its first micro-batch is away
(from the end of its forward to the beginning of its backward), the next stage how long it keeps that, and the
difference is the trip. Only the first micro-batch tells it: it meets stages that are idle, so no queue counts as a way.

Every process says what it has seen with each step. All know the same then, and come to the same in-flight limits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from whale_nebula.ir.cut import Cut, PhasePlan
from whale_nebula.report.records import Span
from whale_nebula.runtime.clock import CODING, Clocks
from whale_nebula.schedule.limits import Pace

_SKIP = 1  # the first step also pays for TensorFlow's own warming up
_KEPT = 16
Seen = Mapping[str, float]
"""Seconds by "phase.stage.kind": "forward", "backward" or "fused" of any micro-batch; and by "phase.stage.first.kind":
"away" and "kept" of the first one, "held" of the line that this stage's process keeps busiest for a micro-batch.
"""


@dataclass
class Trips:
    """What the stages of this process saw in the last steps."""

    steps: int = 0
    _seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, clocks: Clocks) -> None:
        """Take in a step."""
        self.steps += 1
        if self.steps <= _SKIP:
            return
        for (stage, _), clock in clocks.stages.items():
            for what, seconds in _first(clock.spans):
                self._keep(f"{what[0]}.{stage}.first.{what[1]}", seconds)
        for phase, seconds in _held(clocks.lines.told):
            self._keep(f"{phase}.{min((seat.stage for seat in clocks.stages), default=0)}.first.held", seconds)

    def _keep(self, what: str, seconds: float) -> None:
        self._seconds[what].append(seconds)
        del self._seconds[what][:-_KEPT]

    def seen(self) -> Seen:
        """The medians; nothing before the second step."""
        return {what: median(kept) for what, kept in self._seconds.items()}


def _first(spans: Sequence[Span]) -> Iterator[tuple[tuple[int, str], float]]:
    """How long the first micro-batch was kept, and how long it was away meanwhile, by phase."""
    by_phase: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.micro_batch == 0 and not span.what.startswith(CODING):
            by_phase[span.phase].append(span)
    for phase, own in by_phase.items():
        yield (phase, "kept"), own[-1].end - own[0].start
        if len(own) > 1:
            yield (phase, "away"), own[-1].start - own[0].end


def _held(told: Sequence[Span]) -> Iterator[tuple[int, float]]:
    """For how long a micro-batch held the line that was busiest, by phase."""
    seconds: defaultdict[tuple[int, str, int], float] = defaultdict(float)
    for span in told:
        if span.micro_batch is not None:
            seconds[span.phase, span.lane, span.micro_batch] += span.end - span.start
    lines: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for (phase, lane, _), each in seconds.items():
        lines[phase, lane].append(each)
    busiest: defaultdict[int, float] = defaultdict(float)
    for (phase, _), many in lines.items():
        busiest[phase] = max(busiest[phase], median(many))
    yield from busiest.items()


def paces(cut: Cut, seen: Seen) -> list[Pace]:
    """The pace of every phase; none before all of them were seen."""
    found = [_pace(phase, len(cut.program.stages), seen) for phase in cut.phases]
    known = [pace for pace in found if pace is not None]
    return known if len(known) == len(found) else []


def _pace(phase: PhasePlan, stages: int, seen: Seen) -> Pace | None:
    kinds = ("forward", "backward", "fused")
    compute = max(sum(seen.get(f"{phase.index}.{stage}.{kind}", 0.0) for kind in kinds) for stage in range(stages))
    if compute <= 0.0:
        return None
    trips = tuple(_trip(phase.index, stage, seen) for stage in range(stages - 1))
    held = max(seen.get(f"{phase.index}.{stage}.first.held", 0.0) for stage in range(stages))
    return Pace(compute, trips, held).cautious


def _trip(phase: int, stage: int, seen: Seen) -> float:
    away = seen.get(f"{phase}.{stage}.first.away", 0.0)
    return away - seen.get(f"{phase}.{stage + 1}.first.kept", 0.0)
