"""Replicas become virtual devices, which are given to the workers of their cluster; each has a share by its speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whale_nebula.ir.cut import VirtualDevice, Worker
from whale_nebula.ir.program import Program, Stage
from whale_nebula.ir.routing import Order, by_speed


def spread(stages: Sequence[Stage], clusters: Mapping[str, Sequence[str]]) -> list[Worker]:
    """The workers of `clusters` (a cluster's name to those of its workers), each with the stages that it runs.

    A replica of what is inside an `nb.replica` stands on neighbours: with two stages in two replicas on four workers,
    the first two have the stages of the first replica. Where there are fewer workers than replicas, they have several
    each. A stage that is not copied is on its cluster's first worker.

    >>> two = [Stage("a", "gpu", replicas=2), Stage("b", "gpu", replicas=2)]
    >>> [worker.stages for worker in spread(two, {"gpu": ["gpu/0", "gpu/1", "gpu/2", "gpu/3"]})]
    [(0,), (1,), (0,), (1,)]
    >>> [worker.stages for worker in spread(two, {"gpu": ["gpu/0", "gpu/1"]})]
    [(0, 1), (0, 1)]
    """
    runs: dict[str, list[int]] = {worker: [] for workers in clusters.values() for worker in workers}
    for number, stage in enumerate(stages):
        workers = clusters[stage.cluster]
        for replica in range(min(stage.replicas, len(workers))):
            runs[workers[_place(stages, number, replica, len(workers))]].append(number)
    return [
        Worker(worker, cluster, tuple(runs[worker])) for cluster, workers in clusters.items() for worker in workers
    ]


def _place(stages: Sequence[Stage], number: int, replica: int, workers: int) -> int:
    """The place among its cluster's workers of a replica of stage `number`."""
    stage = stages[number]
    if stage.replicas == 1:
        return 0
    alike = [n for n, each in enumerate(stages) if (each.cluster, each.replicas) == (stage.cluster, stage.replicas)]
    room = max(1, workers // stage.replicas)
    return replica * room + min(alike.index(number), room - 1)


def running(stages: int, workers: Sequence[Worker]) -> list[frozenset[int]]:
    """For each stage, the numbers of the workers that run it."""
    return [frozenset(n for n, worker in enumerate(workers) if stage in worker.stages) for stage in range(stages)]


def devices(program: Program, workers: Sequence[Worker]) -> tuple[VirtualDevice, ...]:
    """A virtual device for each replica of each stage; the workers that run the stage take them in turn."""
    found = []
    for number, stage in enumerate(program.stages):
        homes = [worker.name for worker in workers if number in worker.stages]
        found += [VirtualDevice(number, r, worker=homes[r % len(homes)]) for r in range(stage.replicas)]
    return tuple(found)


def speeds(stages: Sequence[Stage], workers: Mapping[str, Sequence[float]]) -> list[tuple[float, ...]]:
    """For each stage the speeds of its replicas, where `workers` gives those of the workers of its cluster and they are
    not all alike. Replicas on one worker share what that has.

    >>> three = [Stage("a", "gpu", replicas=3), Stage("b", "npu", replicas=2)]
    >>> speeds(three, {"gpu": [1.0, 2.0]})
    [(0.5, 2.0, 0.5), ()]
    """
    return [_speeds(stages, number, workers.get(stage.cluster, ())) for number, stage in enumerate(stages)]


def _speeds(stages: Sequence[Stage], number: int, workers: Sequence[float]) -> tuple[float, ...]:
    homes = min(stages[number].replicas, len(workers))
    if homes < 2 or len(set(workers)) < 2:
        return ()
    places = [_place(stages, number, home, len(workers)) for home in range(homes)]
    taken = [places[replica % homes] for replica in range(stages[number].replicas)]
    return tuple(workers[place] / taken.count(place) for place in taken)


def orders(program: Program) -> tuple[Order, ...]:
    """For each stage, which replica takes which micro-batch; none where all take turns."""
    found = tuple(by_speed(stage.speeds, program.pipeline.micro_batch) for stage in program.stages)
    return found if any(found) else ()
