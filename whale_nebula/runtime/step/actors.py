"""Execute a step with actors: one thread per stage works through its instructions, so links overlap with computation.

A task starts when its inputs are there; how far a stage runs ahead is its in-flight limit, which follows the
measured pace.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from whale_nebula.errors import StateError
from whale_nebula.faults import failpoint
from whale_nebula.feed.batch import Batch
from whale_nebula.ir.cut import PhasePlan
from whale_nebula.ir.program import PartKey, Stage
from whale_nebula.ir.routing import Routing, Seat
from whale_nebula.passes.exchange import Bundle
from whale_nebula.report.records import EXCHANGE, Span
from whale_nebula.runtime.exchange.post import Post
from whale_nebula.runtime.replicas.bucketed_allreduce import Added
from whale_nebula.runtime.split.shards import SplitExchange
from whale_nebula.runtime.step.clock import Clocks, StageClock
from whale_nebula.runtime.step.compiled import Compiled
from whale_nebula.runtime.step.gradients import Sums
from whale_nebula.runtime.step.once import ASSERTION, OnceRun, Peers
from whale_nebula.runtime.step.rollback import Guard
from whale_nebula.runtime.step.stage_run import StageRun
from whale_nebula.schedule.schedules import Backward, Instruction, Pace, instructions, limits
from whale_nebula.spec import Value


@dataclass
class Turnstile:
    """Lets micro-batch m pass once m - 1 has: what both write (the seeds of a dropout) must not be left to chance.

    >>> gate = Turnstile()
    >>> with gate.turn(0), contextlib.suppress(StateError):
    ...     pass
    >>> gate.next
    1
    """

    next: int = 0
    _closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextlib.contextmanager
    def turn(self, micro_batch: int) -> Iterator[None]:
        """Wait for the turn of a micro-batch; when it is done, the next one may go."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.next == micro_batch)
            if self._closed:
                raise StateError("another replica of the stage failed", why="the step is given up")
        yield
        with self._changed:
            self.next = micro_batch + 1
            self._changed.notify_all()

    def abort(self) -> None:
        """A replica failed: nobody's turn comes any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


T = TypeVar("T")
Parts = dict[PartKey, tuple[Any, ...]]


@dataclass
class TimedPeers:
    """Peers whose answers are waited for on the clock of what runs once a step."""

    peers: Peers
    clock: StageClock

    def send(self, bundle: Bundle, tensors: Sequence[Any]) -> None:
        """Send something: nobody waits for that."""
        self.peers.send(bundle, tensors)

    def receive(self, bundle: Bundle) -> Sequence[Any]:
        """Wait for what another worker has made."""
        return self._time_wait(lambda: self.peers.receive(bundle), bundle.phase)

    def later(self, bundle: Bundle) -> Sequence[Any]:
        """Nobody waits for that either."""
        return self.peers.later(bundle)

    def even(self, phase: PhasePlan, runs: Sequence[StageRun]) -> None:
        """Let the replicas of each stage have what all of them have made."""
        self._time_wait(lambda: self.peers.even(phase, runs), phase.index)

    def parts(self, phase: PhasePlan, own: Parts) -> Parts:
        """Exchange the gradient parts of variables that live on several workers."""
        return self._time_wait(lambda: self.peers.parts(phase, own), phase.index)

    def _time_wait(self, wait: Callable[[], T], phase: int) -> T:
        began = time.perf_counter()
        found = wait()
        ended = time.perf_counter()
        self.clock.waiting += ended - began
        start = self.clock.start
        self.clock.spans.append(Span(self.clock.lane, EXCHANGE, began - start, ended - start, None, phase))
        return found


def seat_replicas(compiled: Compiled, routing: Routing) -> dict[Seat, Stage]:
    """The replicas that this process runs, each with its stage."""
    stages, own = compiled.cut.program.stages, compiled.worker
    found: dict[Seat, Stage] = {}
    for number in compiled.stages:
        host = own if own in routing.of(number) else routing.first(number)
        found |= dict.fromkeys(routing.seats(number, host), stages[number])
    return found


@dataclass
class ActorStep:
    """What stays from step to step: the threads, and the pace that was measured. `looked_at`: see `measurements`."""

    compiled: Compiled
    routing: Routing
    seats: int = 1
    adder: Added | None = None
    looked_at: bool = False
    pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.pool = ThreadPoolExecutor(max(1, self.seats), thread_name_prefix="nebula-stage")

    def run(
        self,
        batch: Batch,
        post: Post | SplitExchange,
        clocks: Clocks,
        guard: Guard,
        paces: Sequence[Pace] = (),
        peers: Peers | None = None,
        lazy: bool = False,
        agreed: Callable[[], object] = lambda: None,
        blame: Callable[[BaseException], BaseException] = lambda failure: failure,
        left_out: Callable[[int], bool] = lambda phase: False,
    ) -> list[Any]:
        """Run one step; gives its results.

        `paces` are those of the phases, once they have been measured. `agreed` returns when an update may begin, or
        raises. With `lazy`, numbers of other workers that are only returned are not waited for. `blame` gets to know
        what a stage raised, and gives what is to be raised for it. `left_out` says, once the micro-batches of a phase
        are done, whether its update is to leave no trace.
        """
        program = self.compiled.cut.program
        values: dict[Value, Any] = {}
        once = clocks.once
        timed = None if peers is None else TimedPeers(peers, clocks.once)
        worker = OnceRun(self.compiled, batch, values, timed, lazy=lazy)
        with once.computing("whole batch"):
            batch = worker.weighed()
        runs = {
            seat: StageRun(
                self.compiled, seat.stage, batch, post, values, Sums(program), clock,
                turns=self._turns(seat, len(batch.slices)), adder=None if self.looked_at else self.adder,
                looked_at=self.looked_at,
            )
            for seat, clock in clocks.stages.items()
        }  # fmt: skip
        with guard.undone():
            with guard.once("part that is computed from the whole batch", 0), once.computing("whole batch"):
                worker.whole()
            for phase in self.compiled.cut.phases:
                with guard.once("prologue", phase.index), once.computing("prologue", phase=phase.index):
                    worker.prologue(phase)
                self._micro_batches(phase, runs, post, guard, _of(paces, phase), blame)
                agreed()
                out = left_out(phase.index)
                failpoint("update.before")
                if worker.asserts(phase):
                    with guard.once(ASSERTION, phase.index), once.computing("update", phase=phase.index):
                        worker.check(phase, list(runs.values()))
                if not out:
                    guard.begin()
                failpoint("update.begun")
                with guard.once("update", phase.index), once.computing("update", phase=phase.index):
                    self._whole(guard.without_trace(partial(worker.update, phase, list(runs.values())), out))
                failpoint("update.after")
            return worker.results()

    def _turns(self, seat: Seat, count: int) -> tuple[int, ...]:
        """The micro-batches that a seat of this process takes."""
        replicas = self.routing.seats(seat.stage, self.routing.hosts[seat.stage][seat.replica])[seat]
        return tuple(m for m in range(count) if self.routing.replica(seat.stage, m) in replicas)

    def _micro_batches(
        self,
        phase: PhasePlan,
        runs: Mapping[Seat, StageRun],
        post: Post | SplitExchange,
        guard: Guard,
        pace: Pace | None,
        blame: Callable[[BaseException], BaseException],
    ) -> None:
        futures: list[Future[None]] = []
        order = {stage: Turnstile() for stage in self._in_order(phase, runs)}
        for (stage, _), run in runs.items():
            work = self._list(phase, stage, run, pace)
            gate = order.get(stage)
            futures.append(self.pool.submit(self._work, phase, run, work, guard, post, blame, gate))
        _wait(futures, post.abort)
        failed = [error for future in futures if (error := future.exception()) is not None]
        if failed:
            raise min(failed, key=lambda error: getattr(error, "nebula_when", float("inf")))

    def _whole(self, update: Callable[[], None]) -> None:
        """Run an update to its end, even where the user interrupts the step on the way."""
        future = self.pool.submit(update)
        _wait([future])
        future.result()

    def _in_order(self, phase: PhasePlan, runs: Mapping[Seat, StageRun]) -> Iterator[int]:
        """The stages of which several replicas here write the same variables as they go forward: seeds, averages."""
        for plan in phase.stages:
            several = sum(seat.stage == plan.stage for seat in runs) > 1
            if several and (plan.skip is not None or plan.drifting):
                yield plan.stage

    def _list(self, phase: PhasePlan, stage: int, run: StageRun, pace: Pace | None) -> Sequence[Instruction]:
        plan = next((s for s in phase.stages if s.stage == stage), None)
        if plan is None:
            return ()
        pipeline = self.compiled.cut.program.pipeline
        stages, count = len(self.compiled.cut.program.stages), len(run.batch.slices)
        replicas = [each.replicas for each in self.compiled.cut.program.stages]
        chosen = limits(
            pipeline.schedule, stages, count, pace=pace, in_flight=pipeline.in_flight, replicas=replicas,
            orders=self.routing.orders,
        )  # fmt: skip
        backward = plan.backward is not None or plan.fused
        whole = instructions(
            stage, stages, count, chosen[stage], backward=backward, fused=plan.fused, phase=phase.index
        )
        skips = plan.skip is not None and stage in self.routing.replicated
        return [each for each in whole if each.micro_batch in run.turns or (skips and not isinstance(each, Backward))]

    def _work(
        self,
        phase: PhasePlan,
        run: StageRun,
        instructions: Sequence[Instruction],
        guard: Guard,
        post: Post | SplitExchange,
        blame: Callable[[BaseException], BaseException],
        gate: Turnstile | None = None,
    ) -> None:
        key = self.compiled.cut.program.stages[run.stage].key
        try:
            for instruction in instructions:
                back = isinstance(instruction, Backward)
                if instruction.micro_batch not in run.turns:
                    run.skip(phase)
                    continue
                failpoint("backward.before" if back else "forward.before")
                turn = contextlib.nullcontext() if gate is None or back else gate.turn(instruction.micro_batch)
                with turn, guard.piece(key, phase.index, instruction.micro_batch, "backward" if back else "forward"):
                    (run.backward if back else run.forward)(phase, instruction.micro_batch)
            if not run.turns:
                run.accompany(phase)
        except BaseException as failure:
            cause = blame(failure)
            if not hasattr(cause, "nebula_when"):
                cause.nebula_when = time.monotonic()  # type: ignore[attr-defined]
            post.abort(cause)
            if gate is not None:
                gate.abort()
            if cause is failure:
                raise
            raise cause from failure

    def close(self) -> None:
        """Let the threads go."""
        self.pool.shutdown(wait=False, cancel_futures=True)


def _wait(futures: Sequence[Future[None]], stop: Callable[[BaseException], None] = lambda cause: None) -> None:
    """Wait for threads. One that is interrupted lets them come to rest first, so that nothing is half done."""
    try:
        wait(futures)
    except BaseException as interrupt:
        stop(interrupt)
        wait(futures)
        raise


def _of(paces: Sequence[Pace], phase: PhasePlan) -> Pace | None:
    return paces[phase.index] if paces else None
