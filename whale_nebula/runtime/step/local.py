"""Runners of a step whose clusters are all in this process: as one function, or by actors over emulated links."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import Any, cast

import tensorflow as tf

from whale_nebula.capture.step import pause_garbage_collection
from whale_nebula.codec.sizes import payload_bytes
from whale_nebula.feed.inputs import Batch, count_micro_batch_rows, divide_batch
from whale_nebula.ir.cut import Cut, Exchange, PhasePlan
from whale_nebula.ir.integers import Shape
from whale_nebula.ir.program import Leaf
from whale_nebula.ir.routing import Routing
from whale_nebula.ir.sizes import ExchangeSizes, fill_cut_sizes, has_known_crossings
from whale_nebula.passes.batch import find_batch_fixes
from whale_nebula.passes.replicas import count_local_micro_batches
from whale_nebula.report.records import BoundaryReport, LinkReport, StageReport
from whale_nebula.runtime.exchange.admission import count_known_rows
from whale_nebula.runtime.exchange.crossing import Crossings
from whale_nebula.runtime.exchange.link_exchange import LinkExchange
from whale_nebula.runtime.run import current_run
from whale_nebula.runtime.step.actors import ActorStep, RunningStep
from whale_nebula.runtime.step.clock import Runner, StepOutcome
from whale_nebula.runtime.step.compiled import Compiled
from whale_nebula.runtime.step.gradients import GradientSums
from whale_nebula.runtime.step.measurements import LineRates, Medians, compute_paces
from whale_nebula.runtime.step.peers import Parts, Peers
from whale_nebula.runtime.step.rollback import Guard, micro_batch_error
from whale_nebula.runtime.step.stage_run import StageRun
from whale_nebula.runtime.step.traffic import plan_link_reports
from whale_nebula.runtime.step.whole_batch import ASSERTION, WholeBatchRun
from whale_nebula.schedule.lines import compute_pace
from whale_nebula.schedule.schedules import Pace
from whale_nebula.spec import Value
from whale_nebula.tf import private as tf_private
from whale_nebula.transport import Key, KeyKind, Link, MemoryNetwork
from whale_nebula.wire.frame import count_frames, count_wire_bytes

PATIENCE = 3600.0


@dataclass
class EmulatedPeers(Peers):
    """An emulation of an update's exchange between processes, which occupies lines with the same bytes. `rows` are
    those of the whole batch.
    """

    exchange: Sequence[Exchange]
    links: Mapping[tuple[str, str], Link]
    program: int
    step: int
    rows: int

    def exchange_parts(self, phase: PhasePlan, own: Parts) -> Parts:
        """Occupy the lines with the exchange of a phase's update, round by round; returns the parts unchanged."""
        due = [each for each in self.exchange if each.phase == phase.index]
        for number in sorted({each.round for each in due}):
            together = [each for each in due if each.round == number]
            for each in together:
                size = _count_bytes(each, own, self.rows)
                self.links[each.source, each.destination].send(self._make_key(each), None, raw_bytes=size, size=size)
            for each in together:
                self.links[each.destination, each.source].receive(self._make_key(each), PATIENCE)
        return own

    def _make_key(self, each: Exchange) -> Key:
        kind = cast(KeyKind, each.kind)
        return Key(kind, self.program, self.step, each.phase, -1 - each.copy, each.slot, each.source, each.destination)


def _count_bytes(each: Exchange, own: Parts, rows: int) -> int:
    """Bytes of a message: a result with the batch's rows, or a gradient part as it is."""
    if each.part is None:
        return each.spec.nbytes(unknown=rows)
    tensor = own[each.part][each.piece]
    return int(tensor.shape.num_elements()) * int(tensor.dtype.size)


@dataclass
class EmulatedStep(ActorStep):
    """The runner of steps over memory links with the configured rates and delays. Its hosts are the clusters."""

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
        """Run one step. A failed step leaves nothing on the links."""
        plan = self.compiled.cut
        counts = count_micro_batch_rows(plan.program.leaves, tensors, count_local_micro_batches(plan.program))
        batch = divide_batch(plan.program.leaves, tensors, counts)
        medians = self.measured.medians()
        clocks, before = self._start_clocks(), self._read_totals()
        step = RunningStep(
            batch,
            LinkExchange(
                self.channels, self.links, self.program, self.steps, PATIENCE, batch.slices,
                count_known_rows(plan.program.leaves, batch.whole, batch.rows),
                self._make_estimate(batch.rows, medians), clocks=clocks.stages,
            ),
            clocks,
            Guard(self.variables, plan.forward_written, locations=self.compiled.locations, updates=plan.updates),
            EmulatedPeers(plan.exchanges, self.links, self.program, self.steps, sum(batch.rows)),
            self._find_paces(batch.rows, medians),
        )  # fmt: skip
        try:
            results = self.run_stages(step)
        except BaseException:
            step.link_exchange.restore_states()
            self.steps += 1
            self._connect()
            raise
        seconds = clocks.seconds()
        self._record_measurements(step)
        return self._make_outcome(step, results, seconds, self._count_links(before, clocks), medians)

    def _find_paces(self, rows: Sequence[int], medians: Medians) -> Sequence[Pace]:
        """The pace of each phase from the load of its lines or, if sizes of crossings are not planned, from round
        trips.
        """
        if not self.measured.traffic.is_known(tuple(rows)):
            return compute_paces(self.compiled.cut, medians)
        return [compute_pace(phase.works, phase.hops) for phase in self.measured.phases(rows[0], medians)]

    def _handle_failure(self, step: RunningStep, failure: BaseException) -> BaseException:
        """Wake all stages that wait for a link."""
        for link in self.links.values():
            link.fail({"what": str(failure)})
        return failure


NOT_BEGUN = float("inf")


@dataclass
class LocalExchange:
    """The exchange within one trace: a dict. Tensors for another cluster are cast and cast back, like on a link.
    `hosts` are the clusters of the stages.
    """

    crossings: Crossings
    hosts: Sequence[str]
    values: dict[tuple[Value, int, str], Any] = field(default_factory=dict)

    def put(self, value: Value, micro_batch: int, tensor: Any, rows: Any = None) -> None:
        """Store a value for each cluster that reads it."""
        crossing = self.crossings.by_value[value]
        precision = crossing.encoding.precision if tensor.dtype.is_floating else None
        for host in dict.fromkeys(self.hosts[stage] for stage in crossing.readers):
            given = tensor
            if precision is not None and host != self.hosts[crossing.source]:
                given = precision.decode(precision.encode(tensor), (), tensor.dtype.name)
            self.values[value, micro_batch, host] = given

    def get(self, value: Value, micro_batch: int, stage: int) -> Any:
        """Return a stored value."""
        return self.values[value, micro_batch, self.hosts[stage]]


def run_in_sequence(
    compiled: Compiled, batch: Batch, guard: Guard | None = None, begun: tf.Variable | None = None
) -> list[Any]:
    """Run a step, piece by piece; returns its results. With a `guard`, name the failing piece, and stop before the
    first update.

    `begun` is written when an update starts, after all earlier parts are finished.
    """
    program = compiled.cut.program
    values: dict[Value, Any] = {}
    exchange = LocalExchange(
        Crossings(compiled.cut, compiled.cut.routing_by_cluster), [stage.cluster for stage in program.stages]
    )
    whole = WholeBatchRun(compiled, batch, values)
    batch = whole.weigh_micro_batches()
    runs = [StageRun(compiled, s, batch, exchange, values, GradientSums(program)) for s in range(len(program.stages))]
    if begun is not None:
        whole.gate = _make_gate(begun)
    with _guard_once(guard, "part that is computed from the whole batch", 0):
        whole.run_whole_batch()
    for phase in compiled.cut.phases:
        with _guard_once(guard, "prologue", phase.index):
            whole.run_prologue(phase)
        for micro_batch in range(len(batch.slices)):
            for run in runs:
                with _name_failures(guard, run, phase, micro_batch, "forward"):
                    run.forward(phase, micro_batch)
            for run in reversed(runs):
                with _name_failures(guard, run, phase, micro_batch, "backward"):
                    run.backward(phase, micro_batch)
                    run.backward_weights(phase, micro_batch)
        if whole.has_assertions(phase):
            with _guard_once(guard, ASSERTION, phase.index):
                whole.check_assertions(phase, runs)
        if guard is not None:
            return []
        whole.run_update(phase, runs)
    return whole.collect_results()


def _make_gate(begun: tf.Variable) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Add to a trace an op that waits for all inputs of an update, and marks the update's start.

    After TensorFlow has inlined a call, a control edge from it waits only for its effects; failures of ops without
    effects are awaited by reading an element of every result.
    """

    def gate(tensors: Sequence[Any]) -> Sequence[Any]:
        flat = [t for t in tf.nest.flatten(list(tensors), expand_composites=True) if t.dtype.is_floating]
        row, zero, one = (tf.constant([number]) for number in (-1, 0, 1))
        rows = [tf.raw_ops.Reshape(tensor=t, shape=row) for t in flat]  # raw ops, which are cheaper to create
        firsts = [tf.raw_ops.StridedSlice(input=t, begin=zero, end=one, strides=one) for t in rows]
        numbers = [tf.cast(first, tf.float32) for first in firsts]
        operations = tf.compat.v1.get_default_graph().get_operations()
        calls = [op for op in operations if op.type.endswith("PartitionedCall")]
        with tf.control_dependencies(calls):
            total = tf.reduce_sum(tf.concat([[0.0], *numbers], 0))
            return [begun.assign(tf.where(tf.math.is_finite(total), total, 0.0), read_value=False)]

    return gate


def _guard_once(guard: Guard | None, what: str, phase: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if guard is None else guard.explain_phase_failure(what, phase)


def _name_failures(
    guard: Guard | None, run: StageRun, phase: PhasePlan, micro_batch: int, what: str
) -> contextlib.AbstractContextManager[None]:
    if guard is None:
        return contextlib.nullcontext()
    key = run.compiled.cut.program.stages[run.stage].key
    return guard.explain_stage_failure(key, phase.index, micro_batch, what)


def trace_step(compiled: Compiled, counts: Sequence[int], begun: tf.Variable) -> Any:
    """A step of micro-batches of `counts` rows as one concrete function of the leaves."""
    leaves = compiled.cut.program.leaves

    def step(*tensors: Any) -> list[Any]:
        begun.assign(NOT_BEGUN)
        return run_in_sequence(compiled, divide_batch(leaves, tensors, counts), begun=begun)

    def spec(leaf: Leaf) -> tf.TensorSpec:
        shape = leaf.spec.shape
        if shape is not None and leaf.batched and len(counts) > 1:
            shape = (sum(counts), *shape[1:])
        return tf.TensorSpec(shape, leaf.spec.dtype)

    return tf.function(step, input_signature=[spec(leaf) for leaf in leaves], autograph=False).get_concrete_function()


_CrossingReports = tuple[Mapping[str, LinkReport], Mapping[str, BoundaryReport]]


@dataclass
class LocalStep(Runner):
    """The runner of steps as one function for each division of the batch."""

    compiled: Compiled
    variables: Mapping[str, Any]
    _crossing_reports: dict[tuple[tuple[int, ...], tuple[Shape, ...]], _CrossingReports] = field(default_factory=dict)
    _functions: dict[tuple[int, ...], Any] = field(default_factory=dict)
    _update_marker: Any = field(default_factory=lambda: tf.Variable(NOT_BEGUN, trainable=False, name="nebula_begun"))

    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run one step."""
        program = self.compiled.cut.program
        counts = tuple(count_micro_batch_rows(program.leaves, tensors, count_local_micro_batches(program)))
        function = self._find_function(counts)
        current_run().current_step.micro_batches = len(counts)
        plan = self.compiled.cut
        guard = Guard(self.variables, plan.forward_written, locations=self.compiled.locations, updates=plan.updates)
        start = time.perf_counter()
        try:
            results = tf_private.call_flat(function, tensors, function.captured_inputs)
            seconds = time.perf_counter() - start
            links, boundaries = self._count_crossings(counts, tensors)
            return StepOutcome(results, seconds, counts, self._stages, links, boundaries=boundaries)
        except tf.errors.OpError as failure:
            guard.restore()
            if float(self._update_marker) != NOT_BEGUN:
                raise guard.update_error(failure, 0) from failure
            with guard.roll_back_on_failure():  # repeat by pieces, without the update, to name the failing one
                run_in_sequence(self.compiled, divide_batch(program.leaves, tensors, counts), guard=guard)
            guard.restore()  # no piece has failed again
            raise guard.step_error(failure) from failure

    def trace(self, rows: Sequence[int]) -> None:
        """Trace the function of a step for micro-batches of these rows before it runs."""
        self._find_function(tuple(rows))

    def _find_function(self, counts: tuple[int, ...]) -> Any:
        """The function of a step for micro-batches of these rows; a single micro-batch may have any number."""
        key = counts if len(counts) > 1 else (0,)
        if key not in self._functions:
            try:
                with pause_garbage_collection():
                    self._functions[key] = trace_step(self.compiled, counts, self._update_marker)
            except (ValueError, TypeError, tf.errors.OpError) as failure:
                fixes = find_batch_fixes(self.compiled.cut.program)
                raise micro_batch_error(counts, failure, self.compiled.locations, fixes.alone) from failure
        return self._functions[key]

    @cached_property
    def _stages(self) -> Mapping[str, StageReport]:
        """The stages' part of every report. Stages are not timed separately, so replicas are only counted."""
        return {
            stage.key: StageReport(
                cluster=stage.cluster, replicas=() if stage.replicas == 1 else None, copies=stage.replicas
            )
            for stage in self.compiled.cut.program.stages
        }

    def _count_crossings(self, counts: tuple[int, ...], tensors: Sequence[Any]) -> _CrossingReports:
        """Bytes that would cross free links, cached for each division of the batch and, with unknown axes, each shape
        of the crossing tensors.
        """
        shapes = () if self._is_sized else tuple(tuple(tensor.shape) for tensor in tensors)
        if (counts, shapes) not in self._crossing_reports:
            plan = self.compiled.cut if self._is_sized else fill_cut_sizes(self.compiled.cut, shapes, max(counts))
            hosts = [stage.cluster for stage in plan.program.stages]
            links = plan_link_reports(plan, hosts, counts, ExchangeSizes(plan))
            self._crossing_reports[counts, shapes] = links, count_casts(plan, hosts, counts)
        return self._crossing_reports[counts, shapes]

    @cached_property
    def _is_sized(self) -> bool:
        return has_known_crossings(self.compiled.cut)


def count_casts(cut: Cut, hosts: Sequence[str], counts: Sequence[int]) -> Mapping[str, BoundaryReport]:
    """The statistics of each boundary direction that is cast, by its label, in a step whose micro-batches have these
    rows; directions with sizes known only in a step are omitted.
    """
    crossings = Crossings(cut, Routing.from_hosts(hosts))
    found: dict[str, BoundaryReport] = {}
    for each in crossings.boundary_crossings:
        codec, spec = each.encoding.cast, each.spec
        if codec is None or not crossings.list_links(each) or spec.shape is None or None in spec.shape[1:]:
            continue
        for rows in counts:
            size = payload_bytes(codec, spec.dtype, spec.fill_shape(rows))
            report = BoundaryReport(codec, spec.nbytes(rows), size, count_wire_bytes(size), count_frames(size))
            found[each.label] = found.get(each.label, BoundaryReport()) + report
    return found
