"""What cutting the batch into micro-batches asks of the step: how forward values become one again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from whale_nebula.errors import BatchCoupledError
from whale_nebula.ir.graph import Op
from whale_nebula.ir.program import Program
from whale_nebula.ir.spec import Value
from whale_nebula.passes.effects import is_effect, resources
from whale_nebula.passes.reduce import Fold, Folding, fold, merge_rule, verdict

_ONCE = frozenset({"after", "inverse"})
_MERGED = frozenset({"sum", "mean", "count", "after", "inverse", "shape", "whole"})
Where = Callable[[int], str]


@dataclass
class BatchFolds:
    """`once` are ops that wait for merged values, `wholes` values of the inputs computed on the whole batch."""

    program: Program
    folding: Folding | None = None
    once: frozenset[int] = frozenset()
    wholes: frozenset[Value] = frozenset()
    where: Where = lambda op: ""
    notes: list[str] = field(default_factory=list)

    def merge(self, value: Value) -> str:
        """How a forward value of every micro-batch becomes one; with a single one there is nothing to do."""
        if self.folding is None:
            return "only"
        if self.program.weights and value in self.targets:
            return "mean"
        state = self.folding.of(value)
        rule = merge_rule(state)
        return self._coupled(value, state) if rule in ("coupled", "after") else rule

    @cached_property
    def targets(self) -> frozenset[Value]:
        """What is differentiated: by what nb.loss_weight says, each micro-batch's counts as a mean."""
        return frozenset(value for request in self.program.requests for value in request.targets)

    def layout(self, value: Value) -> str:
        """How a boundary lies on the micro-batches: by rows, the same in each, or a part of a sum."""
        if self.folding is None:
            return "rows"
        kind = self.folding.of(value).kind
        return kind if kind in ("rows", "whole") else "partial"

    def _coupled(self, value: Value, state: Fold) -> str:
        refusal = verdict(state, self.program.graph, where=self.where, what="a value that leaves the micro-batches")
        if refusal is None or self.program.weights or self.program.pipeline.coupled == "allow":
            self._note(refusal)
            return self._allowed(value)
        raise refusal

    def _allowed(self, value: Value) -> str:
        spec = self.program.graph.spec(value)
        if spec.scalar:
            return "mean" if spec.floating else "last"
        return "concat:0" if spec.shape and spec.shape[0] is None else "last"

    def _note(self, refusal: BatchCoupledError | None) -> None:
        if refusal is not None and refusal.what not in self.notes:
            self.notes.append(refusal.what)


def fold_batch(program: Program, where: Where = lambda op: "") -> BatchFolds:
    """Classify the forward's values where the batch is cut; with one micro-batch nothing needs to be known.

    What is asserted is asserted of each micro-batch, and what is differentiated belongs to each.
    """
    if program.pipeline.micro_batch < 2:
        return BatchFolds(program)
    backward = {op for request in program.requests for op in request.backward}
    folding = fold(
        program.graph,
        {leaf.op: 0 for leaf in program.leaves if leaf.batched},
        targets=[value for request in program.requests for value in request.targets],
        skip=backward.__contains__,
    )
    wholes = frozenset() if program.weights else frozenset(folding.wholes)
    found = BatchFolds(program, folding, frozenset(), wholes, where)
    own = [op for op in program.graph.ops if op.index not in backward]
    checked = program.graph.ascend(op.index for op in own if op.type == "Assert")
    checked |= program.graph.ascend(value.op for request in program.requests for value in request.targets)
    found.once = frozenset(op.index for op in own if op.index not in checked and _waits(op, program, folding))
    _check_effects(own, found)
    return found


def _waits(op: Op, program: Program, folding: Folding) -> bool:
    """Whether an op must wait for merged values: a function of them, or a write of one."""
    if is_effect(op, program.graph):
        return bool(resources(op, program.graph)) and all(state.kind in _MERGED for state in _given(op, folding))
    return any(folding.of(value).kind in _ONCE for value in op.values)


def _given(op: Op, folding: Folding) -> list[Fold]:
    return [folding.of(value) for value in op.inputs]


def _check_effects(own: list[Op], found: BatchFolds) -> None:
    """A variable written with a coupled value would be written once a micro-batch: refused, unless allowed."""
    for op in own:
        writes = is_effect(op, found.program.graph) and resources(op, found.program.graph)
        if found.folding is None or op.index in found.once or not writes:
            continue
        for state in _given(op, found.folding):
            refusal = verdict(state, found.program.graph, where=found.where, what="what the step writes")
            if refusal is not None and found.program.pipeline.coupled != "allow":
                raise refusal
            found._note(refusal)
