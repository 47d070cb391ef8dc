"""Expand replicas into virtual devices, map these to workers, and share rows by worker speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from whale_nebula.errors import BatchCoupledError
from whale_nebula.ir.cut import Cut, VirtualDevice, Worker, rank_workers
from whale_nebula.ir.graph import REPLICA_SUM
from whale_nebula.ir.program import Program, Stage
from whale_nebula.ir.routing import Order, order_by_speed
from whale_nebula.passes.readings import list_fragments
from whale_nebula.passes.rules.verdict import list_batch_fixes
from whale_nebula.site import Origin


def place_stages(stages: Sequence[Stage], clusters: Mapping[str, Sequence[str]]) -> list[Worker]:
    """The workers of `clusters` (a cluster's name to those of its workers), each with the stages that it runs.

    The stages inside one replica of an `nb.replica` are on adjacent workers: with two stages in two replicas on four
    workers, the first two have the stages of the first replica. Fewer workers than replicas have several each. A stage
    without replicas is on its cluster's first worker, unless a planner has placed its first replica; the devices of a
    split stage are workers as well: shard s of replica r is on the worker at r * shards + s.

    >>> two = [Stage("a", "gpu", replicas=2), Stage("b", "gpu", replicas=2)]
    >>> [worker.stages for worker in place_stages(two, {"gpu": ["gpu/0", "gpu/1", "gpu/2", "gpu/3"]})]
    [(0,), (1,), (0,), (1,)]
    >>> [worker.stages for worker in place_stages(two, {"gpu": ["gpu/0", "gpu/1"]})]
    [(0, 1), (0, 1)]
    >>> [worker.stages for worker in place_stages([Stage("a", "gpu", first=1)], {"gpu": ["gpu/0", "gpu/1"]})]
    [(), (0,)]
    >>> split = [Stage("a", "gpu"), Stage("b", "gpu", shards=2)]
    >>> [worker.stages for worker in place_stages(split, {"gpu": ["gpu/0", "gpu/1", "gpu/2"]})]
    [(0, 1), (1,), ()]
    >>> both = [Stage("a", "gpu", replicas=2), Stage("b", "gpu", replicas=2, shards=2)]
    >>> [worker.stages for worker in place_stages(both, {"gpu": ["gpu/0", "gpu/1", "gpu/2", "gpu/3"]})]
    [(0, 1), (1,), (0, 1), (1,)]
    """
    runs: dict[str, list[int]] = {worker: [] for workers in clusters.values() for worker in workers}
    for number, stage in enumerate(stages):
        workers = clusters[stage.cluster]
        for seat in range(min(stage.replicas * stage.shards, len(workers))):
            runs[workers[_find_place(stages, number, seat, len(workers))]].append(number)
    return [Worker(worker, cluster, tuple(runs[worker])) for cluster, workers in clusters.items() for worker in workers]


def _find_place(stages: Sequence[Stage], number: int, seat: int, workers: int) -> int:
    """The place among its cluster's workers of a replica, or of a device, of stage `number`."""
    stage = stages[number]
    seats = stage.replicas * stage.shards
    if stage.first is not None:
        return (stage.first + seat) % workers
    if seats == 1:
        return 0
    alike = [n for n, e in enumerate(stages) if (e.cluster, e.replicas * e.shards) == (stage.cluster, seats)]
    room = max(1, workers // seats)
    return seat * room + min(alike.index(number), room - 1)


def list_stage_workers(stages: int, workers: Sequence[Worker]) -> list[frozenset[int]]:
    """For each stage, the numbers of the workers that run it."""
    return [frozenset(n for n, worker in enumerate(workers) if stage in worker.stages) for stage in range(stages)]


def list_devices(program: Program, workers: Sequence[Worker]) -> tuple[VirtualDevice, ...]:
    """A virtual device for each shard of each replica of each stage, assigned round robin to the
    workers that run it.
    """
    found, ranks = [], rank_workers(workers)
    for number, stage in enumerate(program.stages):
        homes = [worker.name for worker in workers if number in worker.stages]
        groups = [
            sorted(homes[n : n + stage.shards], key=ranks.__getitem__) for n in range(0, len(homes), stage.shards)
        ]
        for replica in range(stage.replicas):
            group = groups[replica % len(groups)]
            found += [VirtualDevice(number, replica, s, group[s % len(group)]) for s in range(stage.shards)]
    return tuple(found)


def find_replica_speeds(stages: Sequence[Stage], workers: Mapping[str, Sequence[float]]) -> list[tuple[float, ...]]:
    """For each stage the speeds of its replicas on several workers, if `workers` has the speeds of its cluster's
    workers. Replicas on one worker share its speed; one on several workers is as fast as the slowest.

    >>> three = [Stage("a", "gpu", replicas=3), Stage("b", "npu", replicas=2)]
    >>> find_replica_speeds(three, {"gpu": [1.0, 2.0]})
    [(0.5, 2.0, 0.5), ()]
    >>> find_replica_speeds([Stage("a", "gpu", replicas=2, shards=2)], {"gpu": [1.0, 2.0, 3.0, 4.0]})
    [(1.0, 3.0)]
    """
    found: list[tuple[float, ...]] = []
    for number, stage in enumerate(stages):
        own = workers.get(stage.cluster, ())
        homes = min(stage.replicas, len(own) // stage.shards)
        places = [_find_place(stages, number, seat, len(own)) for seat in range(homes * stage.shards)]
        groups = [places[n * stage.shards : (n + 1) * stage.shards] for n in range(homes)]
        taken = [groups[replica % homes] for replica in range(stage.replicas if homes else 0)]
        found.append(tuple(min(own[p] for p in each) / taken.count(each) for each in taken) if homes > 1 else ())
    return found


def list_orders(program: Program) -> tuple[Order, ...]:
    """For each stage, the order in which its replicas take micro-batches; empty if all take turns."""
    found = tuple(order_by_speed(stage.speeds, program.pipeline.micro_batch) for stage in program.stages)
    return found if any(found) else ()


Where = Callable[[int], str]


def find_replica_sums(program: Program) -> Mapping[int, tuple[int, ...]]:
    """The ops that sum over replicas in a program's forward, by the number of their stage."""
    found: dict[int, tuple[int, ...]] = {}
    for op in program.graph.ops:
        if op.type == REPLICA_SUM and program.request_of(op.index) is None:
            stage = program.labels.get(op.index, 0)
            found[stage] = (*found.get(stage, ()), op.index)
    return found


def has_one_order(cut: Cut, stage: int) -> bool:
    """Whether TensorFlow sums a stage's replicas in the same order for all shards, so that sums of whole values are
    bit-identical on the devices of a replica.
    """
    ranks = rank_workers(cut.workers)
    hosts = {cut.routings[worker].hosts[stage] for worker in cut.workers_of(stage)}
    orders = {tuple(sorted(range(len(own)), key=lambda r: ranks[own[r]])) for own in hosts}
    return cut.program.stages[stage].replicas < 3 or len(orders) == 1


def count_local_micro_batches(program: Program) -> int:
    """The number of micro-batches that one process computes in a step; replicas that add up sums during the forward
    count as one.
    """
    return 1 if find_replica_sums(program) else program.pipeline.micro_batch


def find_batch_sum_error(program: Program, where: Where) -> BatchCoupledError | None:
    """The reason why a program's sums over replicas cannot be computed from micro-batches; None if they can,
    or if there are none.
    """
    count = program.pipeline.micro_batch
    for stage, ops in find_replica_sums(program).items() if count > 1 else ():
        own = program.stages[stage]
        if own.replicas != count:
            why = (
                f"they are summed over replicas that have one micro-batch each, but stage {own.key!r} has {count} "
                f"micro-batches for {own.replicas} replica{'s' * (own.replicas > 1)}"
            )
            return _batch_sum_error(program, stage, ops[0], where, why)
    return None


def check_replica_sums(cut: Cut, worker: str, where: Where, *, collectives: bool) -> None:
    """In a run of several processes, refuse sums over replicas if two replicas share a worker, if this process,
    `worker`, runs one without `collectives`, or if they are outside of stages.
    """
    for stage, ops in find_replica_sums(cut.program).items() if cut.program.pipeline.micro_batch > 1 else ():
        key, replicas, hosts = (
            cut.program.stages[stage].key,
            cut.program.stages[stage].replicas,
            cut.routing.hosts_of(stage),
        )
        if len(hosts) < replicas:
            why = f"stage {key!r} has {replicas} replicas, which need a worker each, but its cluster has {len(hosts)}"
            raise _batch_sum_error(cut.program, stage, ops[0], where, why)
        if worker in hosts and not collectives:
            raise _batch_sum_error(cut.program, stage, ops[0], where, _STARTED_REASON)
        unstaged = (each for each in list_fragments(cut) if each.stage is None and each.kind != "whole")
        outside = next((op for fragment in unstaged for op in fragment.ops if op in ops), None)
        if outside is not None:
            raise _batch_sum_error(cut.program, stage, outside, where, _OUTSIDE_REASON)


_OUTSIDE_REASON = "they are computed outside of stages, where no replica runs"
_STARTED_REASON = (
    "its replicas use TensorFlow's collectives, which cannot be enabled after TensorFlow has started: call "
    "nb.init() before anything that creates a tensor, a variable or a layer"
)


BATCH_SUM_NOTE = "synchronized moments are computed over all replicas of stage "
"""The beginning of the note on sums over replicas."""


def list_batch_sum_notes(program: Program) -> list[str]:
    """Notes on a program's sums over replicas, one for each stage that has some."""
    stages = find_replica_sums(program) if program.pipeline.micro_batch > 1 else ()
    return [
        f"{BATCH_SUM_NOTE}{program.stages[stage].key!r}; one process computes them over the entire batch"
        for stage in stages
    ]


def _batch_sum_error(program: Program, stage: int, op: int, where: Where, why: str) -> BatchCoupledError:
    line, count, own = where(op), program.pipeline.micro_batch, program.stages[stage]
    layer = line.layer_description if isinstance(line, Origin) else ""
    most = max(each.replicas for each in program.stages)
    as_many = f"use nb.replica({count}) around stage {own.key!r}, so each replica has one micro-batch"
    if own.replicas == most > 1:
        as_many = f"use nb.pipeline(micro_batch={own.replicas}), one for each replica"
    others = list_batch_fixes(count if count > most else 1, copied=most > 1)
    return BatchCoupledError(
        f"micro-batches would change the synchronized moments{f' of {layer}' if layer else ''}",
        op=program.graph.ops[op].label,
        line=str(line),
        why=why,
        mends=(*[as_many] * (own.replicas != count), others.alone, others.allow),
    )
