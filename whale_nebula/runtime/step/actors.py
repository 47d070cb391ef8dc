"""Execute a step with actors: one thread per stage executes its instructions, so links overlap with computation.

A task starts when its inputs have arrived; a stage runs ahead up to its in-flight limit, which follows the measured
pace.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from whale_nebula.config import Links
from whale_nebula.errors import StateError
from whale_nebula.faults import failpoint
from whale_nebula.feed.inputs import Batch
from whale_nebula.ir.cut import PhasePlan
from whale_nebula.ir.program import Stage
from whale_nebula.ir.routing import Routing, Seat
from whale_nebula.report.records import LinkReport
from whale_nebula.runtime.exchange.auto import StepEstimate
from whale_nebula.runtime.exchange.crossing import Channels
from whale_nebula.runtime.exchange.link_exchange import LinkExchange
from whale_nebula.runtime.exchange.state import States
from whale_nebula.runtime.replicas.bucketed_allreduce import BucketedAllReduce
from whale_nebula.runtime.run import current_run
from whale_nebula.runtime.step.clock import Clocks, LineClock, Runner, StepOutcome
from whale_nebula.runtime.step.compiled import Compiled
from whale_nebula.runtime.step.gradients import GradientSums
from whale_nebula.runtime.step.measurements import LineRates, Medians, StageMeasurements, count_busiest_turns
from whale_nebula.runtime.step.peers import Peers
from whale_nebula.runtime.step.rollback import Guard
from whale_nebula.runtime.step.stage_run import BoundaryExchange, StageRun
from whale_nebula.runtime.step.whole_batch import ASSERTION, WholeBatchRun
from whale_nebula.schedule.schedules import (
    Backward,
    BackwardWeights,
    Forward,
    Fused,
    Instruction,
    Pace,
    choose_delays,
    limits,
    list_instructions,
)
from whale_nebula.spec import Value
from whale_nebula.transport import Link, LinkTotals


@dataclass
class Turnstile:
    """A barrier that micro-batch m passes after m - 1, so that the order of writes (of dropout's seeds) is fixed.

    >>> gate = Turnstile()
    >>> with gate.turn(0), contextlib.suppress(StateError):
    ...     pass
    >>> gate.next
    1
    """

    next: int = 0
    _is_closed: bool = False
    _condition: threading.Condition = field(default_factory=threading.Condition)

    @contextlib.contextmanager
    def turn(self, micro_batch: int) -> Iterator[None]:
        """Wait for the turn of a micro-batch; at the end of the context the next one may run."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or self.next == micro_batch)
            if self._is_closed:
                raise StateError("another replica of the stage failed", why="the step is abandoned")
        yield
        with self._condition:
            self.next = micro_batch + 1
            self._condition.notify_all()

    def abort(self) -> None:
        """Abort all waits, because a replica failed."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()


@dataclass
class RunningStep:
    """A running step: its batch, its exchange, its clocks and its rollback (`guard`).

    `paces` are those of the phases, once measured. Stages use `stage_exchange` for boundaries, if there is one,
    otherwise the link exchange. `announcements` has the announcements of the step by the other processes, once they all
    match.
    """

    batch: Batch
    link_exchange: LinkExchange
    clocks: Clocks
    guard: Guard
    peers: Peers
    paces: Sequence[Pace] = ()
    stage_exchange: BoundaryExchange | None = None
    announcements: Future[Mapping[str, Mapping[str, Any]]] | None = None


@dataclass
class ActorStep(Runner):
    """Runner that uses one thread for each local replica of a stage. `lines` are the configured rates of the links,
    `links` the links by the names of their hosts, `program` is the number of the program in the run, and `steps` that
    of the next step. With `lazy`, numbers of other processes are awaited when they are read. In a step that
    `is_sampled` each piece is timed, without all-reduces inside the backward.
    """

    compiled: Compiled
    variables: Mapping[str, Any]
    lines: Links
    program: int = 0
    states: States = field(default_factory=States)
    seed: int = 0
    lazy: bool = False
    steps: int = 0
    clocks: Clocks | None = None
    allreduce: BucketedAllReduce | None = None
    is_sampled: bool = False
    links: dict[tuple[str, str], Link] = field(default_factory=dict)

    def _set_up(
        self, routing: Routing, here: Callable[[str], bool], clusters: Mapping[str, str], rates: LineRates
    ) -> None:
        """Initialise the stages in this process by a routing; `clusters` maps hosts other than clusters to theirs."""
        cut = self.compiled.cut
        self.routing, self.rates = routing, rates
        self.seats = _seat_replicas(self.compiled, routing)
        self.pool = ThreadPoolExecutor(max(1, len(self.seats)), thread_name_prefix="nebula-stage")
        self.channels = Channels(cut, routing, self.states, self.seed, here, clusters)
        stages = [stage.cluster for stage in cut.program.stages]
        self.measured = StageMeasurements(cut, stages, self.lines, paced=not clusters)

    # ------------------------------------------------------------------ before and after a step
    def _start_clocks(self) -> Clocks:
        named = ((name, link) for pair, link in self.links.items() if (name := self._name_line(*pair)))
        self.clocks = Clocks.start(self.seats, LineClock.start(self.program, self.steps, named))
        return self.clocks

    def _name_line(self, here: str, there: str) -> str:
        """The name of the line that a link between hosts uses; "" within a cluster."""
        one, other = map(self.channels.crossings.find_cluster, (here, there))
        return f"{one}->{other}" if one != other else ""

    def _read_totals(self) -> dict[tuple[str, str], LinkTotals]:
        return {pair: link.totals() for pair, link in self.links.items()}

    def _count_links(self, before: Mapping[tuple[str, str], LinkTotals], clocks: Clocks) -> dict[str, LinkReport]:
        """What this process has sent over each line since `before`, and the seconds for which that occupied it."""
        found: dict[str, LinkReport] = {}
        for pair, link in self.links.items():
            sent = link.totals() - before[pair]
            if (name := self._name_line(*pair)) and sent.frames:
                found[name] = found.get(name, LinkReport()) + LinkReport(*sent.counts())
        held = clocks.lines.seconds()
        return {name: report + LinkReport(seconds=held.get(name, 0.0)) for name, report in found.items()}

    def _make_estimate(self, rows: Sequence[int], medians: Medians) -> StepEstimate:
        """The estimates before a step whose micro-batches have these rows."""
        turns = count_busiest_turns(self.routing, len(rows), self.measured.slowness)
        return self.rates.make_estimate(rows, medians, turns)

    def _record_measurements(self, step: RunningStep) -> None:
        self.measured.add(step.clocks)
        self.measured.set_boundaries(self.channels.list_boundaries())
        self.rates.add(step.clocks.lines.spans)
        self.steps += 1

    def _make_outcome(
        self, step: RunningStep, results: list[Any], seconds: float, links: Mapping[str, LinkReport], pace: Medians
    ) -> StepOutcome:
        counts = step.batch.rows
        return StepOutcome(
            results,
            seconds=seconds,
            counts=counts,
            stages=step.clocks.reports(),
            links=links,
            spans=step.clocks.spans(),
            basis=self.measured.basis(counts, pace),
            boundaries=self.channels.last_reports,
            compression_lines=self.channels.list_lines(step.link_exchange.tally),
            pace=pace,
        )

    # ------------------------------------------------------------------ methods of single runners
    @abstractmethod
    def _handle_failure(self, step: RunningStep, failure: BaseException) -> BaseException:
        """Notify all that wait for a stage of its exception; returns the exception to raise instead, or the same."""

    def _is_skipped(self, step: RunningStep, phase: int) -> bool:
        """After the micro-batches of a phase: whether its update is to be rolled back."""
        return bool(step.link_exchange.tally.skip_reason)

    # ------------------------------------------------------------------ the step
    def run_stages(self, step: RunningStep) -> list[Any]:
        """Run a step; returns its results."""
        values: dict[Value, Any] = {}
        current_run().current_step.micro_batches = len(step.batch.rows)
        once, guard = step.clocks.whole_batch, step.guard

        @contextlib.contextmanager
        def run_once(part: str, kind: str, phase: int = 0) -> Iterator[None]:
            """A part that runs once a step, outside micro-batches: time it, and explain its failure."""
            with guard.explain_phase_failure(part, phase), once.time_computing(kind, phase=phase):
                yield

        whole = WholeBatchRun(self.compiled, step.batch, values, step.peers, clock=once, lazy=self.lazy)
        with once.time_computing("whole batch"):
            step.batch = whole.weigh_micro_batches()
        runs = {seat: self._make_stage_run(step, seat, values) for seat in step.clocks.stages}
        with guard.roll_back_on_failure():
            with run_once("part that is computed from the whole batch", "whole batch"):
                whole.run_whole_batch()
            for phase in self.compiled.cut.phases:
                with run_once("prologue", "prologue", phase.index):
                    whole.run_prologue(phase)
                self._run_micro_batches(step, phase, runs)
                if step.announcements is not None:
                    step.announcements.result()
                is_skipped = self._is_skipped(step, phase.index)
                failpoint("update.before")
                if whole.has_assertions(phase):
                    with run_once(ASSERTION, "update", phase.index):
                        whole.check_assertions(phase, list(runs.values()))
                if not is_skipped:
                    guard.begin()
                failpoint("update.begun")
                update = partial(whole.run_update, phase, list(runs.values()))
                with run_once("update", "update", phase.index):
                    self._run_to_end(guard.roll_back_if_skipped(update, is_skipped))
                failpoint("update.after")
            results = whole.collect_results()
        if step.link_exchange.tally.skip_reason:
            step.link_exchange.restore_states()
        self.channels.last_reports = step.link_exchange.tally.reports()
        return results

    def _make_stage_run(self, step: RunningStep, seat: Seat, values: dict[Value, Any]) -> StageRun:
        replicas = self.routing.seats(seat.stage, self.routing.hosts[seat.stage][seat.replica])[seat]
        count = len(step.batch.slices)
        turns = (m for m in range(count) if self.routing.replica(seat.stage, m) in replicas)
        # A replica without micro-batches adds its zeros after those of its other stages, which may wait for this one.
        can_overlap = (
            self.allreduce is not None
            and not self.is_sampled
            and all(self.routing.turns(seat.stage, host, count) for host in self.routing.hosts_of(seat.stage))
        )
        return StageRun(
            self.compiled, seat.stage, step.batch, step.stage_exchange or step.link_exchange, values,
            GradientSums(self.compiled.cut.program), step.clocks.stages[seat], tuple(turns),
            self.allreduce if can_overlap else None, self.is_sampled,
        )  # fmt: skip

    def _run_micro_batches(self, step: RunningStep, phase: PhasePlan, runs: Mapping[Seat, StageRun]) -> None:
        gates = {stage: Turnstile() for stage in self._list_ordered_stages(phase, runs)}
        futures = [
            self.pool.submit(self._execute_instructions, step, phase, run, gates.get(seat.stage))
            for seat, run in runs.items()
        ]
        _join(futures, step.link_exchange.abort)
        failed = [error for future in futures if (error := future.exception()) is not None]
        if failed:
            raise min(failed, key=lambda error: getattr(error, "nebula_when", float("inf")))

    def _run_to_end(self, update: Callable[[], None]) -> None:
        """Run an update to completion, even if the user interrupts the step."""
        future = self.pool.submit(update)
        _join([future])
        future.result()

    def _list_ordered_stages(self, phase: PhasePlan, runs: Mapping[Seat, StageRun]) -> Iterator[int]:
        """The stages with several local replicas whose forwards write the same variables (seeds, moving averages), so
        that they take turns.
        """
        for plan in phase.stages:
            has_several = sum(seat.stage == plan.stage for seat in runs) > 1
            if has_several and (plan.skip is not None or plan.drifting):
                yield plan.stage

    def _list_instructions(self, step: RunningStep, phase: PhasePlan, run: StageRun) -> Sequence[Instruction]:
        plan = next((s for s in phase.stages if s.stage == run.stage), None)
        if plan is None:
            return ()
        program = self.compiled.cut.program
        pipeline, stages, count = program.pipeline, len(program.stages), len(step.batch.slices)
        pace = step.paces[phase.index] if step.paces else None
        in_flight = limits(
            pipeline.schedule, stages, count, pace=pace, in_flight=pipeline.in_flight,
            replicas=[each.replicas for each in program.stages], orders=self.routing.orders,
        )  # fmt: skip
        fused = {each.stage for each in phase.stages if each.fused}
        delays = choose_delays(
            in_flight, count, [stage in fused for stage in range(stages)], pace=pace, in_flight=pipeline.in_flight,
            recompute=pipeline.recompute,
        )  # fmt: skip
        instructions = list_instructions(
            run.stage, stages, count, in_flight[run.stage], backward=plan.backward is not None or plan.fused,
            fused=plan.fused, phase=phase.index, delay=None if plan.weights is None else delays[run.stage],
        )  # fmt: skip
        skips = plan.skip is not None and run.stage in self.routing.replicated
        return [
            each
            for each in instructions
            if each.micro_batch in run.turns or (skips and isinstance(each, Forward | Fused))
        ]

    def _execute_instructions(
        self, step: RunningStep, phase: PhasePlan, run: StageRun, turnstile: Turnstile | None
    ) -> None:
        """The body of a stage's thread in a phase."""
        key = self.compiled.cut.program.stages[run.stage].key
        try:
            for instruction in self._list_instructions(step, phase, run):
                back, number = isinstance(instruction, Backward | BackwardWeights), instruction.micro_batch
                if number not in run.turns:
                    run.skip(phase)
                    continue
                failpoint("backward.before" if back else "forward.before")
                turn = contextlib.nullcontext() if turnstile is None or back else turnstile.turn(number)
                run_backward = run.backward_weights if isinstance(instruction, BackwardWeights) else run.backward
                with (
                    turn,
                    step.guard.explain_stage_failure(key, phase.index, number, "backward" if back else "forward"),
                ):
                    (run_backward if back else run.forward)(phase, number)
            if not run.turns:
                run.join_forward_sums(phase)
        except BaseException as failure:
            now = time.monotonic()  # earlier than the failures that the notification of others causes
            cause = self._handle_failure(step, failure)
            if not hasattr(cause, "nebula_when"):
                cause.nebula_when = now  # type: ignore[attr-defined]
            step.link_exchange.abort(cause)
            if turnstile is not None:
                turnstile.abort()
            if cause is failure:
                raise
            raise cause from failure

    def close(self) -> None:
        """Stop the threads."""
        self.pool.shutdown(wait=False, cancel_futures=True)


def _seat_replicas(compiled: Compiled, routing: Routing) -> dict[Seat, Stage]:
    """The replicas that this process runs, each with its stage."""
    stages, own = compiled.cut.program.stages, compiled.worker
    found: dict[Seat, Stage] = {}
    for number in compiled.stages:
        host = own if own in routing.hosts_of(number) else routing.first(number)
        found |= dict.fromkeys(routing.seats(number, host), stages[number])
    return found


def _join(futures: Sequence[Future[None]], stop: Callable[[BaseException], None] = lambda cause: None) -> None:
    """Wait for threads. On an interrupt, `stop` is called with it, and they finish first, so that no step is left
    incomplete.
    """
    try:
        wait(futures)
    except BaseException as interrupt:
        stop(interrupt)
        wait(futures)
        raise
