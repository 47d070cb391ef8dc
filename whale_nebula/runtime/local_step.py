"""A step whose stages all live in this process and whose links are free: one function, and exact errors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tensorflow as tf

from whale_nebula.feed.batch import cut, micro_batches
from whale_nebula.ir.integers import Shape
from whale_nebula.ir.program import Stage
from whale_nebula.ir.sizes import is_sized, sized
from whale_nebula.passes.batch import lines_of
from whale_nebula.passes.replica_sums import pieces_here
from whale_nebula.report.records import BoundaryReport, LinkReport, StageReport
from whale_nebula.runtime.channels.counted import counted
from whale_nebula.runtime.compiled import Compiled
from whale_nebula.runtime.guard import Guard, unfit
from whale_nebula.runtime.outcome import StepOutcome
from whale_nebula.runtime.sequence import NOT_BEGUN, one_function, run_in_sequence
from whale_nebula.runtime.sizes import link_reports
from whale_nebula.tf import private as tf_private

_Crossed = tuple[Mapping[str, LinkReport], Mapping[str, BoundaryReport]]


@dataclass
class LocalStep:
    """Runs steps as one function for each way the batch is cut."""

    compiled: Compiled
    variables: Mapping[str, Any]
    _counted: dict[tuple[tuple[int, ...], tuple[Shape, ...]], _Crossed] = field(default_factory=dict)
    _functions: dict[tuple[int, ...], Any] = field(default_factory=dict)
    _begun: Any = field(default_factory=lambda: tf.Variable(NOT_BEGUN, trainable=False, name="nebula_begun"))

    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run one step."""
        program = self.compiled.cut.program
        counts = tuple(micro_batches(program.leaves, tensors, pieces_here(program)))
        function = self._function(counts)
        plan = self.compiled.cut
        guard = Guard(
            self.variables, plan.forward_written, whereabouts=self.compiled.whereabouts, updates=plan.updates
        )
        start = time.perf_counter()
        try:
            results = tf_private.call_flat(function, tensors, function.captured_inputs)
            seconds = time.perf_counter() - start
            links, boundaries = self._crossed(counts, tensors)
            return StepOutcome(results, seconds, counts, self._stages, links, boundaries=boundaries)
        except tf.errors.OpError as failure:
            guard.restore()
            if float(self._begun) == NOT_BEGUN:
                with guard.undone():
                    self._locate(tensors, counts, guard)
            raise guard.failed_update(failure, 0) from failure

    def _function(self, counts: tuple[int, ...]) -> Any:
        """The step for micro-batches of these rows; with one, for any number of them."""
        key = counts if len(counts) > 1 else (0,)
        if key not in self._functions:
            try:
                self._functions[key] = one_function(self.compiled, counts, self._begun)
            except (ValueError, TypeError, tf.errors.OpError) as failure:
                alone = lines_of(self.compiled.cut.program).alone
                raise unfit(counts, failure, self.compiled.whereabouts, alone) from failure
        return self._functions[key]

    @cached_property
    def _stages(self) -> Mapping[str, StageReport]:
        """What every step says of its stages, which are not timed apart."""
        return {stage.key: _untimed(stage) for stage in self.compiled.cut.program.stages}

    def _crossed(self, counts: tuple[int, ...], tensors: Sequence[Any]) -> _Crossed:
        """Free links carry what others would: counted, once for each way the batch is cut, and each form of it where
        what crosses has axes that are open.
        """
        shapes = () if self._is_sized else tuple(tuple(tensor.shape) for tensor in tensors)
        if (counts, shapes) not in self._counted:
            plan = self.compiled.cut if self._is_sized else sized(self.compiled.cut, shapes, max(counts))
            hosts = [stage.cluster for stage in plan.program.stages]
            self._counted[counts, shapes] = link_reports(plan, hosts, counts), counted(plan, hosts, counts)
        return self._counted[counts, shapes]

    @cached_property
    def _is_sized(self) -> bool:
        return is_sized(self.compiled.cut)

    def _locate(self, tensors: Sequence[Any], counts: Sequence[int], guard: Guard) -> None:
        """Run the failed step again, piece by piece and without its update: the piece that fails has a name."""
        batch = cut(self.compiled.cut.program.leaves, tensors, counts)
        run_in_sequence(self.compiled, batch, guard=guard)


def _untimed(stage: Stage) -> StageReport:
    """Of a part of one function only its replicas can be counted."""
    return StageReport(cluster=stage.cluster, replicas=() if stage.replicas == 1 else None, copies=stage.replicas)
