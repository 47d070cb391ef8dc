"""The planning problem as arrays: a chain of blocks, clusters, links between them, and limits.

A block is a sequence of ops that is never cut. Blocks are in the order of the data flow; a cut is a place between two
of them. Seconds and bytes that grow with the rows of a micro-batch are given as two numbers: the cost of a call, and
that of each row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from whale_nebula.schedule.lines import Line

Array = NDArray[np.float64]
MANY = 128
"""The number of workers from which on fewer numbers of micro-batches are tried."""


@dataclass(frozen=True, eq=False)
class ClusterCosts:
    """A cluster for the planner: number of workers, their speed, and the memory of each.

    `forward` and `backward` are seconds of each block on one worker: a row for a call and a row for each row of the
    micro-batch. `call` are the seconds of calling a stage's forward or backward, `update` those of a block's update
    once per step, `accumulation` those of accumulating a byte of a gradient over micro-batches. If forward and backward
    are one function they take `fused_ratio` times as long as separately. At either end a tensor that crosses takes
    `message` seconds of computing, and each of its bytes `crossing`; a step takes `step` seconds in addition.
    `inner_line` is the link between the cluster's workers. `deferred_backward` is the part of `backward` for gradients
    of weights alone.
    """

    name: str
    workers: int
    forward: Array
    backward: Array
    update: Array
    call: float = 0.0
    memory: float = math.inf
    inner_line: Line = field(default_factory=Line)
    accumulation: float = 0.0
    fused_ratio: float = 1.0
    crossing: float = 0.0
    message: float = 0.0
    step: float = 0.0
    deferred_backward: Array | None = None


class Parallelism(NamedTuple):
    """How a stage uses several workers: the number of its replicas, or of the shards of its variables."""

    replicas: int = 1
    shards: int = 1


@dataclass(frozen=True, eq=False)
class CodecCosts:
    """Costs of crossing at each cut with a codec: bytes per row forward (`sent_bytes`) and backward (`returned_bytes`),
    and `seconds` a row of one core for four operations: to encode and to decode the activation, and to encode and to
    decode the gradient.
    """

    codec: str
    sent_bytes: Array
    returned_bytes: Array
    seconds: Array


@dataclass(frozen=True, eq=False)
class Chain:
    """The blocks of a program.

    By block: bytes of `weights`, of the optimizer's `slots` for them, of their `gradients`; bytes per row that are kept
    from the forward for the backward (`activations`), and that a running op needs in addition (`transient`); bytes of
    the `largest_gradient` of one variable, and bytes per row that deferred gradients of weights read
    (`deferred_inputs`). By cut, one before each block and one at the end: bytes per row that cross forward
    (`sent_bytes`) and backward (`returned_bytes`), bytes that cross once per step for weights on both sides
    (`tied_bytes`), and whether a cut is allowed; the numbers of tensors that cross (`sent_tensors`,
    `returned_tensors`). `separate_gradients` are the bytes of a block's gradients that are computed separately from the
    gradient that is sent back. `codecs` are the codecs that may be chosen between clusters, the most accurate first;
    empty: no codec. `object_bytes` are bytes of a block that are not variables (rows of a table), of which there are no
    replicas. `update_temporaries` is the number of temporary tensors of the largest variable's update (None: unknown).
    """

    names: tuple[str, ...]
    weights: Array
    slots: Array
    gradients: Array
    activations: Array
    transient: Array
    sent_bytes: Array
    returned_bytes: Array
    tied_bytes: Array
    cuttable: NDArray[np.bool_]
    separate_gradients: Array | None = None
    codecs: tuple[CodecCosts, ...] = ()
    sent_tensors: Array | None = None
    returned_tensors: Array | None = None
    largest_gradient: Array | None = None
    deferred_inputs: Array | None = None
    object_bytes: Array | None = None
    update_temporaries: int | None = None

    @cached_property
    def resident(self) -> Array:
        """Bytes of each block that its worker holds all the time."""
        return self.weights + self.slots + (0.0 if self.object_bytes is None else self.object_bytes)

    @cached_property
    def single(self) -> NDArray[np.bool_]:
        """Whether each block can have one replica only."""
        return np.zeros(len(self), bool) if self.object_bytes is None else self.object_bytes > 0

    @cached_property
    def uncompressed(self) -> CodecCosts:
        """Costs of crossing without a codec."""
        return CodecCosts("none", self.sent_bytes, self.returned_bytes, np.zeros((4, len(self) + 1)))

    @property
    def codec_choices(self) -> tuple[CodecCosts, ...]:
        """The codecs from which crossings between clusters may choose, at least one."""
        return self.codecs or (self.uncompressed,)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class WrittenStage:
    """A stage that the user has written: the blocks from `begin` to `end` belong to one stage of every plan, without
    blocks of other written stages. It runs on one of `clusters` (empty: any) with that number of `replicas` (None:
    any); `scope_line` quotes its scope and line.
    """

    key: str
    begin: int
    end: int
    clusters: tuple[int, ...] = ()
    replicas: int | None = None
    scope_line: str = ""

    def admits(self, cluster: int) -> bool:
        """Whether the stage may run on a cluster."""
        return not self.clusters or cluster in self.clusters


class PinnedBlock(NamedTuple):
    """A block that only some clusters may run, as they have an input that it reads."""

    block: int
    clusters: tuple[int, ...]


@dataclass(frozen=True)
class Options:
    """Decisions of the user that constrain the search; None leaves one to the search. `max_micro_batches` bounds the
    micro-batches, `in_flight` those that a stage holds, `memory` the bytes of each worker. A later one of `schedules`
    is taken only if it is clearly faster, and a less lossy codec if the step takes at most the share of `slack` longer.
    With `split`, stages with several workers shard their variables instead of replicating them; if open, this is tried
    if memory is short or all-reduces take long.
    """

    micro_batch: int | None = None
    replica: int | None = None
    recompute: bool | None = None
    schedules: tuple[str, ...] = ("eager-1f1b", "zero-bubble")
    max_micro_batches: int = 64
    memory: float = math.inf
    split: bool | None = False
    slack: float = 0.02
    in_flight: int | None = None


@dataclass(frozen=True)
class Problem:
    """The complete input of the search. `lines` connect pairs of clusters, by their numbers, in one direction each;
    `written_stages` are the stages that the user has written, and `pinned_blocks` the blocks that some clusters may not
    run, in order.
    """

    chain: Chain
    clusters: tuple[ClusterCosts, ...]
    rows: int
    lines: Mapping[tuple[int, int], Line] = field(default_factory=dict)
    options: Options = Options()
    written_stages: tuple[WrittenStage, ...] = ()
    pinned_blocks: tuple[PinnedBlock, ...] = ()

    def line(self, source: int, destination: int) -> Line:
        """The link from one cluster to another; one without transfer time if none is known."""
        if source == destination:
            return self.clusters[source].inner_line
        return self.lines.get((source, destination), Line())

    def name_line(self, source: int, destination: int) -> str:
        """The name of the link from one cluster to another, as in reports: "gpu->npu"."""
        return f"{self.clusters[source].name}->{self.clusters[destination].name}"

    @property
    def named_lines(self) -> dict[str, Line]:
        """The known links between clusters by name."""
        return {self.name_line(*ends): line for ends, line in self.lines.items()}

    def rows_of(self, micro_batches: int) -> int:
        """Rows of the largest micro-batch."""
        return math.ceil(self.rows / micro_batches)

    @property
    def micro_batch_counts(self) -> tuple[int, ...]:
        """The numbers of micro-batches to try: powers of two, with one in between if there are few workers."""
        replicas = [self.options.replica, *(each.replicas for each in self.written_stages)]
        least = max(1, min(max(each or 1 for each in replicas), self.rows))  # one micro-batch for each replica
        if self.options.micro_batch is not None:
            return (max(least, min(self.options.micro_batch, self.rows)),)
        most = max(least, min(self.options.max_micro_batches, self.rows))
        steps = {least} | {2**power for power in range(11)}
        if sum(cluster.workers for cluster in self.clusters) <= MANY:
            steps |= {3 * 2**power for power in range(10)}
        return tuple(sorted(count for count in steps if least <= count <= most))

    def count_room(self, cluster: int) -> int:
        """How many replicas of stages fit on a cluster: one for each worker, or more if the user has written more
        stages, which then share workers.
        """
        own = [0] * len(self.clusters)
        free = 0
        for each in self.written_stages:
            if len(each.clusters) == 1:
                own[each.clusters[0]] += each.replicas or 1
            else:
                free += each.replicas or 1
        left = sum(max(0, each.workers - taken) for each, taken in zip(self.clusters, own, strict=True))
        return max(self.clusters[cluster].workers, own[cluster]) + max(0, free - left)

    def list_written_stages(self, part: Part) -> list[WrittenStage]:
        """The written stages that a part contains blocks of."""
        return [each for each in self.written_stages if each.begin < part.end and part.begin < each.end]

    def admits(self, shape: Shape) -> bool:
        """Whether a shape has the user's number of replicas, satisfies all written stages, and shares workers only
        where they require it.
        """
        single = self.chain.single if self.options.replica is None else self.chain.single & False
        if any(
            part.replicas > 1 and single[part.begin : part.end].any() and not self.list_written_stages(part)
            for part in shape.parts
        ):
            return False
        if self.options.replica is not None and any(
            part.replicas != least.replicas
            for part, least in zip(shape.parts, self.reduce_replicas(shape).parts, strict=True)
        ):
            return False
        if not all(part.cluster in each.clusters for part in shape.parts for each in self.pinned_blocks
                   if part.begin <= each.block < part.end):  # fmt: skip
            return False
        if not self.written_stages:
            return True
        used = [0] * len(self.clusters)
        for part in shape.parts:
            used[part.cluster] += part.worker_count
            for each in self.list_written_stages(part)[:2]:
                whole = part.begin <= each.begin and each.end <= part.end and each.admits(part.cluster)
                if len(self.list_written_stages(part)) > 1 or not whole or each.replicas not in (None, part.replicas):
                    return False
        few = self.reduce_replicas(shape).parts
        crowded = [taken > cluster.workers for taken, cluster in zip(used, self.clusters, strict=True)]
        return all(part == least or not crowded[part.cluster] for part, least in zip(shape.parts, few, strict=True))

    def reduce_replicas(self, shape: Shape) -> Shape:
        """The shape with replicas reduced to those that the user requires."""
        parts = []
        for part in shape.parts:
            asked = [each.replicas for each in self.list_written_stages(part) if each.replicas is not None]
            parts.append(replace(part, replicas=asked[0] if asked else self.options.replica or 1, shards=1))
        return replace(shape, parts=tuple(parts))

    def assign_workers(self, parts: Sequence[Part]) -> list[int]:
        """Assign workers to stages: for each stage, the number in its cluster of the worker of its first replica.
        Assignment is round robin, and starts again at the first worker if there are too few.
        """
        used, found = [0] * len(self.clusters), []
        for part in parts:
            first = used[part.cluster]
            if first + part.worker_count > self.clusters[part.cluster].workers:
                first = 0
            used[part.cluster] = first + part.worker_count
            found.append(first)
        return found

    def workers_of(self, parts: Sequence[Part]) -> list[list[tuple[int, int]]]:
        """The workers of each stage as pairs of cluster and number, without duplicates."""
        found = []
        for part, first in zip(parts, self.assign_workers(parts), strict=True):
            hosts = min(part.worker_count, self.clusters[part.cluster].workers)
            found.append([(part.cluster, first + number) for number in range(hosts)])
        return found


@dataclass(frozen=True)
class Part:
    """A stage of a candidate: the blocks from `begin` to `end`, on `replicas` workers of a cluster or sharded over
    `shards` workers. Input from another cluster is encoded by the codec with the number `codec`.
    """

    cluster: int
    begin: int
    end: int
    replicas: int = 1
    shards: int = 1
    codec: int = 0

    @property
    def worker_count(self) -> int:
        """The number of workers of the stage."""
        return self.replicas * self.shards


@dataclass(frozen=True)
class Shape:
    """A candidate without its costs: stages, and how the batch is divided."""

    parts: tuple[Part, ...]
    micro_batches: int = 1
    recompute: bool = False


class Bottleneck(NamedTuple):
    """The bottleneck of a step: the stage at a `place` or the `line` of this name if one is busy for most of it
    ("stage", "line"); otherwise "updates", or "latency" (of micro-batches between clusters).
    """

    kind: str
    place: int = -1
    line: str = ""


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted costs.

    `memory` are the bytes that a worker of each stage needs, `compute` its seconds of a micro-batch without those of
    crossings; `bytes` the load of each link in a step. `in_flight` limits the micro-batches
    that a stage holds, if memory requires it.
    """

    shape: Shape
    schedule: str
    in_flight: int | None
    seconds: float
    compute: tuple[float, ...]
    memory: tuple[float, ...]
    bytes: Mapping[str, float]
    bottleneck: Bottleneck

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stages."""
        return self.shape.parts

    @property
    def crossing_places(self) -> tuple[int, ...]:
        """The places of stages whose input comes from another cluster."""
        return tuple(n for n in range(1, len(self.parts)) if self.parts[n].cluster != self.parts[n - 1].cluster)


@dataclass(frozen=True)
class Excess:
    """Why a shape does not fit: the stage, the memory that its worker needs, and the memory that it has. If it is the
    result of a search, `sufficient` is the memory of each worker, by cluster, with which a plan is found.
    """

    cluster: str
    needed: float
    allowed: float
    begin: int
    end: int
    sufficient: Mapping[str, float] = field(default_factory=dict)
