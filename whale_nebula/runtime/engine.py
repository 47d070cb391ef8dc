"""What runs a captured step: the user's own function where nothing is cut, one function where all is local and free,
and actors where links take time.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

import tensorflow as tf

from whale_nebula.capture.mirror import in_order
from whale_nebula.capture.places import place_of
from whale_nebula.capture.step import Captured, Signature, filled
from whale_nebula.errors import NebulaWarning
from whale_nebula.ir.canonical import canonical_lines
from whale_nebula.ir.digest import digest_lines, first_difference
from whale_nebula.ir.plan import Cut, Worker
from whale_nebula.passes.plan import cut_program
from whale_nebula.report.report import Report, StageReport, publish
from whale_nebula.run import Run, current_run
from whale_nebula.runtime.compiled import Compiled
from whale_nebula.runtime.distributed import DistributedStep
from whale_nebula.runtime.emulated import EmulatedStep
from whale_nebula.runtime.fragment_function import Workshop
from whale_nebula.runtime.guard import whole_step
from whale_nebula.runtime.local_step import LocalStep
from whale_nebula.runtime.outcome import StepOutcome


class Runner(Protocol):
    """Runs a step on the tensors of its leaves."""

    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run one step."""
        ...


@dataclass
class Engine:
    """A captured step with its plan and its runner."""

    name: str
    captured: Captured
    cut: Cut
    runner: Runner
    steps: int = 0

    def run(self, tensors: Sequence[Any]) -> Any:
        """Run one step, report on it, and pack its results as the user's code returns them."""
        outcome = self.runner.run(tensors)
        self.steps += 1
        if self.steps == 1:
            self._warn_few(len(outcome.counts))
        publish(
            Report(
                program=self.name,
                step=self.steps,
                step_seconds=outcome.seconds,
                micro_batches=len(outcome.counts),
                stages=outcome.stages,
                links=outcome.links,
                spans=outcome.spans,
                predicted_seconds=outcome.predicted,
                notes=self.cut.notes,
            )
        )
        return self.captured.pack(outcome.tensors)


    def _warn_few(self, count: int) -> None:
        """More micro-batches than rows: each row is one, and the rest is not there."""
        asked = self.cut.program.pipeline.micro_batch
        if count < asked:
            warning = NebulaWarning(
                f"nb.pipeline asks for {asked} micro-batches, and the first batch has {count} rows",
                where=self.name,
                why="a micro-batch has at least one row",
                mend=f"nb.pipeline(micro_batch={count}), or a larger batch",
            )
            warnings.warn(warning, stacklevel=2)


@dataclass
class Uncut:
    """One stage, one micro-batch: the user's own function."""

    function: Any
    stage: str

    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run it."""
        start = time.perf_counter()
        try:
            results = tf.nest.flatten(self.function(*tensors), expand_composites=True)
        except tf.errors.OpError as failure:
            raise whole_step(self.stage, failure) from failure
        found = [leaf for leaf in results if isinstance(leaf, tf.Tensor)]
        return StepOutcome(found, time.perf_counter() - start, (1,), {self.stage: StageReport()})


def engine(captured: Captured, call: Callable[[Sequence[Any]], Any], layout: Signature, name: str) -> Engine:
    """Plan a captured step and choose what runs it."""
    run = current_run()
    program = captured.program
    run.meet([stage.cluster for stage in program.stages])
    run.programs += 1
    operations = in_order(captured.graph.get_operations())
    cut = cut_program(program, place_workers(captured, run), lambda number: place_of(operations[number]))
    if not run.alone:
        return Engine(name, captured, cut, _together(captured, cut, run, name))
    return Engine(name, captured, cut, _runner(captured, cut, run, call, layout))


def place_workers(captured: Captured, run: Run) -> list[Worker]:
    """All stages on one worker in one process; else each on the first worker of its cluster."""
    stages = captured.program.stages
    if run.alone:
        return [Worker("local/0", "local", tuple(range(len(stages))))]
    first = {cluster: worker for worker, cluster in reversed(list(run.workers.items()))}
    return [
        Worker(worker, cluster, tuple(s for s, stage in enumerate(stages) if first[stage.cluster] == worker))
        for worker, cluster in run.workers.items()
    ]


def _runner(
    captured: Captured, cut: Cut, run: Run, call: Callable[[Sequence[Any]], Any], layout: Signature
) -> Runner:
    program = captured.program
    if len(program.stages) == 1 and program.pipeline.micro_batch == 1:
        return Uncut(plain_function(call, layout), program.stages[0].key)
    compiled = Compiled(cut, "local/0", Workshop(captured.graph, captured.aliases))
    if any(_slow(run, a.cluster, b.cluster) for a, b in combinations(program.stages, 2)):
        step = EmulatedStep(compiled, captured.variables, run.links, run.programs)
        _close_with(run, step)
        return step
    return LocalStep(compiled, captured.variables)


def _together(captured: Captured, cut: Cut, run: Run, name: str) -> Runner:
    """Agree with the other processes, leave their variables to them, and run our stages."""
    session = run.ledger.session
    lines = canonical_lines(captured.program)
    try:
        session.agree(name, digest_lines(lines), lines, first_difference)
        run.ledger.settle(captured.variables, cut.held)
    except BaseException as failure:
        session.fail(failure)
        raise
    ids = frozenset([run.ids] if isinstance(run.ids, str) else run.ids or ())
    compiled = Compiled(cut, session.worker, Workshop(captured.graph, captured.aliases))
    step = DistributedStep(compiled, captured.variables, session, name, run.programs, ids)
    _close_with(run, step)
    return step


def _close_with(run: Run, step: DistributedStep | EmulatedStep) -> None:
    """Close a step at the end of the run; the run itself does not keep it, so a model that is dropped goes."""
    held = weakref.ref(step)

    def close() -> None:
        if (alive := held()) is not None:
            alive.close()

    run.closers.append(close)


def _slow(run: Run, a: str, b: str) -> bool:
    line = run.links.between(a, b)
    return bool(line.rate or line.delay)


def plain_function(call: Callable[[Sequence[Any]], Any], layout: Signature) -> Any:
    """The user's step as a plain tf.function: the oracle of every other way to run it."""

    def body(*tensors: Any) -> Any:
        return call(filled(layout, tensors))

    return tf.function(body, autograph=False, input_signature=list(layout.specs))
