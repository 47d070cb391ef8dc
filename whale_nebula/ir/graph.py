"""A traced step as pure data: ops, their inputs, and nothing of TensorFlow.

Passes read and label this mirror; only the runtime converts parts of it back into functions. Ops keep their index in
the trace, so a mirror made during a trace is a prefix of the one made at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from whale_nebula.spec import Spec, Value

Attribute = bool | int | float | str | tuple["Attribute", ...]
_NO_ATTRIBUTES: Mapping[str, Attribute] = MappingProxyType({})

INPUT = "input"
"""Role of an op that holds a leaf of the user's batch."""
CAPTURE = "capture"
"""Role of an op that holds a value from outside the trace, usually a variable."""
HOLDER = "holder"
"""Role of a placeholder op for a gradient, until the backward has run."""
FEED = "feed"
"""Role of an inserted op that the runtime feeds: a boundary's gradient, a share."""

REPLICA_SUM = "ReplicaSum"
"""Type of an inserted op for a sum over all replicas of its stage: its input is each replica's own part."""

LAYER = "_nebula_layer"
"""Attribute of an op made by a layer that `nb.place` places: the layer and its place, in words."""


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation of the trace.

    `control` are the ops that run before it without giving it a value; `name` and `role` say what a placeholder holds.
    `stage` is the key of the stage whose scope contains it, `compress` the number of its compress scope. `constant` has
    the entries of a small Const, `functions` the names of the bodies that it calls.
    """

    index: int
    type: str
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Spec, ...] = ()
    control: tuple[int, ...] = ()
    name: str = ""
    role: str = ""
    stage: str | None = None
    compress: int | None = None
    stateful: bool = False
    attributes: Mapping[str, Attribute] = field(default_factory=lambda: _NO_ATTRIBUTES)
    constant: tuple[int, ...] | None = None
    functions: tuple[str, ...] = ()

    @property
    def values(self) -> Iterator[Value]:
        """The op's outputs, in order."""
        return (Value(self.index, out) for out in range(len(self.outputs)))

    @property
    def label(self) -> str:
        """Name and type, for errors."""
        return f"{self.name} ({self.type})"


@dataclass(frozen=True)
class Graph:
    """Ops in the order they were traced, and the bodies of the functions they call.

    >>> graph = Graph((Op(0, "Placeholder", outputs=(Spec("float32", ()),)), Op(1, "Neg", inputs=(Value(0),))))
    >>> [op.type for op in graph.consumers(Value(0))]
    ['Neg']
    """

    ops: tuple[Op, ...]
    functions: Mapping[str, Graph] = field(default_factory=dict)
    arguments: tuple[int, ...] = ()
    returns: tuple[Value, ...] = ()

    def __len__(self) -> int:
        return len(self.ops)

    def stamp(self, stages: Mapping[int, str]) -> Graph:
        """The graph in which these ops, given by their indices, have these stages, given by their keys."""
        return replace(self, ops=tuple(replace(op, stage=stages.get(op.index, op.stage)) for op in self.ops))

    def spec(self, value: Value) -> Spec:
        """Element type and shape of a value."""
        return self.ops[value.op].outputs[value.out]

    @cached_property
    def _consumers(self) -> Mapping[Value, tuple[int, ...]]:
        found: dict[Value, dict[int, None]] = {}
        for op in self.ops:
            for value in op.inputs:
                found.setdefault(value, {})[op.index] = None
        return {value: tuple(ops) for value, ops in found.items()}

    def consumers(self, value: Value) -> tuple[Op, ...]:
        """The ops that read a value, in trace order."""
        return tuple(self.ops[index] for index in self._consumers.get(value, ()))

    def add_control_inputs(self, waits: Mapping[int, int]) -> Graph:
        """The graph with additional control inputs: ops in `waits` run after the op that they wait for."""
        ops = list(self.ops)
        for index, before in waits.items():
            ops[index] = replace(ops[index], control=(*ops[index].control, before))
        return replace(self, ops=tuple(ops)) if waits else self

    def with_bodies(self, ops: Iterable[Op]) -> Iterator[Op]:
        """Ops, and those of the function bodies that they call, directly or not, each body once."""
        pending, seen = [*ops], set[str]()
        while pending:
            op = pending.pop(0)
            yield op
            for name in op.functions:
                if name not in seen:
                    seen.add(name)
                    pending.extend(self.functions[name].ops)

    def descend(
        self, roots: Iterable[int], *, control: bool = False, skip: Callable[[int], bool] | None = None
    ) -> set[int]:
        """The ops that depend on `roots` (included), over data edges and optionally control edges."""
        found = set(roots)
        for op in self.ops:
            if op.index in found or (skip is not None and skip(op.index)):
                continue
            if any(value.op in found for value in op.inputs) or (control and not found.isdisjoint(op.control)):
                found.add(op.index)
        return found

    def ascend(self, roots: Iterable[int], *, stop: Callable[[int], bool] | None = None) -> set[int]:
        """The ops that `roots` (which are included) depend on over data edges; `stop` ops are included, not passed."""
        found: set[int] = set()
        stack = list(roots)
        while stack:
            index = stack.pop()
            if index in found:
                continue
            found.add(index)
            if stop is None or not stop(index):
                stack.extend(value.op for value in self.ops[index].inputs)
        return found
