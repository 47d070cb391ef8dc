"""Build the public Plan of a captured step, cut as for running."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

import whale_nebula
from whale_nebula.capture.step import Captured, Signature, capture, pause_garbage_collection
from whale_nebula.feed.checks import MissingInput, find_absent
from whale_nebula.feed.inputs import count_micro_batch_rows
from whale_nebula.ir.canonical import canonical_lines
from whale_nebula.ir.cut import Cut
from whale_nebula.ir.program import LocalSgd, Program
from whale_nebula.passes.pipeline import run_passes, text_after
from whale_nebula.passes.readings import check_absent_inputs
from whale_nebula.plan.forbidden import forbidden_inputs
from whale_nebula.plan.overview import RecordBuilder, list_fallbacks
from whale_nebula.plan.plan import Plan
from whale_nebula.plan.records import PlanLink
from whale_nebula.plan.splits import CrossingSizes, list_collectives, list_layouts, list_notes
from whale_nebula.plan.timing import fill_in_flight
from whale_nebula.report.prediction import rounds_seconds
from whale_nebula.report.records import duration, size
from whale_nebula.runtime.clusters import find_rings
from whale_nebula.runtime.local_sgd.one_bit import OneBitRounds, find_exchanged
from whale_nebula.runtime.local_sgd.one_bit_collectives import MemberRounds
from whale_nebula.runtime.local_sgd.topology import (
    Participants,
    count_encoded_bytes,
    count_numbers,
    find_participants,
    find_weights,
)
from whale_nebula.runtime.run import Run, current_run
from whale_nebula.runtime.step.compiled import FunctionBuilder
from whale_nebula.runtime.step.engine import prepare_compilation
from whale_nebula.runtime.step.results import list_returned_names
from whale_nebula.runtime.step.traffic import Traffic, plan_link_reports
from whale_nebula.scopes.auto import get_current_limits


def describe_meetings(program: Program, variables: Mapping[str, Any], rows: int, run: Run) -> Sequence[str]:
    """Sentences on local SGD for a plan: the rows of each cluster, and what is exchanged with each other cluster; empty
    without local SGD or other clusters.
    """
    local_sgd = program.local_sgd
    participants = None if local_sgd is None else find_participants(local_sgd, run)
    if local_sgd is None or participants is None or len(participants.names) == 1 or not program.requests:
        return ()
    shares = [end - begin for begin, end in (participants.rows(name, rows) for name in participants.names)]
    worked = ", ".join(f"{name} {share}" for name, share in zip(participants.names, shares, strict=True))
    weights, own = find_weights(program, variables, ()), participants.find_own(run)
    who = "worker" if local_sgd.copies > 1 else "cluster"
    found = [f"the {rows} rows are divided ({worked}); the values above are for one {who} on all rows"]
    if local_sgd.exchange:
        return [*found, *_describe_momenta(local_sgd, participants, weights, variables, run)]
    crosses = count_encoded_bytes(local_sgd.codec, count_numbers(weights))
    for other in participants.names:
        if other != own:
            sent = _describe_sent(crosses, run.links.between(own, other).rate)
            found.append(f"a round sends {sent} from {own} to {other}, and as much back")
    return [*found, local_sgd.chosen] if local_sgd.chosen else found


def _describe_sent(crosses: int, rate: float | None) -> str:
    return size(crosses) + (f", {duration(8 * crosses / rate)} of the link" if rate else "")


def _describe_momenta(
    local_sgd: LocalSgd, participants: Participants, weights: Mapping[str, Any], variables: Mapping[str, Any], run: Run
) -> Sequence[str]:
    """Sentences on the exchange of momenta: the bytes of a step in the warm-up, and after it."""
    exchanged, own = find_exchanged(weights, variables, local_sgd.where), participants.find_own(run)
    kind = MemberRounds if local_sgd.copies > 1 else OneBitRounds
    sizes = [math.prod(weights[path].shape) for path in exchanged.paths]
    warm, after = kind.count_bytes(exchanged.optimizer, sizes, len(participants.names))
    freeze = exchanged.optimizer.freeze_step
    if local_sgd.copies > 1:
        how = "all-to-all, then all-gather" if exchanged.optimizer.servers else "all-gather"
        return [
            f"in each of {freeze} warm-up steps, each worker sends each other worker {size(warm)} of momenta, by "
            f"all-to-all, then all-gather; in each later step {size(after)}, by {how}"
        ]
    lines = {other: run.links.between(own, other).rate for other in participants.names if other != own}
    return [
        f"in each of {freeze} warm-up steps, {own} sends {other} {_describe_sent(warm, rate)}, in each later step "
        f"{_describe_sent(after, rate)}, and as much comes back"
        for other, rate in lines.items()
    ]


def capture_step(
    name: str,
    call: Callable[[Sequence[Any]], Any],
    layout: Signature,
    tensors: Sequence[Any] | None = None,
    **options: Any,
) -> Captured:
    """Capture a step, with what a planner decides (`plan_capture`). `tensors` are its first batch, if there is one;
    `options` are those of `capture`.
    """
    return plan_capture(name, capture(call, layout, **options), call, layout, tensors, **options)


def plan_capture(
    name: str,
    captured: Captured,
    call: Callable[[Sequence[Any]], Any],
    layout: Signature,
    tensors: Sequence[Any] | None = None,
    **options: Any,
) -> Captured:
    """A captured step with what a planner decides: under `nb.auto_parallel` the stages, within the constraints of
    scopes, and the interval of local SGD if that is "auto". Arguments are those of `capture_step`.
    """
    found, limits = captured, get_current_limits()
    if limits is not None:
        from whale_nebula.runtime.auto_parallel import (
            capture_planned,  # imports the planner, which other scripts do not need
        )

        found = capture_planned(name, found, limits, call, layout, tensors, **options)
    if found.program.local_sgd is not None and found.program.local_sgd.is_undecided:
        from whale_nebula.runtime.local_sgd.interval import choose_interval

        found = choose_interval(name, found, layout, tensors)
    return found


@pause_garbage_collection()
def plan_step(name: str, captured: Captured, example: Sequence[Any], notes: Sequence[str] = ()) -> Plan:
    """The plan of a captured step; `example` has tensors with the specs of its leaves."""
    run = current_run()
    compilation = prepare_compilation(captured, run, follows_inputs=True)
    cut: Cut = run_passes(compilation).require("cut")
    rows = count_micro_batch_rows(captured.program.leaves, example, captured.program.pipeline.micro_batch)
    if not run.alone:
        check_absent_inputs(cut, run.here().worker, find_absent(example), compilation.where)
    example = [each.fill_rows(sum(rows)) if isinstance(each, MissingInput) else each for each in example]
    plan = _assemble_plan(name, captured, cut, rows, [tuple(tensor.shape) for tensor in example], run)
    plan = replace(plan, passes=functools.partial(text_after, compilation=compilation))
    meetings = describe_meetings(captured.program, captured.variables, sum(rows), run)
    planner = [] if run.alone else [f"this plan was created by {run.here().worker}; every worker creates the same plan"]
    return fill_in_flight(replace(plan, notes=(*plan.notes, *meetings, *notes, *planner)))


def _assemble_plan(
    name: str, captured: Captured, cut: Cut, rows: Sequence[int], shapes: Sequence[tuple[int, ...]], run: Run
) -> Plan:
    pipeline = cut.program.pipeline
    model, _, step = name.rpartition(".")
    returned = list_returned_names(captured.structured_outputs)
    builder = functools.cache(lambda: FunctionBuilder(captured.graph, captured.aliases))
    overview = RecordBuilder(cut, rows, run.links, shapes, model if step.endswith("_step") else "", returned)
    traffic = Traffic(cut, [stage.cluster for stage in cut.program.stages], run.links, shapes)
    crossed = CrossingSizes(cut, rows, shapes)
    decision = None if captured.decision is None else captured.decision.find_record(name)
    inputs = [leaf.name for leaf in cut.program.leaves]
    forbidden = forbidden_inputs(run.config.forbid, inputs)
    plan = Plan(
        name=name,
        stages=overview.stages(),
        boundaries=overview.boundaries(),
        links=_list_links(traffic, rows),
        once=overview.list_once_parts(),
        tied=overview.list_tied_variables(),
        micro_batch=pipeline.micro_batch,
        rows=tuple(rows),
        schedule=pipeline.schedule,
        in_flight=pipeline.in_flight,
        recompute=pipeline.recompute,
        versions={
            "tensorflow": tf.__version__, "keras": keras.__version__, "whale_nebula": whale_nebula.__version__
        },
        threads={
            "intra_op": tf.config.threading.get_intra_op_parallelism_threads(),
            "inter_op": tf.config.threading.get_inter_op_parallelism_threads(),
        },
        notes=list_notes(cut, crossed, len(rows)),
        lines=canonical_lines(cut.program),
        exchange_seconds=rounds_seconds(traffic.rounds(tuple(rows))),
        layouts=list_layouts(cut),
        collectives=list_collectives(cut, crossed, len(rows), find_rings(run) if cut.layouts else None),
        definition=functools.partial(_find_graph_def, cut, builder),
        decision=decision,
        considered=() if decision is None else decision.considered,
        crossings=cut.input_crossings,
        forbid=run.config.forbid,
        protected=tuple(each for each in inputs if each in run.config.inputs or each in forbidden),
    )  # fmt: skip
    return replace(plan, notes=(*plan.notes, *list_fallbacks(plan), *overview.advice(plan)))


def _list_links(traffic: Traffic, rows: Sequence[int]) -> dict[str, PlanLink]:
    """The links that a step uses, by name, with the bytes that links will count."""
    found: dict[str, PlanLink] = {}
    for name, link in plan_link_reports(traffic.cut, traffic.hosts, rows, traffic.exchange_sizes).items():
        line, sent = traffic.lines.between(*name.split("->")), (link.payload_bytes, link.bytes, link.frames)
        found[name] = PlanLink(str(line), *sent, line.rate, line.delay, at_most=name in traffic.at_most)
    return found


def _find_graph_def(cut: Cut, builder: Callable[[], FunctionBuilder], stage: str) -> Any:
    """The graph of a stage's forward, in the first phase in which it has one."""
    for phase in cut.phases:
        for found in phase.stages:
            if cut.program.stages[found.stage].key == stage and found.forward is not None:
                return builder().build(found.forward).concrete.graph.as_graph_def()
    return tf.compat.v1.GraphDef()


def check_pinned(name: str, captured: Captured, layout: Signature) -> None:
    """Refuse a step whose plan differs from its pin, or is not approved by the owner of this cluster. Does nothing
    without pins and approvals.
    """
    run = current_run()
    pins, scoped = run.pins, captured.program.has_scopes
    pin, approvals = pins.find_pin(name), run.approvals if scoped or not run.alone else None
    if pin is None and pins and scoped:
        pins.warn_unpinned(name)
    if pin is None and approvals is None:
        return
    plan = plan_step(name, captured, [_example(spec) for spec in layout.specs])
    if pin is not None:
        pins.check(plan, pin)
    if approvals is not None:
        approvals.check(plan)


def _example(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([1 if axis is None else axis for axis in spec.shape], spec.dtype)
