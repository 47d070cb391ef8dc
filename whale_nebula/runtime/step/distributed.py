"""The runner of a step whose clusters are separate processes: this one runs its stages and exchanges the rest."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import eq
from typing import Any

from whale_nebula.config import Links
from whale_nebula.errors import InputMismatchError, LinkClosedError, PlanMismatchError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.faults import failpoint
from whale_nebula.feed.batch import Batch, cut, micro_batches
from whale_nebula.feed.checks import absent_in, fingerprints
from whale_nebula.feed.inputs import Given, take_inputs
from whale_nebula.ir.cut import Cut
from whale_nebula.launch.ending import departure
from whale_nebula.passes.readings import check_here, rows_read
from whale_nebula.passes.replicas import sums_of
from whale_nebula.report.records import Elsewhere, LinkReport, StageReport
from whale_nebula.runtime.exchange.channels import Channels
from whale_nebula.runtime.exchange.expected import known_rows
from whale_nebula.runtime.exchange.post import Post
from whale_nebula.runtime.exchange.state import States
from whale_nebula.runtime.replicas.bucketed_allreduce import find_groups
from whale_nebula.runtime.replicas.collectives import Collectives
from whale_nebula.runtime.replicas.exchange import Mates
from whale_nebula.runtime.session.session import Session
from whale_nebula.runtime.split.shards import Shards, SplitExchange
from whale_nebula.runtime.step.actors import ActorStep, seat_replicas
from whale_nebula.runtime.step.clock import Clocks, LineClock, Runner, StepOutcome, add_line_seconds
from whale_nebula.runtime.step.compiled import Compiled
from whale_nebula.runtime.step.estimates import Measured, Medians, Seen
from whale_nebula.runtime.step.measurements import (
    Heard,
    Look,
    Trips,
    better_orders,
    changes,
    looked_at,
    paces,
    replicas,
    slowness,
)
from whale_nebula.runtime.step.measurements import hear as hear_speeds
from whale_nebula.runtime.step.once import Wires
from whale_nebula.runtime.step.rollback import Guard
from whale_nebula.runtime.variables.checksums import due, sums
from whale_nebula.transport.protocol import LinkTotals

Told = Mapping[str, Any]
_MOST = 1000  # a peer may tell of no more stages or links than this


def tell(stages: Mapping[str, StageReport], links: Mapping[str, LinkReport]) -> Told:
    """A step of this process, as plain lists.

    >>> tell({"gpu": StageReport(0.25, 0.5, cluster="gpu", in_flight=2)}, {"gpu->npu": LinkReport(8, 10, 8, 1, 0.5)})
    {'stages': {'gpu': [0.25, 0.5, 2, 'gpu']}, 'links': {'gpu->npu': [8, 10, 8, 1, 0.5]}}
    """
    return {
        "stages": {
            name: [_short(each.compute_seconds), _short(each.wait_seconds), each.in_flight, each.cluster]
            for name, each in stages.items()
        },
        "links": {
            name: [each.payload_bytes, each.bytes, each.raw_bytes, each.frames, _short(each.seconds)]
            for name, each in links.items()
        },
    }


def hear(sheets: Iterable[Mapping[str, Any]]) -> Elsewhere:
    """The stages and links that others told of; what is no such thing is left out, as it is only shown.

    >>> found = hear([{"seen": {"stages": {"npu": [0.5, 0.1, 1, "npu"]}, "links": {}}}, {"seen": None}, {}])
    >>> found.stages["npu"].wait_seconds, found.links
    (0.1, {})
    """
    stages: dict[str, StageReport] = {}
    links: dict[str, LinkReport] = {}
    for sheet in sheets:
        seen = sheet.get("seen")
        for name, numbers in _table(seen, "stages", 4):
            compute, wait, in_flight, cluster = numbers
            cluster = escape_foreign_text(cluster)
            stages[name] = StageReport(_float(compute), _float(wait), cluster, _int(in_flight) or None)
        for name, numbers in _table(seen, "links", 5):
            payload, total, raw, frames = map(_int, numbers[:4])
            links[name] = LinkReport(payload, total, raw, frames, _float(numbers[4]) or 0.0)
    return Elsewhere(stages, links)


def _table(seen: Any, part: str, columns: int) -> list[tuple[str, list[Any]]]:
    found = seen.get(part) if isinstance(seen, dict) else None
    rows = list(found.items())[:_MOST] if isinstance(found, dict) else []
    return [(escape_foreign_text(name), row) for name, row in rows if isinstance(row, list) and len(row) == columns]


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _float(given: Any) -> float | None:
    return float(given) if isinstance(given, int | float) else None


def _int(given: Any) -> int:
    return given if isinstance(given, int) else 0


_LOG = logging.getLogger("whale_nebula.runtime.run")

Agreed = Future[Mapping[str, Mapping[str, Any]]]
"""What every peer says of a step, once all have said the same."""


@dataclass
class DistributedStep(Runner):
    """Runs steps of one program together with the other workers.

    `readers` are the workers that read each input that not all processes have: its checksum goes to them alone.
    Where it `stays`, shares are not moved as it runs: what feeds it reads the rows of its own.
    """

    takes_parts = True
    compiled: Compiled
    variables: Mapping[str, Any]
    session: Session
    name: str
    program: int
    ids: frozenset[str] = frozenset()
    lines: Links = field(default_factory=Links)
    lazy: bool = False
    readers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    checked: set[tuple[int, ...]] = field(default_factory=set)
    steps: int = 0
    clocks: Clocks | None = None
    seen: Told | None = None
    trips: Trips = field(default_factory=Trips)
    look: Look = field(default_factory=Look)
    heard: Heard = field(default_factory=dict)
    version: int = 1
    stays: bool = False
    states: States = field(default_factory=States)
    seed: int = 0
    collectives: Collectives | None = None
    leaves: bool = True
    shards: Shards | None = None
    watch: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "nebula-agree"))
    promises: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "nebula-later"))

    def __post_init__(self) -> None:
        self.routing = self.compiled.cut.routing
        self.clusters = {w.name: w.cluster for w in self.compiled.cut.workers}
        self.seats = seat_replicas(self.compiled, self.routing)
        self.added = find_groups(self.compiled, self.collectives, self.program)
        self.actors = ActorStep(self.compiled, self.routing, len(self.seats), self.added)
        here = partial(eq, self.session.worker)
        self.channels = Channels(self.compiled.cut, self.routing, self.states, self.seed, here, self.clusters)
        clusters = [stage.cluster for stage in self.compiled.cut.program.stages]
        self.measured = Measured(self.compiled.cut, clusters, self.lines, paced=False)
        self.links = {(self.session.worker, peer): link for peer, link in self.session.links.items()}
        held = self.compiled.cut.held
        own = self.clusters[self.session.worker]
        others = dict.fromkeys(cluster for cluster in self.clusters.values() if cluster != own)
        self.carried = Seen([f"{own}->{other}" for other in others], self.lines)
        self.pace: Medians = {}
        self.shared: tuple[str, ...] = ()
        self.held_here = frozenset(v for v in self.variables if self.session.worker in held.get(v, ()))
        self.reads = rows_read(self.compiled.cut, self.session.worker)
        self.written_here = [v for v in self.compiled.cut.forward_written if self.session.worker in held.get(v, ())]

    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run one step; what fails here is told to all. Who leaves with all others does so before it."""
        departure.begin()
        try:
            return self._run(tensors)
        except BaseException as failure:
            self.session.fail(failure)
            raise

    def _run(self, tensors: Sequence[Any]) -> StepOutcome:
        program = self.compiled.cut.program
        self._check_here(absent_in(tensors))
        counts = micro_batches(program.leaves, tensors, program.pipeline.micro_batch)
        rows = known_rows(program.leaves, tensors, counts)
        self.session.expected.begin_step(self.program, self.steps, rows)
        inputs = take_inputs(program.leaves, tensors, self.reads)
        self.stays = self.stays or bool(inputs.rows)
        before = {peer: link.totals() for peer, link in self.session.links.items()}
        seen = {**self.measured.medians(), **self.trips.seen()}
        medians = {what: round(seconds, 6) for what, seconds in seen.items()}
        self.clocks = clocks = Clocks.start(self.seats, self._lines())
        self.actors.looked_at = self.looks and looked_at(self.steps)
        asked, speeds = departure.asked if self.leaves else None, dict(self.look.told)
        agreed = self._announce(inputs, counts, medians, asked)
        batch = cut(program.leaves, inputs.tensors, counts).in_rows()
        results = self._results(batch, rows, clocks, agreed)
        told = {peer: sheet.get("leaving") for peer, sheet in agreed.result().items()}
        departure.settle({self.session.worker: asked, **told})
        seconds = clocks.seconds()
        self.measured.add(clocks)
        self.trips.add(clocks)
        if self.looks:
            self.look.add(self.steps, clocks)
        self.measured.uses(self.channels.boundaries())
        self.steps += 1
        failpoint("step.after")
        _LOG.info("%s: applied %d of %r", self.session.worker, self.steps, self.name)
        stages, links = clocks.reports(), add_line_seconds(self._since(before), clocks.lines.told)
        self.seen = tell(stages, links)
        self.carried.add(clocks.lines.told)
        self.pace = _together(agreed, medians)
        known = replicas(self.compiled.cut, self.heard, len(counts))
        self._settle({self.session.worker: {"speeds": speeds, "stays": self.stays}, **agreed.result()})
        return StepOutcome(
            results,
            seconds=seconds,
            counts=counts,
            stages=_with(stages, known),
            links=links,
            elsewhere=_besides(hear(agreed.result().values()), stages, known),
            spans=clocks.spans(),
            basis=self.measured.basis(counts, self.pace),
            boundaries=self.channels.reports(),
            said=self.channels.told(),
            notes=self.shared,
        )

    def _settle(self, sheets: Mapping[str, Mapping[str, Any]]) -> None:
        """All processes have heard the same of how fast replicas are: from the next step on each has its share."""
        cut, heard = self.compiled.cut, hear_speeds(self.compiled.cut, sheets)
        if heard == self.heard:
            return
        self.heard, self.measured.slowness = heard, slowness(heard, cut)
        orders = better_orders(cut, heard)
        stays = any(sheet.get("stays") for sheet in sheets.values())
        if orders != cut.orders and not stays:
            self._move(replace(cut, orders=orders))

    def _move(self, cut: Cut) -> None:
        """Go on by a new version of the plan, in which replicas have other shares."""
        self.version += 1
        said = "; ".join(changes(self.compiled.cut, cut))
        self.shared = (f"plan version {self.version}, from step {self.steps + 1} on: {said}",)
        _LOG.info("%s: %r goes on by %s", self.session.worker, self.name, self.shared[0])
        self.compiled.cut = self.measured.cut = cut
        self.reads = rows_read(cut, self.session.worker)
        self.routing = self.actors.routing = cut.routing
        self.channels = replace(self.channels, routing=cut.routing)
        self.trips = Trips(self.trips.steps)

    @cached_property
    def looks(self) -> bool:
        """Whether it is looked at how fast replicas are. Where they add up on the way, all are as slow as one."""
        return bool(self.routing.replicated) and not sums_of(self.compiled.cut.program)

    def _check_here(self, absent: tuple[int, ...]) -> None:
        """Inputs may be here in one step and not in the next."""
        if absent not in self.checked:
            graph, line = self.compiled.cut.program.graph, self.compiled.whereabouts.line
            check_here(self.compiled.cut, self.session.worker, absent, lambda op: line(graph.ops[op].name))
            self.checked.add(absent)

    def _lines(self) -> LineClock:
        here = self.clusters[self.session.worker]
        far = {peer: link for peer, link in self.session.links.items() if self.clusters[peer] != here}
        links = ((f"{here}->{self.clusters[peer]}", link) for peer, link in far.items())
        return LineClock.start(self.program, self.steps, links)

    def _announce(self, inputs: Given, counts: Sequence[int], medians: Medians, asked: str | None) -> Agreed:
        """Say which step this is, and check beside the computing that all others say the same. Each also tells its
        pace, since a prediction needs that of all stages, what its last step was like, and whether it has to leave.
        """
        leaves = self.compiled.cut.program.leaves
        peers = self.session.links.keys()
        secret = {name for name, workers in self.readers.items() if not workers & peers}
        sheet = {
            "program": self.program,
            "name": self.name,
            "step": self.steps,
            "rows": sum(counts),
            "inputs": fingerprints(leaves, inputs.tensors, self.ids, secret, inputs.rows, counts),
            "pace": medians,
            "speeds": dict(self.look.told),
            "stays": self.stays,
            "leaving": asked,
            "seen": self.seen,
        }
        pieces = self.shards.paths if self.shards is not None else frozenset[str]()
        if (self.routing.replicated or pieces) and due(self.steps):
            whole = {path: variable for path, variable in self.variables.items() if path not in pieces}
            sheet["alike"] = sums(self.compiled.cut, self.session.worker, whole)
        self.session.start_step(sheet, inputs.mark, self._mates, self.readers)
        return self.watch.submit(self.session.check_step, sheet, inputs.mark)

    @property
    def _mates(self) -> list[str]:
        """The other workers of this cluster."""
        own = self.clusters[self.session.worker]
        return [peer for peer in self.session.links if self.clusters[peer] == own]

    def _results(self, batch: Batch, rows: Sequence[int], clocks: Clocks, agreed: Agreed) -> list[Any]:
        whereabouts = self.compiled.whereabouts
        guard = Guard(
            self.variables, self.written_here, alone=False, whereabouts=whereabouts, own=self.held_here,
            updates=self.compiled.cut.updates,
        )  # fmt: skip
        patience = self.session.patience
        self.channels.begin(batch.slices, self.carried.outlook(batch.rows, self.pace), rows)
        post = Post(self.channels, self.links, self.program, self.steps, patience, lambda host: False, clocks.stages)
        exchange = post if self.shards is None else SplitExchange(post, self.shards)
        agreed.add_done_callback(lambda done: _abort(post, done, self.session))
        cut, links, here = self.compiled.cut, self.session.links, self.session.worker
        mates = Mates(self.compiled, links, self.program, self.steps, patience, self.variables, self.added)
        wires = Wires(cut, here, links, self.program, self.steps, patience, self.promises, mates)
        blame = partial(_blame, agreed, self.session)
        results = self.actors.run(
            batch, exchange, clocks, guard, paces(cut, self.pace), peers=wires, lazy=self.lazy, agreed=agreed.result,
            blame=blame, left_out=self._left_out,
        )  # fmt: skip
        if self.channels.left_out:
            self.channels.undo()
        self.channels.done()
        return results

    def _left_out(self, phase: int) -> bool:
        """Whether any process says that the step is to be left out. They ask one another only where one might."""
        if not self.channels.may_skip:
            return False
        reasons = self.session.vote(self.name, self.steps, phase, self.channels.left_out)
        self.channels.leave_out(reasons)
        return bool(reasons)

    def _since(self, before: Mapping[str, LinkTotals]) -> dict[str, LinkReport]:
        here = self.clusters[self.session.worker]
        found: dict[str, LinkReport] = {}
        for peer, link in self.session.links.items():
            sent = link.totals() - before[peer]
            if self.clusters[peer] == here:
                continue
            name = f"{here}->{self.clusters[peer]}"
            report = LinkReport(sent.payload_bytes, sent.bytes, sent.raw_bytes, sent.frames)
            found[name] = found.get(name, LinkReport()) + report
        return found

    def close(self) -> None:
        """Let the threads go, once what was promised has come."""
        self.promises.shutdown()
        self.actors.close()
        self.watch.shutdown(wait=False, cancel_futures=True)


def _together(agreed: Agreed, own: Medians) -> Medians:
    """The pace of all stages, each as its own process told it; of a stage in several, that of the slowest."""
    found = dict(own)
    for sheet in agreed.result().values():
        for what, seconds in sheet.get("pace", {}).items():
            found[what] = max(seconds, found.get(what, seconds))
    return found


def _with(stages: Mapping[str, StageReport], known: Mapping[str, StageReport]) -> dict[str, StageReport]:
    """The stages, with what is known of all of their replicas."""
    told = {n: known.get(n, each) for n, each in stages.items()}
    return {n: replace(each, replicas=told[n].replicas, copies=told[n].copies) for n, each in stages.items()}


def _besides(told: Elsewhere, own: Mapping[str, StageReport], known: Mapping[str, StageReport]) -> Elsewhere:
    """What others told, and of stages that are not here what is known of their replicas."""
    far = {name: each for name, each in known.items() if name not in own}
    return replace(told, stages={**told.stages, **_with({**far, **told.stages}, far)}) if far else told


def _abort(post: Post, done: Agreed, session: Session) -> None:
    failure = done.exception() if not done.cancelled() else None
    if failure is not None:
        post.abort(failure)
        session.fail(failure)


_SOON = 1.0


def _blame(agreed: Agreed, session: Session, failure: BaseException) -> BaseException:
    """Where the processes do not do the same, that is why a stage failed. Whatever it was, all get to know."""
    cause = None
    with contextlib.suppress(TimeoutError):
        cause = agreed.exception(_SOON)
    differ = isinstance(cause, InputMismatchError | PlanMismatchError)
    if cause is None or not (differ or isinstance(failure, LinkClosedError)):
        cause = failure
    session.fail(cause)
    return cause
