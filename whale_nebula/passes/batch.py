"""Merge rules: how values of micro-batches are combined into those of the whole batch, and refusals of steps that
micro-batches would change (for losses see `capture.loss_weights`).

The gradient of rows has rows. That of a value which is the same in every micro-batch, or a mean over the batch, is a
sum; that of a sum over the batch is the same in every micro-batch, as a loss is linear in it::

    rows        loss_m depends on its own rows alone        concatenated
    whole, mean loss = loss_0 + loss_1 + ...                added
    sum         d loss / d (s_0 + s_1 + ...) = d loss_m / d s_m   the same
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from whale_nebula.errors import BatchCoupledError, CaptureError, NebulaError
from whale_nebula.ir.graph import CAPTURE, Graph, Op
from whale_nebula.ir.program import ADDED, GradientPart, Program, Request
from whale_nebula.passes.batch_writes import adds_up, explain_body_writes, explain_write, find_addend
from whale_nebula.passes.effects import (
    find_written_handles,
    is_check,
    is_effect,
    is_seeded_draw,
    is_stateful_draw,
    list_resources,
)
from whale_nebula.passes.rules import COUPLED, ROWS, WHOLE, Fold, Folding, coupling_error, fold, merge_rule
from whale_nebula.passes.rules.verdict import BatchFixes, list_batch_fixes
from whale_nebula.spec import Value

SAME = "same"
_MERGES_BY_KIND = {WHOLE: ADDED, "mean": ADDED, "sum": SAME}


def add_merges(program: Program, folds: BatchFolds) -> Program:
    """Add the merge rule of every requested gradient; refuse those that cannot be merged."""
    if folds.folding is None:
        return program
    requests = []
    for request in program.requests:
        merges = tuple(_choose_merge(program, folds, folds.folding, request, n) for n in range(len(request.origins)))
        parts = tuple(_merge_slices(part, request, folds, folds.folding) for part in request.parts)
        requests.append(replace(request, merges=merges, parts=parts))
    return replace(program, requests=tuple(requests))


def _merge_slices(part: GradientPart, request: Request, folds: BatchFolds, folding: Folding) -> GradientPart:
    """A sparse part with the merge rule of its slices, which depends on its indices.

    The uncut gradient has one slice for each index. For an optimizer that squares slices, such as Adam, a sum of slices
    differs from the slices of all micro-batches: so these are merged to the slices of the uncut step.
    """
    if not part.sparse:
        return part
    state = folding.fold_of(part.values[1])
    if state.kind == WHOLE:
        return replace(part, merge=ADDED)
    if state.kind != ROWS or state.position:
        name = request.sources[part.source]
        if state.is_mergeable:
            state = Fold(
                COUPLED, blame=part.values[1].op, reason=f"rows of {name!r} are looked up by {state.description}"
            )
        folds.refuse(state, f"the gradient of {name!r}")
    return part


def _choose_merge(program: Program, folds: BatchFolds, folding: Folding, request: Request, source: int) -> str:
    origin, parts = request.origins[source], [part for part in request.parts if part.source == source]
    if origin < 0 or program.graph.ops[origin].role == CAPTURE or not parts:
        return ADDED
    value, *others = program.graph.ops[origin].values
    state = folding.fold_of(value)
    alike = all(folding.fold_of(other).without_numbers == state.without_numbers for other in others)
    sparse = not alike or any(part.sparse for part in parts)
    if state.kind in _MERGES_BY_KIND and not (sparse and state.kind != WHOLE):
        return _MERGES_BY_KIND[state.kind]
    if state.kind == ROWS and not (state.axis or state.order_problem or sparse):
        return ROWS
    if state.is_mergeable:
        reason = state.order_problem or f"the gradient of {state.description} is requested"
        along = f" along axis {state.axis}" if state.kind == ROWS and state.axis else ""
        state = Fold(COUPLED, blame=value.op, reason=reason + along)
    folds.refuse(state, "a requested gradient")
    shape = program.graph.spec(value).shape
    return ROWS if shape and shape[0] is None else ADDED


_CONJUNCTIONS = frozenset({"All", "LogicalAnd", "Identity", "StopGradient", "Reshape", "Squeeze", "ExpandDims", "Pack"})
_LESS_OPS = frozenset({"Less", "LessEqual"})
_GREATER_OPS = frozenset({"Greater", "GreaterEqual"})
_ASSERT_GUARD = "AssertGuard"
"""A part of the name of TensorFlow's branch for an assertion; its condition is the asserted one."""


class AssertionSplit(NamedTuple):
    """Assertions of a forward: `deferred_ops` are those that wait for merged values; `refused` has the reasons against
    the others.
    """

    deferred_ops: frozenset[int]
    refused: tuple[Fold, ...]


def split_assertions(graph: Graph, checks: Collection[int], folding: Folding) -> AssertionSplit:
    """Find the checks that a micro-batch cannot make on its own rows, and the reasons to refuse some."""
    of_all = [op for op in sorted(checks) if not _holds_for_batch(graph, graph.ops[op], folding)]
    refused = [_assertion_refusal(graph, op, folding) for op in of_all]
    good = frozenset(op for op, why in zip(of_all, refused, strict=True) if why is None)
    return AssertionSplit(good, tuple(why for why in refused if why is not None))


def _holds_for_batch(graph: Graph, op: Op, folding: Folding) -> bool:
    """Whether an assertion holds for the batch if and only if it holds for each micro-batch."""
    if op.type.startswith("CheckNumerics"):
        return True
    if op.type == "Assert" or _ASSERT_GUARD in op.name:
        return _holds_for_each(graph, op.inputs[0], folding)
    return all(folding.fold_of(value).kind in (ROWS, WHOLE) for value in op.inputs)


def _holds_for_each(graph: Graph, value: Value, folding: Folding) -> bool:
    op = graph.ops[value.op]
    if folding.fold_of(value).kind in (ROWS, WHOLE):
        return True
    if op.type in _CONJUNCTIONS:
        return _holds_for_each(graph, op.inputs[0], folding) and (
            op.type not in ("LogicalAnd", "Pack")
            or all(_holds_for_each(graph, each, folding) for each in op.inputs[1:])
        )
    if op.type in _LESS_OPS | _GREATER_OPS:
        low, high = op.inputs if op.type in _LESS_OPS else reversed(op.inputs)
        least = 1 if op.type.endswith("Equal") else 0
        if folding.fold_of(high).kind == "count" and max(folding.fold_of(low).literal or (least + 1,)) <= least:
            return True  # no micro-batch is empty
        return _is_extremum(graph, low, "Max", folding) and _is_extremum(graph, high, "Min", folding)
    return op.type == "Equal" and _have_equal_counts(*(folding.fold_of(each) for each in op.inputs))


def _is_extremum(graph: Graph, value: Value, kind: str, folding: Folding) -> bool:
    """Whether a value is the maximum (minimum) over rows, or the same in every micro-batch."""
    state, op = folding.fold_of(value), graph.ops[value.op]
    return state.kind == WHOLE or (op.type == kind and folding.fold_of(op.inputs[0]).kind == ROWS)


def _have_equal_counts(left: Fold, right: Fold) -> bool:
    """Whether two shapes scale with the rows in the same way, so that they are equal for a micro-batch if they are
    equal for the batch.
    """
    if left.parts is not None and right.parts is not None and len(left.parts) == len(right.parts):
        return all(_have_equal_counts(*pair) for pair in zip(left.parts, right.parts, strict=True))
    counts = left.kind == right.kind == "count" and left.per == right.per > 0
    return counts or (left.kind == right.kind == WHOLE)


def _assertion_refusal(graph: Graph, check: int, folding: Folding) -> Fold | None:
    """The reason why an assertion cannot be made on merged values, or None if it can."""
    states = [folding.fold_of(value) for value in graph.ops[check].inputs]
    bad = next((state for state in states if state.kind == COUPLED), None)
    rows = any(state.kind == ROWS for state in states)
    return bad or (Fold(COUPLED, blame=check, reason=_ROWS_REASON) if rows else None)


_ROWS_REASON = "it checks all rows at once and reports values of each row, which would have to be sent as well"


def find_rereads(
    graph: Graph,
    user_ops: Sequence[Op],
    micro_batch_ops: Collection[int],
    deferred_ops: Collection[int],
    folding: Folding,
) -> Iterator[tuple[Op, Op]]:
    """Every write whose value depends on the batch, with the first op that reads its variable afterwards in each
    micro-batch.

    `micro_batch_ops` are the ops that run for every micro-batch, with its rows, or in the backward; reads for no such
    op can be deferred. A write that is not in `deferred_ops` precedes the reads of the next micro-batch, wherever it
    is.
    """
    for write in user_ops:
        if is_effect(write, graph) and any(folding.fold_of(value).kind != WHOLE for value in write.inputs):
            handles = set(find_written_handles(write, graph))
            touching = (op for op in graph.ops if op.outputs and op is not write)
            readers = [op for op in touching if handles.intersection(list_resources(op, graph))]
            after = graph.descend([write.index], control=True) if readers and write.index in deferred_ops else None
            due = (op for op in readers if after is None or op.index in after)
            later = (op for op in due if not graph.descend([op.index]).isdisjoint(micro_batch_ops))
            read = next(later, None)
            if read is not None:
                yield write, read


_WAITING_KINDS = frozenset({"after", "inverse"})
_MERGEABLE_KINDS = frozenset({"sum", "mean", "count", "after", "inverse", "shape", "whole"})
Where = Callable[[int], str]

DRAWS_NOTE = (
    "each micro-batch draws its own random numbers (dropout): results are reproducible, but differ from the uncut step"
)
"""The note on a cut step that draws random numbers."""


@dataclass
class BatchFolds:
    """How each value of a program depends on the batch, and what follows for a step that is divided.

    Without a `folding` there is one micro-batch. `deferred_ops` are ops that wait for merged values, `wholes` values of
    the inputs computed on the whole batch.

    `checks` are assertions; they recompute their inputs in `deferred_ops` for their own micro-batch. `added` are ops
    with coupled values that each micro-batch computes, and whose sum is added to a variable once.
    """

    program: Program
    folding: Folding | None = None
    deferred_ops: frozenset[int] = frozenset()
    checks: frozenset[int] = frozenset()
    wholes: frozenset[Value] = frozenset()
    where: Where = lambda op: ""
    added: frozenset[int] = frozenset()
    notes: list[str] = field(default_factory=list)

    def merge(self, value: Value) -> str:
        """The merge rule of a forward value (see `rules.merge_rule`), "only" for a single micro-batch; refuses values
        that cannot be merged.
        """
        if self.folding is None:
            return "only"
        if self.program.loss_weights and value in self.targets:
            return "mean"
        state = self.folding.fold_of(value)
        rule = merge_rule(state)
        if rule not in ("coupled", "after", "whole"):
            return rule
        if state.is_mergeable:  # the micro-batches' values together are not those of the batch
            reason = state.order_problem or f"it is {state.description}, computed from one micro-batch"
            state = Fold(COUPLED, blame=value.op, reason=reason)
        self.refuse(state, "a value that is used after the micro-batches", allowed=bool(self.program.loss_weights))
        spec = self.program.graph.spec(value)
        if spec.scalar:
            return "mean" if spec.floating else "last"
        return "concat:0" if spec.shape and spec.shape[0] is None else "last"

    @cached_property
    def batch_fixes(self) -> BatchFixes:
        """The changes of the script that would leave the batch whole, including those of replicas."""
        return find_batch_fixes(self.program)

    @cached_property
    def targets(self) -> frozenset[Value]:
        """The differentiated values."""
        return frozenset(value for request in self.program.requests for value in request.targets)

    def layout(self, value: Value) -> str:
        """How a boundary tensor relates to the micro-batches: "rows", "whole" (the same in each) or "partial"."""
        if self.folding is None:
            return "rows"
        kind, shape = self.folding.fold_of(value).kind, self.program.graph.spec(value).shape
        if kind == "coupled" and shape and shape[0] is None:  # allowed: each micro-batch has its own rows
            return "rows"
        return kind if kind in ("rows", "whole") else "partial"

    def refuse(self, state: Fold, what: str, fixes: tuple[str, ...] = (), *, allowed: bool = False) -> None:
        """Refuse a value that micro-batches would change, described by `what`, or add a note if that is allowed;
        nothing if they would not. `fixes` are specific to this value.
        """
        refusal = coupling_error(
            state, self.program.graph, where=self.where, what=what, fixes=fixes, batch_fixes=self.batch_fixes
        )
        if refusal is not None and not allowed and self.program.pipeline.coupled != "allow":
            raise refusal
        self.note(refusal)

    def note(self, refusal: CaptureError | None) -> None:
        """Add a refusal as a note, once for each cause, as a layer that couples rows affects both the loss and its
        writes.
        """
        cause = "" if refusal is None else refusal.what.partition(": ")[2] or refusal.what
        if refusal is not None and not any(note.endswith(cause) for note in self.notes):
            self.notes.append(refusal.what)


def find_batch_fixes(program: Program) -> BatchFixes:
    """The changes by which the batch of a program stays whole."""
    copied = max((stage.replicas for stage in program.stages), default=1)
    count = program.pipeline.micro_batch
    return list_batch_fixes(count if count > copied else 1, copied=copied > 1)


def fold_batch(program: Program, where: Where = lambda op: "") -> BatchFolds:
    """Classify the forward's values if the batch is cut; with one micro-batch this is not needed.

    Assertions on rows are made in each micro-batch, before any update (on the whole batch for inputs alone, and once
    for values of all rows), and differentiated values belong to each micro-batch.
    """
    if program.pipeline.micro_batch < 2:
        return BatchFolds(program)
    graph = program.graph
    own = [op for op in graph.ops if program.request_of(op.index) is None]
    checks = frozenset(op.index for op in own if is_check(op, graph, program.returns))
    targets = [value for request in program.requests for value in request.targets]
    folding = _fold_program(program, checks=checks)
    allowed = program.pipeline.coupled == "allow"
    if allowed and not all(state.is_mergeable for state in folding.folds.values()):
        folding = _fold_program(program, checks=checks, apart=True)
    loss = next((folding.fold_of(target) for target in targets if not folding.fold_of(target).is_mergeable), None)
    means: Collection[Value] = ()
    if loss is not None and allowed:
        means = _find_loss_terms(program, folding, targets)
        folding = _fold_program(program, checks=checks, means=means, apart=True)
    coupled, added = folding, _find_added_values(own, graph, folding) if allowed else {}
    if added:
        folding = _fold_program(program, checks=checks, means=means, sums=added, apart=True)
    wholes = frozenset() if program.loss_weights else frozenset(folding.wholes)
    found = BatchFolds(program, folding, frozenset(), checks, wholes, where, frozenset(value.op for value in added))
    found.note(None if loss is None else coupling_error(loss, graph, where=where))
    for value, op in added.items():
        found.refuse(coupled.fold_of(value), *_describe_write(op, program))
    forward = (op for op in own if op.stage is not None or op.index in program.batch_dependent_ops)
    found.notes += [DRAWS_NOTE] * any(is_stateful_draw(op) or is_seeded_draw(op) for op in graph.with_bodies(forward))
    each = graph.ascend(value.op for value in targets)
    found.deferred_ops = frozenset(op.index for op in own if op.index not in each and _must_wait(op, program, folding))
    assertions = split_assertions(graph, checks, folding)
    for state in assertions.refused:
        found.refuse(state, "an assertion", ("return the numbers from the step and check them outside",))
    found.deferred_ops, found.checks = found.deferred_ops | assertions.deferred_ops, checks - assertions.deferred_ops
    for refusal in _find_refusals(own, found.deferred_ops, program, folding):
        found.refuse(*refusal)
    found.deferred_ops -= _find_writes_of_coupled_means(own, found.deferred_ops, graph, folding)
    # Writes that each micro-batch reads after its own write.
    micro_batch_ops = ({op.index for op in own if op.index in program.batch_dependent_ops} - found.deferred_ops) | {
        op for request in program.requests for op in request.backward
    }
    rereads = list(find_rereads(graph, own, micro_batch_ops, found.deferred_ops, folding))
    for write, read in rereads:
        state = Fold(COUPLED, blame=read.index, reason=f"{_describe_resource(write, read, program)} {_REREAD_REASON}")
        found.refuse(state, "a result of the step", (_REREAD_FIX,) if write.index in found.deferred_ops else ())
    found.deferred_ops -= graph.ascend(write.index for write, _ in rereads)
    return found


def _find_added_values(own: Sequence[Op], graph: Graph, folding: Folding) -> dict[Value, Op]:
    """The coupled values that are added to variables without other writes, each with the op that adds it.

    Their sum over micro-batches equals adding one after the other, and is the same in all processes.
    """
    added: dict[Value, Op] = {}
    others: set[int] = set()
    for write in own:
        if is_effect(write, graph) and list_resources(write, graph):
            value = find_addend(graph, write)
            if value is None:
                others.update(find_written_handles(write, graph))
            elif folding.fold_of(value).kind == COUPLED and not folding.fold_of(value).inputs:
                added[value] = write
    return {value: write for value, write in added.items() if others.isdisjoint(find_written_handles(write, graph))}


def _fold_program(program: Program, **options: Any) -> Folding:
    """Fold all but the backward; of that only the ops for the indices of sparse gradients, on which the merge rules
    depend.
    """
    batched = {leaf.op: 0 for leaf in program.leaves if leaf.batched}
    targets = [value for request in program.requests for value in request.targets]
    sparse = (part.values[1].op for part in program.gradient_parts.values() if part.sparse)
    looked_up = program.graph.ascend(sparse)

    def skip(op: int) -> bool:
        return program.request_of(op) is not None and op not in looked_up

    return fold(program.graph, batched, targets=targets, skip=skip, **options)


def count_entries_per_row(program: Program, values: Collection[Value]) -> Mapping[Value, int]:
    """How many entries along its first axis a value has for each row of the batch; without values that have differently
    many, or a number known only at run time.
    """
    if not values:
        return {}
    folding = _fold_program(program)
    found = {value: folding.fold_of(value) for value in values}
    alike = (n for n, each in found.items() if each.kind == ROWS and each.axis == 0 and not each.ragged)
    return {n: found[n].per for n in alike if found[n].per > 0}


_LINEAR_OPS = frozenset({"Identity", "AddV2", "AddN", "Sub", "Neg", "Mul", "RealDiv", "Cast"})


def _find_loss_terms(program: Program, folding: Folding, targets: Iterable[Value]) -> frozenset[Value]:
    """The terms of a loss with coupled rows, and the loss itself: each is the mean over the micro-batches.

    So writes of them, such as Keras's metric of the loss, are made once.
    """
    found: set[Value] = set()
    stack = list(targets)
    while stack:
        value = stack.pop()
        spec, op = program.graph.spec(value), program.graph.ops[value.op]
        if value in found or not (spec.scalar and spec.floating) or folding.fold_of(value).is_mergeable:
            continue
        found.add(value)
        stack.extend(op.inputs if op.type in _LINEAR_OPS else ())
    return frozenset(found)


def _must_wait(op: Op, program: Program, folding: Folding) -> bool:
    """Whether an op must wait for merged values: a function of them, or a write of one."""
    if is_effect(op, program.graph):
        whole = bool(op.functions) and op.stage is None and not adds_up(op, folding)  # once, with the rows of all
        return bool(list_resources(op, program.graph)) and all(
            state.kind in _MERGEABLE_KINDS or (whole and state.kind == ROWS and not state.order_problem)
            for state in _list_input_folds(op, folding)
        )
    return any(folding.fold_of(value).kind in _WAITING_KINDS for value in op.values)


def _list_input_folds(op: Op, folding: Folding) -> list[Fold]:
    return [folding.fold_of(value) for value in op.inputs]


def _find_writes_of_coupled_means(
    user_ops: list[Op], deferred_ops: Collection[int], graph: Graph, folding: Folding
) -> set[int]:
    """The writes of means on which coupled writes depend, too: like these they run for each micro-batch.

    BatchNormalization's variance is coupled, and its mean is not; averages of both are updated equally often.
    """
    writes = [op for op in user_ops if is_effect(op, graph) and list_resources(op, graph)]
    coupled = [
        op
        for op in writes
        if op.index not in deferred_ops and not all(s.is_mergeable for s in _list_input_folds(op, folding))
    ]

    def is_no_mean(op: int) -> bool:
        return any(folding.fold_of(value).kind != "mean" for value in graph.ops[op].values)

    means = [op for op in graph.ascend(op.index for op in coupled) if graph.ops[op].outputs and not is_no_mean(op)]
    return graph.descend(means, skip=is_no_mean) & {op.index for op in writes} if means else set()


def _describe_resource(write: Op, read: Op, program: Program) -> str:
    """The resource that an op writes and another one reads: a variable by its name, or a lookup
    table, which has none.
    """
    graph = program.graph
    known = (program.variable_ops.get(handle) for handle in find_written_handles(write, graph))
    path = next((variable.path for variable in known if variable is not None), None)
    table = any(op.type.startswith("LookupTable") for op in graph.with_bodies((write, read)))
    return f"variable {path!r}" if path is not None else "a lookup table" if table else "a resource"


_REREAD_REASON = (
    "is written from the batch and read afterwards: a micro-batch would read it before the others have written it"
)
_REREAD_FIX = "read the variable before it is written"


Refusal = tuple[Fold, str, tuple[str, ...]]
"""A refused value: its state, its description, and its specific fixes."""


def _find_refusals(
    user_ops: list[Op], deferred_ops: Collection[int], program: Program, folding: Folding
) -> Iterator[Refusal]:
    """Reasons to refuse: writes of values that a micro-batch has alone, and `output_gradients` that are not by rows."""
    graph = program.graph
    for op in user_ops:
        if is_effect(op, graph) and list_resources(op, graph) and op.index not in deferred_ops:
            what, fixes = _describe_write(op, program)
            inputs = _list_input_folds(op, folding)
            reason = explain_write(op, inputs) or explain_body_writes(op, folding)
            states = inputs if reason is None else [Fold(COUPLED, blame=op.index, reason=reason)]
            yield from ((state, what, fixes) for state in states)
    for number in sorted(op for request in program.requests for op in request.backward):
        if is_effect(graph.ops[number], graph) and list_resources(graph.ops[number], graph):
            state = Fold(COUPLED, blame=number, reason="the backward writes a variable, once for each micro-batch")
            yield state, "a variable that the step writes", ()
    for value in (value for request in program.requests for value in request.output_gradients):
        state = folding.fold_of(value)
        if state.kind == WHOLE or (state.kind == ROWS and not state.order_problem):
            continue
        reason = state.order_problem or f"output_gradients is {state.description}"
        state = Fold(COUPLED, blame=value.op, reason=reason) if state.is_mergeable else state
        yield state, "a given output gradient", ()


def _describe_write(op: Op, program: Program) -> tuple[str, tuple[str, ...]]:
    """A description of what a write affects, and its specific fixes."""
    known = program.variable_ops
    variables = [known[handle] for handle in list_resources(op, program.graph) if handle in known]
    metric = next((variable.metric for variable in variables if variable.metric), "")
    if not metric:
        return "a variable that the step writes", ()
    return (
        f"the value of metric {metric!r}",
        (f"remove {metric!r} from model.compile(metrics=[...]) and compute it from model.predict(x) after training",),
    )


def is_divisible(program: Program) -> bool:
    """Whether rows are independent: nothing differentiated, written or returned couples them.

    For a step that is already cut, without `coupled="allow"`, this was verified before.
    """
    pipeline = program.pipeline
    if pipeline.micro_batch > 1 and pipeline.coupled == "error":
        return True
    tried = replace(program, pipeline=replace(pipeline, micro_batch=max(2, pipeline.micro_batch), coupled="error"))
    try:
        return _are_uncoupled(fold_batch(tried))
    except NebulaError:
        return False


def explain_coupling(program: Program, where: Where = lambda op: "") -> str:
    """Why micro-batches would change a step that was captured uncut, as its rows depend on each other. Empty if they
    would not, or if it is not known: the weights that divide the loss are only in the trace of a cut step.
    """
    tried = replace(program, pipeline=replace(program.pipeline, micro_batch=max(2, program.pipeline.micro_batch)))
    folding = _fold_program(tried)
    losses = [folding.fold_of(value) for request in program.requests for value in request.targets]
    if any(not each.is_mergeable and each.kind != COUPLED for each in losses):
        return ""
    try:
        fold_batch(tried, where)
    except BatchCoupledError as refused:
        return refused.what
    except CaptureError:
        pass  # a different cause, which is reported where the step is cut
    return ""


def _are_uncoupled(folds: BatchFolds) -> bool:
    folding, program = folds.folding, folds.program
    if folding is None or program.loss_weights:
        return True
    returned = [value for value in program.returns if value.op in program.batch_dependent_ops]
    kept = all(merge_rule(folding.fold_of(value)._replace(inputs=False)) != "coupled" for value in returned)
    return kept and all(folding.fold_of(target).is_mergeable for target in folds.targets)
