"""From measured steps to a pace: what the in-flight limits and the prediction of a step are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from whale_nebula.config import Links
from whale_nebula.ir.plan import Cut
from whale_nebula.report.report import Span
from whale_nebula.runtime.sizes import messages
from whale_nebula.schedule.limits import Pace
from whale_nebula.schedule.lines import Hop, Line, Work, pace
from whale_nebula.schedule.simulate import simulate
from whale_nebula.wire.frame import wire_bytes

_SKIP = 1  # the first step also pays for TensorFlow's own warming up


@dataclass
class Measured:
    """Median seconds of each stage's forward and backward of a micro-batch, over the last steps."""

    cut: Cut
    hosts: Sequence[str]
    links: Links
    steps: int = 0
    seconds: dict[tuple[int, str], list[float]] = field(default_factory=dict)

    def add(self, spans: Mapping[int, Sequence[Span]]) -> None:
        """Take in a step's spans, by stage."""
        self.steps += 1
        if self.steps <= _SKIP:
            return
        for stage, own in spans.items():
            for span in own:
                kept = self.seconds.setdefault((stage, span.what.split()[0]), [])
                kept.append(span.end - span.start)
                del kept[:-64]

    def works(self) -> list[Work] | None:
        """What each stage computes for a micro-batch; None before it was measured."""
        found = [self._work(stage) for stage in range(len(self.cut.program.stages))]
        known = [work for work in found if work is not None]
        return known if len(known) == len(found) else None

    def _work(self, stage: int) -> Work | None:
        forward, backward = self._median(stage, "forward"), self._median(stage, "backward")
        fused = self._median(stage, "fused")
        if fused is not None:
            return Work(0.0, fused)
        return None if forward is None else Work(forward, backward)

    def _median(self, stage: int, what: str) -> float | None:
        kept = sorted(self.seconds.get((stage, what), ()))
        return kept[len(kept) // 2] if kept else None

    def hops(self, rows: int) -> dict[tuple[int, int], Hop]:
        """What crosses between stages for a micro-batch, and over which lines."""
        there: dict[tuple[int, int], float] = {}
        for message in messages(self.cut, self.hosts, rows):
            key = (message.source, message.destination)
            there[key] = there.get(key, 0.0) + wire_bytes(message.payload)
        pairs = {(a, b) if a < b else (b, a) for a, b in there}
        return {(a, b): self._hop(a, b, there) for a, b in sorted(pairs)}

    def _hop(self, a: int, b: int, sizes: Mapping[tuple[int, int], float]) -> Hop:
        return Hop(self._line(a, b), self._line(b, a), sizes.get((a, b), 0.0), sizes.get((b, a)))

    def _line(self, a: int, b: int) -> Line | None:
        if self.hosts[a] == self.hosts[b]:
            return None
        line = self.links.between(self.hosts[a], self.hosts[b])
        rate = line.rate / 8 if line.rate else float("inf")
        return Line(f"{self.hosts[a]}->{self.hosts[b]}", rate, line.delay)

    def pace(self, rows: int) -> Pace | None:
        """The pace of a micro-batch of `rows` rows, or None before anything was measured."""
        works = self.works()
        return None if works is None else pace(works, self.hops(rows))

    def predicted(self, counts: Sequence[int]) -> float | None:
        """Seconds that the simulator gives for the micro-batches of a step, its updates left out."""
        works = self.works()
        if works is None or len(self.cut.phases) > 1:
            return None
        pipeline = self.cut.program.pipeline
        return simulate(
            works, self.hops(counts[0]), len(counts), name=pipeline.schedule, in_flight=pipeline.in_flight
        ).seconds
