"""The cut of a program: fragments with their stages and workers, and the values that cross between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from whale_nebula.ir.layout import Layouts
from whale_nebula.ir.program import PartKey, Program
from whale_nebula.ir.routing import Order, Routing
from whale_nebula.spec import Spec, Value


@dataclass(frozen=True)
class VirtualDevice:
    """A place for one replica or shard of one stage, before it is mapped to a worker."""

    stage: int
    replica: int = 0
    shard: int = 0
    worker: str = ""


@dataclass(frozen=True)
class Fragment:
    """A part of the traced graph that runs as one function: its feeds, ops and fetches.

    `kind` is one of whole, weight, prologue, forward, backward, fused, weights, skip, update: "whole" computes values
    of the whole batch, "weight" a micro-batch's `nb.loss_weight`, "weights" the gradients of weights that a backward
    defers, and "skip" is `StagePhase.skip`. `round` numbers the pieces of an update that wait for values of other
    workers.
    """

    kind: str
    phase: int
    stage: int | None
    worker: str
    round: int
    ops: tuple[int, ...]
    feeds: tuple[Value, ...]
    fetches: tuple[Value, ...]


@dataclass(frozen=True)
class Boundary:
    """A tensor that crosses from one stage to others; `backward` is whether its gradient crosses back. `slot` numbers
    the boundaries; `layout` is "rows", "whole" (the same in every micro-batch) or "partial".

    `codec` and `backward_codec` are its encodings in both directions (`codec.encoding`); `mask` marks the rows to send,
    `ids` names the samples whose differences are sent. `where` is the line of the compress scope that sets them.
    """

    slot: int
    value: Value
    phase: int
    source: int
    destinations: tuple[int, ...]
    backward: bool
    codec: str = "none"
    backward_codec: str = "none"
    layout: str = "rows"
    mask: Value | None = None
    ids: Value | None = None
    where: str = ""


@dataclass(frozen=True)
class StagePhase:
    """The functions of one stage in one phase, for each micro-batch. `weights`, if any, computes the gradients of
    weights that the backward defers.

    With replicas, `skip` is what each of them runs for the micro-batches of the others, and `drifting` are the
    variables that its forward writes from its input rows.
    """

    stage: int
    phase: int
    forward: Fragment | None
    backward: Fragment | None
    fused: bool
    skip: Fragment | None = None
    drifting: tuple[str, ...] = ()
    weights: Fragment | None = None

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments that run for each micro-batch, in order."""
        return tuple(each for each in (self.forward, self.backward, self.weights) if each is not None)


@dataclass(frozen=True)
class Crossing:
    """A value that an update (or a result) needs on workers other than the one that computes it. It is sent after
    `round` of the sender's update; -1: before the first.
    """

    value: Value
    phase: int
    source: str
    destinations: tuple[str, ...]
    round: int


@dataclass(frozen=True)
class Exchange:
    """A value that an update in one cluster needs from another, if each is a process of its own: `source` and
    `destination` are clusters, `slot` numbers the values of a kind in a phase.

    `kind` is "part": tensor number `piece` (values, indices) of the gradient part with key `part`, of a variable that
    both clusters hold; or "scalar": any other value (a global norm's share, a result). `result` marks values that the
    step returns. Exchanges of the same `round` are sent together; `copy` numbers those to several workers of a cluster.
    """

    kind: str
    phase: int
    round: int
    slot: int
    source: str
    destination: str
    spec: Spec
    part: PartKey | None = None
    piece: int = 0
    result: bool = False
    copy: int = 0

    @property
    def what(self) -> str:
        """A description in words."""
        if self.part is not None:
            return "gradients of tied variables"
        return "results" if self.result else "scalars such as losses and metrics"


@dataclass(frozen=True)
class Worker:
    """One process with one device of a cluster, and the stages of which it runs a replica or shard."""

    name: str
    cluster: str
    stages: tuple[int, ...]


ALL_CLUSTERS = "*"
"""The destination of values that go to every other cluster."""


@dataclass(frozen=True)
class InputCrossing:
    """A value that goes from one cluster to another in a step; `depends` has by the name of an input of the step how
    the value depends on it (`config.schema.DEPENDS`). For an input that a cluster reads, `source` is empty.
    """

    name: str
    source: str
    destination: str
    depends: Mapping[str, str]


def rank_workers(workers: Iterable[Worker]) -> dict[str, str]:
    """By worker, the text by which TensorFlow sorts the members of a collective: its number in its cluster.

    >>> ranks = rank_workers([Worker(f"gpu/{letter}", "gpu", ()) for letter in "abcdefghijkl"])
    >>> sorted(ranks, key=ranks.get)[:5]
    ['gpu/a', 'gpu/b', 'gpu/k', 'gpu/l', 'gpu/c']
    """
    clusters: dict[str, list[str]] = {}
    for worker in workers:
        clusters.setdefault(worker.cluster, []).append(worker.name)
    return {name: str(number) for own in clusters.values() for number, name in enumerate(sorted(own))}


@dataclass(frozen=True)
class PhasePlan:
    """One phase: the functions of each stage and, by worker, the parts that run once."""

    index: int
    requests: tuple[int, ...]
    stages: tuple[StagePhase, ...]
    prologue: Mapping[str, Fragment]
    updates: Mapping[str, tuple[Fragment, ...]]
    crossings: tuple[Crossing, ...]


@dataclass(frozen=True)
class Cut:
    """A program mapped to workers: everything the runtime needs, as data.

    `merges` is how a forward value used after the micro-batches is merged over them; `variable_workers` which workers
    hold a variable; by worker, `batch_fragments` compute values of the whole batch from inputs alone, and
    `weight_fragments` a micro-batch's weight. `forward_written` are the paths of the variables that forwards write,
    `updates` is whether the step writes any variable. `exchanges` and `input_crossings` list what crosses between
    clusters. `owners` are the workers that return a tensor to the user, if not all do;
    `orders`, for each stage, which replica takes which micro-batch (empty: round robin in all stages). `layouts` are
    those of stages whose variables are split over devices.
    """

    program: Program
    workers: tuple[Worker, ...]
    devices: tuple[VirtualDevice, ...]
    phases: tuple[PhasePlan, ...]
    boundaries: tuple[Boundary, ...]
    merges: Mapping[Value, str]
    variable_workers: Mapping[str, tuple[str, ...]]
    batch_fragments: Mapping[str, Fragment]
    weight_fragments: Mapping[str, Fragment] = field(default_factory=dict)
    forward_written: tuple[str, ...] = ()
    updates: bool = True
    notes: tuple[str, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    owners: Mapping[Value, tuple[str, ...]] = field(default_factory=dict)
    orders: tuple[Order, ...] = ()
    layouts: Mapping[int, Layouts] = field(default_factory=dict)
    input_crossings: tuple[InputCrossing, ...] = ()

    @cached_property
    def routing(self) -> Routing:
        """Which worker takes which micro-batch of a stage: in a split stage, the first worker of each replica."""
        return self._routing_from(lambda device: device.worker)

    @cached_property
    def routings(self) -> Mapping[str, Routing]:
        """By worker, the routing among those with the same pieces: shard s of a replica takes the micro-batches of its
        first worker, and reduces gradients with shard s of the other replicas.
        """
        return {worker.name: self._routing_from(lambda device: device.worker, worker.name) for worker in self.workers}

    @cached_property
    def routing_by_cluster(self) -> Routing:
        """The routing by cluster, if all workers of a cluster share their memory."""
        return self._routing_from(lambda device: self.program.stages[device.stage].cluster)

    def workers_of(self, stage: int) -> tuple[str, ...]:
        """The workers that run a replica, or a device, of a stage."""
        return tuple(worker.name for worker in self.workers if stage in worker.stages)

    def group_of(self, stage: int, worker: str) -> tuple[str, ...]:
        """The workers that together hold a stage's variables in pieces, in the order of the pieces: those of a worker's
        replica, or all replicas if these hold parts of slots.
        """
        workers, count = self.workers_of(stage), self.layouts[stage].count
        first = workers.index(worker) // count * count
        return tuple(sorted(workers[first : first + count], key=rank_workers(self.workers).__getitem__))

    def _routing_from(self, host: Callable[[VirtualDevice], str], worker: str = "") -> Routing:
        found: list[list[str]] = [[] for _ in self.program.stages]
        own = {device.stage: device.shard for device in self.devices if device.worker == worker}
        for device in sorted(self.devices, key=lambda device: (device.stage, device.replica)):
            if device.shard == own.get(device.stage, 0):
                found[device.stage].append(host(device))
        return Routing(tuple(map(tuple, found)), self.orders)
