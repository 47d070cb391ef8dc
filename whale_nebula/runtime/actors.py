"""A step run by actors: a thread for each stage works through its instructions, and links overlap with computing.

A task starts when its inputs are there; how far a stage runs ahead is its in-flight limit, which follows the
measured pace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from whale_nebula.feed.batch import Batch
from whale_nebula.ir.plan import PhasePlan
from whale_nebula.ir.spec import Value
from whale_nebula.runtime.clock import Clocks
from whale_nebula.runtime.compiled import Compiled
from whale_nebula.runtime.gradients import Sums
from whale_nebula.runtime.guard import Guard
from whale_nebula.runtime.once_run import OnceRun, Peers
from whale_nebula.runtime.post import Post
from whale_nebula.runtime.stage_run import StageRun
from whale_nebula.runtime.timed_peers import TimedPeers
from whale_nebula.schedule.instructions import Backward, Instruction
from whale_nebula.schedule.limits import Pace
from whale_nebula.schedule.schedules import limits, schedule
from whale_nebula.testing.failpoints import failpoint


@dataclass
class ActorStep:
    """What stays from step to step: the threads, and the pace that was measured."""

    compiled: Compiled
    pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.pool = ThreadPoolExecutor(max(1, len(self.compiled.stages)), thread_name_prefix="nebula-stage")

    def run(
        self,
        batch: Batch,
        post: Post,
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
            stage: StageRun(self.compiled, stage, batch, post, values, Sums(program), clock)
            for stage, clock in clocks.stages.items()
        }
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
                guard.begun |= not out
                failpoint("update.begun")
                with guard.once("update", phase.index), once.computing("update", phase=phase.index):
                    self._whole(guard.without_trace(partial(worker.update, phase, list(runs.values())), out))
                failpoint("update.after")
            return worker.results()

    def _micro_batches(
        self,
        phase: PhasePlan,
        runs: Mapping[int, StageRun],
        post: Post,
        guard: Guard,
        pace: Pace | None,
        blame: Callable[[BaseException], BaseException],
    ) -> None:
        futures: list[Future[None]] = []
        for stage, run in runs.items():
            work = self._list(phase, stage, run, pace)
            futures.append(self.pool.submit(self._work, phase, run, work, guard, post, blame))
        _wait(futures, post.abort)
        failed = [error for future in futures if (error := future.exception()) is not None]
        if failed:
            raise min(failed, key=lambda error: getattr(error, "nebula_when", float("inf")))

    def _whole(self, update: Callable[[], None]) -> None:
        """Run an update to its end, even where the user interrupts the step on the way."""
        future = self.pool.submit(update)
        _wait([future])
        future.result()

    def _list(self, phase: PhasePlan, stage: int, run: StageRun, pace: Pace | None) -> Sequence[Instruction]:
        plan = next((s for s in phase.stages if s.stage == stage), None)
        if plan is None:
            return ()
        pipeline = self.compiled.cut.program.pipeline
        stages, count = len(self.compiled.cut.program.stages), len(run.batch.slices)
        chosen = limits(pipeline.schedule, stages, count, pace=pace, in_flight=pipeline.in_flight)
        backward = plan.backward is not None or plan.fused
        generate = schedule(pipeline.schedule).generate
        return list(
            generate(stage, stages, count, chosen[stage], backward=backward, fused=plan.fused, phase=phase.index)
        )

    def _work(
        self,
        phase: PhasePlan,
        run: StageRun,
        instructions: Sequence[Instruction],
        guard: Guard,
        post: Post,
        blame: Callable[[BaseException], BaseException],
    ) -> None:
        key = self.compiled.cut.program.stages[run.stage].key
        try:
            for instruction in instructions:
                back = isinstance(instruction, Backward)
                failpoint("backward.before" if back else "forward.before")
                with guard.piece(key, phase.index, instruction.micro_batch, "backward" if back else "forward"):
                    (run.backward if back else run.forward)(phase, instruction.micro_batch)
        except BaseException as failure:
            cause = blame(failure)
            if not hasattr(cause, "nebula_when"):
                cause.nebula_when = time.monotonic()  # type: ignore[attr-defined]
            post.abort(cause)
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

