"""Runner of a step whose clusters are separate processes: this process runs its stages and exchanges the rest."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import eq
from typing import Any

from whale_nebula.errors import InputMismatchError, LinkClosedError, PlanMismatchError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.faults import failpoint
from whale_nebula.feed.checks import compute_fingerprints, find_absent
from whale_nebula.feed.inputs import Batch, StepInputs, count_micro_batch_rows, divide_batch, unwrap_inputs
from whale_nebula.ir.cut import Cut
from whale_nebula.launch.worker_exit import exit_agreement
from whale_nebula.passes.readings import check_absent_inputs, find_rows_read
from whale_nebula.passes.replicas import find_replica_sums
from whale_nebula.report.records import LinkReport, RemoteMeasurements, StageReport, WorkerReport
from whale_nebula.runtime.exchange.admission import count_known_rows
from whale_nebula.runtime.exchange.link_exchange import LinkExchange
from whale_nebula.runtime.replicas.bucketed_allreduce import make_bucketed_allreduce
from whale_nebula.runtime.replicas.collectives import Collectives
from whale_nebula.runtime.run import current_run
from whale_nebula.runtime.session.session import Session, are_sums_due, checksum_variables, read_settings
from whale_nebula.runtime.split.shards import Shards, SplitExchange
from whale_nebula.runtime.step.actors import ActorStep, RunningStep
from whale_nebula.runtime.step.clock import Clocks, StepOutcome, count_bytes, measure_memory
from whale_nebula.runtime.step.measurements import (
    LineRates,
    Medians,
    Speeds,
    SpeedSampler,
    compute_paces,
    compute_slowness,
    describe_order_changes,
    improve_orders,
    is_sampled,
    parse_speeds,
    report_replicas,
)
from whale_nebula.runtime.step.peers import WorkerPeers
from whale_nebula.runtime.step.rollback import Guard

PeerReport = Mapping[str, Any]
"""The report of a process on its last step, which it sends with the announcement of the next one."""
_MAX_ENTRIES = 1000  # the maximum number of stages or links in a peer's report


def pack_report(
    stages: Mapping[str, StageReport], links: Mapping[str, LinkReport], workers: Mapping[str, WorkerReport]
) -> PeerReport:
    """The report of a step of this process, as plain lists.

    >>> stages = {"gpu": StageReport(0.25, 0.5, cluster="gpu", in_flight=2)}
    >>> pack_report(stages, {"gpu->npu": LinkReport(8, 10, 8, 1, 0.5)}, {"gpu/0": WorkerReport(4, 9)})["workers"]
    {'gpu/0': [4, 9]}
    """
    return {
        "workers": {name: [each.variable_bytes, each.peak_bytes] for name, each in workers.items()},
        "stages": {
            name: [
                _round_seconds(each.compute_seconds),
                _round_seconds(each.wait_seconds),
                each.in_flight,
                each.cluster,
            ]
            for name, each in stages.items()
        },
        "links": {
            name: [each.payload_bytes, each.bytes, each.raw_bytes, each.frames, _round_seconds(each.seconds)]
            for name, each in links.items()
        },
    }


def parse_reports(sheets: Iterable[Mapping[str, Any]]) -> RemoteMeasurements:
    """Parse reports of stages and links from other processes: of a stage in several of them that of the busiest.
    Invalid ones are dropped, because they are only displayed.

    >>> found = parse_reports([{"seen": {"stages": {"npu": [0.5, 0.1, 1, "npu"]}, "links": {}}}, {"seen": None}, {}])
    >>> found.stages["npu"].wait_seconds, found.links
    (0.1, {})
    """
    stages: dict[str, StageReport] = {}
    links: dict[str, LinkReport] = {}
    workers: dict[str, WorkerReport] = {}
    for sheet in sheets:
        seen = sheet.get("seen")
        for name, numbers in _read_table(seen, "stages", 4):
            compute, wait, in_flight, cluster = numbers
            cluster = escape_foreign_text(cluster)
            report = StageReport(_read_float(compute), _read_float(wait), cluster, _read_int(in_flight) or None)
            stages[name] = max(stages.get(name, report), report, key=lambda each: each.compute_seconds or 0.0)
        for name, numbers in _read_table(seen, "links", 5):
            payload, total, raw, frames = map(_read_int, numbers[:4])
            more = LinkReport(payload, total, raw, frames, _read_float(numbers[4]) or 0.0)
            links[name] = links.get(name, LinkReport()) + more  # several workers of a cluster send
        workers |= {name: WorkerReport(*map(_read_int, numbers)) for name, numbers in _read_table(seen, "workers", 2)}
    return RemoteMeasurements(stages, links, workers)


def _read_table(seen: Any, part: str, columns: int) -> list[tuple[str, list[Any]]]:
    found = seen.get(part) if isinstance(seen, dict) else None
    rows = list(found.items())[:_MAX_ENTRIES] if isinstance(found, dict) else []
    return [(escape_foreign_text(name), row) for name, row in rows if isinstance(row, list) and len(row) == columns]


def _round_seconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _read_float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _read_int(value: Any) -> int:
    return value if isinstance(value, int) else 0


_LOG = logging.getLogger("whale_nebula.runtime.run")
_CAUSE_SECONDS = 1.0
"""The longest wait for the comparison of announcements, which may be the cause of a stage's failure."""

Announcements = Future[Mapping[str, Mapping[str, Any]]]
"""The announcements of a step by every peer, once all of them match."""


@dataclass
class DistributedStep(ActorStep):
    """The runner of one program's steps together with the other workers, which are its hosts.

    `ids` are the names of inputs with sample ids. `readers` are the workers that read each input that not all processes
    have: its checksum is sent only to them. With `has_fixed_shares`, shares do not change during the run: the input
    pipeline reads only the process's own rows. `settings` are the paths of variables whose values are compared at each
    step, `all_written` those of the variables that the step writes in any process. Without `includes_all_processes`,
    those of other clusters train their own copies. `version` counts the versions of the plan, which differ in shares.
    """

    takes_partial_inputs = True
    session: Session = field(kw_only=True)
    name: str = field(kw_only=True)
    ids: frozenset[str] = frozenset()
    readers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    collectives: Collectives | None = None
    includes_all_processes: bool = True
    shards: Shards | None = None
    settings: Sequence[str] = ()
    all_written: Collection[str] = ()
    checked_absences: set[tuple[int, ...]] = field(default_factory=set)
    own_report: PeerReport | None = None
    speed_sampler: SpeedSampler = field(default_factory=SpeedSampler)
    replica_speeds: Speeds = field(default_factory=dict)
    version: int = 1
    has_fixed_shares: bool = False
    check_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "nebula-agree"))
    receive_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "nebula-later"))
    _running_step: RunningStep | None = None
    _known_changes: int = -1

    def __post_init__(self) -> None:
        cut, here = self.compiled.cut, self.session.worker
        self.clusters = {w.name: w.cluster for w in cut.workers}
        own = self.clusters[here]
        others = dict.fromkeys(cluster for cluster in self.clusters.values() if cluster != own)
        rates = LineRates([f"{own}->{other}" for other in others], self.lines)
        self._set_up(cut.routings[here], partial(eq, here), self.clusters, rates)
        self.channels = replace(self.channels, routing=cut.routing)
        self.allreduce = make_bucketed_allreduce(self.compiled, self.collectives, self.program)
        self.links = {(here, peer): link for peer, link in self.session.links.items()}
        self.mates = [peer for peer in self.session.links if self.clusters[peer] == own]
        self.pace: Medians = {}
        self.plan_notes: tuple[str, ...] = ()
        self.held_paths = frozenset(v for v in self.variables if here in cut.variable_workers.get(v, ()))
        self.held_bytes = count_bytes(self.variables[path] for path in self.held_paths)
        self.reads = find_rows_read(cut, here)
        self.written_paths = [v for v in cut.forward_written if here in cut.variable_workers.get(v, ())]

    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run one step; failures are announced to all processes. A coordinated exit happens before the step; if
        checkpoints are written, after everything is saved and before a step that they count.
        """
        if current_run().checkpoints is None:
            exit_agreement.begin_step()
        self._running_step = None
        try:
            outcome = self._run(tensors)
        except BaseException as failure:
            if self._running_step is not None and not self.torn:
                self._running_step.link_exchange.restore_states()
            self._send_failure(failure)
            raise
        self._running_step = None
        return outcome

    @property
    def torn(self) -> bool:
        """Whether the update of a failed step had begun."""
        return self._running_step is not None and self._running_step.guard.has_begun

    def _send_failure(self, failure: BaseException) -> None:
        """Announce a failure to all processes. If all are to save the state before this step, they may first complete
        the previous step.
        """
        self.session.fail(failure, last=current_run().checkpoints is not None and not self.torn)

    def _prepare_variables(self) -> None:
        """Prepare the variables if a program has changed their holders since the last step, or inside `gather`."""
        ledger = current_run().ledger
        if ledger.gathered:
            ledger.drop_outdated(self.variables[path] for path in self.all_written)
        if self.includes_all_processes and ledger.changes != self._known_changes:
            ledger.prepare_step(self.variables, self.compiled.cut.variable_workers, self.all_written)
            self._known_changes = ledger.changes

    def _run(self, tensors: Sequence[Any]) -> StepOutcome:
        program = self.compiled.cut.program
        self._prepare_variables()
        self._check_absent_inputs(find_absent(tensors))
        counts = count_micro_batch_rows(program.leaves, tensors, program.pipeline.micro_batch)
        rows = count_known_rows(program.leaves, tensors, counts)
        self.session.expected.begin_step(self.program, self.steps, rows)
        inputs = unwrap_inputs(program.leaves, tensors, self.reads)
        self.has_fixed_shares = self.has_fixed_shares or bool(inputs.rows)
        seen = {**self.measured.medians(), **self.rates.seconds()}
        medians = {what: round(seconds, 6) for what, seconds in seen.items()}
        clocks, before = self._start_clocks(), self._read_totals()
        self.is_sampled = self.samples_speeds and is_sampled(self.steps)
        departure_word = exit_agreement.announcement if self.includes_all_processes else None
        speeds = dict(self.speed_sampler.seconds)
        announcements = self._announce(inputs, counts, medians, departure_word)
        batch = divide_batch(program.leaves, inputs.tensors, counts).fill_rows()
        step = self._make_step(batch, rows, clocks, announcements)
        results = self.run_stages(step)
        leaving = {peer: sheet.get("leaving") for peer, sheet in announcements.result().items()}
        exit_agreement.conclude_step({self.session.worker: departure_word, **leaving})
        seconds = clocks.seconds()
        if self.samples_speeds:
            self.speed_sampler.add(self.steps, clocks)
        self._record_measurements(step)
        failpoint("step.after")
        _LOG.info("%s: applied %d of %r", self.session.worker, self.steps, self.name)
        links = self._count_links(before, clocks)
        self.own_report = pack_report(
            clocks.reports(), links, {self.session.worker: measure_memory(self.held_bytes or 0)}
        )
        self.pace = _merge_medians(announcements, medians)
        self._receive_checkpoints(announcements.result())
        replica_reports = report_replicas(self.compiled.cut, self.replica_speeds, len(counts))
        self._adapt_shares(
            {self.session.worker: {"speeds": speeds, "stays": self.has_fixed_shares}, **announcements.result()}
        )
        outcome = self._make_outcome(step, results, seconds, links, self.pace)
        return replace(
            outcome,
            stages=_add_replicas(outcome.stages, replica_reports),
            elsewhere=_merge_remote_reports(
                parse_reports(announcements.result().values()), outcome.stages, replica_reports
            ),
            notes=self.plan_notes,
        )

    def _receive_checkpoints(self, sheets: Mapping[str, Mapping[str, Any]]) -> None:
        """Collect the state of all processes' parts of a checkpoint, and whether a new one is due."""
        checkpoints = current_run().checkpoints
        if checkpoints is not None:
            entries = {peer: sheet.get("checkpoint") for peer, sheet in sheets.items()}
            checkpoints.receive_sheets({self.session.worker: checkpoints.pending_notes, **entries})

    def _adapt_shares(self, sheets: Mapping[str, Mapping[str, Any]]) -> None:
        """Adapt shares, from the next step on, to the speeds of replicas, which are the same in all processes."""
        cut, seconds = self.compiled.cut, parse_speeds(self.compiled.cut, sheets)
        if seconds == self.replica_speeds:
            return
        self.replica_speeds, self.measured.slowness = seconds, compute_slowness(seconds, cut)
        orders = improve_orders(cut, seconds)
        has_fixed_shares = any(sheet.get("stays") for sheet in sheets.values())
        if orders != cut.orders and not has_fixed_shares:
            self._apply_plan(replace(cut, orders=orders))

    def _apply_plan(self, cut: Cut) -> None:
        """Continue with a new version of the plan, in which replicas take other micro-batches."""
        self.version += 1
        text = "; ".join(describe_order_changes(self.compiled.cut, cut))
        self.plan_notes = (f"plan version {self.version}, from step {self.steps + 1} on: {text}",)
        _LOG.info("%s: %r continues with %s", self.session.worker, self.name, self.plan_notes[0])
        self.compiled.cut = cut
        self.measured.set_cut(cut)
        self.reads = find_rows_read(cut, self.session.worker)
        self.routing = cut.routings[self.session.worker]
        self.channels = replace(self.channels, routing=cut.routing)

    @cached_property
    def samples_speeds(self) -> bool:
        """Whether the speed of replicas is measured. With all-reduces inside the backward, all replicas are as slow as
        the slowest.
        """
        return bool(self.routing.replicated) and not find_replica_sums(self.compiled.cut.program)

    def _check_absent_inputs(self, absent: tuple[int, ...]) -> None:
        """Check inputs that this process reads, because they may be absent in some steps."""
        if absent not in self.checked_absences:
            graph, line = self.compiled.cut.program.graph, self.compiled.locations.find_line
            check_absent_inputs(self.compiled.cut, self.session.worker, absent, lambda op: line(graph.ops[op].name))
            self.checked_absences.add(absent)

    def _announce(
        self, inputs: StepInputs, counts: Sequence[int], medians: Medians, departure_word: str | None
    ) -> Announcements:
        """Announce the step, and verify concurrently that all processes run the same one. Each also reports the medians
        of its measurements, the speeds of its replicas, its last step, and whether it has to leave (`departure_word`).
        """
        leaves = self.compiled.cut.program.leaves
        peers = self.session.links.keys()
        secret = {name for name, workers in self.readers.items() if not workers & peers}
        sheet = {
            "program": self.program,
            "name": self.name,
            "step": self.steps,
            "rows": sum(counts),
            "inputs": compute_fingerprints(leaves, inputs.tensors, self.ids, secret, inputs.rows, counts),
            "pace": medians,
            "speeds": dict(self.speed_sampler.seconds),
            "stays": self.has_fixed_shares,
            "leaving": departure_word,
            "seen": self.own_report,
            "settings": read_settings(self.settings, self.variables),
        }
        checkpoints = current_run().checkpoints
        if checkpoints is not None:
            sheet["checkpoint"] = checkpoints.sheet()
        pieces = {} if self.shards is None else self.shards.mates
        if (self.routing.replicated or pieces) and are_sums_due(self.steps):
            sheet["alike"] = checksum_variables(self.compiled.cut, self.session.worker, self.variables, pieces)
        self.session.start_step(sheet, inputs.mark, self.mates, self.readers)
        return self.check_pool.submit(self.session.check_step, sheet, inputs.mark)

    def _make_step(
        self, batch: Batch, rows: Sequence[int], clocks: Clocks, announcements: Announcements
    ) -> RunningStep:
        cut, session = self.compiled.cut, self.session
        link_exchange = LinkExchange(
            self.channels, self.links, self.program, self.steps, session.patience, batch.slices, rows,
            self._make_estimate(batch.rows, self.pace), is_local=lambda host: False, clocks=clocks.stages,
        )  # fmt: skip
        guard = Guard(
            self.variables, self.written_paths, alone=False, locations=self.compiled.locations,
            held_paths=self.held_paths, updates=cut.updates,
        )  # fmt: skip
        peers = WorkerPeers(
            self.compiled, session.links, self.program, self.steps, session.patience, self.receive_pool, self.variables,
            self.allreduce,
        )  # fmt: skip
        announcements.add_done_callback(partial(self._abort_on_mismatch, link_exchange))
        exchange = None if self.shards is None else SplitExchange(link_exchange, self.shards)
        self._running_step = RunningStep(
            batch, link_exchange, clocks, guard, peers, compute_paces(cut, self.pace), exchange, announcements
        )
        return self._running_step

    def _abort_on_mismatch(self, link_exchange: LinkExchange, done: Announcements) -> None:
        failure = done.exception() if not done.cancelled() else None
        if failure is not None:
            link_exchange.abort(failure)
            self._send_failure(failure)

    def _is_skipped(self, step: RunningStep, phase: int) -> bool:
        """Whether any process votes to skip the step. Collective, but only if a boundary may skip steps."""
        if not self.channels.may_skip:
            return False
        tally = step.link_exchange.tally
        reasons = self.session.vote(self.name, self.steps, phase, tally.skip_reason)
        tally.skip_reason = next(iter(reasons), "")  # they all report the same
        return bool(reasons)

    def _handle_failure(self, step: RunningStep, failure: BaseException) -> BaseException:
        """The cause of a stage's failure: a disagreement between processes, if there is one. Notifies all of them."""
        cause = None
        with contextlib.suppress(TimeoutError):
            cause = None if step.announcements is None else step.announcements.exception(_CAUSE_SECONDS)
        differ = isinstance(cause, InputMismatchError | PlanMismatchError)
        if cause is None or not (differ or isinstance(failure, LinkClosedError)):
            cause = failure
        self._send_failure(cause)
        return cause

    def close(self) -> None:
        """Stop the threads when outstanding receptions have completed."""
        self.receive_pool.shutdown()
        super().close()
        self.check_pool.shutdown(wait=False, cancel_futures=True)


def _merge_medians(announcements: Announcements, own: Medians) -> Medians:
    """The medians of all processes; of a name that several have measured, the largest."""
    found = dict(own)
    for sheet in announcements.result().values():
        for what, seconds in sheet.get("pace", {}).items():
            found[what] = max(seconds, found.get(what, seconds))
    return found


def _add_replicas(
    stages: Mapping[str, StageReport], replica_reports: Mapping[str, StageReport]
) -> dict[str, StageReport]:
    """The reports of stages, with those of all of their replicas where these are known."""
    known = {name: replica_reports.get(name, each) for name, each in stages.items()}
    return {n: replace(each, replicas=known[n].replicas, copies=known[n].copies) for n, each in stages.items()}


def _merge_remote_reports(
    elsewhere: RemoteMeasurements, own: Mapping[str, StageReport], replica_reports: Mapping[str, StageReport]
) -> RemoteMeasurements:
    """The reports of other processes, with those of all replicas of stages that this one (`own`) does not run."""
    remote = {name: each for name, each in replica_reports.items() if name not in own}
    return replace(elsewhere, stages=_add_replicas({**remote, **elsewhere.stages}, remote))
