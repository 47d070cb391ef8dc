"""Values that updates on separate clusters exchange, derived from a plan with one worker per cluster.

Also the dependences of all values that cross on the inputs of a step. An input is followed through the graph, forward
and backward. Values of inputs alone count as the input itself, as do results of ops that only move numbers. Values
written to a variable are followed to its reads, also in the next step; except for gradients and values made with them,
as weights depend on all data that a model was trained on. Ops that read or write state outside the graph (Python,
files) are assumed to read all inputs of such ops in their cluster. Sizes of tensors are not followed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from whale_nebula.config.schema import DEPENDS, GRADIENT, ITSELF, NUMBER
from whale_nebula.ir.cut import ALL_CLUSTERS, Crossing, Cut, Exchange, InputCrossing, PhasePlan, Worker
from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, Op
from whale_nebula.ir.program import GradientPart, PartKey, Program
from whale_nebula.passes.effects import SHAPE_OPS, find_written_handles, is_effect, touches_external_state
from whale_nebula.passes.readings import list_readings
from whale_nebula.passes.replicas import place_stages
from whale_nebula.spec import Spec, Value

PARTS_ROUND = -2
"""The round of gradient parts, which are sent before the first scalars."""


class SharedPart(NamedTuple):
    """A tensor of a gradient part that crosses: tensor number `piece` (values, indices) of the part with this key,
    numbered `slot`, from the worker that computes it to those that hold the variable without computing a part.
    """

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
        """The spec of the message: that of the tensor, or of the concatenated bytes of the scalars."""
        return self.specs[0] if len(self.specs) == 1 else Spec("uint8", (sum(spec.nbytes() for spec in self.specs),))


def list_cluster_workers(program: Program) -> list[Worker]:
    """The workers if each cluster were a process of its own, named like the cluster; a cluster with replicated stages
    has as many as its stage with most replicas.
    """
    most: dict[str, int] = {}
    for stage in program.stages:
        most[stage.cluster] = max(most.get(stage.cluster, 1), stage.replicas)
    names = {
        name: [name if count == 1 else f"{name}/{number}" for number in range(count)] for name, count in most.items()
    }
    return place_stages(program.stages, names)


def list_exchanges(cut: Cut) -> tuple[Exchange, ...]:
    """All exchanges between clusters for the updates of a step, in the order of sending."""
    clusters = {worker.name: worker.cluster for worker in cut.workers}
    seen: Counter[Exchange] = Counter()
    found: list[Exchange] = []
    for each in (exchange for phase in cut.phases for exchange in _list_phase_exchanges(cut, phase, clusters)):
        if each.source != each.destination:
            found.append(replace(each, copy=seen[each]))
            seen[each] += 1
    return tuple(found)


def _list_phase_exchanges(cut: Cut, phase: PhasePlan, clusters: dict[str, str]) -> Iterator[Exchange]:
    for part in list_shared_parts(cut, phase):
        for destination in part.destinations:
            ends = clusters[part.source], clusters[destination]
            yield Exchange("part", phase.index, PARTS_ROUND, part.slot, *ends, part.spec, part.key, part.piece)
    returned = frozenset(cut.program.returns)
    for bundle in sorted(list_bundles(cut, phase), key=lambda each: each.round):
        ends = clusters[bundle.source], clusters[bundle.destination]
        result = all(crossing.value in returned for crossing in bundle.crossings)
        yield Exchange("scalar", phase.index, bundle.round, bundle.number, *ends, bundle.spec, result=result)


def list_bundles(cut: Cut, phase: PhasePlan) -> tuple[Bundle, ...]:
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


def list_shared_parts(cut: Cut, phase: PhasePlan) -> Iterator[SharedPart]:
    """The tensors of gradient parts that other workers need, numbered identically in every process."""
    program = cut.program
    slot = 0
    for number in phase.requests:
        request = program.requests[number]
        for part in request.ordered_parts:
            variable = program.variable_ops.get(request.origins[part.source])
            holders = cut.variable_workers.get(variable.path, ()) if variable is not None else ()
            makers = cut.workers_of(part.stage)
            others = tuple(worker for worker in holders if worker not in makers)
            for piece, value in enumerate(part.values):
                if others:
                    yield SharedPart(slot, request.key_of(part), piece, program.graph.spec(value), makers[0], others)
                slot += 1


class ReplicaMessage(NamedTuple):
    """A message between replicas of stages; its slot is its number, identical in every process.

    `kind` is "numbers" (all scalars of the own micro-batches in one message), "tensor" (a value of a micro-batch),
    "sum" (a tensor of a gradient part) or "drift" (a variable that the forward wrote from its rows). `key` is that of
    the gradient part, `piece` the number of its tensor; `path` is that of the variable.
    """

    slot: int
    kind: Literal["numbers", "tensor", "sum", "drift"]
    stage: int
    specs: tuple[Spec, ...]
    values: tuple[Value, ...] = ()
    key: PartKey = (-1, -1, -1, -1)
    piece: int = 0
    path: str = ""


def list_replica_messages(cut: Cut, phase: PhasePlan) -> tuple[ReplicaMessage, ...]:
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
    for key, part in list_gradient_parts(cut, phase, stage):
        for piece, value in enumerate(part.values):
            yield ReplicaMessage(0, "sum", stage, (spec(value),), (value,), key, piece)
    for path in plan.drifting:
        variable = next(each for each in cut.program.variables if each.path == path)
        yield ReplicaMessage(0, "drift", stage, (variable.spec,), path=path)


def list_gradient_parts(cut: Cut, phase: PhasePlan, stage: int) -> Iterator[tuple[PartKey, GradientPart]]:
    """The gradient parts that a stage computes in a phase, in the same order in every process."""
    for number in phase.requests:
        request = cut.program.requests[number]
        for part in request.ordered_parts:
            if part.stage == stage:
                yield request.key_of(part), part


# ---------------------------------------------------------------------- dependences on inputs
_MOVEMENTS = frozenset(
    {
        *("Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot", "ReadVariableOp", "Cast", "Bitcast"),
        *("Reshape", "Squeeze", "ExpandDims", "Transpose", "ConcatV2", "Concat", "Pack", "Unpack", "Split", "SplitV"),
        *("StridedSlice", "Slice", "Tile", "Pad", "PadV2", "BroadcastTo", "Reverse", "ReverseV2"),
    }
)
"""Ops that only move numbers."""
_SIZE_READERS = SHAPE_OPS | {"ZerosLike", "OnesLike", "VariableShape", "BroadcastGradientArgs"}
"""Ops that read only the size of a tensor."""
_Kinds = tuple[int, int, int]
"""Sets of inputs that a value consists of, is derived from, and is a gradient of: bit n is input n."""
_NONE: _Kinds = (0, 0, 0)


@dataclass(frozen=True)
class Dependences:
    """How the values of a program depend on the inputs of a step."""

    program: Program

    def inputs_of(self, value: Value) -> Mapping[str, str]:
        """How a value depends on inputs, by their names: a word of `config.schema.DEPENDS`; not on inputs that are
        absent.
        """
        found: dict[str, str] = {}
        kinds = self._kinds_by_op[value.op]
        scalar = self.program.graph.spec(value).scalar
        for number, leaf in enumerate(self.program.leaves):
            how = next((DEPENDS[kind] for kind in range(3) if kinds[kind] >> number & 1), None)
            if how is not None:
                found[leaf.name] = NUMBER if scalar and how != ITSELF else how
        return found

    @cached_property
    def _kinds_by_op(self) -> Sequence[_Kinds]:
        """The dependences of each op, as a fixed point over values from later stages and variables kept for the next
        step.
        """
        graph, program = self.program.graph, self.program
        found = [_NONE] * len(graph.ops)
        if not program.leaves:
            return found
        weighted = graph.descend(op.index for op in graph.ops if op.role in (CAPTURE, FEED, HOLDER))
        arriving = {feed: [*self._list_flows(*arrival)] for feed, arrival in self._arrivals.items()}
        writers: dict[int, list[Op]] = {}
        for op in graph.ops:
            for handle in find_written_handles(op, graph) if is_effect(op, graph) else ():
                writers.setdefault(handle, []).append(op)
        outside = self._external_state
        known = dict.fromkeys(outside, _NONE)
        changed = True
        while changed:
            changed = False
            for op in graph.ops:
                if op.index in writers:
                    given = (_merge_kinds(found[value.op] for value in writer.inputs) for writer in writers[op.index])
                    now = _merge_kinds(each for each in given if not each[2])
                else:
                    read = [known[cluster] for cluster, (_, readers) in outside.items() if op.index in readers]
                    now = self._find_kinds(op, found, op.index in weighted, arriving, read)
                changed = changed or (now != found[op.index] and (op.index in arriving or op.index in writers))
                found[op.index] = now
            before = known
            known = {
                cluster: _merge_kinds(found[value.op] for value in given) for cluster, (given, _) in outside.items()
            }
            changed = changed or known != before
        return found

    @cached_property
    def _external_state(self) -> Mapping[str, tuple[Sequence[Value], frozenset[int]]]:
        """By cluster: the inputs of ops that read or write state outside the graph, and these ops. Those without stage
        may run in any cluster.
        """
        graph, program = self.program.graph, self.program
        touching = [op for op in graph.ops if touches_external_state(op, graph)]
        found = {}
        for cluster in {stage.cluster for stage in program.stages} if touching else ():
            stages = {number for number, stage in enumerate(program.stages) if stage.cluster == cluster}
            own = [op for op in touching if program.labels.get(op.index) in {None, *stages}]
            found[cluster] = [value for op in own for value in op.inputs], frozenset(op.index for op in own)
        return found

    def _find_kinds(
        self,
        op: Op,
        found: Sequence[_Kinds],
        weighted: bool,
        arriving: Mapping[int, Sequence[Value]],
        read: Sequence[_Kinds],
    ) -> _Kinds:
        number = self.program.leaf_ops.get(op.index)
        if number is not None:
            return 1 << number, 0, 0
        if op.type in _SIZE_READERS:
            return _NONE
        given = (found[value.op] for value in (*op.inputs, *arriving.get(op.index, ())))
        itself, derived, gradient = _merge_kinds([*given, *read])
        if op.index in arriving:  # the indices of a sparse gradient may be an input
            return (itself, 0, derived | gradient) if op.role == HOLDER else (0, 0, itself | derived | gradient)
        if op.type in _MOVEMENTS or not weighted:
            return itself, derived, gradient
        if self.program.request_of(op.index) is not None:
            return 0, 0, itself | derived | gradient
        return 0, itself | derived, gradient

    @cached_property
    def _arrivals(self) -> Mapping[int, tuple[int, Value]]:
        """By the placeholder of a gradient: the request, and the value whose gradient it is."""
        program = self.program
        found = {op: (number, arrival.boundary) for op, (number, arrival) in program.arrivals.items()}
        held = ((op, number, each) for op, (number, holder) in program.holders.items() for each in holder.values)
        return {**found, **{op: (number, each) for op, number, each in held if each.op == op}}

    def _list_flows(self, number: int, value: Value) -> Iterator[Value]:
        """The values that fill the placeholder of the gradient of `value`, or the holder `value`, in a request."""
        request = self.program.requests[number]
        yield from (flow.gradient for flow in request.flows if flow.boundary == value)
        for holder in request.holders:
            for place, own in enumerate(holder.values):
                if own == value:
                    parts = (part for part in request.parts if part.source == holder.source)
                    yield from (_select_piece(part, place) for part in parts)


def _merge_kinds(each: Iterable[_Kinds]) -> _Kinds:
    itself = derived = gradient = 0
    for one in each:
        itself, derived, gradient = itself | one[0], derived | one[1], gradient | one[2]
    return itself, derived, gradient


def _select_piece(part: GradientPart, place: int) -> Value:
    return part.values[min(place, len(part.values) - 1)]


def list_crossings(cut: Cut) -> tuple[InputCrossing, ...]:
    """All values that go from one cluster to another in a step, with the inputs that they depend on. Each cluster is a
    process of its own in `cut`.
    """
    clusters = {worker.name: worker.cluster for worker in cut.workers}
    apart = cut.program.local_sgd
    if apart is not None and apart.copies == 1 and cut.program.requests:
        return (
            InputCrossing(
                "differences of weights", "", ALL_CLUSTERS, {leaf.name: GRADIENT for leaf in cut.program.leaves}
            ),
        )
    if len(set(clusters.values())) < 2:
        return ()
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for what, source, destination, depends in _list_crossings(cut, clusters, Dependences(cut.program)):
        if source != destination:
            known = found.setdefault((what, source, destination), {})
            for name, how in depends.items():
                known[name] = min(how, known.get(name, how), key=DEPENDS.index)
    return tuple(InputCrossing(*key, depends) for key, depends in found.items() if depends)


def _list_crossings(
    cut: Cut, clusters: Mapping[str, str], dependences: Dependences
) -> Iterator[tuple[str, str, str, Mapping[str, str]]]:
    program, home = cut.program, [stage.cluster for stage in cut.program.stages]
    for worker, cluster in clusters.items():
        for reading in list_readings(cut, worker):
            if not reading.rows:
                name = program.leaves[reading.leaf].name
                yield f"input {name}", "", cluster, {name: ITSELF}
    flows = [flow for request in program.requests for flow in request.flows]
    for boundary in cut.boundaries:
        name, source = f"b{boundary.slot}", home[boundary.source]
        for stage in boundary.destinations:
            yield name, source, home[stage], dependences.inputs_of(boundary.value)
        for flow in flows if boundary.backward else ():
            if flow.boundary == boundary.value:
                yield f"gradient of {name}", home[flow.stage], source, dependences.inputs_of(flow.gradient)
    for phase in cut.phases:
        for shared in list_shared_parts(cut, phase):
            part = program.gradient_parts[shared.key]
            for destination in shared.destinations:
                ends = clusters[shared.source], clusters[destination]
                yield "gradients of tied variables", *ends, dependences.inputs_of(part.values[shared.piece])
        for each in phase.crossings:
            for destination in each.destinations:
                scalar = program.graph.spec(each.value).scalar
                what = "losses, metrics and other numbers" if scalar else "results and other tensors"
                yield what, clusters[each.source], clusters[destination], dependences.inputs_of(each.value)
