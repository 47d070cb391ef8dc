"""Which variables a stage holds, and what comes with them: gradients, and what an optimizer keeps for each.

A variable belongs to every stage whose forward reads it, whoever made the op: a layer that stands outside all
scopes runs in a stage, too. What only an update or a metric touches belongs to none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from whale_nebula.ir.cut import Cut, Fragment, StagePhase
from whale_nebula.ir.graph import CAPTURE, HOLDER, Op
from whale_nebula.ir.program import Variable

READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})
_NEAR = 200
"""An optimizer's slot is this near to the gradient that it belongs to, counted in ops."""


@dataclass(frozen=True)
class Holdings:
    """Reads a Cut: who holds which variable."""

    cut: Cut

    def of(self, stage: int) -> tuple[Variable, ...]:
        """The variables of a stage, in the order in which its ops read them."""
        variables = self.cut.program.variable_ops
        return tuple(variables[op] for op in self.readers(stage))

    def readers(self, stage: int) -> Mapping[int, int]:
        """For each variable of a stage (the op that holds it), the first op that reads it."""
        return self._readers[stage]

    def slots(self, stage: int) -> tuple[Variable, ...]:
        """What an optimizer keeps beside the variables of a stage."""
        owned = self._readers[stage]
        variables = self.cut.program.variable_ops
        return tuple(variables[slot] for slot, owner in self._slots.items() if owner in owned)

    @cached_property
    def _readers(self) -> tuple[Mapping[int, int], ...]:
        return tuple(self._of_stage(stage) for stage in range(len(self.cut.program.stages)))

    def _of_stage(self, stage: int) -> dict[int, int]:
        pieces = [found for phase in self.cut.phases for found in phase.stages if found.stage == stage]
        found: dict[int, int] = {}
        for piece in pieces:
            for op, reader in self._read(piece).items():
                found.setdefault(op, reader)
        layers = {_layer(self.cut.program.variable_ops[op]) for op in found} - {""}
        for op, writer in self._only_written.items():
            if _layer(self.cut.program.variable_ops[op]) in layers:
                found.setdefault(op, writer)
        return found

    def _read(self, piece: StagePhase) -> dict[int, int]:
        """Variables that lead to something of the stage's own; a metric that its fragment keeps does not."""
        graph, variables = self.cut.program.graph, self.cut.program.variable_ops
        fragments = list(fragments_of(piece))
        needed = {op for fragment in fragments for op in self._ends(fragment)}
        found: dict[int, int] = {}
        for index in sorted({op for fragment in fragments for op in fragment.ops}, reverse=True):
            if index not in needed:
                continue
            above = [value.op for value in graph.ops[index].inputs]
            needed.update(above)
            found.update({op: index for op in above if op in variables and not self._ignored(op)})
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def _ends(self, fragment: Fragment) -> Iterator[int]:
        program = self.cut.program
        yield from (op for op in fragment.ops if program.graph.ops[op].stage is not None)
        if not program.requests:
            yield from (value.op for value in (*fragment.fetches, *program.returns))
            return
        yield from (value.op for request in program.requests for value in request.targets)
        yield from (boundary.value.op for boundary in self.cut.boundaries)

    def _ignored(self, variable: int) -> bool:
        """Where nothing is trained, what the step writes without a scope is a metric."""
        return not self.cut.program.requests and variable in self._written

    @cached_property
    def _written(self) -> frozenset[int]:
        return frozenset(self._only_written)

    @cached_property
    def _only_written(self) -> dict[int, int]:
        """What is written outside scopes, with the op that does.

        A layer that stands there may write what it does not read, such as its moving averages: these lie beside
        the variables that it does read.
        """
        ops, variables = self.cut.program.graph.ops, self.cut.program.variable_ops
        writers = (op for op in ops if op.stage is None and writes(op))
        return {value.op: op.index for op in writers for value in op.inputs if value.op in variables}

    # ------------------------------------------------------------------ slots
    @cached_property
    def _slots(self) -> Mapping[int, int]:
        """For each slot (the op that holds it), the variable that it belongs to."""
        graph, variables = self.cut.program.graph, self.cut.program.variable_ops
        owned = frozenset(op for readers in self._readers for op in readers)
        found: dict[int, int] = {}
        for op in graph.ops:
            if op.stage is None and writes(op):
                for value in op.inputs:
                    if value.op in variables and value.op not in owned and value.op not in found:
                        owner = self._nearest(op, variables[value.op], owned)
                        found.update({value.op: owner} if owner is not None else {})
        return found

    def _nearest(self, writer: Op, slot: Variable, owned: Collection[int]) -> int | None:
        """The variable of the same form whose gradient, or whose value, is the nearest to what is written."""
        graph = self.cut.program.graph
        seen: set[int] = set()
        queue = deque(value.op for value in writer.inputs if graph.ops[value.op].role != CAPTURE)
        while queue and len(seen) < _NEAR:
            index = queue.popleft()
            if index in seen:
                continue
            seen.add(index)
            owner = self._owner(graph.ops[index], owned)
            if owner is not None and self.cut.program.variable_ops[owner].spec == slot.spec:
                return owner
            queue.extend(value.op for value in graph.ops[index].inputs)
        return None

    def _owner(self, op: Op, owned: Collection[int]) -> int | None:
        if op.role == HOLDER:
            request, holder = self.cut.program.holders[op.index]
            origin = self.cut.program.requests[request].origins[holder.source]
            return origin if origin in owned else None
        read = [value.op for value in op.inputs if value.op in owned] if op.type in READS else []
        return read[0] if read else None


def fragments_of(piece: StagePhase) -> Iterator[Fragment]:
    """What a stage runs in a phase: its forward and its backward, or the one function that is both."""
    return (fragment for fragment in (piece.forward, piece.backward) if fragment is not None)


def writes(op: Op) -> bool:
    """Whether an op changes a variable that it is given, as far as its type tells."""
    return op.stateful and op.type not in READS


def made_in(fragments: Iterable[Fragment]) -> set[int]:
    """The ops of fragments."""
    return {op for fragment in fragments for op in fragment.ops}


def _layer(variable: Variable) -> str:
    return variable.path.rpartition("/")[0]
