"""The runner of a step whose clusters are all in this process, joined by emulated links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, cast

from whale_nebula.config import Links
from whale_nebula.feed.batch import Batch, cut, micro_batches
from whale_nebula.ir.cut import Exchange, PhasePlan
from whale_nebula.ir.program import PartKey
from whale_nebula.passes.exchange import Bundle
from whale_nebula.passes.replicas import pieces_here
from whale_nebula.report.records import LinkReport
from whale_nebula.runtime.exchange.auto import Outlook
from whale_nebula.runtime.exchange.channels import Channels
from whale_nebula.runtime.exchange.expected import known_rows
from whale_nebula.runtime.exchange.post import Post
from whale_nebula.runtime.exchange.state import States
from whale_nebula.runtime.step.actors import ActorStep, seat_replicas
from whale_nebula.runtime.step.clock import Clocks, LineClock, Runner, StepOutcome, add_line_seconds
from whale_nebula.runtime.step.compiled import Compiled
from whale_nebula.runtime.step.estimates import Measured, Seen, paces
from whale_nebula.runtime.step.rollback import Guard
from whale_nebula.runtime.step.stage_run import StageRun
from whale_nebula.schedule.schedules import Pace
from whale_nebula.transport import MemoryNetwork
from whale_nebula.transport.protocol import Key, KeyKind, Link, LinkTotals

Parts = dict[PartKey, tuple[Any, ...]]


@dataclass
class Rehearsal:
    """The exchange of one step. It stands where an update has its peers in several processes."""

    exchange: Sequence[Exchange]
    links: Mapping[tuple[str, str], Link]
    program: int
    step: int
    rows: int
    patience: float

    def even(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """The replicas of a stage share one memory."""

    def parts(self, phase: PhasePlan, own: Parts) -> Parts:
        """Let the lines carry what the update of a phase would exchange, round after round; gives the parts back."""
        due = [each for each in self.exchange if each.phase == phase.index]
        for number in sorted({each.round for each in due}):
            self._carry([each for each in due if each.round == number], own)
        return own

    def _carry(self, together: Sequence[Exchange], own: Parts) -> None:
        for each in together:
            size = _size(each, own, self.rows)
            self.links[each.source, each.destination].send(self._key(each), None, raw_bytes=size, size=size)
        for each in together:
            self.links[each.destination, each.source].receive(self._key(each), self.patience)

    def _key(self, each: Exchange) -> Key:
        kind = cast(KeyKind, each.kind)
        return Key(kind, self.program, self.step, each.phase, -1 - each.copy, each.slot, each.source, each.destination)

    def send(self, bundle: Bundle, tensors: Sequence[Any]) -> None:
        """Between the fragments of one process nothing crosses."""

    def receive(self, bundle: Bundle) -> Sequence[Any]:
        """Between the fragments of one process nothing crosses."""
        return ()

    def later(self, bundle: Bundle) -> Sequence[Any]:
        """Between the fragments of one process nothing crosses."""
        return ()


def _size(each: Exchange, own: Parts, rows: int) -> int:
    """Bytes of what is sent: a result has the rows of the batch, a sparse gradient as many as the batch asked for."""
    if each.part is None:
        return each.spec.nbytes(unknown=rows)
    tensor = own[each.part][each.piece]
    return int(tensor.shape.num_elements()) * int(tensor.dtype.size)


PATIENCE = 3600.0


@dataclass
class EmulatedStep(Runner):
    """Runs steps by actors over memory links."""

    compiled: Compiled
    variables: Mapping[str, Any]
    lines: Links
    program: int = 0
    steps: int = 0
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    clocks: Clocks | None = None
    states: States = field(default_factory=States)
    seed: int = 0

    def __post_init__(self) -> None:
        self.hosts = [stage.cluster for stage in self.compiled.cut.program.stages]
        self.routing = self.compiled.cut.routing_by_cluster
        self.seats = seat_replicas(self.compiled, self.routing)
        self.actors = ActorStep(self.compiled, self.routing, len(self.seats))
        self.channels = Channels(self.compiled.cut, self.routing, self.states, self.seed)
        self.measured = Measured(self.compiled.cut, self.hosts, self.lines)
        self.seen = Seen([f"{a}->{b}" for a, b in permutations(dict.fromkeys(self.hosts), 2)], self.lines, exact=True)
        self._connect()

    def _connect(self) -> None:
        pairs = list(permutations(dict.fromkeys(self.hosts), 2))
        network = MemoryNetwork({(a, b): self.lines.between(a, b) for a, b in pairs})
        self.links = {(a, b): network.link(a, b, a, b) for a, b in pairs}

    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run one step."""
        program = self.compiled.cut.program
        counts = micro_batches(program.leaves, tensors, pieces_here(program))
        batch = cut(program.leaves, tensors, counts)
        plan = self.compiled.cut
        guard = Guard(self.variables, plan.forward_written, whereabouts=self.compiled.whereabouts, updates=plan.updates)
        before = {pair: link.totals() for pair, link in self.links.items()}
        medians = self.measured.medians()
        outlook = self.seen.outlook(batch.rows, medians)
        links = ((f"{a}->{b}", link) for (a, b), link in self.links.items())
        self.clocks = clocks = Clocks.start(self.seats, LineClock.start(self.program, self.steps, links))
        results = self._results(batch, clocks, guard, paces(self.measured.phases(batch.rows[0], medians)), outlook)
        seconds = clocks.seconds()
        self.measured.add(clocks)
        self.measured.uses(self.channels.boundaries())
        self.steps += 1
        carried = add_line_seconds(self._since(before), clocks.lines.told)
        self.seen.add(clocks.lines.told)
        return StepOutcome(
            results,
            seconds=seconds,
            counts=counts,
            stages=clocks.reports(),
            links=carried,
            spans=clocks.spans(),
            basis=self.measured.basis(counts, medians),
            boundaries=self.channels.reports(),
            said=self.channels.told(),
        )

    def _results(
        self, batch: Batch, clocks: Clocks, guard: Guard, paces: Sequence[Pace], outlook: Outlook
    ) -> list[Any]:
        known = known_rows(self.compiled.cut.program.leaves, batch.whole, batch.rows)
        self.channels.begin(batch.slices, outlook, known)
        post = Post(self.channels, self.links, self.program, self.steps, PATIENCE, clocks=clocks.stages)
        try:
            rows = sum(batch.rows)
            peers = Rehearsal(self.compiled.cut.exchange, self.links, self.program, self.steps, rows, PATIENCE)
            results = self.actors.run(
                batch, post, clocks, guard, paces, peers=peers, blame=self._fail_links,
                left_out=lambda phase: bool(self.channels.left_out),
            )  # fmt: skip
            if self.channels.left_out:
                self.channels.undo()
            return results
        except BaseException:
            self.channels.undo()
            self.steps += 1
            self._connect()
            raise
        finally:
            self.channels.done()

    def _fail_links(self, failure: BaseException) -> BaseException:
        """Who waits for something at a link stops waiting."""
        for link in self.links.values():
            link.fail({"what": str(failure)})
        return failure

    def _since(self, before: Mapping[tuple[str, str], LinkTotals]) -> dict[str, LinkReport]:
        found = {}
        for (a, b), link in self.links.items():
            sent = link.totals() - before[a, b]
            found[f"{a}->{b}"] = LinkReport(sent.payload_bytes, sent.bytes, sent.raw_bytes, sent.frames)
        return {name: link for name, link in found.items() if link.frames}

    def close(self) -> None:
        """Let the threads go."""
        self.actors.close()
