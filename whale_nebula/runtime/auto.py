"""Steps under `nb.auto_parallel`: captured uncut, planned, and captured again with the stages that were decided."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from whale_nebula.capture.step import Captured, Signature, capture
from whale_nebula.errors import CaptureError, NebulaError, PlanError
from whale_nebula.hardware import Clusters
from whale_nebula.hardware.measured import find_slowness, slowness_path
from whale_nebula.ir.program import Stage
from whale_nebula.passes.pipeline import run_passes
from whale_nebula.planner.chain import Layers, layers_of
from whale_nebula.planner.correction import slow_down
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
        if decision.replaces is None or decision.program != name:
            return _with_stages(first, decision, limits, call, layout, options)
        try:
            return _check(_with_stages(first, decision, limits, call, layout, options), decision, run)
        except (CaptureError, PlanError):
            before = _go_back(run, decision, decision.replaces)
            return _with_stages(first, before, limits, call, layout, options)
    made = _decide(name, first, _shapes(layout, tensors), limits, run)
    if made is None:  # nothing that could be given to stages: one cluster runs all of it
        stage = Stage("stage0", _clusters(limits, run).names[0], str(limits.site))
        return replace(first, program=replace(first.program, stages=(stage,)))
    decision, clusters = made
    try:
        found = _check(_with_stages(first, decision, limits, call, layout, options), decision, run)
    except (CaptureError, PlanError) as refused:
        decision = _without_micro_batches(decision, clusters, limits, refused)
        found = _with_stages(first, decision, limits, call, layout, options)
    run.decisions.append(decision)
    _LOG.info("%s is planned by nb.auto_parallel:\n%s", name, decision.considered[0])
    return found


def _check(found: Captured, decision: Decision, run: Run) -> Captured:
    """The passes may refuse to cut the batch; and what is to go on by another plan must not end by it."""
    if decision.chosen.shape.micro_batches > 1 or decision.replaces is not None:
        run_passes(prepare_compilation(found, run))
    return found


def _go_back(run: Run, refused: Decision, before: Decision) -> Decision:
    """A better plan is refused after all: the one before goes on."""
    stays = replace(before, replan=False, replaces=refused)
    run.decisions[:] = [stays if each is refused else each for each in run.decisions]
    return stays


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
    clusters, rows, slowness = _agree(name, _clusters(limits, run), rows, run)
    layers = layers_of(captured.program, rows, _with_rows(captured, shapes, rows))
    if layers is None:
        return None
    options, reasons = Options(limits.micro_batch, limits.replica, limits.recompute), []
    if limits.memory is not None:
        options = replace(options, memory=float(limits.memory))
    whole = _why_whole(captured, layers)
    if limits.micro_batch is None and whole:
        options, reasons = replace(options, micro_batch=1), [f"the batch stays whole: {whole}"]
    reasons += [f"{each} computes {times:.2g} times as long as its rates say, as it did in a run before: "
                f"{slowness_path()}" for each, times in sorted(slowness.items())]  # fmt: skip
    decision = _search(layers, clusters, options, limits, tuple(reasons), slowness)
    found = replace(decision, handles=_handles(captured), program=name, replan=bool(limits.replan))
    return replace(found, clusters=clusters, slowness=slowness), clusters


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


def _search(
    layers: Layers, clusters: Clusters, options: Options, limits: Limits, reasons: tuple[str, ...],
    slowness: Mapping[str, float],
) -> Decision:  # fmt: skip
    times = {number: slowness[name] for number, name in enumerate(clusters.names) if name in slowness}
    problem = slow_down(problem_of(layers, clusters, options), times)
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
    options = replace(before.problem.options, micro_batch=1)
    found = _search(before.layers, clusters, options, limits, reasons, before.slowness)
    return replace(before, problem=found.problem, candidates=found.candidates, reasons=reasons)


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
    """What crosses is compressed as the user has said."""
    with contextlib.ExitStack() as opened:
        if limits.compress is not None:
            opened.enter_context(public.cluster())
            opened.enter_context(public.compress(codec=limits.compress))
        yield


# ---------------------------------------------------------------------- clusters
def _clusters(limits: Limits, run: Run) -> Clusters:
    """The clusters that may take part, by what the config says."""
    return told_by_config(run, limits.clusters)


def _agree(name: str, told: Clusters, rows: int, run: Run) -> tuple[Clusters, int, Mapping[str, float]]:
    """With what was measured, the rows of the batch, and what runs before have shown of clusters: the same in every
    process, as each tells the others.
    """
    completed = complete(told, config_of(run))
    slowness = find_slowness(completed, run.alone)
    if run.alone:
        return completed, rows, slowness
    session, own = run.ledger.session, run.here().cluster
    mine = {cluster: factor for cluster, factor in slowness.items() if cluster == own}
    sheet = {"shared": {"rows": rows, "clusters": completed.to_json(), "slowness": mine}}
    heard = session.exchange(f"the planning of {name!r}", sheet, set(session.links))
    every, slowness = [each["shared"] for _, each in sorted({session.worker: sheet, **heard}.items())], {}
    for each in every:
        told = told.complete_from(Clusters.from_json(each["clusters"], where=name))
        for cluster, factor in each["slowness"].items():
            slowness[cluster] = max(factor, slowness.get(cluster, 0.0))
    return told, max(int(each["rows"]) for each in every), slowness


def _with_rows(captured: Captured, shapes: Sequence[tuple[int, ...]], rows: int) -> list[tuple[int, ...]]:
    pairs = zip(shapes, captured.program.leaves, strict=True)
    return [(rows, *shape[1:]) if leaf.batched and shape else shape for shape, leaf in pairs]
