"""What a stage computes and what it keeps: FLOPs, activations, and both of them layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from whale_nebula.ir.cut import Cut, StagePhase
from whale_nebula.ir.graph import CAPTURE
from whale_nebula.ir.sizes import Sizes
from whale_nebula.plan.effort import Effort
from whale_nebula.plan.holdings import Holdings, fragments_of, made_in
from whale_nebula.plan.layers import Names
from whale_nebula.plan.records import PlanLayer
from whale_nebula.spec import Spec, Value

_SAME = frozenset({"Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient"})
"""Ops whose output is their first input's memory."""


@dataclass(frozen=True)
class Work:
    """Counts for a Cut whose first micro-batch has `rows` rows; `shapes` are those of its leaves in the example."""

    cut: Cut
    holdings: Holdings
    rows: int
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    subject: str = ""

    @cached_property
    def effort(self) -> Effort:
        """Sizes of everything that micro-batches compute, and what it costs."""
        program = self.cut.program
        leaves = {Value(op): shape for op, shape in self.shapes.items()}
        like = {feed: arrival.boundary for feed, (_, arrival) in program.arrivals.items()}
        once = [*self.cut.whole.values(), *self.cut.weight.values()]
        once += [fragment for phase in self.cut.phases for fragment in phase.prologue.values()]
        ops = made_in([*once, *(f for phase in self.cut.phases for s in phase.stages for f in fragments_of(s))])
        sizes = Sizes(program.graph, self.rows, leaves, like=like)
        return Effort(sizes.follow(sorted(ops | like.keys() | self.shapes.keys())))

    def pieces(self, stage: int) -> list[StagePhase]:
        """What a stage runs, phase by phase."""
        return [found for phase in self.cut.phases for found in phase.stages if found.stage == stage]

    def ops(self, piece: StagePhase, *, backward: bool) -> list[int]:
        """The ops of a piece's forward, or of its backward; with recompute the latter has the former's, too."""
        request_of = self.cut.program.request_of
        if piece.backward is not None:
            fragment = piece.backward if backward else piece.forward
            return list(fragment.ops) if fragment is not None else []
        return [op for op in made_in(fragments_of(piece)) if (request_of(op) is not None) == backward]

    def flops(self, stage: int, *, backward: bool) -> int:
        """Floating-point operations for the first micro-batch."""
        return sum(self.effort.flops(self.ops(piece, backward=backward)) for piece in self.pieces(stage))

    def kept(self, piece: StagePhase) -> dict[Value, int]:
        """The tensors that a piece's backward is given from its forward, with their bytes."""
        values = self._handed_over(piece) if piece.backward is not None else self._read_again(piece)
        counted = {self._memory(value): value for value in values if self._is_kept(value)}
        return {value: self.effort.nbytes(value) for value in counted.values()}

    def _handed_over(self, piece: StagePhase) -> Iterable[Value]:
        """Forward and backward are functions of their own: what one gives to the other."""
        forward = set(piece.forward.ops) if piece.forward is not None else set()
        feeds = piece.backward.feeds if piece.backward is not None else ()
        crossing = {boundary.value for boundary in self.cut.boundaries}
        return [value for value in feeds if value.op in forward or value in crossing]

    def _read_again(self, piece: StagePhase) -> Iterable[Value]:
        """They are one function: what the second half of it reads of the first."""
        graph, request_of = self.cut.program.graph, self.cut.program.request_of
        ops = made_in(fragments_of(piece))
        inside = [op for op in ops if request_of(op) is not None]
        read = dict.fromkeys(value for op in inside for value in graph.ops[op].inputs)
        return [value for value in read if request_of(value.op) is None and value.op in ops]

    def _is_kept(self, value: Value) -> bool:
        """Constants, variables and the batch are there anyway."""
        op = self.cut.program.graph.ops[self._memory(value).op]
        given = op.role == CAPTURE or op.index in self.cut.program.leaf_ops
        return not given and op.type not in ("Const", "ReadVariableOp")

    def _memory(self, value: Value) -> Value:
        """The value whose memory this one is."""
        graph = self.cut.program.graph
        while graph.ops[value.op].type in _SAME and graph.ops[value.op].inputs:
            value = graph.ops[value.op].inputs[0]
        return value

    # ------------------------------------------------------------------ layers
    def layers(self, stage: int, steps: float) -> tuple[PlanLayer, ...]:
        """The layers of a stage, in the order of their first op; FLOPs for so many micro-batches."""
        table = _Table(self.names)
        for kind, backward in (("forward_ops", False), ("backward_ops", True)):
            for op in sorted(self.told(stage, backward=backward)):
                table.add(self._name(op), **{kind: 1})
            for op in (op for piece in self.pieces(stage) for op in self.ops(piece, backward=backward)):
                table.add(self._name(op), flops=round(self.effort.of(self.cut.program.graph.ops[op]) * steps))
        own = self.told(stage, backward=False)
        for value, size in (item for piece in self.pieces(stage) for item in self.kept(piece).items()):
            table.add(self._name(value.op) if value.op in own else "", activation_bytes=size)
        variables = self.cut.program.variable_ops
        for variable, reader in self.holdings.readers(stage).items():
            table.add(self._name(reader), parameters=parameters(variables[variable].spec))
        return table.rows()

    def told(self, stage: int, *, backward: bool) -> set[int]:
        """The ops of a stage that the user's code made, or those that differentiating made."""
        request_of = self.cut.program.request_of
        ops = made_in(fragment for piece in self.pieces(stage) for fragment in fragments_of(piece))
        return {op for op in ops if (request_of(op) is not None) == backward}

    def _name(self, op: int) -> str:
        return self.cut.program.graph.ops[op].name

    @cached_property
    def names(self) -> Names:
        """Reads layers out of op names."""
        paths = (variable.path for variable in self.cut.program.variables)
        return Names(self.subject, frozenset(part for path in paths for part in path.split("/")[:-1]))


@dataclass
class _Table:
    """Counts by layer."""

    names: Names
    found: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, op: str, **counts: int) -> None:
        row = self.found.setdefault(self.names.layer(op), {})
        for name, count in counts.items():
            row[name] = row.get(name, 0) + count

    def rows(self) -> tuple[PlanLayer, ...]:
        return tuple(PlanLayer(name, **counts) for name, counts in self.found.items())


def parameters(spec: Spec) -> int:
    """How many numbers a variable has; what is not floating (a seed, a counter) is no parameter."""
    return prod(axis or 1 for axis in spec.shape or ()) if spec.floating else 0
