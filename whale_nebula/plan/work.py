"""The work of a stage: FLOPs and activation bytes, in total and by layer."""

from __future__ import annotations

import itertools
import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from whale_nebula.ir.cut import Cut, Fragment, StagePhase
from whale_nebula.ir.graph import CAPTURE, HOLDER, Graph, Op
from whale_nebula.ir.program import Variable
from whale_nebula.ir.sizes import Sizes
from whale_nebula.passes.effects import SHAPE_OPS
from whale_nebula.plan.flops import FlopCounter
from whale_nebula.plan.records import PlanLayer
from whale_nebula.spec import Spec, Value

DEPTH = 3
"""The depth to which nested layers are listed separately."""
LOSS = "compile_loss"
"""The scope in which Keras computes the loss."""
_AROUND = re.compile(r"(nebula|gradient_tape)(_\d+)?")
_AGAIN = re.compile(r"_\d+$")
_OPS = frozenset({
    "strided_slice", "einsum", "range", "moments", "ones", "zeros", "ones_like", "zeros_like", "stack", "concat",
    "split", "add", "sub", "mul", "truediv", "floordiv", "matmul", "transpose", "while", "cond", "assert", "map",
    "norm", "batchnorm", "stateless_dropout", "stateless_random_uniform", "random_uniform", "random_normal",
    "clip_by_value", "l2_normalize", "boolean_mask", "one_hot", "reduce", "normalize", "rnn", "unstack", "conv",
    "separable_conv2d", "zero_fraction",
})  # fmt: skip
"""Name scopes of TensorFlow's own functions."""


@dataclass(frozen=True)
class LayerNames:
    """A parser of op names. `subject` is the model's name in a step of Keras's; `known` are parts of variables' paths.

    Keras enters a layer's scope a second time when it calls it, so TensorFlow adds a number to the name.

    >>> LayerNames("transformer").find_layer("nebula_1/transformer_1/block0_1/attention_1/einsum/Einsum_grad/mul")
    'block0/attention'
    >>> LayerNames("").find_layer("MatMul"), LayerNames("", {"encoder"}).find_layer("encoder_1/MatMul")
    ('', 'encoder')
    """

    subject: str = ""
    known: Collection[str] = frozenset()

    def find_layer(self, name: str) -> str:
        """The path of an op's layer, to a depth of at most `DEPTH`; "" for an op outside layers."""
        parts = name.split("/")[:-1]
        found: list[str] = []
        for part in itertools.dropwhile(_AROUND.fullmatch, parts):
            layer = self._layer(part)
            if layer is None or len(found) > DEPTH:
                break
            found.append(layer)
        if found and found[0] == self.subject:
            found = found[1:]
        return "/".join(found[:DEPTH])

    def find_maker(self, name: str) -> str:
        """The layer of an op, or the op itself if it belongs to none, such as Keras's masks.

        >>> names = LayerNames("model")
        >>> names.find_maker("model_1/embed_1/GatherV2"), names.find_maker("model_1/NotEqual")
        ('embed', 'NotEqual')
        """
        return self.find_layer(name) or name.rpartition("/")[2]

    def _layer(self, part: str) -> str | None:
        """The name of the layer of a name scope; None for a scope within a layer."""
        shorter = _AGAIN.sub("", part)
        if shorter in self.known:
            return shorter
        if part in self.known or part == LOSS:
            return part
        if part.endswith("_grad") or part[:1].isupper() or shorter in _OPS:
            return None
        if not self.subject:
            return part
        return shorter if shorter != part else None


READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})
_NEAR = 200
"""The number of ops that are searched from an optimizer's slot for the gradient that it belongs to."""


@dataclass(frozen=True)
class StageVariables:
    """The variables and optimizer slots of each stage of a Cut, found by the ops that read and write them."""

    cut: Cut

    def list_variables(self, stage: int) -> tuple[Variable, ...]:
        """The variables of a stage, in the order in which its ops read them."""
        variables = self.cut.program.variable_ops
        return tuple(variables[op] for op in self.find_first_readers(stage))

    def find_first_readers(self, stage: int) -> Mapping[int, int]:
        """For each variable of a stage (the op that holds it), the first op that reads it."""
        return self._readers[stage]

    def list_slots(self, stage: int) -> tuple[Variable, ...]:
        """The optimizer slots of a stage's variables."""
        owned = self._readers[stage]
        variables = self.cut.program.variable_ops
        return tuple(variables[slot] for slot, owner in self._slots.items() if owner in owned)

    @cached_property
    def _readers(self) -> tuple[Mapping[int, int], ...]:
        return tuple(self._find_readers(stage) for stage in range(len(self.cut.program.stages)))

    def _find_readers(self, stage: int) -> dict[int, int]:
        phases = [found for phase in self.cut.phases for found in phase.stages if found.stage == stage]
        found: dict[int, int] = {}
        for phase in phases:
            for op, reader in self._read(phase).items():
                found.setdefault(op, reader)
        layers = {_layer(self.cut.program.variable_ops[op]) for op in found} - {""}
        for op, writer in self._only_written.items():
            if _layer(self.cut.program.variable_ops[op]) in layers:
                found.setdefault(op, writer)
        return found

    def _read(self, phase: StagePhase) -> dict[int, int]:
        """The variables on which ops of the stage depend, each with its first reader; metrics are omitted."""
        graph, variables = self.cut.program.graph, self.cut.program.variable_ops
        # without training, variables written outside scopes are metrics
        ignored = {} if self.cut.program.requests else self._only_written
        fragments = list(phase.fragments)
        needed = {op for fragment in fragments for op in self._ends(fragment)}
        found: dict[int, int] = {}
        for index in sorted({op for fragment in fragments for op in fragment.ops}, reverse=True):
            if index not in needed:
                continue
            above = [value.op for value in graph.ops[index].inputs]
            needed.update(above)
            found.update({op: index for op in above if op in variables and op not in ignored})
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def _ends(self, fragment: Fragment) -> Iterator[int]:
        program = self.cut.program
        yield from (op for op in fragment.ops if program.graph.ops[op].stage is not None)
        if not program.requests:
            yield from (value.op for value in (*fragment.fetches, *program.returns))
            return
        yield from (value.op for request in program.requests for value in request.targets)
        yield from (boundary.value.op for boundary in self.cut.boundaries)

    @cached_property
    def _only_written(self) -> dict[int, int]:
        """The variables written outside scopes, each with the op that writes it.

        A layer outside scopes may write variables that it does not read, such as moving averages: these are next to
        the variables that it reads.
        """
        ops, variables = self.cut.program.graph.ops, self.cut.program.variable_ops
        writers = (op for op in ops if op.stage is None and writes_variable(op))
        return {value.op: op.index for op in writers for value in op.inputs if value.op in variables}

    # ------------------------------------------------------------------ slots
    @cached_property
    def _slots(self) -> Mapping[int, int]:
        """For each slot (the op that holds it), the variable that it belongs to."""
        graph, variables = self.cut.program.graph, self.cut.program.variable_ops
        owned = frozenset(op for readers in self._readers for op in readers)
        found: dict[int, int] = {}
        for op in graph.ops:
            if op.stage is None and writes_variable(op):
                for value in op.inputs:
                    if value.op in variables and value.op not in owned and value.op not in found:
                        owner = self._nearest(op, variables[value.op], owned)
                        found.update({value.op: owner} if owner is not None else {})
        return found

    def _nearest(self, writer: Op, slot: Variable, owned: Collection[int]) -> int | None:
        """The variable of the same shape whose gradient, or whose value, is nearest to the written value."""
        graph = self.cut.program.graph
        seen: set[int] = set()
        queue = deque(value.op for value in writer.inputs if graph.ops[value.op].role != CAPTURE)
        while queue and len(seen) < _NEAR:
            index = queue.popleft()
            if index in seen:
                continue
            seen.add(index)
            owner = self._owner(graph.ops[index], owned)
            if owner is not None and self.cut.program.variable_ops[owner].spec == slot.spec:
                return owner
            queue.extend(value.op for value in graph.ops[index].inputs)
        return None

    def _owner(self, op: Op, owned: Collection[int]) -> int | None:
        if op.role == HOLDER:
            request, holder = self.cut.program.holders[op.index]
            origin = self.cut.program.requests[request].origins[holder.source]
            return origin if origin in owned else None
        read = [value.op for value in op.inputs if value.op in owned] if op.type in READS else []
        return read[0] if read else None


def writes_variable(op: Op) -> bool:
    """Whether an op changes one of its variables, by its type."""
    return op.stateful and op.type not in READS


def list_ops_in(fragments: Iterable[Fragment]) -> set[int]:
    """The ops of fragments."""
    return {op for fragment in fragments for op in fragment.ops}


def _layer(variable: Variable) -> str:
    return variable.path.rpartition("/")[0]


_ALIASES = frozenset({"Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient"})
"""Ops whose output is their first input's memory."""


def memory_of(graph: Graph, value: Value) -> Value:
    """The value that owns the memory of another one."""
    while graph.ops[value.op].type in _ALIASES and graph.ops[value.op].inputs:
        value = graph.ops[value.op].inputs[0]
    return value


@dataclass(frozen=True)
class StageWork:
    """FLOPs and activation bytes of a Cut's stages, for a first micro-batch of `rows` rows. `shapes` are those of the
    leaves in the example, `subject` is the model's name in a step of Keras's.
    """

    cut: Cut
    stage_variables: StageVariables
    rows: int
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    subject: str = ""

    @cached_property
    def flop_counter(self) -> FlopCounter:
        """The FLOPs of all ops of a micro-batch, with the sizes of what they compute and read."""
        program = self.cut.program
        leaves = {Value(op): shape for op, shape in self.shapes.items()}
        like = {feed: arrival.boundary for feed, (_, arrival) in program.arrivals.items()}
        once = [*self.cut.batch_fragments.values(), *self.cut.weight_fragments.values()]
        once += [fragment for phase in self.cut.phases for fragment in phase.prologue.values()]
        ops = list_ops_in([*once, *(f for phase in self.cut.phases for s in phase.stages for f in s.fragments)])
        sizes = Sizes(program.graph, self.rows, leaves, like=like)
        return FlopCounter(sizes.follow(sorted(ops | like.keys() | self.shapes.keys())))

    def list_phases(self, stage: int) -> list[StagePhase]:
        """The stage's fragments in each phase."""
        return [found for phase in self.cut.phases for found in phase.stages if found.stage == stage]

    def list_phase_ops(self, phase: StagePhase, *, backward: bool) -> list[int]:
        """The ops of a stage's forward in a phase, or of its backward, which includes the forward's with recompute."""
        request_of = self.cut.program.request_of
        if phase.backward is not None:
            own = phase.fragments[-1 - (phase.weights is not None) :] if backward else (phase.forward,)
            return sorted(list_ops_in(fragment for fragment in own if fragment is not None))
        return [op for op in list_ops_in(phase.fragments) if (request_of(op) is not None) == backward]

    def count_flops(self, stage: int, *, backward: bool) -> int:
        """Floating-point operations of a stage's forward or backward for the first micro-batch, in all phases."""
        return sum(
            self.flop_counter.flops(self.list_phase_ops(phase, backward=backward)) for phase in self.list_phases(stage)
        )

    def count_weights_flops(self, stage: int) -> int:
        """Floating-point operations of gradients of weights that are separate from the rest of the backward."""
        own = (phase.weights.ops for phase in self.list_phases(stage) if phase.weights is not None)
        return sum(map(self.flop_counter.flops, own))

    def count_kept_bytes(self, phase: StagePhase) -> dict[Value, int]:
        """The tensors that a stage's backward receives from its forward, with their bytes.

        If the two are separate functions these are the outputs passed between them, else the values that the backward
        ops read from the forward ops. Constants, variables and the batch do not count, and tensors that share memory
        count once. If gradients of weights are separate, the larger of the two sets counts.
        """
        own = self._kept_for(phase, phase.backward, () if phase.forward is None else phase.forward.ops)
        if phase.weights is None:
            return own
        made = list_ops_in(each for each in phase.fragments if each is not phase.weights)
        later = self._kept_for(phase, phase.weights, made | self.cut.program.arrivals.keys())
        return max(own, later, key=lambda found: sum(found.values()))

    def _kept_for(self, phase: StagePhase, fragment: Fragment | None, before: Collection[int]) -> dict[Value, int]:
        """The inputs of a function computed by ops before it; without a function, the values that backward ops of the
        only function read from its forward ops.
        """
        program, values = self.cut.program, list[Value]()
        if fragment is not None:
            crossing = {boundary.value for boundary in self.cut.boundaries}
            values = [value for value in fragment.feeds if value.op in before or value in crossing]
        else:
            ops = list_ops_in(phase.fragments)
            behind = (op for op in ops if program.request_of(op) is not None)
            inside = [op for op in behind if program.graph.ops[op].type not in SHAPE_OPS]
            read = dict.fromkeys(value for op in inside for value in program.graph.ops[op].inputs)
            values = [value for value in read if program.request_of(value.op) is None and value.op in ops]
        counted: dict[Value, Value] = {}
        for value in values:
            memory = memory_of(program.graph, value)
            op = program.graph.ops[memory.op]
            if op.role != CAPTURE and op.index not in program.leaf_ops and op.type not in ("Const", "ReadVariableOp"):
                counted[memory] = value
        return {value: self.flop_counter.nbytes(value) for value in counted.values()}

    # ------------------------------------------------------------------ layers
    def list_layers(self, stage: int, factor: float) -> tuple[PlanLayer, ...]:
        """The layers of a stage, in the order of their first op, with the first micro-batch's FLOPs times `factor`."""
        ops, variables, names = self.cut.program.graph.ops, self.cut.program.variable_ops, self.names
        rows: dict[str, Counter[str]] = {}

        def add(op: int | None, **counts: int) -> None:
            rows.setdefault("" if op is None else names.find_layer(ops[op].name), Counter()).update(counts)

        phases, forward = self.list_phases(stage), self.list_ops(stage, backward=False)
        for backward, kind in ((False, "forward_ops"), (True, "backward_ops")):
            for op in sorted(self.list_ops(stage, backward=backward)):
                add(op, **{kind: 1})
            for op in (op for phase in phases for op in self.list_phase_ops(phase, backward=backward)):
                add(op, flops=round(self.flop_counter.count_op(ops[op]) * factor))
        for value, size in (item for phase in phases for item in self.count_kept_bytes(phase).items()):
            add(value.op if value.op in forward else None, activation_bytes=size)
        for variable, reader in self.stage_variables.find_first_readers(stage).items():
            add(reader, parameters=count_parameters(variables[variable].spec))
        return tuple(PlanLayer(name, **counts) for name, counts in rows.items())

    def list_ops(self, stage: int, *, backward: bool) -> set[int]:
        """The ops of a stage that come from the user's code, or (`backward`) from differentiation."""
        request_of = self.cut.program.request_of
        ops = list_ops_in(fragment for phase in self.list_phases(stage) for fragment in phase.fragments)
        return {op for op in ops if (request_of(op) is not None) == backward}

    @cached_property
    def names(self) -> LayerNames:
        """The parser of op names."""
        paths = (variable.path for variable in self.cut.program.variables)
        return LayerNames(self.subject, frozenset(part for path in paths for part in path.split("/")[:-1]))


def count_parameters(spec: Spec) -> int:
    """The number of a variable's parameters; 0 for one that is not floating-point, such as a seed or a counter."""
    return prod(axis or 1 for axis in spec.shape or ()) if spec.floating else 0
