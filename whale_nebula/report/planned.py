"""What the planner had predicted of a step beside what was measured of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from whale_nebula.report.records import Beside, duration, size

OFF = 0.2
"""A step that differs by more than this share from what was predicted is told."""
LEAST = 5e-3
"""So many seconds it must differ besides: what a call takes on a busy machine is less."""
_TELLING = 0.3
"""A term that explains less than this share of the difference is not named."""


@dataclass(frozen=True)
class PlannedReport:
    """A step of a plan that `nb.auto_parallel` has found: what was predicted before anything ran, beside the middle
    values of the `steps` that were measured since it was compiled.

    `stages` are seconds that each computes a step, `links` those for which a step holds each line, `memory` the bytes
    that a worker needs by the plan, beside the most that its process has had, Python and TensorFlow and all. `offer` is
    a better plan in words, where one was found with what was measured.
    """

    steps: int
    seconds: Beside
    stages: Mapping[str, Beside] = field(default_factory=dict)
    links: Mapping[str, Beside] = field(default_factory=dict)
    memory: Mapping[str, Beside] = field(default_factory=dict)
    offer: str = ""

    @property
    def off(self) -> float:
        """By which share of what was predicted the step takes longer.

        >>> PlannedReport(8, Beside(0.375, 0.25)).off
        0.5
        """
        return self.seconds.measured / self.seconds.predicted - 1.0 if self.seconds.predicted else 0.0

    @property
    def is_off(self) -> bool:
        """Whether that is so much that it is told."""
        return abs(self.off) > OFF and abs(self.seconds.gap) > LEAST

    @property
    def headline(self) -> str:
        """How long it takes, beside what was predicted, in words.

        >>> PlannedReport(8, Beside(0.375, 0.25)).headline
        '0.375 s, 50 % more than the 0.250 s that nb.auto_parallel predicted'
        """
        told = f"{duration(self.seconds.measured)}, {100 * abs(self.off):.0f} % {'more' if self.off > 0 else 'less'}"
        return f"{told} than the {duration(self.seconds.predicted or 0.0)} that nb.auto_parallel predicted"

    @property
    def cause(self) -> str:
        """The term that is most off, in a sentence.

        >>> PlannedReport(8, Beside(0.4, 0.3), {"gpu": Beside(0.3, 0.2)}, {"gpu->npu": Beside(0.1, 0.1)}).cause
        'stage gpu computes 0.300 s of it (predicted 0.200 s)'
        """
        terms = [(each, f"stage {name} computes", "of it") for name, each in self.stages.items()]
        terms += [(each, f"line {name} is held for", "of it") for name, each in self.links.items()]
        gap, verb, end = max(terms, key=lambda term: abs(term[0].gap), default=(Beside(0.0), "", ""))
        measured, predicted = duration(gap.measured), duration(gap.predicted or 0.0)
        if abs(gap.gap) >= _TELLING * abs(self.seconds.gap):
            return f"{verb} {measured} {end} (predicted {predicted})"
        return "no stage and no line is that far off: it is updates, calls and waiting"


def planned_lines(planned: PlannedReport) -> Iterator[str]:
    r"""The lines of a report.

    >>> print("\n".join(planned_lines(PlannedReport(8, Beside(0.4, 0.3), {"gpu": Beside(0.3, 0.2)}, offer="..."))))
    planned: 0.400 s, 33 % more than the 0.300 s that nb.auto_parallel predicted (the middle of 8 steps)
      stage gpu: computes 0.300 s (predicted 0.200 s)
      better: ...
    """
    yield f"planned: {planned.headline} (the middle of {planned.steps} step{'s' * (planned.steps != 1)})"
    yield from (f"  stage {name}: computes {each.text(duration)}" for name, each in planned.stages.items())
    if not planned.stages:
        yield "  its stages run as one function here, and are not timed apart"
    yield from (f"  line {name}: held for {each.text(duration)}" for name, each in planned.links.items())
    for name, each in planned.memory.items():
        yield f"  worker {name}: its process has had {each.text(size, ' for what the plan holds')}"
    if planned.offer:
        yield f"  better: {planned.offer}"
