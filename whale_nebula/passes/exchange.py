"""What updates in separate clusters exchange, read off a plan that has a worker for each cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from whale_nebula.ir.plan import Cut, Exchange, PhasePlan, Worker
from whale_nebula.ir.program import Program
from whale_nebula.ir.spec import Spec

PARTS = -2
"""The round of gradient parts: they go before the first scalars."""


class Shared(NamedTuple):
    """A tensor of a gradient part that crosses: its number, where it belongs, what it is, who has and who needs it."""

    slot: int
    key: tuple[int, int, int]
    piece: int
    spec: Spec
    source: str
    destinations: tuple[str, ...]


def clusters_apart(program: Program) -> list[Worker]:
    """A worker for each cluster, as if each were a process of its own; named like the cluster."""
    names = dict.fromkeys(stage.cluster for stage in program.stages)
    return [
        Worker(name, name, tuple(s for s, stage in enumerate(program.stages) if stage.cluster == name))
        for name in names
    ]


def exchanges(cut: Cut) -> tuple[Exchange, ...]:
    """All that crosses between workers for the updates of a step, in the order in which it is sent."""
    clusters = {worker.name: worker.cluster for worker in cut.workers}
    return tuple(
        exchange
        for phase in cut.phases
        for exchange in (*_parts(cut, phase, clusters), *_scalars(cut, phase, clusters))
    )


def _parts(cut: Cut, phase: PhasePlan, clusters: dict[str, str]) -> Iterator[Exchange]:
    for part in shared_parts(cut, phase):
        for destination in part.destinations:
            ends = clusters[part.source], clusters[destination]
            yield Exchange("part", phase.index, PARTS, part.slot, *ends, part.spec, part.key, part.piece)


def _scalars(cut: Cut, phase: PhasePlan, clusters: dict[str, str]) -> Iterator[Exchange]:
    returned = frozenset(cut.program.returns)
    for slot, crossing in sorted(enumerate(phase.crossings), key=lambda each: each[1].round):
        spec = cut.program.graph.spec(crossing.value)
        for destination in crossing.destinations:
            ends = clusters[crossing.source], clusters[destination]
            result = crossing.value in returned
            yield Exchange("scalar", phase.index, crossing.round, slot, *ends, spec, result=result)


def shared_parts(cut: Cut, phase: PhasePlan) -> Iterator[Shared]:
    """Every gradient part's tensor that another worker needs too, numbered alike in every process."""
    program = cut.program
    workers = {stage: worker.name for worker in cut.workers for stage in worker.stages}
    slot = 0
    for number in phase.requests:
        request = program.requests[number]
        for part in sorted(request.parts, key=lambda part: (part.source, part.stage)):
            variable = program.variable_ops.get(request.origins[part.source])
            holders = cut.held.get(variable.path, ()) if variable is not None else ()
            source = workers[part.stage]
            others = tuple(worker for worker in holders if worker != source)
            for index, value in enumerate(part.values):
                if others:
                    key, spec = (number, part.source, part.stage), program.graph.spec(value)
                    yield Shared(slot, key, index, spec, source, others)
                slot += 1
