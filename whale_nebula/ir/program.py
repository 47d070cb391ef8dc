"""The Program: one captured step of the user's script, independent of where it runs; and an assignment of its variables
to stages, which a planner decides, with the constraints that scopes impose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from whale_nebula.ir.graph import Graph
from whale_nebula.ir.outer_optimizer import OUTER_BY_NAME, Outer, format_outer
from whale_nebula.spec import Spec, Value

SYNC, ASYNC = "sync", "async"
UNDECIDED = -1
"""The interval, or the delay, of local SGD that is still to be chosen."""


@dataclass(frozen=True)
class LocalSgd:
    """The options of `nb.replica(sync_every=...)` with defaults filled in. `clusters` are those of its layout, empty if
    it names none; `codec` is the encoding of weights, as text.

    Without `fragments` their number follows from the size of the weights. `chosen` is the reason for an interval that
    was chosen for `sync_every="auto"`.

    In `mode` "async" a server on the first cluster's first worker applies each difference as it arrives, and no cluster
    is more than `staleness` rounds ahead of the slowest. With an `exchange` all clusters exchange their momenta after
    each step; in a run of one cluster, `copies` of its workers train a copy each.

    >>> print(LocalSgd(every=100, delay=10, codec="int4"))
    each cluster trains a copy, differences are exchanged every 100 steps with 10 steps to arrive, int4, average
    """

    every: int
    fragments: int = 0
    delay: int = 0
    outer: Outer = OUTER_BY_NAME["average"]
    codec: str = "none"
    clusters: tuple[str, ...] = ()
    mode: str = SYNC
    staleness: int = 0
    where: str = ""
    exchange: str = ""
    chosen: str = ""
    copies: int = 1

    @property
    def is_undecided(self) -> bool:
        """Whether the interval is still to be chosen."""
        return self.every == UNDECIDED

    @property
    def option(self) -> str:
        """The option of `nb.replica` that requests local SGD, as written in a call."""
        if self.exchange:
            return f'exchange="{self.exchange}"'
        return 'sync_every="auto"' if self.is_undecided or self.chosen else f"sync_every={self.every}"

    def __str__(self) -> str:
        if self.is_undecided:
            return f'each cluster trains a copy, sync_every="auto", {self.codec}, {format_outer(self.outer)}'
        if self.exchange:
            who = f"each of {self.copies} workers" if self.copies > 1 else "each cluster"
            return f"{who} trains a copy, momenta are exchanged after each step, {self.exchange}"
        if self.mode == ASYNC:
            rounds = f"{self.staleness} round{'s' * (self.staleness != 1)}"
            how = f"each sends its difference every {_format_interval(self.every)}, at most {rounds} ahead"
        elif self.fragments > 1:
            pieces = f" in {self.fragments} fragments"
            how = f"differences are exchanged every {_format_interval(self.every)}{pieces}"
            how += f" with {_format_steps(self.delay)} each to arrive" * bool(self.delay)
        else:
            how = f"differences are exchanged every {_format_interval(self.every)}"
            how += f" with {_format_steps(self.delay)} to arrive" * bool(self.delay)
        return f"each cluster trains a copy, {how}, {self.codec}, {format_outer(self.outer)}"


def _format_interval(count: int) -> str:
    return f"{count} steps" if count > 1 else "step"


def _format_steps(count: int) -> str:
    return f"{count} step{'s' * (count > 1)}"


@dataclass(frozen=True)
class Leaf:
    """One tensor of the user's batch; `op` holds it in the graph. `batched`: it has a row for each sample."""

    op: int
    name: str
    spec: Spec
    batched: bool = True


@dataclass(frozen=True)
class Variable:
    """A variable that the step touches, named by its path in the model, never by its stage; `op` holds its handle.

    `metric` is the name of the metric of `compile` to which it belongs, if any.
    """

    op: int
    path: str
    spec: Spec
    trainable: bool = True
    metric: str = ""


@dataclass(frozen=True)
class Stage:
    """A part of the model that one cluster runs. Its index in `Program.stages` is its order.

    Each of its `replicas` takes a share of the micro-batches; `speeds` are their relative speeds, if the config has
    different ones. `shards` is the number of devices over which its variables are split. `first` is the number of the
    cluster's worker with the first of them, if a planner sets it. Its inputs cross by the compress scope of number
    `compress`, unless a scope in the script sets their codec.
    With `shared_slots` each replica holds a part of the optimizer's slots, and with `shared_gradients` a part of all
    gradients that are summed.
    """

    key: str
    cluster: str
    where: str = ""
    replicas: int = 1
    speeds: tuple[float, ...] = ()
    shards: int = 1
    shared_slots: bool = False
    shared_gradients: bool = False
    first: int | None = None
    compress: int | None = None


@dataclass(frozen=True)
class Split:
    """A variable, by its op, that the devices of a stage hold in pieces along an axis, set by the scope at `where`."""

    variable: int
    stage: int
    axis: int
    where: str = ""


@dataclass(frozen=True)
class Holder:
    """The gradient of source number `source` as the user's code received it: the placeholder of a dense tensor, or
    those of values and indices.
    """

    source: int
    values: tuple[Value, ...]

    @property
    def sparse(self) -> bool:
        """Whether the gradient is an IndexedSlices."""
        return len(self.values) > 1


@dataclass(frozen=True)
class Arrival:
    """The gradient of a boundary, which enters the backward through the placeholder `feed`."""

    boundary: Value
    feed: Value


@dataclass(frozen=True)
class Flow:
    """The share of a boundary's gradient that the backward of `stage` computes."""

    stage: int
    boundary: Value
    gradient: Value


PartKey = tuple[int, int, int, int]
"""Request, source, stage and term of a gradient part."""

ADDED, ROWS = "sum", "rows"
"""How the slices of a sparse gradient part are merged over micro-batches."""


@dataclass(frozen=True)
class GradientPart:
    """A share of the gradient of the request's source number `source`, computed by the backward of `stage`.

    A stage with several lookups in a table has a sparse part, values and indices, for each: `term` numbers them.
    `merge` is how its slices are merged over micro-batches: "rows" are concatenated, and slices whose indices are the
    same in each micro-batch are added value by value ("sum").
    """

    stage: int
    source: int
    values: tuple[Value, ...]
    term: int = 0
    merge: str = ROWS

    @property
    def sparse(self) -> bool:
        """Whether the part is values and indices."""
        return len(self.values) > 1

    @property
    def concatenated(self) -> bool:
        """Whether its slices over a step are concatenated over micro-batches rather than summed."""
        return self.sparse and self.merge == ROWS


@dataclass(frozen=True)
class Request:
    """One call of `tape.gradient`, already differentiated.

    `start` is the first op traced after the call; `origins` are the ops that hold its sources (-1: not in the trace);
    `effects` the (stage, op) of the side effects of custom gradients; `output_gradients` the user's `output_gradients`;
    `merges` how each source's gradient is merged (rows, sum, same), as defined in `passes.batch`.
    """

    index: int
    start: int
    backward: frozenset[int]
    targets: tuple[Value, ...]
    sources: tuple[str, ...]
    origins: tuple[int, ...]
    holders: tuple[Holder, ...]
    arrivals: tuple[Arrival, ...] = ()
    flows: tuple[Flow, ...] = ()
    parts: tuple[GradientPart, ...] = ()
    effects: tuple[tuple[int, int], ...] = ()
    output_gradients: tuple[Value, ...] = ()
    merges: tuple[str, ...] = ()

    def key_of(self, part: GradientPart) -> PartKey:
        """The key of a part of this request within the program."""
        return self.index, part.source, part.stage, part.term

    @property
    def ordered_parts(self) -> list[GradientPart]:
        """The parts, in the order of adding or concatenating."""
        return sorted(self.parts, key=self.key_of)


@dataclass(frozen=True)
class Pipeline:
    """The options of `nb.pipeline`: how a step is divided along its batch."""

    micro_batch: int = 1
    schedule: str = "eager-1f1b"
    in_flight: int | None = None
    recompute: bool = False
    coupled: str = "error"


@dataclass(frozen=True)
class Program:
    """A captured step: the graph with its gradients, and the annotations of the capture.

    `labels` maps an op to the number of its stage; `loss_weights` are the arguments of `nb.loss_weight`; `compressions`
    are the encodings forward and backward by the number in `Op.compress`, and `masks` Keras's masks of the rows of
    tensors; `compress_sites` are the lines of the compress scopes. `share` and `grow` are the placeholders of the
    micro-batch's share of the rows and of its inverse, if the step uses them. With `local_sgd` each cluster of the run
    trains a copy of the whole program. `splits` are the variables that nb.split divides.
    """

    graph: Graph
    leaves: tuple[Leaf, ...] = ()
    variables: tuple[Variable, ...] = ()
    stages: tuple[Stage, ...] = ()
    requests: tuple[Request, ...] = ()
    returns: tuple[Value, ...] = ()
    loss_weights: tuple[Value, ...] = ()
    share: Value | None = None
    grow: Value | None = None
    pipeline: Pipeline = Pipeline()
    compressions: tuple[tuple[str, str], ...] = ()
    labels: dict[int, int] = field(default_factory=dict)
    masks: dict[Value, Value] = field(default_factory=dict)
    compress_sites: tuple[str, ...] = ()
    local_sgd: LocalSgd | None = None
    splits: tuple[Split, ...] = ()

    @property
    def has_scopes(self) -> bool:
        """Whether the script places the step: without scopes it is one stage without a site."""
        return any(stage.where for stage in self.stages)

    @cached_property
    def _request_of(self) -> dict[int, int]:
        return {op: request.index for request in self.requests for op in request.backward}

    def request_of(self, op: int) -> int | None:
        """The request whose backward an op belongs to, or None for an op of the user's own."""
        return self._request_of.get(op)

    @cached_property
    def gradient_parts(self) -> dict[PartKey, GradientPart]:
        """All gradient parts by their keys."""
        return {request.key_of(part): part for request in self.requests for part in request.parts}

    @cached_property
    def holders(self) -> dict[int, tuple[int, Holder]]:
        """Op index of a gradient's placeholder to (request, holder)."""
        return {v.op: (r.index, h) for r in self.requests for h in r.holders for v in h.values}

    @cached_property
    def arrivals(self) -> dict[int, tuple[int, Arrival]]:
        """Op index of a boundary gradient's placeholder to (request, arrival)."""
        return {a.feed.op: (r.index, a) for r in self.requests for a in r.arrivals}

    @cached_property
    def leaf_ops(self) -> dict[int, int]:
        """Op index to the number of the leaf that it holds."""
        return {leaf.op: number for number, leaf in enumerate(self.leaves)}

    @cached_property
    def batch_dependent_ops(self) -> frozenset[int]:
        """The ops that depend on the user's batch through data edges."""
        return frozenset(self.graph.descend(self.leaf_ops))

    @cached_property
    def gradient_dependent_ops(self) -> frozenset[int]:
        """The ops that depend on gradients, also through a variable that was written before: through control edges."""
        return frozenset(self.graph.descend(self.holders, control=True))

    @cached_property
    def variable_ops(self) -> dict[int, Variable]:
        """The variables by the index of the op that holds their handle."""
        return {variable.op: variable for variable in self.variables}


@dataclass(frozen=True)
class ScopedStage:
    """A stage defined by scopes: on one of `clusters` (empty: any), with `replicas` (None: any). `scope_text` is the
    text of its scope, with its line.
    """

    key: str
    scope_text: str
    clusters: tuple[str, ...] = ()
    replicas: int | None = None


@dataclass(frozen=True)
class Constraints:
    """The constraints that the scopes of a step impose on a planner: its stages, the clusters of nb.cluster (empty:
    any), and the options of nb.pipeline and of an nb.replica around all. `unplanned` is the reason why a planner leaves
    the step unchanged.
    """

    stages: tuple[ScopedStage, ...] = ()
    clusters: tuple[str, ...] = ()
    pipeline: Pipeline = field(default_factory=Pipeline)
    micro_batch: int | None = None
    replicas: int | None = None
    unplanned: str = ""

    def describe(self) -> list[str]:
        """The constraints in effect, one phrase each.

            >>> Constraints((ScopedStage("a", "nb.stage() at train.py:3", ("gpu",), 2),), micro_batch=4).describe()
            ['nb.stage() at train.py:3 (gpu, 2 replicas)', '4 micro-batches']
            >>> Constraints(pipeline=Pipeline(schedule="gpipe", in_flight=2, recompute=True)).describe()
            ['schedule gpipe', 'at most 2 in flight', 'recompute=True']
        >>> Constraints(micro_batch=1, replicas=1).describe()
        ['1 replica', '1 micro-batch']
        """
        found = []
        for each in self.stages:
            holds = [" or ".join(each.clusters)] * bool(each.clusters)
            if each.replicas is not None:
                holds.append(f"{each.replicas} replica{'s' * (each.replicas > 1)}")
            found.append(each.scope_text + f" ({', '.join(holds)})" * bool(holds))
        found += [f"clusters {', '.join(self.clusters)}"] * bool(self.clusters)
        found += [f"{self.replicas} replica{'s' * (self.replicas != 1)}"] * bool(self.replicas and not self.stages)
        found += [f"{self.micro_batch} micro-batch{'es' * (self.micro_batch != 1)}"] * bool(self.micro_batch)
        found += [f"schedule {self.pipeline.schedule}"] * (self.pipeline.schedule != Pipeline.schedule)
        found += [f"at most {self.pipeline.in_flight} in flight"] * bool(self.pipeline.in_flight)
        return found + ["recompute=True"] * self.pipeline.recompute


@dataclass(frozen=True)
class Assignment:
    """Stages in the order of the data flow, how the batch is cut, and for each variable, by its path, the stages of the
    ops that read it.

    Those ops are in the order of the trace; the last stage applies to all that follow. Ops that read no variable are
    placed where the fewest bytes cross, like those outside any scope. `codecs` are those of the stages' inputs. `homes`
    are the clusters that have an input, by its number, for inputs that some clusters lack: only their stages read it.

    >>> assignment = Assignment((Stage("stage0", "gpu"), Stage("stage1", "npu")), {"table": ("stage0", "stage1")})
    >>> [assignment.stage_of("table", number) for number in range(3)], assignment.stage_of("other", 0)
    (['stage0', 'stage1', 'stage1'], None)
    """

    stages: tuple[Stage, ...]
    variables: Mapping[str, tuple[str, ...]]
    pipeline: Pipeline = field(default_factory=Pipeline)
    codecs: Mapping[str, str] = field(default_factory=dict)
    homes: Mapping[int, frozenset[str]] = field(default_factory=dict)

    def stage_of(self, path: str, number: int) -> str | None:
        """The key of the stage of the variable's reader of this number; None if the variable has no stage."""
        stages = self.variables.get(path)
        return None if stages is None else stages[min(number, len(stages) - 1)]
