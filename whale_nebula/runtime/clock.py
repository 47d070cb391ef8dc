"""How a stage spends its time: computing and waiting, with a span for each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from whale_nebula.report.report import Span, StageReport


@dataclass
class StageClock:
    """The time of one stage in one step, in seconds from the step's start."""

    lane: str
    start: float
    compute: float = 0.0
    waiting: float = 0.0
    spans: list[Span] = field(default_factory=list)

    @contextlib.contextmanager
    def computing(self, what: str) -> Iterator[None]:
        """Time a piece of computing."""
        began = time.perf_counter()
        yield
        ended = time.perf_counter()
        self.compute += ended - began
        self.spans.append(Span(self.lane, what, began - self.start, ended - self.start))

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Time a wait for other stages."""
        began = time.perf_counter()
        yield
        self.waiting += time.perf_counter() - began

    def report(self) -> StageReport:
        """What the report of the step says of the stage."""
        return StageReport(self.compute, self.waiting)
