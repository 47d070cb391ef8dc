"""The runner of a step whose clusters are all in this process, joined by emulated links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, cast

from whale_nebula.feed.inputs import cut, micro_batches
from whale_nebula.ir.cut import Exchange, PhasePlan
from whale_nebula.passes.replicas import pieces_here
from whale_nebula.runtime.exchange.expected import known_rows
from whale_nebula.runtime.exchange.post import Post
from whale_nebula.runtime.step.actors import ActorStep, OneStep
from whale_nebula.runtime.step.clock import StepOutcome
from whale_nebula.runtime.step.measured import LineRates
from whale_nebula.runtime.step.peers import Parts, Peers
from whale_nebula.runtime.step.rollback import Guard
from whale_nebula.schedule.lines import pace
from whale_nebula.transport import Key, KeyKind, Link, MemoryNetwork

PATIENCE = 3600.0


@dataclass
class EmulatedPeers(Peers):
    """Where an update has its peers in several processes, lines of one process carry as many bytes for as long."""

    exchange: Sequence[Exchange]
    links: Mapping[tuple[str, str], Link]
    program: int
    step: int
    rows: int

    def parts(self, phase: PhasePlan, own: Parts) -> Parts:
        """Let the lines carry what the update of a phase would exchange, round after round; gives the parts back."""
        due = [each for each in self.exchange if each.phase == phase.index]
        for number in sorted({each.round for each in due}):
            together = [each for each in due if each.round == number]
            for each in together:
                size = _size(each, own, self.rows)
                self.links[each.source, each.destination].send(self._key(each), None, raw_bytes=size, size=size)
            for each in together:
                self.links[each.destination, each.source].receive(self._key(each), PATIENCE)
        return own

    def _key(self, each: Exchange) -> Key:
        kind = cast(KeyKind, each.kind)
        return Key(kind, self.program, self.step, each.phase, -1 - each.copy, each.slot, each.source, each.destination)


def _size(each: Exchange, own: Parts, rows: int) -> int:
    """Bytes of what is sent: a result has the rows of the batch, a sparse gradient as many as the batch asked for."""
    if each.part is None:
        return each.spec.nbytes(unknown=rows)
    tensor = own[each.part][each.piece]
    return int(tensor.shape.num_elements()) * int(tensor.dtype.size)


@dataclass
class EmulatedStep(ActorStep):
    """Runs steps over memory links. Its hosts are the clusters."""

    def __post_init__(self) -> None:
        clusters = dict.fromkeys(stage.cluster for stage in self.compiled.cut.program.stages)
        self.pairs = list(permutations(clusters, 2))
        rates = LineRates([f"{a}->{b}" for a, b in self.pairs], self.lines, exact=True)
        self._set_up(self.compiled.cut.routing_by_cluster, lambda host: True, {}, rates)
        self._connect()

    def _connect(self) -> None:
        network = MemoryNetwork({(a, b): self.lines.between(a, b) for a, b in self.pairs})
        self.links = {(a, b): network.link(a, b, a, b) for a, b in self.pairs}

    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run one step. One that fails leaves nothing on its links."""
        plan = self.compiled.cut
        counts = micro_batches(plan.program.leaves, tensors, pieces_here(plan.program))
        batch = cut(plan.program.leaves, tensors, counts)
        medians = self.measured.medians()
        clocks, before = self._start_clocks(), self._totals()
        step = OneStep(
            batch,
            Post(
                self.channels, self.links, self.program, self.steps, PATIENCE, batch.slices,
                known_rows(plan.program.leaves, batch.whole, batch.rows),
                self.rates.outlook(batch.rows, medians), clocks=clocks.stages,
            ),
            clocks,
            Guard(self.variables, plan.forward_written, whereabouts=self.compiled.whereabouts, updates=plan.updates),
            EmulatedPeers(plan.exchange, self.links, self.program, self.steps, sum(batch.rows)),
            [pace(phase.works, phase.hops) for phase in self.measured.phases(batch.rows[0], medians)],
        )  # fmt: skip
        try:
            results = self.run_stages(step)
        except BaseException:
            step.post.undo()
            self.steps += 1
            self._connect()
            raise
        seconds = clocks.seconds()
        self._measure(step)
        return self._report(step, results, seconds, self._count_links(before, clocks), medians)

    def _blame(self, step: OneStep, failure: BaseException) -> BaseException:
        """Who waits for something at a link stops waiting."""
        for link in self.links.values():
            link.fail({"what": str(failure)})
        return failure
