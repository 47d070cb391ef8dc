"""A plan's fragments compiled to functions, for the stages of one worker, with their inputs resolved once.

An update writes large variables one after the other: TensorFlow would update all variables concurrently, and hold a
temporary tensor of the size of each. In order, it holds those of only one variable.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import tensorflow as tf

from whale_nebula.capture.mirror import Donor, import_nodes, mirror_spec
from whale_nebula.ir.cut import Boundary, Cut, Fragment, PhasePlan, StagePhase
from whale_nebula.ir.graph import REPLICA_SUM, Graph, Op
from whale_nebula.ir.layout import find_local_spec
from whale_nebula.ir.program import GradientPart, Program, Stage
from whale_nebula.passes.branches import Aliases
from whale_nebula.passes.exchange import Bundle, ReplicaMessage, list_bundles, list_replica_messages
from whale_nebula.passes.facts import ASSIGNS
from whale_nebula.runtime.replicas.collectives import ReplicaSums
from whale_nebula.runtime.split.groups import Group, LocalGroup, Pieces
from whale_nebula.runtime.split.lowering import Lowering, SplitStage
from whale_nebula.runtime.split.shards import CollectiveGroup, Shards
from whale_nebula.runtime.step.rollback import OpLocations
from whale_nebula.spec import Spec, Value
from whale_nebula.tf import private as tf_private


class Handover:
    """A variable through which a function gets a tensor as its only owner, so that TensorFlow writes results into its
    memory; it is empty before and after. The caller of a tf.function holds its arguments until it returns, so an update
    that reads a gradient would need memory for another temporary tensor of that size.

    >>> handover = Handover(tf.float32)
    >>> handover.put(tf.constant([1.0, 2.0]))
    >>> tf.function(lambda: 2 * handover.take([2]))().numpy().tolist()
    [2.0, 4.0]
    >>> handover.variable.shape, len(handover.variable.numpy())
    (TensorShape(None), 0)
    """

    def __init__(self, dtype: Any) -> None:
        self.variable = tf.Variable(tf.zeros([0], dtype), trainable=False, shape=tf.TensorShape(None))

    def put(self, tensor: Any) -> None:
        """Hold a tensor until the function takes it; the caller drops its own references."""
        tf.raw_ops.AssignVariableOp(resource=self.variable.handle, value=tensor)

    def take(self, shape: Sequence[int | None]) -> Any:
        """The tensor, in a function that is being traced; from there on only the function holds it."""
        tensor = self.variable.read_value()
        with tf.control_dependencies([tensor]):
            empty = tf.raw_ops.AssignVariableOp(resource=self.variable.handle, value=tf.zeros([0], tensor.dtype))
        with tf.control_dependencies([empty]):
            return tf.ensure_shape(tensor, shape)


@dataclass(frozen=True)
class Function:
    """A callable fragment, from tensors of its feeds to tensors of its fetches. A function with `waits` contains
    collectives, and is called inside that context. With `is_sharded` it takes and returns shards of tensors; a
    process with a single shard passes it as a tensor. Values in `handover_slots` are not arguments: they are handed
    over.
    """

    fragment: Fragment
    concrete: Any
    captured_inputs: Sequence[Any]
    waits: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    is_sharded: bool = False
    handover_slots: Mapping[Value, Handover] = field(default_factory=dict)

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """Run the fragment on the tensors of its feeds that are not handed over."""
        if self.is_sharded:
            tensors = tf.nest.flatten(list(tensors), expand_composites=True)
        with contextlib.nullcontext() if self.waits is None else self.waits():
            found = tf_private.call_flat(self.concrete, tensors, self.captured_inputs)
        if not self.is_sharded:
            return found
        return [each.tensors[0] if isinstance(each, Pieces) and len(each.tensors) == 1 else each for each in found]


class FunctionBuilder:
    """A builder of functions from one traced graph, which it reads once; `aliases` are replacements of values.

    XLA compiles the fragments that `xla` takes. If replicas are processes, `sums` has the sums over them. Stages with
    layouts in a `cut` run in pieces: all of them in this process, or one with `shards`.
    """

    def __init__(
        self,
        graph: Any,
        aliases: Aliases | None = None,
        xla: Xla | None = None,
        sums: ReplicaSums | None = None,
        cut: Cut | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.graph = graph
        self.sums = sums
        self._xla = xla
        self._graph = Graph(()) if cut is None else cut.program.graph
        self._sizes_are_fixed = cut is not None and _has_fixed_sizes(cut.program)
        self._layouts = {} if cut is None else dict(cut.layouts)
        self._shards = shards
        if shards is not None:
            self._layouts = {stage: self._layouts[stage] for stage in shards.stages}
        self._donor = Donor(graph)
        self._donor.replace_inputs(aliases or {})
        self._external = {internal.op.name: external for external, internal in graph.captures}

    def build(self, fragment: Fragment, handed_values: Collection[Value] = ()) -> Function:
        """Build the function of a fragment; tensors of `handed_values` are handed over to it."""
        slots = {value: Handover(self._donor.tensor(value).dtype) for value in handed_values}
        if any(
            each.split_ops.intersection(fragment.ops) or each.handed_on.intersection(fragment.feeds)
            for each in self._layouts.values()
        ):
            return self._build_in_pieces(fragment, slots)
        operations = [self._donor.operations[index] for index in fragment.ops]
        feeds = [self._donor.tensor(value) for value in fragment.feeds]
        fetches = [self._donor.tensor(value) for value in fragment.fetches]
        definition = self._donor.cut(fragment.ops, self._find_update_order(fragment))
        used = {t.op.name for op in operations for t in op.inputs} | {t.op.name for t in fetches}
        captures = {name: self._external[name] for name in used if name in self._external}
        summed = () if self.sums is None else self.sums.list_ops(fragment)

        def body(*tensors: Any) -> list[Any]:
            graph = tf.compat.v1.get_default_graph()
            taken = self._list_inputs(fragment, tensors, slots)
            known = {tensor.name: given for tensor, given in zip(feeds, taken, strict=True)}
            known |= {f"{name}:0": graph.capture(external) for name, external in captures.items()}
            marks = [self._donor.tensor(Value(op)) for op in summed]
            found = import_nodes(definition, known, [tensor.name for tensor in (*fetches, *marks)])
            return self._replace_sums(fragment, found[: len(fetches)], found[len(fetches) :])

        concrete = self._trace(fragment, body, slots)
        waits = self.sums.explain_failures(fragment) if self.sums is not None and summed else None
        return Function(fragment, concrete, concrete.captured_inputs, waits, handover_slots=slots)

    def _list_inputs(self, fragment: Fragment, tensors: Sequence[Any], slots: Mapping[Value, Handover]) -> list[Any]:
        """The tensors of all feeds in a function: `tensors`, and those that are handed over."""
        arguments = iter(tensors)
        return [
            self._take_handed_over(value, slots[value])
            if value in slots
            else self._restore_sizes(self._donor.tensor(value), next(arguments))
            for value in fragment.feeds
        ]

    def _restore_sizes(self, traced: Any, given: Any) -> Any:
        """A fed shape with the sizes that were known in the trace, which some ops of gradients need."""
        sizes = traced.op.inputs[0].shape if traced.op.type == "Shape" and self._sizes_are_fixed else ()
        if not sizes or not any(sizes):
            return given
        axes = enumerate(sizes)
        return tf.stack([given[axis] if size is None else tf.cast(size, given.dtype) for axis, size in axes])

    def _take_handed_over(self, value: Value, slot: Handover) -> Any:
        form = self._make_spec(value)
        return Pieces((slot.take(form.tensors[0].shape),)) if isinstance(form, Pieces.Spec) else slot.take(form.shape)

    def _build_in_pieces(self, fragment: Fragment, slots: Mapping[Value, Handover]) -> Function:
        """Build the function of a fragment that has ops of stages in pieces."""
        graph, donor = self._graph.add_control_inputs(self._find_update_order(fragment)), self._donor
        pieces = {} if self._shards is None else self._shards.pieces

        def body(*given: Any) -> list[Any]:
            traced = tf.compat.v1.get_default_graph()
            import_nodes(donor.cut_library(fragment.ops), {}, [])
            handles = {}
            for number in {value.op for op in fragment.ops for value in graph.ops[op].inputs}:
                name = donor.operations[number].name
                if name in self._external:
                    own = pieces[number].variable.handle if number in pieces else self._external[name]
                    handles[number] = traced.capture(own)
            groups = {stage: self._make_group(stage, fragment) for stage in self._layouts}
            shared = [SplitStage(each, groups[stage]) for stage, each in self._layouts.items()]
            add_sum = self._find_replica_sum(fragment, groups)
            lowering = Lowering(graph, donor.operations, shared, handles, add_sum)
            tensors = self._list_inputs(fragment, given, slots)
            return lowering.run(fragment.ops, dict(zip(fragment.feeds, tensors, strict=True)), fragment.fetches)

        concrete = self._trace(fragment, body, slots)
        waits = None if self._shards is None else self._shards.explain_failures
        return Function(fragment, concrete, concrete.captured_inputs, waits, is_sharded=True, handover_slots=slots)

    def _find_replica_sum(self, fragment: Fragment, groups: Mapping[int, Group]) -> Callable[[int, Any], Any] | None:
        """The function that adds sums over replicas in other processes; None if a fragment has none."""
        sums = self.sums
        if sums is None or not sums.list_ops(fragment):
            return None
        group = next((each for stage, each in groups.items() if stage == fragment.stage), None)
        if not isinstance(group, CollectiveGroup):
            return partial(sums.add, fragment)
        return lambda op, tensor: group.run_between(partial(sums.add, fragment, op, tensor))

    def _find_update_order(self, fragment: Fragment) -> Mapping[int, int]:
        """For each ordered op of an update, the write that it waits for."""
        return order_updates(self._graph, fragment.ops) if self._graph.ops and fragment.kind == "update" else {}

    def _make_group(self, stage: int, fragment: Fragment) -> Group:
        """The devices of a stage, for one function."""
        return LocalGroup(self._layouts[stage].count) if self._shards is None else self._shards.group(stage, fragment)

    def can_hand_over(self, value: Value) -> bool:
        """Whether a value is one large tensor in this process."""
        form = self._make_spec(value)
        several = isinstance(form, Pieces.Spec) and len(form.tensors) > 1
        return not several and is_large(mirror_spec(self._donor.tensor(value)))

    def _trace(self, fragment: Fragment, body: Callable[..., list[Any]], handed_values: Collection[Value]) -> Any:
        signature = [self._make_spec(value) for value in fragment.feeds if value not in handed_values]
        body.__name__ = _name_function(fragment)
        xla = (self._xla is not None and self._shards is None and self._xla.compiles(fragment)) or None
        return tf.function(body, input_signature=signature, autograph=False, jit_compile=xla).get_concrete_function()

    def _make_spec(self, value: Value) -> Any:
        """The spec with which a function is fed a value."""
        tensor = self._donor.tensor(value)
        stage = next((stage for stage, each in self._layouts.items() if value in each.handed_on), None)
        if stage is None:
            return tf.TensorSpec(tensor.shape, tensor.dtype)
        layouts, whole = self._layouts[stage], mirror_spec(tensor)
        here = range(layouts.count) if self._shards is None else [self._shards.index(stage)]
        shapes = [find_local_spec(whole, layouts.layout(value), layouts.count, device).shape for device in here]
        return Pieces.Spec(tuple(tf.TensorSpec(shape, tensor.dtype) for shape in shapes))

    def _replace_sums(self, fragment: Fragment, fetches: list[Any], marks: list[Any]) -> list[Any]:
        """The fetched tensors, with placeholders of sums over replicas replaced by the sums."""
        found = self.sums.replace_markers(fragment, marks) if self.sums is not None and marks else {}
        return [found.get(tensor.ref(), tensor) for tensor in fetches]


def _has_fixed_sizes(program: Program) -> bool:
    """Whether sizes that are known in the trace are those of all micro-batches: none depends on their rows."""
    is_divided = program.pipeline.micro_batch > 1 or any(stage.replicas > 1 for stage in program.stages)
    return not is_divided or all((leaf.spec.shape or ())[:1] == (None,) for leaf in program.leaves if leaf.batched)


def _name_function(fragment: Fragment) -> str:
    stage = "" if fragment.stage is None else f"_stage{fragment.stage}"
    return f"{fragment.kind}{stage}_phase{fragment.phase}"


class Feed(NamedTuple):
    """The source of a function's input.

    `kind` is leaf (an input of the step), share or grow (the micro-batch's share of the rows, or its inverse), arrival
    (a boundary's gradient), holder (a gradient that an update reads), boundary (a value of another stage), once (a
    value that is computed once a step) or local (a value of the same stage and micro-batch). `key` is a leaf's number
    or a value.
    """

    kind: str
    key: Any


@dataclass(frozen=True)
class BoundFunction:
    """A function with the sources of its inputs, and the gradients of variables that it computes: their `parts`, each
    with the number of its request, and those of their values (`summed_only`) that are needed only in sums.
    """

    function: Function
    feeds: tuple[Feed, ...]
    parts: tuple[tuple[int, GradientPart], ...] = ()
    summed_only: frozenset[Value] = frozenset()

    @property
    def fragment(self) -> Fragment:
        """The function's fragment."""
        return self.function.fragment

    @property
    def fetches(self) -> tuple[Value, ...]:
        """The values that the function returns."""
        return self.function.fragment.fetches


@dataclass(frozen=True)
class StageFunctions:
    """The functions of one stage in one phase; if the plan is fused, `forward` includes the backward."""

    plan: StagePhase
    forward: BoundFunction | None
    backward: BoundFunction | None
    skip: BoundFunction | None = None
    weights: BoundFunction | None = None


@dataclass
class Compiled:
    """Everything that one worker runs of a plan. With `is_outside_trace` its functions are called one by one, outside
    traces.
    """

    cut: Cut
    worker: str
    builder: FunctionBuilder
    is_outside_trace: bool = False
    _bound_functions: dict[int, BoundFunction] = field(default_factory=dict)  # by identity: a fragment's hash is slow

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stages of this worker."""
        return next(w.stages for w in self.cut.workers if w.name == self.worker)

    @cached_property
    def locations(self) -> OpLocations:
        """Source lines of ops, for errors at run time."""
        return OpLocations(self.builder.graph, self.cut.program.stages, len(self.cut.phases))

    @cached_property
    def boundaries(self) -> Mapping[Value, Boundary]:
        """Boundaries by their value."""
        return {boundary.value: boundary for boundary in self.cut.boundaries}

    @cached_property
    def masks(self) -> frozenset[Value]:
        """The masks of boundaries' rows."""
        return frozenset(boundary.mask for boundary in self.cut.boundaries if boundary.mask is not None)

    @cached_property
    def gradient_flows(self) -> Mapping[Value, tuple[tuple[int, Value], ...]]:
        """By the placeholder of a boundary's gradient: (stage, value) of each share, from the last stage."""
        found: dict[Value, tuple[tuple[int, Value], ...]] = {}
        for request in self.cut.program.requests:
            for arrival in request.arrivals:
                shares = [(f.stage, f.gradient) for f in request.flows if f.boundary == arrival.boundary]
                found[arrival.feed] = tuple(sorted(shares, reverse=True))
        return found

    @cached_property
    def gradient_shares(self) -> frozenset[Value]:
        """The shares of boundaries' gradients, which are sent to the stages that computed the boundaries."""
        return frozenset(flow.gradient for request in self.cut.program.requests for flow in request.flows)

    @cached_property
    def deferred_inputs(self) -> frozenset[Value]:
        """The values that deferred gradients of weights need, which are kept until then."""
        plans = (plan.weights for phase in self.cut.phases for plan in phase.stages if plan.weights is not None)
        return frozenset(value for fragment in plans for value in fragment.feeds)

    def bind_stage(self, phase: PhasePlan, stage: int) -> StageFunctions | None:
        """The functions of a stage in a phase, or None if it has none."""
        plan = next((s for s in phase.stages if s.stage == stage), None)
        if plan is None:
            return None
        return StageFunctions(plan, *map(self._bind_fragment, (plan.forward, plan.backward, plan.skip, plan.weights)))

    def bind_prologue(self, phase: PhasePlan) -> BoundFunction | None:
        """The piece that runs once before the micro-batches of a phase, or None."""
        return self._bind_fragment(phase.prologue.get(self.worker))

    @cached_property
    def bundles(self) -> Sequence[tuple[Bundle, ...]]:
        """The messages between the updates of each phase."""
        return [list_bundles(self.cut, phase) for phase in self.cut.phases]

    @cached_property
    def replica_messages(self) -> Sequence[tuple[ReplicaMessage, ...]]:
        """The messages between replicas of stages in each phase."""
        return [list_replica_messages(self.cut, phase) for phase in self.cut.phases]

    def bind_updates(self, phase: PhasePlan) -> Sequence[BoundFunction]:
        """The pieces of a phase's update, which run once after the micro-batches, in the order of their rounds."""
        return [piece for f in phase.updates.get(self.worker, ()) if (piece := self._bind_fragment(f)) is not None]

    @cached_property
    def whole_batch_function(self) -> BoundFunction | None:
        """The piece that computes values of the inputs alone on the whole batch, or None."""
        return self._bind_fragment(self.cut.batch_fragments.get(self.worker))

    @cached_property
    def loss_weight_function(self) -> BoundFunction | None:
        """The piece that computes `nb.loss_weight` for one micro-batch, or None."""
        return self._bind_fragment(self.cut.weight_fragments.get(self.worker))

    def _bind_fragment(self, fragment: Fragment | None) -> BoundFunction | None:
        if fragment is None:
            return None
        if id(fragment) not in self._bound_functions:
            feeds = tuple(self._find_feed(fragment, value) for value in fragment.feeds)
            function, parts = self.builder.build(fragment, self._find_handed_over(fragment)), self._list_parts(fragment)
            values = frozenset(value for _, part in parts for value in part.values)
            summed_only = values - self.gradient_shares - self.deferred_inputs
            self._bound_functions[id(fragment)] = BoundFunction(function, feeds, parts, summed_only)
        return self._bound_functions[id(fragment)]

    def _list_parts(self, fragment: Fragment) -> tuple[tuple[int, GradientPart], ...]:
        """The gradients of variables that a micro-batch's fragment computes completely."""
        if fragment.kind not in ("backward", "fused", "weights"):
            return ()
        given = frozenset(fragment.fetches)
        return tuple(
            (number, part)
            for number in self.cut.phases[fragment.phase].requests
            for part in self.cut.program.requests[number].parts
            if part.stage == fragment.stage and given.issuperset(part.values)
        )

    def _find_handed_over(self, fragment: Fragment) -> frozenset[Value]:
        """The gradients that only one update of this worker reads, if they are large."""
        if not self.is_outside_trace or fragment.kind != "update":
            return frozenset()
        readers = [each for phase in self.cut.phases for each in phase.updates.get(self.worker, ()) if each != fragment]
        read = {value for each in readers for value in each.feeds}.union(fragment.fetches)
        own = {value for value in fragment.feeds if value.op in self.cut.program.holders} - read
        return frozenset(filter(self.builder.can_hand_over, own))

    def _find_feed(self, fragment: Fragment, value: Value) -> Feed:
        program = self.cut.program
        if value.op in program.leaf_ops:
            return Feed("leaf", program.leaf_ops[value.op])
        if value in (program.share, program.grow):
            return Feed("share" if value == program.share else "grow", value)
        if value.op in program.arrivals:
            return Feed("arrival", value)
        if value.op in program.holders:
            return Feed("holder" if fragment.stage is None else "once", value)
        if fragment.stage is None or value in self._precomputed_values[fragment.phase]:
            return Feed("once", value)
        boundary = self.boundaries.get(value)
        crosses = boundary is not None and boundary.source != fragment.stage
        return Feed("boundary" if crosses else "local", value)

    @cached_property
    def _precomputed_values(self) -> Sequence[frozenset[Value]]:
        """By phase, the values that are computed or received once a step before its forward: of the whole batch, of a
        prologue or an update.
        """
        before, found, received = [self.cut.batch_fragments.get(self.worker)], [], set[Value]()
        for phase in self.cut.phases:
            before.append(phase.prologue.get(self.worker))
            made = {v for f in before if f is not None for v in f.fetches if v not in f.feeds}
            found.append(frozenset(made | received))
            before += phase.updates.get(self.worker, ())
            sent = (each for each in phase.crossings if each.round >= 0)  # others are those of the forward, merged
            received.update(each.value for each in sent if self.worker in each.destinations)
        return found

    @cached_property
    def later_inputs(self) -> Mapping[tuple[int, int], frozenset[Value]]:
        """By phase and stage, the local values that a later phase reads."""
        found, later = {}, dict[int, frozenset[Value]]()
        for phase in reversed(self.cut.phases):
            found.update({(phase.index, stage): values for stage, values in later.items()})
            for plan in phase.stages:
                feeds = (value for fragment in plan.fragments for value in fragment.feeds)
                later[plan.stage] = later.get(plan.stage, frozenset()).union(feeds)
        return found


_COMPILED_KINDS = frozenset({"forward", "backward", "fused", "weights"})
_CALL_OPS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
# XLA has kernels for these, but drops checks, and does not know the result sizes of the others
_EXCLUDED_OPS = frozenset({"Assert", "CheckNumerics", "CheckNumericsV2", "Where", "Unique", "UniqueV2", "ListDiff"})
_UNSUPPORTED_DTYPES = frozenset({"variant", "string"})
_REFUSAL_PATTERN = re.compile(r"XLA|tf2xla|compile-time constant|[Nn]ot compilable|uncompilable")


@dataclass
class Xla:
    """Decides for each fragment of a plan whether XLA compiles it, and records why not."""

    graph: Graph
    stages: Sequence[Stage]
    notes: list[str] = field(default_factory=list)

    def compiles(self, fragment: Fragment) -> bool:
        """Whether a fragment is compiled; if a stage's fragment is not, the reason is noted."""
        if fragment.kind not in _COMPILED_KINDS or fragment.stage is None:
            return False
        obstacle = next(self._find_obstacles(fragment), None)
        if obstacle is not None:
            self._note(f"stage {self.stages[fragment.stage].key!r} is not compiled by XLA: it contains {obstacle}")
        return obstacle is None

    def note_refusal(self, failure: BaseException) -> None:
        """Note that no stage is compiled, because XLA failed to compile ops that it has kernels for."""
        self._note(f"no stage is compiled by XLA: {_find_refusal_line(failure)}")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _find_obstacles(self, fragment: Fragment) -> Iterator[str]:
        ops = [self.graph.ops[op] for op in fragment.ops]
        yield from _find_unsupported_ops(self.graph, ops)
        yield from _find_unsupported_values(self.graph, (*fragment.feeds, *fragment.fetches))


def _find_unsupported_ops(graph: Graph, ops: Collection[Op]) -> Iterator[str]:
    for op in ops:
        if op.functions and op.type in _CALL_OPS:
            yield from _find_unsupported_ops(graph.functions[op.functions[0]], graph.functions[op.functions[0]].ops)
        elif op.functions or op.type in _EXCLUDED_OPS or not (op.role or _has_kernel(op)):
            yield f"{op.type} ({op.name})"


def _has_kernel(op: Op) -> bool:
    return op.type == "Placeholder" or tf_private.is_supported_by_xla(
        op.type, gpu=bool(tf.config.list_physical_devices("GPU"))
    )


def _find_unsupported_values(graph: Graph, values: Sequence[Value]) -> Iterator[str]:
    for value in values:
        if graph.spec(value).dtype in _UNSUPPORTED_DTYPES:
            yield f"a {graph.spec(value).dtype} ({graph.ops[value.op].name})"


def is_xla_refusal(failure: BaseException) -> bool:
    """Whether a step failed because XLA could not compile a piece of it."""
    return _REFUSAL_PATTERN.search(_read_message(failure)) is not None


def _read_message(failure: BaseException) -> str:
    cause = failure.__cause__ or failure
    return str(getattr(cause, "message", cause))


def _find_refusal_line(failure: BaseException) -> str:
    return next((line.strip() for line in _read_message(failure).splitlines() if _REFUSAL_PATTERN.search(line)), "")[
        :200
    ]


MIN_ORDERED_BYTES = 1 << 20
"""The minimum size, in bytes, of a variable that is ordered."""


def order_updates(graph: Graph, ops: Sequence[int]) -> dict[int, int]:
    """For each ordered op of an update: the write that it waits for, which is that of the previous large variable.

    Only ops that create large values for exactly one of the final writes are ordered: those on which no other write
    depends.
    """
    chosen = set(ops)
    before = {
        index: {*(value.op for value in graph.ops[index].inputs), *graph.ops[index].control} & chosen for index in ops
    }
    if any(each > index for index, needed in before.items() for each in needed):
        return {}  # a TensorFlow 1 loop
    writes = [index for index in sorted(ops) if graph.ops[index].type in ASSIGNS]
    bits = {index: 1 << number for number, index in enumerate(writes)}
    reached = _propagate_bits(before, bits)  # the writes that depend on an op, itself included
    last = sorted(index for index in writes if reached[index] == bits[index])
    finals = sum(bits[index] for index in last)
    large: dict[int, list[int]] = {bits[index]: [] for index in last}
    for index in sorted(ops):
        if (only := reached[index] & finals) in large and _may_wait(graph, index):
            large[only].append(index)
    found = {}
    ordered = [index for index in last if large[bits[index]]]
    for previous, index in itertools.pairwise(ordered):
        mine = large[bits[index]]
        found.update({each: previous for each in mine if before[each].isdisjoint(mine)})
    return found


def _propagate_bits(before: Mapping[int, set[int]], bits: Mapping[int, int]) -> dict[int, int]:
    """The bits of all ops that depend on each op."""
    found = {index: bits.get(index, 0) for index in before}
    for index in sorted(before, reverse=True):
        for each in before[index]:
            found[each] |= found[index]
    return found


def _may_wait(graph: Graph, index: int) -> bool:
    """Whether an op creates a large value, and may be delayed: it has no effects, and no other process waits for it."""
    op = graph.ops[index]
    alone = not op.stateful or op.type == "ReadVariableOp"
    return alone and bool(op.inputs) and op.type != REPLICA_SUM and any(map(is_large, op.outputs))


def is_large(spec: Spec) -> bool:
    """Whether a tensor has the size of a large variable, as far as known."""
    return spec.shape is not None and None not in spec.shape and spec.nbytes() >= MIN_ORDERED_BYTES
