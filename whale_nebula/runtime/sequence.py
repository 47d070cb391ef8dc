"""All stages here and links free: the whole step is one TensorFlow function, stage after stage.

Micro-batches follow one another, each forward and then backward, so that no more than one is alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from whale_nebula.feed.batch import Batch, cut
from whale_nebula.ir.cut import PhasePlan
from whale_nebula.runtime.casts import decode, encode
from whale_nebula.runtime.compiled import Compiled
from whale_nebula.runtime.gradients import Sums
from whale_nebula.runtime.guard import Guard
from whale_nebula.runtime.once_run import ASSERTION, OnceRun
from whale_nebula.runtime.post import Slots
from whale_nebula.runtime.stage_run import StageRun
from whale_nebula.spec import Value

NOT_BEGUN = float("inf")


@dataclass
class Shelf:
    """An exchange within one trace: a dict. What goes to another cluster passes its codec, as over any link."""

    slots: Slots
    hosts: Sequence[str]
    held: dict[tuple[Value, int, str], Any] = field(default_factory=dict)

    def put(
        self, value: Value, micro_batch: int, source: int, destinations: Sequence[int], tensor: Any, rows: Any = None
    ) -> None:
        """Lay a value down for each cluster that reads it."""
        slot = self.slots.by_value[value]
        for host in dict.fromkeys(self.hosts[stage] for stage in destinations):
            crosses = host != self.hosts[source]
            given = decode(encode(slot.codec, tensor), tensor.dtype) if crosses else tensor
            self.held[value, micro_batch, host] = given

    def get(self, value: Value, micro_batch: int, stage: int) -> Any:
        """Take a value up."""
        return self.held[value, micro_batch, self.hosts[stage]]


def run_in_sequence(
    compiled: Compiled, batch: Batch, guard: Guard | None = None, begun: tf.Variable | None = None
) -> list[Any]:
    """Run a step; gives its results. With a `guard`, name what fails, and stop before the first update.

    `begun` is written when an update starts, which is when all before it is done.
    """
    program = compiled.cut.program
    once: dict[Value, Any] = {}
    shelf = Shelf(Slots(compiled.cut), [stage.cluster for stage in program.stages])
    worker = OnceRun(compiled, batch, once)
    batch = worker.weighed()
    runs = [StageRun(compiled, s, batch, shelf, once, Sums(program)) for s in range(len(program.stages))]
    if begun is not None:
        worker.gate = _gate(begun)
    with _once(guard, "part that is computed from the whole batch", 0):
        worker.whole()
    for phase in compiled.cut.phases:
        with _once(guard, "prologue", phase.index):
            worker.prologue(phase)
        for micro_batch in range(len(batch.slices)):
            for run in runs:
                with _named(guard, run, phase, micro_batch, "forward"):
                    run.forward(phase, micro_batch)
            for run in reversed(runs):
                with _named(guard, run, phase, micro_batch, "backward"):
                    run.backward(phase, micro_batch)
        if worker.asserts(phase):
            with _once(guard, ASSERTION, phase.index):
                worker.check(phase, runs)
        if guard is not None:
            return []
        worker.update(phase, runs)
    return worker.results()


def _gate(begun: tf.Variable) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """In a trace: given all that an update reads, an op that waits for it and notes that the update begins.

    A control edge from a call waits for its effects alone, once TensorFlow has inlined it; what fails in an op
    without effects is waited for by reading a number of every result.
    """

    def gate(tensors: Sequence[Any]) -> Sequence[Any]:
        numbers = [tf.cast(tf.reshape(t, [-1])[:1], tf.float32) for t in tensors if t.dtype.is_floating]
        operations = tf.compat.v1.get_default_graph().get_operations()
        calls = [op for op in operations if op.type.endswith("PartitionedCall")]
        with tf.control_dependencies(calls):
            total = tf.reduce_sum(tf.concat([[0.0], *numbers], 0))
            return [begun.assign(tf.where(tf.math.is_finite(total), total, 0.0), read_value=False)]

    return gate


def _once(guard: Guard | None, what: str, phase: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if guard is None else guard.once(what, phase)


def _named(
    guard: Guard | None, run: StageRun, phase: PhasePlan, micro_batch: int, what: str
) -> contextlib.AbstractContextManager[None]:
    if guard is None:
        return contextlib.nullcontext()
    key = run.compiled.cut.program.stages[run.stage].key
    return guard.piece(key, phase.index, micro_batch, what)


def one_function(compiled: Compiled, counts: Sequence[int], begun: tf.Variable) -> Any:
    """A step of micro-batches of `counts` rows as one concrete function of the leaves."""
    leaves = compiled.cut.program.leaves

    def step(*tensors: Any) -> list[Any]:
        begun.assign(NOT_BEGUN)
        return run_in_sequence(compiled, cut(leaves, tensors, counts), begun=begun)

    signature = [tf.TensorSpec(_given(leaf.spec.shape, leaf.batched, counts), leaf.spec.dtype) for leaf in leaves]
    return tf.function(step, input_signature=signature, autograph=False).get_concrete_function()


def _given(shape: tuple[int | None, ...] | None, batched: bool, counts: Sequence[int]) -> Any:
    if shape is None or not batched or len(counts) == 1:
        return shape
    return (sum(counts), *shape[1:])
