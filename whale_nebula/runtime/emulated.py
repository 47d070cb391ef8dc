"""A step whose clusters all live in this process, joined by lines that behave like slow ones."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from whale_nebula.config import Links
from whale_nebula.feed.batch import Batch, cut, micro_batches
from whale_nebula.report.report import LinkReport
from whale_nebula.runtime.actors import ActorStep
from whale_nebula.runtime.clock import StageClock
from whale_nebula.runtime.compiled import Compiled
from whale_nebula.runtime.guard import Guard
from whale_nebula.runtime.outcome import StepOutcome
from whale_nebula.runtime.pace import Measured
from whale_nebula.runtime.post import Post, Slots
from whale_nebula.transport import Link, MemoryNetwork
from whale_nebula.transport.protocol import LinkTotals

PATIENCE = 3600.0


@dataclass
class EmulatedStep:
    """Runs steps by actors over memory links."""

    compiled: Compiled
    variables: Mapping[str, Any]
    lines: Links
    program: int = 0
    steps: int = 0
    links: dict[tuple[str, str], Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hosts = [stage.cluster for stage in self.compiled.cut.program.stages]
        self.actors = ActorStep(self.compiled)
        self.slots = Slots(self.compiled.cut)
        self.measured = Measured(self.compiled.cut, self.hosts, self.lines)
        self._connect()

    def _connect(self) -> None:
        pairs = list(permutations(dict.fromkeys(self.hosts), 2))
        network = MemoryNetwork({(a, b): self.lines.between(a, b) for a, b in pairs})
        self.links = {(a, b): network.link(a, b, a, b) for a, b in pairs}

    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run one step."""
        program = self.compiled.cut.program
        counts = micro_batches(program.leaves, tensors, program.pipeline.micro_batch)
        batch = cut(program.leaves, tensors, counts)
        guard = Guard(self.variables, self.compiled.cut.forward_written)
        before = self._totals()
        start = time.perf_counter()
        clocks = {s: StageClock(program.stages[s].key, start) for s in self.compiled.stages}
        results = self._results(batch, clocks, guard)
        seconds = time.perf_counter() - start
        spans = {stage: clock.spans for stage, clock in clocks.items()}
        self.measured.add(spans)
        self.steps += 1
        return StepOutcome(
            results,
            seconds=seconds,
            counts=counts,
            stages={clock.lane: clock.report() for clock in clocks.values()},
            links=self._since(before),
            spans=tuple(span for own in spans.values() for span in own),
            predicted=self.measured.predicted(counts),
        )

    def _results(self, batch: Batch, clocks: Mapping[int, StageClock], guard: Guard) -> list[Any]:
        post = Post(self.slots, self.hosts, self.links, self.program, self.steps, PATIENCE)
        pace = self.measured.pace(batch.rows[0])
        try:
            return self.actors.run(batch, post, clocks, guard, pace, blame=self._tell)
        except BaseException:
            self.steps += 1
            self._connect()
            raise

    def _tell(self, failure: BaseException) -> BaseException:
        """Who waits for something at a link stops waiting."""
        for link in self.links.values():
            link.fail({"what": str(failure)})
        return failure

    def _totals(self) -> dict[tuple[str, str], LinkTotals]:
        return {pair: link.totals() for pair, link in self.links.items()}

    def _since(self, before: Mapping[tuple[str, str], LinkTotals]) -> dict[str, LinkReport]:
        found = {}
        for (a, b), link in self.links.items():
            sent = link.totals() - before[a, b]
            found[f"{a}->{b}"] = LinkReport(sent.payload_bytes, sent.bytes, sent.raw_bytes, sent.frames)
        return {name: link for name, link in found.items() if link.frames}

    def close(self) -> None:
        """Let the threads go."""
        self.actors.close()
