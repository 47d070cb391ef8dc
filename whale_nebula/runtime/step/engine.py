"""The engine of a captured step, which selects its runner: uncut, local, emulated or distributed."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from whale_nebula.capture import patches, tracing
from whale_nebula.capture.mirror import find_origin, order_operations
from whale_nebula.capture.step import Captured, Signature, fill_layout
from whale_nebula.errors import GradientError, StageFailedError
from whale_nebula.errors.text import escape_foreign_text
from whale_nebula.feed.checks import parse_ids, refuse_unshared_ids
from whale_nebula.feed.inputs import count_micro_batch_rows, unwrap_whole
from whale_nebula.ir.canonical import canonical_lines, describe_first_difference, digest_lines
from whale_nebula.ir.cut import Cut, Worker
from whale_nebula.ir.layout import Layout
from whale_nebula.ir.program import Program, Stage
from whale_nebula.passes.effects import list_written_variables
from whale_nebula.passes.pipeline import Compilation, run_passes
from whale_nebula.passes.readings import check_absent_inputs, find_readers
from whale_nebula.passes.replicas import check_replica_sums, find_replica_sums, place_stages
from whale_nebula.passes.split import check_devices, check_held_layouts, list_split_workers
from whale_nebula.plan.forbidden import check_forbidden, forbidden_inputs
from whale_nebula.report.published import begin, publish
from whale_nebula.report.records import StageReport
from whale_nebula.report.report import Prices, Report, StepCost
from whale_nebula.runtime.clusters import find_configured
from whale_nebula.runtime.exchange.crossing import Crossings, has_codecs
from whale_nebula.runtime.exchange.state import Models, States, StepLines
from whale_nebula.runtime.local_sgd.clusters import ClusterCopy, make_cluster_copy
from whale_nebula.runtime.replicas.collectives import ReplicaSums, make_replica_sums
from whale_nebula.runtime.run import Run, current_run
from whale_nebula.runtime.session.session import list_settings, read_settings
from whale_nebula.runtime.split.shards import NewShards, Shards, hold_pieces
from whale_nebula.runtime.step.clock import Runner, StepOutcome, annotation, count_bytes, measure_memory
from whale_nebula.runtime.step.compiled import Compiled, FunctionBuilder, Xla, is_xla_refusal
from whale_nebula.runtime.step.distributed import DistributedStep
from whale_nebula.runtime.step.local import EmulatedStep, LocalStep
from whale_nebula.runtime.step.results import PendingResult, ScalarResults, find_scalar_results
from whale_nebula.runtime.step.rollback import OpLocations, plain_step_error
from whale_nebula.site import script_site, warn_at
from whale_nebula.tf import private as tf_private
from whale_nebula.tf.failures import suspend_carried_errors

if TYPE_CHECKING:
    from whale_nebula.runtime.replan import PlanWatch
    from whale_nebula.runtime.step.background import Prepared


def warn_if_few_rows(program: Program, name: str, micro_batches: int, rows: int) -> None:
    """Warn if the first batch, of `rows` rows, was divided into fewer `micro_batches` than the step `name` requests."""
    # replicas with sums in the forward count as one in one process
    if max(micro_batches, rows) < program.pipeline.micro_batch:
        asked = f"{_name_request_source(program)} for {program.pipeline.micro_batch} micro-batches"
        what, why = f"but the first batch has {rows} row{'s' * (rows != 1)}", "a micro-batch has at least one row"
        mend = f"{_suggest_fewer(program, max(1, rows))}, or a larger batch"
        if not any(leaf.batched for leaf in program.leaves):
            what = "but the step has no batch: it runs undivided, with correct results"
            why = "no argument of the step has rows to divide"
            mend = (
                "pass the batch as arguments, for batch in dataset: step(*batch), not the iterator; or, if there is no "
                "batch, remove nb.pipeline"
            )
        warn_at(script_site(), f"{asked}, {what}", why=why, mend=mend, where=name)


def _name_request_source(program: Program) -> str:
    """A text that names the origin of the number of micro-batches: replicas, shares by speed, or `nb.pipeline`."""
    most = max(program.stages, key=lambda stage: stage.replicas)
    asked = program.pipeline.micro_batch
    if most.replicas == asked > 1:
        return f"the {asked} replicas of stage {most.key!r} ask"
    shared = any(stage.speeds for stage in program.stages)
    return "nb.pipeline, or shares by speed, ask" if shared else "nb.pipeline asks"


def _suggest_fewer(program: Program, rows: int) -> str:
    most = max(stage.replicas for stage in program.stages)
    asked = [f"nb.replica({rows})"] * (most > rows) + [f"nb.pipeline(micro_batch={rows})"] * (
        most < program.pipeline.micro_batch
    )
    return " and ".join(asked)


def refuse_outer_gradients(
    name: str, variables: Iterable[Any], arguments: Sequence[Any], results: Sequence[Any]
) -> list[Any]:
    """The results of step `name` for a caller whose tape records: copies that have no gradient.

    A gradient through them with respect to the step's variables, or to sources of its arguments, raises an error.
    """
    fresh = [_copy_result(result) for result in results]
    followed = [each for each in arguments if isinstance(each, tf.Tensor) and tf_private.is_followed_by_tape(each)]
    own = [variable for variable in variables if variable.trainable]
    handles = {id(variable.handle) for variable in own}

    def answer(sources: frozenset[int] | None) -> None:
        if followed or sources is None or not handles.isdisjoint(sources):
            raise _outer_gradient_error(name)

    tf_private.record_on_tapes(own, followed, [tensor for tensor in fresh if _is_differentiable(tensor)], answer)
    return fresh


def _copy_result(result: Any) -> Any:
    """A copy of a result, which may be an argument that is returned or a value still in flight."""
    if not isinstance(result, tf.Tensor | PendingResult) or not _is_differentiable(result):
        return result
    with tf_private.stop_recording():
        return tf.identity(result)


def _is_differentiable(result: Any) -> bool:
    return isinstance(result, tf.Tensor | PendingResult) and bool(result.dtype.is_floating or result.dtype.is_complex)


def _outer_gradient_error(name: str) -> GradientError:
    return GradientError(
        f"a tape outside {name} requests a gradient through a call of it",
        where=str(script_site()),
        why=f"{name} runs with a plan, which has only the gradients that are requested inside the step",
        mend=f"open the tape inside {name}, and return what you need: return loss, tape.gradient(loss, variables)\n"
        f"or, if no gradient is to flow back, use tf.stop_gradient(...) around the call of {name}",
    )


TraceContext = Callable[[Sequence[Any]], contextlib.AbstractContextManager[None]]
Call = Callable[[Sequence[Any]], Any]
"""The user's step, called with the values of its arguments."""


_LOG = logging.getLogger("whale_nebula.runtime.run")


@dataclass
class Engine:
    """A captured step with its plan and its runner. `steps` counts its steps. `unread` are variables of the model that
    it trains, by name, which the step neither reads nor writes: they are saved with it. `title` is the step's name in
    checkpoints, once known. `without_xla` makes the runner that replaces the present one if XLA fails to compile it.
    """

    name: str
    captured: Captured
    cut: Cut
    runner: Runner
    worker: str = "local/0"
    steps: int = 0
    notes: Sequence[str] = ()
    xla: Xla | None = None
    without_xla: Callable[[], Runner] | None = None
    plan_watch: PlanWatch | None = None
    title: str = ""
    unread: Mapping[str, Any] = field(default_factory=dict)

    def run(self, tensors: Sequence[Any]) -> Any:
        """Run one step, report it, and pack its results as the user's code returns them."""
        checkpoints = current_run().checkpoints
        if checkpoints is not None:
            checkpoints.restore_if_requested(self)
            checkpoints.before_step(self, tensors)
        begin(self)
        if not self.runner.synchronizes_clusters:
            current_run().settle()
        if not self.runner.takes_partial_inputs:
            tensors = unwrap_whole(self.cut.program.leaves, tensors)
        taped = tf_private.is_tape_recording() and not self.runner.plain
        without_tape = tf_private.stop_recording() if taped else contextlib.nullcontext()
        failing = contextlib.nullcontext() if checkpoints is None else checkpoints.note_failure(self.runner)
        now = current_run().current_step
        now.number, now.micro_batches = now.number + 1, 1
        now.is_local_sgd = self.captured.program.local_sgd is not None
        try:
            with annotation("whale_nebula", step_num=self.steps, _r=1), without_tape, failing, suspend_carried_errors():
                outcome = self._run(tensors)
        finally:
            now.micro_batches = 0
        self.steps += 1
        self._log(outcome.compression_lines)
        if self.steps == 1 and self.captured.decision is None:
            warn_if_few_rows(self.cut.program, self.name, len(outcome.counts), sum(outcome.counts))
        xla_notes = () if self.xla is None else self.xla.notes
        workers = {self.worker: measure_memory(self._held_bytes), **outcome.elsewhere.workers}
        publish(
            Report(
                program=self.name,
                step=self.steps,
                step_seconds=outcome.seconds,
                micro_batches=len(outcome.counts),
                stages=outcome.stages,
                links=outcome.links,
                spans=outcome.spans,
                basis=outcome.basis,
                notes=(*self.cut.notes, *self.notes, *xla_notes, *outcome.compression_lines.notes, *outcome.notes),
                scalars=self._scalars.from_results(outcome.tensors),
                worker=self.worker,
                elsewhere=outcome.elsewhere,
                boundaries=outcome.boundaries,
                meetings=outcome.meetings,
                time=time.time(),
                workers=workers,
                planned=None if self.plan_watch is None else self.plan_watch.add(outcome, tensors, workers),
                goodput=None if checkpoints is None else checkpoints.time_account.sum_up(),
                cost=self._count_cost(outcome, tensors),
            )
        )
        if checkpoints is not None:
            checkpoints.after_step(self, partial(self._scalars.from_results, outcome.tensors))
        if not taped:
            return self.captured.pack(outcome.tensors)
        return self.captured.pack(
            refuse_outer_gradients(self.name, self.captured.variables.values(), tensors, outcome.tensors)
        )

    def count_from(self, steps: int) -> None:
        """Continue the count of steps at `steps`, unless it is already higher: that of the engine of another signature,
        or of an earlier start of the run.
        """
        runner = self.runner.innermost
        self.steps = max(self.steps, steps)
        if hasattr(runner, "steps"):
            runner.steps = max(runner.steps, self.steps)

    @cached_property
    def trains(self) -> bool:
        """Whether the step requests gradients."""
        return bool(self.cut.program.requests)

    def list_trained(self) -> list[Any]:
        """The variables whose gradients are requested."""
        known = self.cut.program.variable_ops
        asked = {op for request in self.cut.program.requests for op in request.origins}
        return [self.captured.variables[known[op].path] for op in sorted(asked & known.keys())]

    def _count_cost(self, outcome: StepOutcome, tensors: Sequence[Any]) -> StepCost | None:
        """The cost of a step of all workers, if the config has prices."""
        if self._prices is None or self.captured.program.local_sgd is not None:
            return None
        whole = self.runner.innermost.plain  # an uncut step does not count its rows
        counts = count_micro_batch_rows(self.cut.program.leaves, tensors, 1) if whole else outcome.counts
        return self._prices.price_step(outcome.seconds, outcome.summed_links, sum(counts))

    @cached_property
    def _prices(self) -> Prices | None:
        return Prices.from_clusters(find_configured(current_run()))

    @cached_property
    def _held_bytes(self) -> int:
        held = self.runner.innermost.held_bytes
        return count_bytes(self.captured.variables.values()) if held is None else held

    def _run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run the step; if XLA fails to compile it, run it without XLA from then on."""
        try:
            return self.runner.run(tensors)
        except StageFailedError as failure:
            began = failure.torn and not self.runner.innermost.plain
            if self.xla is None or self.without_xla is None or began or not is_xla_refusal(failure):
                raise
            self.xla.note_refusal(failure)
            self.runner, self.without_xla = self.without_xla(), None
            return self.runner.run(tensors)

    def _log(self, lines: StepLines) -> None:
        """Log the lines of a step about its boundaries; both sides of a boundary log them."""
        for line in lines.fresh:
            _LOG.info("%s: step %d of %r, %s", self.worker, self.steps, self.name, line)
        if lines.skip_reason:
            _LOG.warning("%s: step %d of %r is skipped: %s", self.worker, self.steps, self.name, lines.skip_reason)

    @cached_property
    def _scalars(self) -> ScalarResults:
        return find_scalar_results(self.captured.structured_outputs)

    @property
    def doing(self) -> Mapping[str, str]:
        """The current activity of each stage, if stages run separately."""
        return {} if self.runner.clocks is None else self.runner.clocks.doing()


@dataclass
class UncutStep(Runner):
    """Runner of one stage and one micro-batch, with the original function."""

    plain = True
    function: Any
    stage: Stage
    graph: Any

    def run(self, tensors: Sequence[Any]) -> StepOutcome:
        """Run one step."""
        start = time.perf_counter()
        try:
            results = tf.nest.flatten(self.function(*tensors), expand_composites=True)
        except tf.errors.OpError as failure:
            raise plain_step_error(self.stage.key, failure, OpLocations(self.graph, [self.stage])) from failure
        found = [leaf for leaf in results if isinstance(leaf, tf.Tensor)]
        return StepOutcome(found, time.perf_counter() - start, (1,), {self.stage.key: StageReport()})


def make_engine(
    captured: Captured,
    call: Call,
    layout: Signature,
    name: str,
    *,
    jit: bool = False,
    lazy: bool = False,
    notes: Sequence[str] = (),
    models: Sequence[Any] = (),
    prepared: Prepared | None = None,
) -> Engine:
    """Plan a captured step and choose its runner; in several processes, agree with the others. With `jit`, XLA compiles
    its stages where possible; with `lazy`, values from other processes are awaited when they are read. `models` are
    those that the step trains or evaluates; `prepared` has what was made of the capture ahead.
    """
    run = current_run()
    given = prepare_compilation(captured, run, follows_inputs=bool(run.config.forbid))
    program, watch = captured.program, _watch_plan(captured, run, name)
    run.programs += 1
    known, functions = (None, None) if prepared is None else prepared.find_results(given)
    cut: Cut = known or run_passes(given).require("cut")
    xla = Xla(program.graph, program.stages) if jit else None
    cluster_copy = (
        None if program.local_sgd is None else make_cluster_copy(program.local_sgd, captured, run, name, models)
    )
    notes = notes if cluster_copy is None else (*notes, *cluster_copy.notes)
    written = frozenset[str]() if run.alone else list_written_variables(cut.program)
    with run.share_failures():
        inputs = [leaf.name for leaf in program.leaves]
        check_forbidden(name, cut.input_crossings, run.config.forbid, inputs, trains=bool(program.requests))
        if not run.alone:  # inputs of this cluster and sums of replicas must be available before any process begins
            here = run.ledger.session.worker
            check_absent_inputs(cut, here, layout.absent, given.where)
            opened = run.ledger.collectives is not None
            check_replica_sums(cut, here, given.where, collectives=opened)
            able = opened or here not in list_split_workers(cut)
            check_devices(cut, given.where, collectives=able)
            check_held_layouts(cut, given.held_layouts)
            apart = cluster_copy is not None
            run.ledger.require_movable(captured.variables, cut.variable_workers, written, apart=apart)
        if cluster_copy is not None:
            cluster_copy.check(cut)
    if not run.alone and (cluster_copy is None or cluster_copy.mates):
        runner = _make_distributed(captured, cut, run, name, xla, lazy, written, cluster_copy, functions)
        runner = runner if cluster_copy is None else cluster_copy.wrap_runner(runner)
        return Engine(name, captured, cut, runner, run.ledger.session.worker, notes=notes, xla=xla, plan_watch=watch)
    worker = given.workers[0].name
    if cluster_copy is not None:
        cluster_copy.initialize_variables()

    def choose(xla: Xla | None = None) -> Runner:
        inner = _make_runner(captured, cut, run, call, layout, xla, worker, functions)
        return inner if cluster_copy is None else cluster_copy.wrap_runner(inner)

    return Engine(
        name, captured, cut, choose(xla), worker, notes=notes, xla=xla, without_xla=choose if jit else None,
        plan_watch=watch,
    )  # fmt: skip


def _watch_plan(captured: Captured, run: Run, name: str) -> PlanWatch | None:
    """The comparison of a step with its prediction, if the planner has planned exactly this program."""
    if captured.decision is None or captured.decision.program != name:
        return None
    from whale_nebula.runtime.replan import PlanWatch  # imports the planner, which scripts with scopes do not need

    return PlanWatch(name, captured.decision, run, captured.program.leaves)


def find_held_layouts(captured: Captured, run: Run) -> dict[int, Layout]:
    """The layouts of variables that earlier programs of the run have fixed, by their op."""
    known = {op: run.ledger.layout_of(captured.variables[v.path]) for op, v in captured.program.variable_ops.items()}
    return {op: layout for op, layout in known.items() if layout is not None}


def prepare_compilation(captured: Captured, run: Run, *, follows_inputs: bool = False) -> Compilation:
    """The input of the passes for a captured step, once the run's clusters are connected."""
    stages, apart = captured.program.stages, captured.program.local_sgd is not None and not run.alone
    clusters = list(run.workers.values()) if apart else [stage.cluster for stage in stages]
    run.register_clusters(clusters, {stage.cluster: stage.where for stage in stages})
    operations = order_operations(captured.graph.get_operations())
    workers, config = tuple(_place_workers(captured, run)), run.config
    held = {} if run.alone else find_held_layouts(captured, run)

    def where(number: int) -> str:
        return find_origin(operations[number])

    return Compilation(captured.program, workers, where, config.results, frozenset(config.inputs), held, follows_inputs)


def _place_workers(captured: Captured, run: Run) -> list[Worker]:
    """The workers, each with its stages: a single one with all stages in one process, otherwise those of the stages'
    clusters. With local SGD only those of this process's cluster, or only this one, if each has a copy of its own.
    """
    stages = captured.program.stages
    if run.alone:
        return [Worker("local/0", "local", tuple(range(len(stages))))]
    apart, here = captured.program.local_sgd, run.here()
    own = None if apart is None else here.cluster
    clusters: dict[str, list[str]] = {}
    for worker, cluster in run.workers.items():
        if own in (None, cluster) and (apart is None or apart.copies == 1 or worker == here.worker):
            clusters.setdefault(cluster, []).append(worker)
    return sorted(place_stages(stages, clusters), key=lambda worker: worker.name)


def _make_runner(
    captured: Captured,
    cut: Cut,
    run: Run,
    call: Call,
    layout: Signature,
    xla: Xla | None,
    worker: str,
    functions: Any,
) -> Runner:
    if runs_uncut(cut):
        function = functions or make_uncut_function(captured, call, layout, jit=xla is not None)
        return UncutStep(function, cut.program.stages[0], captured.graph)
    emulated = has_links(cut, run)
    compiled = functions or compile_cut(captured, cut, worker, emulated, xla)
    if not emulated:
        return compiled if isinstance(compiled, LocalStep) else LocalStep(compiled, captured.variables)
    states, seed = _make_states(run, captured), _find_seed(run)
    step = EmulatedStep(compiled, captured.variables, run.links, run.programs, states, seed)
    _close_at_shutdown(run, step)
    return step


def runs_uncut(cut: Cut) -> bool:
    """Whether a step in one process runs as it was traced."""
    return len(cut.program.stages) == 1 and cut.program.pipeline.micro_batch == 1 and not cut.layouts


def has_links(cut: Cut, run: Run) -> bool:
    """Whether the stages of a step in one process run separately, over emulated links: a line has a rate or a delay, or
    a boundary a codec.
    """
    lines = [run.links.between(a.cluster, b.cluster) for a, b in combinations(cut.program.stages, 2)]
    return any(line.rate or line.delay for line in lines) or has_codecs(cut)


def make_uncut_function(captured: Captured, call: Call, layout: Signature, *, jit: bool = False) -> Any:
    """The user's step as a `tf.function` that draws from the variables of its capture."""
    return make_plain_function(call, layout, jit=jit, around=lambda tensors: patches.draw_from(captured.draws))


def compile_cut(
    captured: Captured, cut: Cut, worker: str, is_outside_trace: bool, xla: Xla | None = None,
    sums: ReplicaSums | None = None, shards: Shards | None = None,
) -> Compiled:  # fmt: skip
    """The functions of a worker's fragments, which are built when they are needed."""
    builder = FunctionBuilder(captured.graph, captured.aliases, xla, sums, cut, shards)
    return Compiled(cut, worker, builder, is_outside_trace)


def _make_shards(cut: Cut, captured: Captured, run: Run, worker: str, new_shards: NewShards) -> Shards | None:
    """The part of split stages that belongs to this worker."""
    if worker not in list_split_workers(cut) or run.ledger.collectives is None:
        run.ledger.exchanges += bool(cut.layouts)  # like workers with layouts
        return None
    shards = Shards(cut, worker, run.ledger.collectives, run.programs)
    hold_pieces(shards, new_shards, captured, run.ledger)
    return shards


def _make_distributed(
    captured: Captured,
    cut: Cut,
    run: Run,
    name: str,
    xla: Xla | None,
    lazy: bool,
    written: Collection[str],
    cluster_copy: ClusterCopy | None = None,
    functions: Compiled | None = None,
) -> Runner:
    """Agree with the other processes, release variables that they hold, and make the runner of the local stages. If
    each cluster trains its own copy, the other processes are those of this cluster.
    """
    session = run.ledger.session if cluster_copy is None else cluster_copy.cluster_session
    session.expected.add(run.programs, cut)
    leaves = [leaf.name for leaf in captured.program.leaves]
    secret = {*run.config.inputs, *forbidden_inputs(run.config.forbid, leaves)}
    ids, readers = frozenset(parse_ids(run.ids)), find_readers(cut, secret)
    with session.share_failures():
        clusters = {worker.name: worker.cluster for worker in cut.workers}
        refuse_unshared_ids(ids, readers, clusters)
        states = _make_states(run, captured)
        ends = Crossings(cut, cut.routing, clusters).list_ends(session.worker.__eq__)  # the channels with a local end
        new_shards = NewShards.create(cut, captured.variables, run.ledger)
        _move_variables(captured, cut, run, name)
        run.ledger.admit_program_values(captured.variables, cut.variable_workers, new_shards.shapes(session.worker))
        elsewhere = {
            id(captured.variables[path]) for path, held in cut.variable_workers.items() if session.worker not in held
        }
        later = elsewhere | {id(captured.variables[path]) for path in new_shards.stages}
        captured.initialize_variables(lambda variable: id(variable) not in later)
        settings = list_settings(cut, written)
        values = read_settings(run.ledger.list_common(settings, captured.variables), captured.variables)
        lines = [*canonical_lines(captured.program), *(f"value {path} {value}" for path, value in values.items())]
        versions = session.agree(name, digest_lines(lines), lines, describe_first_difference, states.versions(ends))
        for channel in map(escape_foreign_text, states.drop(versions, ends)):
            _LOG.warning("the processes have different codec states of %s: all of them are reset", channel)
        run.ledger.register_program(
            captured.variables,
            cut.variable_workers,
            () if cluster_copy is None else cluster_copy.other_cluster_workers,
            new_shards.layouts,
        )
        shards = _make_shards(cut, captured, run, session.worker, new_shards)
    sums = (
        make_replica_sums(cut, session.worker, run.ledger.collectives, run.programs)
        if find_replica_sums(cut.program)
        else None
    )
    compiled = functions or compile_cut(captured, cut, session.worker, True, xla, sums, shards)
    variables = dict(captured.variables)
    for op, piece in shards.pieces.items() if shards is not None else ():
        variables[cut.program.variable_ops[op].path] = piece.variable
    step = DistributedStep(
        compiled, variables, run.links, run.programs, states, _find_seed(run), lazy, session=session, name=name,
        ids=ids, readers=readers, collectives=run.ledger.collectives, includes_all_processes=cluster_copy is None,
        shards=shards, settings=settings, all_written=written,
    )  # fmt: skip
    _close_at_shutdown(run, step)
    return step


def _move_variables(captured: Captured, cut: Cut, run: Run, name: str) -> None:
    """Move variables to other workers for a plan that replaces another one. With the planned program, this includes
    variables that no local stage needs any more, because other workers may train them.
    """
    decision, ledger = captured.decision, run.ledger
    if decision is None or decision.replaces is None or ledger.last_decision is decision:
        return
    exactly = decision.program == name
    ledger.move(captured.variables, cut.variable_workers, exactly=exactly)
    ledger.last_decision = decision if exactly else ledger.last_decision


def forget_states(captured: Captured, run: Run) -> None:
    """Discard the codec states of a program with new cuts, because its boundaries are different tensors."""
    if run.models is not None:
        states = _make_states(run, captured)
        states.forget({states.model})


def _make_states(run: Run, captured: Captured) -> States:
    """The codec states of a program's model."""
    run.models = run.models or Models()
    states = States(run.channels, run.models.number(captured.variables.values()))
    states.forget(run.models.find_deleted())
    return states


def _close_at_shutdown(run: Run, step: DistributedStep | EmulatedStep) -> None:
    """Close a step at the end of the run, without a reference that keeps a dropped model alive."""
    held = weakref.ref(step)

    def close() -> None:
        if (alive := held()) is not None:
            alive.close()

    run.close_at_end(close)


def make_plain_function(
    call: Call,
    layout: Signature,
    *,
    jit: bool = False,
    around: TraceContext | None = None,
) -> Any:
    """The user's step as a plain `tf.function`, traced inside `around`: the oracle of every other way to run it."""

    def body(*tensors: Any) -> Any:
        with tracing.uncut(), around(tensors) if around is not None else contextlib.nullcontext():
            return call(fill_layout(layout, tensors))

    made = tf.function(body, autograph=False, input_signature=list(layout.specs), jit_compile=jit or None)
    return tf_private.silence_retracing_warning(made)


def _find_seed(run: Run) -> int:
    """The seed of stochastic rounding, the same in every process."""
    return run.seed if run.seed is not None else run.config.seed or 0
