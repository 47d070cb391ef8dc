"""Steps under `nb.auto_parallel`: captured uncut, planned, and captured again with the decided stages."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from whale_nebula.capture.step import Captured, Signature, capture
from whale_nebula.codec.encoding import AUTO
from whale_nebula.errors import CaptureError, NebulaError, NotYetError, PlanError
from whale_nebula.ir.cut import Cut
from whale_nebula.ir.program import Stage
from whale_nebula.passes.pipeline import run_passes
from whale_nebula.passes.split import check_devices
from whale_nebula.planner.decision import Decision, Unplanned
from whale_nebula.runtime.decisions import (
    check_constraints,
    decide,
    decide_after_refusal,
    find_clusters,
    find_homes,
    map_handles,
    recount_split_costs,
)
from whale_nebula.runtime.run import Run, current_run
from whale_nebula.runtime.step.engine import prepare_compilation
from whale_nebula.scopes import public
from whale_nebula.scopes.auto import Limits
from whale_nebula.scopes.step_options import current_step_options

ROWS = 32
"""The assumed number of rows of an unknown batch."""
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
    """Capture an uncut step again, with the stages that are decided for it or were decided for another step of the same
    variables. `tensors` are its first batch, if there is one; `options` are those of `capture`.
    """
    run, constraints, shapes = current_run(), first.constraints, shapes_of_batch(layout, tensors)
    if constraints.unplanned:
        note = f"nb.auto_parallel at {limits.site} does not change the scopes of this step: {constraints.unplanned}."
        return replace(first, decision=Unplanned(note))
    homes = find_homes(name, layout.absent, run)

    def capture_with(decision: Decision) -> Captured:
        return _capture_stages(first, decision, limits, call, layout, homes, options)

    purpose, trains = current_step_options().plan, bool(first.program.requests)
    before = _list_decisions(run, first)
    decision = next(
        (each for each in before if each.purpose == (purpose or each.purpose) and each.trains >= trains), None
    )
    if decision is not None:
        if decision.replaces is None or not decision.replaces.trains or decision.program != name:
            return _reuse_decision(decision, first, capture_with, limits, shapes, run)
        try:
            recaptured = capture_with(decision)
            _check_cut(recaptured, decision, shapes, run)
            return recaptured
        except (CaptureError, PlanError, NotYetError):
            return capture_with(_restore_previous_plan(run, decision, decision.replaces))
    check_constraints(constraints, limits, run)
    decision = decide(
        name, first, shapes, limits, run, tensors, lambda each: _check_cut(capture_with(each), each, shapes, run),
        layout.absent, homes,
    )  # fmt: skip
    if decision is None:  # nothing to assign to stages: one cluster runs all of it
        unplanned = Unplanned(f"nb.auto_parallel at {limits.site} does not divide this step: it has no variables.")
        if first.program.has_scopes:
            return replace(first, decision=unplanned)
        stage = Stage("stage0", find_clusters(limits, constraints, run).names[0], str(limits.site))
        return replace(first, program=replace(first.program, stages=(stage,)), decision=unplanned)
    found: Captured | None = None
    while found is None:
        found, decision, refused = _try_stages(capture_with, decision, shapes, run)
        if refused is not None:
            decision = decide_after_refusal(decision, limits, refused)
    decision = replace(decision, purpose=purpose, trains=trains, replaces=before[0] if before else None)
    found = replace(found, decision=decision)
    run.decisions[:] = [*(each for each in run.decisions if not each.is_current(before)), decision]
    advance = f", in advance on {decision.found_on}" * bool(decision.found_on)
    _LOG.info("%s is planned by nb.auto_parallel%s:\n%s", name, advance, decision.considered[0])
    return found


def _reuse_decision(
    decision: Decision,
    first: Captured,
    capture_with: Callable[[Decision], Captured],
    limits: Limits,
    shapes: Sequence[tuple[int, ...]],
    run: Run,
) -> Captured:
    """The step with the stages of an earlier decision; with the whole batch in each if its own cannot be divided."""
    try:
        found = capture_with(decision)
        _check_cut(found, decision, shapes, run)
    except (CaptureError, PlanError):
        if limits.micro_batch is not None or first.constraints.micro_batch is not None:
            raise
    else:
        return found
    return replace(capture_with(decision.with_whole_batch()), decision=decision)


def _try_stages(
    capture_with: Callable[[Decision], Captured], decision: Decision, shapes: Sequence[tuple[int, ...]], run: Run
) -> tuple[Captured | None, Decision, NebulaError | None]:
    """The step with the stages of a decision, the decision with the costs that passes have found, and the error of a
    pass that refuses it. The step is None if it was refused, or if a plan without splits is now better.
    """
    try:
        found = capture_with(decision)
        counted = _check_cut(found, decision, shapes, run)
    except (CaptureError, PlanError, NotYetError) as refused:
        return None, decision, refused
    return replace(found, decision=counted) if counted.splits == decision.splits else None, counted, None


def _restore_previous_plan(run: Run, refused: Decision, before: Decision) -> Decision:
    """Return to the previous plan, because a pass refused the better one."""
    stays = replace(before, replan=False, replaces=refused)
    run.decisions[:] = [stays if each is refused else each for each in run.decisions]
    return stays


def _list_decisions(run: Run, captured: Captured) -> list[Decision]:
    """The earlier decisions for any of the step's variables: a model is evaluated with the stages of its training."""
    handles = map_handles(captured).items()
    return [each for each in run.decisions if any(each.handles.get(handle) == path for handle, path in handles)]


def shapes_of_batch(layout: Signature, tensors: Sequence[Any] | None) -> list[tuple[int, ...]]:
    """The shapes of the batch; unknown numbers of rows are `ROWS`."""
    actual = [tuple(getattr(t, "shape", ())) for t in tensors] if tensors is not None else [()] * len(layout.specs)
    rows = [shape[0] for shape, split in zip(actual, layout.batched, strict=True) if split and shape and shape[0]]
    count = max(rows, default=ROWS)
    found = []
    for spec, shape, split in zip(layout.specs, actual, layout.batched, strict=True):
        static = tuple(spec.shape) if spec.shape.rank is not None else ()
        known = shape if len(shape) == len(static) else static
        filled = tuple(count if size is None else int(size) for size in known)
        found.append((count, *filled[1:]) if split and filled else filled)
    return found


def _check_cut(found: Captured, decision: Decision, shapes: Sequence[tuple[int, ...]], run: Run) -> Decision:
    """Let the passes check whether the batch and variables can be divided as decided; returns the decision, with the
    costs of split stages that they have found.
    """
    if decision.chosen.shape.micro_batches == 1 and not decision.splits and decision.replaces is None:
        return decision
    cut: Cut = run_passes(prepare_compilation(found, run)).require("cut")
    if not decision.splits:
        return decision
    if not run.alone:
        check_devices(cut, lambda op: "", collectives=True)
    return recount_split_costs(decision, cut, shapes)


# ---------------------------------------------------------------------- with its stages
def _capture_stages(
    first: Captured,
    decision: Decision,
    limits: Limits,
    call: Call,
    layout: Signature,
    homes: Mapping[int, frozenset[str]],
    options: Mapping[str, Any],
) -> Captured:
    """Capture the step with the stages of a decision; one that runs uncut is not captured again."""
    if decision.uncut:
        stage = Stage("stage0", decision.assignment.stages[0].cluster, decision.site)
        return replace(first, program=replace(first.program, stages=(stage,)), decision=decision)
    assignment = replace(decision.assignment, homes=homes)
    with _compress_crossings(limits):
        found = capture(call, layout, **options, assignment=assignment, handles=decision.handles)

    def initialize_variables(selects: Callable[[Any], bool]) -> None:
        first.initialize_variables(selects)
        found.initialize_variables(selects)

    return replace(found, initialize_variables=initialize_variables, decision=decision)


@contextlib.contextmanager
def _compress_crossings(limits: Limits) -> Iterator[None]:
    """Open the scopes for the user's codec of crossings; with "auto" the decided stages have codecs."""
    with contextlib.ExitStack() as opened:
        if limits.compress not in (None, AUTO):
            opened.enter_context(public.cluster())
            opened.enter_context(public.compress(codec=limits.compress))
        yield
