"""What ops cost, functions and all: a loop costs its body times its turns, a branch its dearest side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.ir.integers import Numbers, Shape
from whale_nebula.ir.sizes import Sizes
from whale_nebula.plan.flops import flops
from whale_nebula.plan.loop_trips import LOOPS, turns
from whale_nebula.spec import Spec, Value

_BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
_LISTS = {"TensorListPushBack": 1, "TensorListSetItem": 2}
"""Ops that put a tensor into a list, and which of their inputs it is."""


@dataclass
class Effort:
    """Counts for the ops of a graph whose sizes were followed. `open_loops` are loops counted as one turn."""

    sizes: Sizes
    turned: dict[int, int] = field(default_factory=dict)
    open_loops: set[str] = field(default_factory=set)
    counted: dict[int, int] = field(default_factory=dict)

    def flops(self, ops: Iterable[int]) -> int:
        """Floating-point operations of these ops."""
        return sum(self.of(self.sizes.graph.ops[index]) for index in ops)

    def of(self, op: Op) -> int:
        """Floating-point operations of one op."""
        if op.index not in self.counted:
            self.counted[op.index] = self._called(op) if op.functions else self._plain(op)
        return self.counted[op.index]

    def _plain(self, op: Op) -> int:
        if not op.outputs or op.type in ("Const", "Placeholder"):
            return 0
        shapes = [self.sizes.shape(value) for value in op.inputs]
        return flops(op, shapes, [self.sizes.shape(value) for value in op.values])

    def nbytes(self, value: Value) -> int:
        """Bytes of a value; a list that a loop fills has what it puts in at each turn."""
        op = self.sizes.graph.ops[value.op]
        if self.sizes.graph.spec(value).dtype == "variant" and op.type in LOOPS:
            return self.turns(op) * self._pushed(op, value.out)
        return self.sizes.nbytes(value)

    def turns(self, op: Op) -> int:
        """How often a loop turns; 1 where nothing tells, which is noted."""
        if op.index not in self.turned:
            found = turns(op, self.sizes.graph, self.sizes.numbers)
            if found is None:
                self.open_loops.add(op.name)
            else:  # a loop's first output is its counter, by which its gradient counts
                self.sizes.numbers[Value(op.index)] = (found,)
            self.turned[op.index] = 1 if found is None else found
        return self.turned[op.index]

    def _called(self, op: Op) -> int:
        shapes = [self.sizes.shape(value) for value in op.inputs]
        numbers = [self.sizes.numbers.get(value) for value in op.inputs]
        if op.type in LOOPS:
            return self.turns(op) * self._inside(op.functions[1], shapes, [None] * len(shapes))
        if op.type in _BRANCHES:
            return max(self._inside(name, shapes[1:], numbers[1:]) for name in op.functions)
        return sum(self._inside(name, shapes, numbers) for name in op.functions)

    def _inside(self, name: str, shapes: Sequence[Shape], numbers: Sequence[Numbers | None]) -> int:
        inner = self._body(name, shapes, numbers)
        count = inner.flops(range(len(inner.sizes.graph)))
        self.open_loops |= inner.open_loops
        return count

    def _body(self, name: str, shapes: Sequence[Shape], numbers: Sequence[Numbers | None]) -> Effort:
        """A function's body, followed with the sizes of what it is given."""
        body: Graph = self.sizes.graph.functions[name]
        given = [Value(argument) for argument in body.arguments]
        known = {v: n for v, n in zip(given, numbers, strict=False) if n is not None}
        sizes = Sizes(body, self.sizes.rows, dict(zip(given, shapes, strict=False)), numbers=known)
        return Effort(sizes.follow(range(len(body))))

    def _pushed(self, op: Op, place: int) -> int:
        """The bytes that a loop's body puts into one of its lists."""
        shapes = [self.sizes.shape(value) for value in op.inputs]
        inner = self._body(op.functions[1], shapes, [None] * len(shapes))
        maker = _behind(inner.sizes.graph, inner.sizes.graph.returns[place])
        item = _LISTS.get(maker.type)
        if item is None:
            return 0
        value = maker.inputs[item]
        return Spec(inner.sizes.graph.spec(value).dtype, inner.sizes.shape(value)).nbytes()


def _behind(graph: Graph, value: Value) -> Op:
    """The op that makes a value, whatever only hands it on."""
    while graph.ops[value.op].type == "Identity":
        value = graph.ops[value.op].inputs[0]
    return graph.ops[value.op]
