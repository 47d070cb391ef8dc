"""Steps under `nb.auto_parallel`: captured uncut, planned, and captured again with the stages that were decided."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from whale_nebula.capture.step import Captured, Signature, capture
from whale_nebula.codec.way import AUTO
from whale_nebula.errors import CaptureError, NebulaError, PlanError
from whale_nebula.hardware import Clusters
from whale_nebula.ir.program import Stage
from whale_nebula.passes.pipeline import run_passes
from whale_nebula.planner.chain import Layers, layers_of
from whale_nebula.planner.decision import Decision, describe_excess
from whale_nebula.planner.problem import Options
from whale_nebula.planner.search import search
from whale_nebula.planner.sites import grounds_of, problem_of
from whale_nebula.runtime.clusters import complete, config_of, told_by_config
from whale_nebula.runtime.run import Run, current_run
from whale_nebula.runtime.step.engine import prepare_compilation
from whale_nebula.scopes import public
from whale_nebula.scopes.auto import Limits

ROWS = 32
"""Rows of a batch of which nothing is known."""
_LOG = logging.getLogger("whale_nebula.runtime.run")

Call = Callable[[Sequence[Any]], Any]


def capture_planned(
    name: str,
    first: Captured,
    limits: Limits,
    call: Call,
    layout: Signature,
    tensors: Sequence[Any] | None,
    **options: Any,
) -> Captured:
    """A step that was captured uncut, with the stages that are decided for it.

    `tensors` are its first batch, if there is one; `options` are those of `capture`.
    """
    run = current_run()
    decision = _find_decision(run, first)
    if decision is not None:
        return _with_stages(first, decision, limits, call, layout, options)
    made = _decide(name, first, _shapes(layout, tensors), limits, run)
    if made is None:  # nothing that could be given to stages: one cluster runs all of it
        stage = Stage("stage0", _clusters(limits, run).names[0], str(limits.site))
        return replace(first, program=replace(first.program, stages=(stage,)))
    decision, clusters = made
    try:
        found = _with_stages(first, decision, limits, call, layout, options)
        if decision.chosen.shape.micro_batches > 1:  # the passes may refuse to cut the batch
            run_passes(prepare_compilation(found, run))
    except (CaptureError, PlanError) as refused:
        decision = _without_micro_batches(decision, clusters, limits, refused)
        found = _with_stages(first, decision, limits, call, layout, options)
    run.decisions.append(decision)
    _LOG.info("%s is planned by nb.auto_parallel:\n%s", name, decision.considered[0])
    return found


def _find_decision(run: Run, captured: Captured) -> Decision | None:
    """What was decided before for the variables of a step: a model is evaluated where it is trained."""
    handles = _handles(captured)
    for decision in run.decisions:
        if any(decision.handles.get(handle) == path for handle, path in handles.items()):
            return decision
    return None


def _handles(captured: Captured) -> dict[int, str]:
    return {id(variable.handle): path for path, variable in captured.variables.items()}


def _shapes(layout: Signature, tensors: Sequence[Any] | None) -> list[tuple[int, ...]]:
    """The shapes of the batch, as far as they are known; the rest has `ROWS` rows."""
    given = [tuple(getattr(t, "shape", ())) for t in tensors] if tensors is not None else [()] * len(layout.specs)
    rows = [shape[0] for shape, split in zip(given, layout.batched, strict=True) if split and shape and shape[0]]
    count = max(rows, default=ROWS)
    found = []
    for spec, shape, split in zip(layout.specs, given, layout.batched, strict=True):
        static = tuple(spec.shape) if spec.shape.rank is not None else ()
        known = shape if len(shape) == len(static) else static
        filled = tuple(count if size is None else int(size) for size in known)
        found.append((count, *filled[1:]) if split and filled else filled)
    return found


def _decide(
    name: str, captured: Captured, shapes: Sequence[tuple[int, ...]], limits: Limits, run: Run
) -> tuple[Decision, Clusters] | None:
    """Search for a plan among clusters; None where the step has nothing that could be given to stages."""
    rows = next((s[0] for s, leaf in zip(shapes, captured.program.leaves, strict=True) if leaf.batched and s), 1)
    clusters, rows = _agree(name, _clusters(limits, run), rows, run)
    layers = layers_of(captured.program, rows, _with_rows(captured, shapes, rows))
    if layers is None:
        return None
    options, reasons = Options(limits.micro_batch, limits.replica, limits.recompute), []
    if limits.memory is not None:
        options = replace(options, memory=float(limits.memory))
    whole = _why_whole(captured, layers)
    if limits.micro_batch is None and whole:
        options, reasons = replace(options, micro_batch=1), [f"the batch stays whole: {whole}"]
    decision = _search(layers, clusters, options, limits, tuple(reasons))
    return replace(decision, handles=_handles(captured)), clusters


def _why_whole(captured: Captured, layers: Layers) -> str:
    """Why a batch is not cut unless the user says so."""
    if len(captured.program.requests) > 1:
        return "the step asks for gradients more than once"
    if layers.draws:
        return (
            "the model draws random numbers (dropout), and each micro-batch would draw others; micro_batch= allows it"
        )
    if not any(leaf.batched for leaf in captured.program.leaves):
        return "no argument of the step has rows"
    return ""


def _search(layers: Layers, clusters: Clusters, options: Options, limits: Limits, reasons: tuple[str, ...]) -> Decision:
    problem = problem_of(layers, clusters, options, limits.compress)
    found = search(problem)
    if not found.candidates:
        what, why, mend = (
            ("no plan was found", "", "") if found.excess is None else describe_excess(found.excess, layers)
        )
        raise PlanError(what, where=str(limits.site), why=why, mend=mend)
    return Decision(layers, problem, found.candidates, grounds_of(layers, clusters), str(limits.site), reasons)


def _without_micro_batches(before: Decision, clusters: Clusters, limits: Limits, refused: NebulaError) -> Decision:
    """Decide again where the passes have refused what was chosen: with the whole batch, or for one worker."""
    if limits.micro_batch is not None or before.chosen.shape.micro_batches == 1:
        raise refused
    reasons = (*before.reasons, f"the batch stays whole: {refused.what}")
    found = _search(before.layers, clusters, replace(before.problem.options, micro_batch=1), limits, reasons)
    return replace(found, handles=before.handles)


# ---------------------------------------------------------------------- with its stages
def _with_stages(
    first: Captured, decision: Decision, limits: Limits, call: Call, layout: Signature, options: Mapping[str, Any]
) -> Captured:
    """The step captured with the stages of a decision; one that runs uncut is not captured again."""
    if decision.uncut:
        stage = Stage("stage0", decision.assignment.stages[0].cluster, decision.where)
        return replace(first, program=replace(first.program, stages=(stage,)), decision=decision)
    with _compress_crossings(limits):
        found = capture(call, layout, **options, assignment=decision.assignment, handles=decision.handles)

    def begin(wanted: Callable[[Any], bool]) -> None:
        first.begin(wanted)
        found.begin(wanted)

    return replace(found, begin=begin, decision=decision)


@contextlib.contextmanager
def _compress_crossings(limits: Limits) -> Iterator[None]:
    """What crosses is compressed as the user has said; with "auto" the stages that were decided say it."""
    with contextlib.ExitStack() as opened:
        if limits.compress not in (None, AUTO):
            opened.enter_context(public.cluster())
            opened.enter_context(public.compress(codec=limits.compress))
        yield


# ---------------------------------------------------------------------- clusters
def _clusters(limits: Limits, run: Run) -> Clusters:
    """The clusters that may take part, by what the config says."""
    return told_by_config(run, limits.clusters)


def _agree(name: str, told: Clusters, rows: int, run: Run) -> tuple[Clusters, int]:
    """With what was measured, and the rows of the batch: the same in every process, as each tells the others."""
    completed = complete(told, config_of(run))
    if run.alone:
        return completed, rows
    session = run.ledger.session
    sheet = {"shared": {"rows": rows, "clusters": completed.to_json()}}
    heard = session.exchange(f"the planning of {name!r}", sheet, set(session.links))
    every = {session.worker: sheet, **heard}
    for worker in sorted(every):
        told = told.complete_from(Clusters.from_json(every[worker]["shared"]["clusters"], where=worker))
    return told, max(int(every[worker]["shared"]["rows"]) for worker in every)


def _with_rows(captured: Captured, shapes: Sequence[tuple[int, ...]], rows: int) -> list[tuple[int, ...]]:
    pairs = zip(shapes, captured.program.leaves, strict=True)
    return [(rows, *shape[1:]) if leaf.batched and shape else shape for shape, leaf in pairs]
