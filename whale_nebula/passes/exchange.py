"""Values that updates on separate clusters exchange, derived from a plan with one worker per cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from whale_nebula.ir.cut import Crossing, Cut, Exchange, PhasePlan, Worker
from whale_nebula.ir.program import GradientPart, PartKey, Program
from whale_nebula.passes.replicas import spread
from whale_nebula.spec import Spec, Value

PARTS = -2
"""The round of gradient parts, which are sent before the first scalars."""


class Shared(NamedTuple):
    """A tensor of a partial gradient that crosses: number, place, kind, and the workers that have and need it."""

    slot: int
    key: PartKey
    piece: int
    spec: Spec
    source: str
    destinations: tuple[str, ...]


class Bundle(NamedTuple):
    """A message between two workers after a round of updates: one tensor, or many scalars in one frame.

    A global norm has a share for each variable, and a frame for each would be mostly header.
    """

    number: int
    phase: int
    round: int
    source: str
    destination: str
    crossings: tuple[Crossing, ...]
    specs: tuple[Spec, ...]

    @property
    def spec(self) -> Spec:
        """The form of the message: that of the tensor, or of the concatenated scalars' bytes."""
        return self.specs[0] if len(self.specs) == 1 else Spec("uint8", (sum(spec.nbytes() for spec in self.specs),))


def clusters_apart(program: Program) -> list[Worker]:
    """The workers if each cluster were a process of its own, named like the cluster; a cluster with replicated stages
    has as many as its stage with most replicas.
    """
    most: dict[str, int] = {}
    for stage in program.stages:
        most[stage.cluster] = max(most.get(stage.cluster, 1), stage.replicas)
    names = {
        name: [name if count == 1 else f"{name}/{number}" for number in range(count)] for name, count in most.items()
    }
    return spread(program.stages, names)


def exchanges(cut: Cut) -> tuple[Exchange, ...]:
    """All exchanges between clusters for the updates of a step, in the order of sending."""
    clusters = {worker.name: worker.cluster for worker in cut.workers}
    seen: Counter[Exchange] = Counter()
    found: list[Exchange] = []
    for each in (exchange for phase in cut.phases for exchange in _phase_exchanges(cut, phase, clusters)):
        if each.source != each.destination:
            found.append(replace(each, copy=seen[each]))
            seen[each] += 1
    return tuple(found)


def _phase_exchanges(cut: Cut, phase: PhasePlan, clusters: dict[str, str]) -> Iterator[Exchange]:
    for part in shared_parts(cut, phase):
        for destination in part.destinations:
            ends = clusters[part.source], clusters[destination]
            yield Exchange("part", phase.index, PARTS, part.slot, *ends, part.spec, part.key, part.piece)
    returned = frozenset(cut.program.returns)
    for bundle in sorted(bundles(cut, phase), key=lambda each: each.round):
        ends = clusters[bundle.source], clusters[bundle.destination]
        result = all(crossing.value in returned for crossing in bundle.crossings)
        yield Exchange("scalar", phase.index, bundle.round, bundle.number, *ends, bundle.spec, result=result)


def bundles(cut: Cut, phase: PhasePlan) -> tuple[Bundle, ...]:
    """The messages between the updates of a phase, numbered identically in every process."""
    together: dict[tuple[int, str, str, int | None], list[Crossing]] = {}
    for slot, crossing in enumerate(phase.crossings):
        alone = None if cut.program.graph.spec(crossing.value).scalar else slot
        for destination in crossing.destinations:
            together.setdefault((crossing.round, crossing.source, destination, alone), []).append(crossing)
    spec = cut.program.graph.spec
    return tuple(
        Bundle(n, phase.index, key[0], key[1], key[2], tuple(found), tuple(spec(each.value) for each in found))
        for n, (key, found) in enumerate(together.items())
    )


def shared_parts(cut: Cut, phase: PhasePlan) -> Iterator[Shared]:
    """Every gradient part's tensor that another worker also needs, numbered identically in every process."""
    program = cut.program
    slot = 0
    for number in phase.requests:
        request = program.requests[number]
        for part in request.ordered_parts:
            variable = program.variable_ops.get(request.origins[part.source])
            holders = cut.held.get(variable.path, ()) if variable is not None else ()
            makers = cut.workers_of(part.stage)
            others = tuple(worker for worker in holders if worker not in makers)
            for piece, value in enumerate(part.values):
                if others:
                    yield Shared(slot, request.key_of(part), piece, program.graph.spec(value), makers[0], others)
                slot += 1


class ReplicaMessage(NamedTuple):
    """A message between replicas of stages; its slot is its number, identical in every process.

    `kind` is "numbers" (all scalars of the own micro-batches in one message), "tensor" (a value of a micro-batch),
    "sum" (a piece of the gradients) or "drift" (a variable that the forward wrote from its rows). `key` and `piece`
    identify the gradient (request, source, stage), `path` the variable.
    """

    slot: int
    kind: Literal["numbers", "tensor", "sum", "drift"]
    stage: int
    specs: tuple[Spec, ...]
    values: tuple[Value, ...] = ()
    key: PartKey = (-1, -1, -1, -1)
    piece: int = 0
    path: str = ""


def replica_messages(cut: Cut, phase: PhasePlan) -> tuple[ReplicaMessage, ...]:
    """All messages between replicas of stages in a phase."""
    every = [each for stage in sorted(cut.routing.replicated) for each in _list_messages(cut, phase, stage)]
    return tuple(each._replace(slot=slot) for slot, each in enumerate(every))


def _list_messages(cut: Cut, phase: PhasePlan, stage: int) -> Iterator[ReplicaMessage]:
    spec = cut.program.graph.spec
    plan = next((each for each in phase.stages if each.stage == stage), None)
    if plan is None:
        return
    made = [value for fragment in plan.fragments for value in fragment.fetches]
    kept = [value for value in dict.fromkeys(made) if value in cut.merges]
    numbers = tuple(value for value in kept if spec(value).scalar)
    if numbers:
        yield ReplicaMessage(0, "numbers", stage, tuple(map(spec, numbers)), numbers)
    for value in kept:
        if value not in numbers:
            yield ReplicaMessage(0, "tensor", stage, (spec(value),), (value,))
    for key, part in parts_of(cut, phase, stage):
        for piece, value in enumerate(part.values):
            yield ReplicaMessage(0, "sum", stage, (spec(value),), (value,), key, piece)
    for path in plan.drifting:
        variable = next(each for each in cut.program.variables if each.path == path)
        yield ReplicaMessage(0, "drift", stage, (variable.spec,), path=path)


def parts_of(cut: Cut, phase: PhasePlan, stage: int) -> Iterator[tuple[PartKey, GradientPart]]:
    """The gradients that a stage computes in a phase, in the same order in every process."""
    for number in phase.requests:
        request = cut.program.requests[number]
        for part in request.ordered_parts:
            if part.stage == stage:
                yield request.key_of(part), part
