"""What updates in separate clusters exchange, read off a plan that has a worker for each cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from whale_nebula.ir.cut import Crossing, Cut, Exchange, PhasePlan, Worker
from whale_nebula.ir.program import PartKey, Program
from whale_nebula.passes.replicate import spread
from whale_nebula.spec import Spec

PARTS = -2
"""The round of gradient parts: they go before the first scalars."""


class Shared(NamedTuple):
    """A tensor of a gradient part that crosses: its number, where it belongs, what it is, who has and who needs it."""

    slot: int
    key: PartKey
    piece: int
    spec: Spec
    source: str
    destinations: tuple[str, ...]


class Bundle(NamedTuple):
    """What goes from one worker to another after the same round of updates: one tensor, or many scalars in one frame.

    A global norm is made of a share for each variable, and each alone would be more header than number.
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
        """What is sent: the tensor itself, or the bytes of the scalars one after the other."""
        return self.specs[0] if len(self.specs) == 1 else Spec("uint8", (sum(spec.nbytes() for spec in self.specs),))


def clusters_apart(program: Program) -> list[Worker]:
    """A worker for each cluster, as if each were a process of its own, named like the cluster; as many as the stage
    with most replicas has, where stages are copied.
    """
    most: dict[str, int] = {}
    for stage in program.stages:
        most[stage.cluster] = max(most.get(stage.cluster, 1), stage.replicas)
    names = {
        name: [name if count == 1 else f"{name}/{number}" for number in range(count)] for name, count in most.items()
    }
    return spread(program.stages, names)


def exchanges(cut: Cut) -> tuple[Exchange, ...]:
    """All that crosses between clusters for the updates of a step, in the order in which it is sent."""
    clusters = {worker.name: worker.cluster for worker in cut.workers}
    every = (
        exchange
        for phase in cut.phases
        for exchange in (*_parts(cut, phase, clusters), *_scalars(cut, phase, clusters))
        if exchange.source != exchange.destination
    )
    return tuple(_told_apart(every))


def _told_apart(every: Iterator[Exchange]) -> Iterator[Exchange]:
    """Number those that go to several workers of a cluster."""
    seen: Counter[Exchange] = Counter()
    for each in every:
        yield replace(each, copy=seen[each])
        seen[each] += 1


def _parts(cut: Cut, phase: PhasePlan, clusters: dict[str, str]) -> Iterator[Exchange]:
    for part in shared_parts(cut, phase):
        for destination in part.destinations:
            ends = clusters[part.source], clusters[destination]
            yield Exchange("part", phase.index, PARTS, part.slot, *ends, part.spec, part.key, part.piece)


def _scalars(cut: Cut, phase: PhasePlan, clusters: dict[str, str]) -> Iterator[Exchange]:
    returned = frozenset(cut.program.returns)
    for bundle in sorted(bundles(cut, phase), key=lambda each: each.round):
        ends = clusters[bundle.source], clusters[bundle.destination]
        result = all(crossing.value in returned for crossing in bundle.crossings)
        yield Exchange("scalar", phase.index, bundle.round, bundle.number, *ends, bundle.spec, result=result)


def bundles(cut: Cut, phase: PhasePlan) -> tuple[Bundle, ...]:
    """What the updates of a phase send one another, numbered alike in every process."""
    together: dict[tuple[int, str, str, int | None], list[Crossing]] = {}
    for slot, crossing in enumerate(phase.crossings):
        alone = None if cut.program.graph.spec(crossing.value).scalar else slot
        for destination in crossing.destinations:
            together.setdefault((crossing.round, crossing.source, destination, alone), []).append(crossing)
    return tuple(
        Bundle(number, phase.index, found[0].round, found[0].source, destination, tuple(found), _specs(cut, found))
        for number, ((_, _, destination, _), found) in enumerate(together.items())
    )


def _specs(cut: Cut, crossings: Sequence[Crossing]) -> tuple[Spec, ...]:
    return tuple(cut.program.graph.spec(crossing.value) for crossing in crossings)


def shared_parts(cut: Cut, phase: PhasePlan) -> Iterator[Shared]:
    """Every gradient part's tensor that another worker needs too, numbered alike in every process."""
    program = cut.program
    slot = 0
    for number in phase.requests:
        request = program.requests[number]
        for part in request.ordered_parts:
            variable = program.variable_ops.get(request.origins[part.source])
            holders = cut.held.get(variable.path, ()) if variable is not None else ()
            replicas = cut.routing.of(part.stage)
            source = replicas[0]
            others = tuple(worker for worker in holders if worker not in replicas)
            for index, value in enumerate(part.values):
                if others:
                    key, spec = request.key_of(part), program.graph.spec(value)
                    yield Shared(slot, key, index, spec, source, others)
                slot += 1
