"""What a plan says to a reader: its stages, what crosses between them, what runs once. Small plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from whale_nebula.ir.graph import Op
from whale_nebula.ir.plan import Boundary, Cut, Fragment, StagePhase
from whale_nebula.ir.program import Variable
from whale_nebula.ir.spec import Spec

_PRECISION = {"fp16": 2, "bf16": 2}
_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})


@dataclass(frozen=True)
class PlanStage:
    """One stage: who runs it, how much there is of it, what it reads and what it gives.

    `inputs` and `outputs` are leaves of the batch, boundaries (b0, b1 ...), "loss" and "result"; `runs` says
    for each phase what the stage does in it: "F", "B", "FB" or nothing.
    """

    name: str
    cluster: str
    worker: str
    forward_ops: int
    backward_ops: int
    variables: tuple[str, ...]
    parameters: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    runs: tuple[str, ...]


@dataclass(frozen=True)
class PlanBoundary:
    """One tensor that crosses, and the bytes that a micro-batch of it takes; None where only a step knows."""

    name: str
    source: str
    destinations: tuple[str, ...]
    dtype: str
    shape: tuple[int | None, ...] | None
    phase: int
    codec: str
    bytes: int | None
    backward: bool
    backward_codec: str
    backward_bytes: int | None


@dataclass(frozen=True)
class PlanLink:
    """What joins two clusters, in one direction, and the payload that a step puts on it."""

    line: str
    bytes: int


@dataclass(frozen=True)
class PlanOnce:
    """What one worker runs once a step in one phase: `kind` is whole, prologue or update."""

    kind: str
    phase: int
    worker: str
    ops: int
    rounds: int
    writes: tuple[str, ...]
    trainable: int


@dataclass(frozen=True)
class PlanTied:
    """A variable that two or more stages use: each holds it, and its gradients are summed."""

    path: str
    dtype: str
    shape: tuple[int | None, ...] | None
    stages: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Overview:
    """Reads a Cut; `rows` are the rows of the first micro-batch."""

    cut: Cut
    rows: int

    def stages(self) -> dict[str, PlanStage]:
        """The stages by name, in their order."""
        workers = {stage: worker.name for worker in self.cut.workers for stage in worker.stages}
        keys = [stage.key for stage in self.cut.program.stages]
        return {key: self._stage(number, workers.get(number, "")) for number, key in enumerate(keys)}

    def boundaries(self) -> tuple[PlanBoundary, ...]:
        """The boundaries, in the order of their making."""
        return tuple(self._boundary(boundary) for boundary in self.cut.boundaries)

    def once(self) -> tuple[PlanOnce, ...]:
        """What runs once, in the order of its running."""
        found = [self._once([fragment]) for fragment in self.cut.whole.values()]
        for phase in self.cut.phases:
            found += [self._once([fragment]) for fragment in phase.prologue.values()]
            found += [self._once(fragments) for fragments in phase.updates.values()]
        return tuple(each for each in found if each.ops)

    def tied(self) -> tuple[PlanTied, ...]:
        """The variables with a gradient from two or more stages."""
        owners: dict[int, set[int]] = {}
        for request in self.cut.program.requests:
            for part in request.parts:
                owners.setdefault(request.origins[part.source], set()).add(part.stage)
        found = {op: sorted(stages) for op, stages in owners.items() if len(stages) > 1}
        variables = self.cut.program.variable_ops
        return tuple(self._tied(variables[op], stages) for op, stages in found.items() if op in variables)

    def _tied(self, variable: Variable, stages: Iterable[int]) -> PlanTied:
        names = tuple(self.cut.program.stages[stage].key for stage in stages)
        return PlanTied(variable.path, *variable.spec, names, variable.spec.nbytes())

    # ------------------------------------------------------------------ stages
    def _stage(self, number: int, worker: str) -> PlanStage:
        stage = self.cut.program.stages[number]
        pieces = [found for phase in self.cut.phases for found in phase.stages if found.stage == number]
        variables = {v.path: v for piece in pieces for v in self._touched(piece)}
        return PlanStage(
            name=stage.key,
            cluster=stage.cluster,
            worker=worker,
            forward_ops=len(self._ops(pieces, backward=False)),
            backward_ops=len(self._ops(pieces, backward=True)),
            variables=tuple(variables),
            parameters=sum(_size(v.spec) for v in variables.values()),
            inputs=tuple(self._inputs(number, pieces)),
            outputs=tuple(self._outputs(number)),
            runs=tuple(self._runs(number, phase.index) for phase in self.cut.phases),
        )

    def _ops(self, pieces: Iterable[StagePhase], *, backward: bool) -> set[int]:
        request_of = self.cut.program.request_of
        found = {op for piece in pieces for fragment in _fragments(piece) for op in fragment.ops}
        return {op for op in found if (request_of(op) is not None) == backward}

    def _touched(self, piece: StagePhase) -> Iterator[Variable]:
        """The variables that a stage's own ops touch; a metric that its fragment happens to read is not one."""
        graph, variables = self.cut.program.graph, self.cut.program.variable_ops
        ops = (graph.ops[index] for fragment in _fragments(piece) for index in fragment.ops)
        own = (value.op for op in ops if op.stage is not None for value in op.inputs)
        return (variables[op] for op in own if op in variables)

    def _inputs(self, number: int, pieces: Iterable[StagePhase]) -> Iterator[str]:
        program = self.cut.program
        fed = {value.op for piece in pieces for fragment in _fragments(piece) for value in fragment.feeds}
        yield from (leaf.name for leaf in program.leaves if leaf.op in fed)
        yield from (_name(b) for b in self.cut.boundaries if number in b.destinations)

    def _outputs(self, number: int) -> Iterator[str]:
        program = self.cut.program
        yield from (_name(b) for b in self.cut.boundaries if b.source == number)
        targets = {value.op for request in program.requests for value in request.targets}
        pieces = [piece for phase in self.cut.phases for piece in phase.stages if piece.stage == number]
        made = self._ops(pieces, backward=False)
        if targets & made:
            yield "loss"
        if {value.op for value in program.returns} & (made - targets):
            yield "result"

    def _runs(self, number: int, phase: int) -> str:
        found = [piece for piece in self.cut.phases[phase].stages if piece.stage == number]
        forward = any(piece.forward is not None for piece in found)
        return "F" * forward + "B" * bool(self._ops(found, backward=True))

    # ------------------------------------------------------------------ what crosses, what runs once
    def _boundary(self, boundary: Boundary) -> PlanBoundary:
        program = self.cut.program
        spec = program.graph.spec(boundary.value)
        rows = self.rows if boundary.layout == "rows" else 1
        back = boundary.backward
        return PlanBoundary(
            name=_name(boundary),
            source=program.stages[boundary.source].key,
            destinations=tuple(program.stages[stage].key for stage in boundary.destinations),
            dtype=spec.dtype,
            shape=spec.shape,
            phase=boundary.phase,
            codec=boundary.codec,
            bytes=payload(spec, boundary.codec, rows),
            backward=back,
            backward_codec=boundary.backward_codec if back else "none",
            backward_bytes=payload(spec, boundary.backward_codec, rows) if back else None,
        )

    def _once(self, fragments: Iterable[Fragment]) -> PlanOnce:
        found = list(fragments)
        graph, variables = self.cut.program.graph, self.cut.program.variable_ops
        ops = sorted({op for fragment in found for op in fragment.ops if graph.ops[op].type != "Const"})
        touched = [value.op for op in ops if _writes(graph.ops[op]) for value in graph.ops[op].inputs]
        written = list(dict.fromkeys(variables[op] for op in touched if op in variables))
        return PlanOnce(
            kind=found[0].kind,
            phase=found[0].phase,
            worker=found[0].worker,
            ops=len(ops),
            rounds=len(found),
            writes=tuple(variable.path for variable in written),
            trainable=sum(variable.op in self._descended for variable in written),
        )

    @cached_property
    def _descended(self) -> frozenset[int]:
        """The variables that the step asks gradients for."""
        return frozenset(op for request in self.cut.program.requests for op in request.origins)


def payload(spec: Spec, codec: str, rows: int) -> int | None:
    """Bytes of a boundary's tensor as its codec makes it; None where more than the rows is unknown.

    >>> payload(Spec("float32", (None, 10)), "fp16", rows=4), payload(Spec("float32", None), "none", rows=4)
    (80, None)
    """
    if spec.shape is None or None in spec.shape[1:]:
        return None
    raw = spec.nbytes(unknown=rows)
    return raw * _PRECISION[codec] // Spec(spec.dtype, ()).nbytes() if codec in _PRECISION else raw


def _fragments(piece: StagePhase) -> Iterator[Fragment]:
    return (fragment for fragment in (piece.forward, piece.backward) if fragment is not None)


def _name(boundary: Boundary) -> str:
    return f"b{boundary.slot}"


def _size(spec: Spec) -> int:
    return prod(axis or 1 for axis in spec.shape or ()) if spec.floating else 0


def _writes(op: Op) -> bool:
    return op.stateful and op.type not in _READS

