"""Divide the backward of a stage in two: gradients that other stages wait for, and gradients of weights, which can be
deferred.

The first part computes the values that leave the stage: gradients of its boundaries and, in one function with the
forward, its outputs. The second computes the other gradients. Its inputs from the first are kept until it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from whale_nebula.ir.graph import CAPTURE, REPLICA_SUM, Graph, Op
from whale_nebula.ir.program import GradientPart, Program, Request
from whale_nebula.passes.cut import Draft
from whale_nebula.passes.effects import is_read, list_resources
from whale_nebula.passes.phases import Parts
from whale_nebula.spec import Value

MIN_SHARE = 0.1
"""The least share of a stage's weights with separate gradients: with fewer, the backward stays in one function."""

_MOVEMENTS = frozenset({
    "AddN", "AddV2", "BroadcastTo", "Cast", "ConcatV2", "Const", "ExpandDims", "Fill", "Identity", "Mul", "Neg", "Pack",
    "Pad", "Reshape", "Shape", "Slice", "Split", "Squeeze", "StridedSlice", "TensorListGetItem", "TensorListStack",
    "Transpose", "Unpack",
})  # fmt: skip
"""Ops that do little more than move data."""


def find_predecessors(graph: Graph, ops: Iterable[int], within: Container[int]) -> set[int]:
    """Those of these ops that are `within` a set, and their predecessors on paths within it."""
    pending, found = list(ops), set[int]()
    while pending:
        number = pending.pop()
        if number in within and number not in found:
            found.add(number)
            pending += [value.op for value in graph.ops[number].inputs]
    return found


def is_movement(graph: Graph, ops: Iterable[int]) -> bool:
    """Whether ops do little more than move data, so that deferring them gains nothing."""
    return all(graph.ops[number].type in _MOVEMENTS for number in ops)


class Gradient(NamedTuple):
    """A gradient that stays in the stage, and the number of elements of its weight."""

    part: GradientPart
    weights: int


@dataclass
class BackwardSplitter:
    """Divides the draft of a stage's backward, or of its forward and backward in one function."""

    program: Program
    parts: Parts
    draft: Draft
    where: Callable[[int], str]
    note: str = ""
    first: set[int] = field(default_factory=set)

    def run(self) -> tuple[Draft, Draft] | None:
        """The drafts of both parts; None if the backward stays in one part, as no gradient is sent back or for the
        reason in `note`.
        """
        stage, phase = self.draft.key.place, self.draft.key.phase
        requests = [r for r in self.program.requests if self.parts.phase_of[r.index] == phase]
        flows = {flow.gradient for request in requests for flow in request.flows if flow.stage == stage}
        if not flows:
            return None
        gradients = [
            Gradient(part, self._count_weights(request, part))
            for request in requests
            for part in request.parts
            if part.stage == stage
        ]
        staying = {value for gradient in gradients for value in gradient.part.values} - flows
        self.first = self._ascend([v for v in self.draft.fetches if v not in staying], self._find_fixed())
        together = [gradient for gradient in gradients if self._is_computed(gradient.part)]
        apart = [gradient for gradient in gradients if gradient not in together]
        weights = sum(gradient.weights for gradient in gradients)
        if sum(gradient.weights for gradient in apart) < MIN_SHARE * max(weights, 1):
            self.note = self._explain(together)
            return None
        self.first |= self._ascend(value for gradient in together for value in gradient.part.values)
        return self._split([value for gradient in apart for value in gradient.part.values], flows)

    def _count_weights(self, request: Request, part: GradientPart) -> int:
        variable = self.program.variable_ops.get(request.origins[part.source])
        return 0 if variable is None else prod(axis or 1 for axis in variable.spec.shape or ())

    def _find_fixed(self) -> Iterator[int]:
        """The ops that the first part always runs: effects, draws, sums over replicas, and reads of variables that a
        later micro-batch may write.
        """
        for number in self.draft.ops:
            op = self.program.graph.ops[number]
            if number in self.draft.roots or op.type == REPLICA_SUM or (op.stateful and not self._can_reread(op)):
                yield number

    def _can_reread(self, op: Op) -> bool:
        """Whether an op reads a variable that no forward writes, so that it can be read again."""
        return is_read(op) and self.parts.forward_written.isdisjoint(list_resources(op, self.program.graph))

    def _ascend(self, values: Iterable[Value], ops: Iterable[int] = ()) -> set[int]:
        """The ops of the draft that these values or ops depend on, included."""
        return find_predecessors(self.program.graph, [*(value.op for value in values), *ops], self.draft.ops)

    def _is_computed(self, part: GradientPart) -> bool:
        """Whether the first part computes a gradient, up to ops that only move data."""
        return is_movement(self.program.graph, self._ascend(part.values) - self.first)

    def _explain(self, together: list[Gradient]) -> str:
        """The reason for one function, with the op that makes most of the gradients of weights and its line."""
        stage = self.program.stages[self.draft.key.place]
        fact = f"the backward of stage {stage.key!r} is not divided"
        largest = max(together, key=lambda gradient: gradient.weights, default=None)
        if largest is None or not largest.weights:
            return f"{fact}: the stage has no weights"
        made = max(self._find_makers(largest.part), default=None)
        if made is None:
            return f"{fact}: the gradients of its weights are the values sent back"
        line = self.where(made)
        op = f"{self.program.graph.ops[made].type}{f' at {line}' if line else ''}"
        return f"{fact}: {op} computes the gradients of its weights together with the values sent back"

    def _find_makers(self, part: GradientPart) -> Iterator[int]:
        """The ops of the first part whose results a gradient consists of, without those that only move data."""
        rest = self._ascend(part.values) - self.first
        read = {value.op for number in rest for value in self.program.graph.ops[number].inputs}
        for number in (read | {value.op for value in part.values}) & self.first:
            if self.program.graph.ops[number].type not in _MOVEMENTS:
                yield number

    def _split(self, staying: list[Value], flows: set[Value]) -> tuple[Draft, Draft]:
        """The drafts of both parts. Constants and weights are read again; everything else that the second part needs is
        kept.
        """
        key, graph = self.draft.key, self.program.graph
        second = Draft(key._replace(kind="weights"), fetches=dict.fromkeys(staying))
        given = {value: None for value in self.draft.fetches if value in flows or value not in second.fetches}
        pending = list(staying)
        while pending:
            value = pending.pop()
            op = graph.ops[value.op]
            if op.role == CAPTURE or op.index in second.ops or value in second.feeds:
                continue
            again = op.type == "Const" or (op.type == "ReadVariableOp" and self._can_reread(op))
            if op.index not in self.draft.ops or (op.index in self.first and not again):
                second.feeds[value] = None
                given |= {value: None} if op.index in self.first else {}
            else:
                second.ops[op.index] = None
                pending += op.inputs
        ops = {number: None for number in self.draft.ops if number in self.first}
        read = {value for number in ops for value in graph.ops[number].inputs} | given.keys()
        feeds = {value: None for value in self.draft.feeds if value in read}
        return replace(self.draft, ops=ops, feeds=feeds, fetches=given), second
