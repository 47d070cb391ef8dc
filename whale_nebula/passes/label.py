"""Which stage runs each op: scopes stamp most of them, this pass finds a place for the rest.

An op between two stages may run anywhere from the latest of its inputs to the earliest of its readers; it goes where
the fewest bytes cross, and what saves bytes only together goes together (see `jointly`). What is fed by variables
alone goes to their owner, so that an L2 penalty crosses as one number and not as a matrix; where as much would cross
early as late, it is computed early, so that the penalties of one stage are scaled and added up there. What reads and
writes one variable goes to one stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, INPUT, Graph, Op
from whale_nebula.passes.effects import is_read
from whale_nebula.passes.jointly import jointly
from whale_nebula.passes.together import together
from whale_nebula.spec import Value

_NOWHERE = frozenset({INPUT, CAPTURE, HOLDER, FEED})


def label(
    graph: Graph, stages: Sequence[str], *, fixed: Mapping[int, int] | None = None, skip: frozenset[int] = frozenset()
) -> dict[int, int]:
    """The stage number of every op of the forward; inputs, captures, constants and `skip` ops have none.

    `fixed` holds what an earlier call said about the first ops of the same trace: it stays.
    """
    if not stages:
        return {}
    numbers = {key: number for number, key in enumerate(stages)}
    found = _Labelling(graph, numbers, dict(fixed or {}), skip)
    labels = found.run()
    moved = together(graph, labels, found.free, found.needed)
    return _Labelling(graph, numbers, {**(fixed or {}), **moved}, skip).run() if moved else labels


@dataclass
class _Labelling:
    graph: Graph
    numbers: Mapping[str, int]
    labels: dict[int, int]
    skip: frozenset[int]
    alone: frozenset[int] = frozenset()
    free: frozenset[int] = frozenset()
    needed: Mapping[int, int] = field(default_factory=dict)

    def run(self) -> dict[int, int]:
        free = [op for op in self.graph.ops if not self._settled(op)]
        self.free = frozenset(op.index for op in free)
        self.alone = made_of_variables(self.graph)
        owners = self._owners()
        earliest, self.needed = self._earliest(free, owners), self._earliest(free, {})
        for op in reversed(free):
            self._settle(op, earliest, self.needed)
        each = [op for op in free if op.index not in self.alone]
        self.labels.update(jointly(self.graph, self.labels, each, len(self.numbers)))
        return self.labels

    def _settled(self, op: Op) -> bool:
        """Stamped and fixed ops are settled; ops without a place need no label."""
        if op.index in self.skip or op.role in _NOWHERE or op.type == "Const" or op.index in self.labels:
            return True
        if op.stage is None or op.stage not in self.numbers:
            return False
        self.labels[op.index] = self.numbers[op.stage]
        return True

    def _owners(self) -> dict[int, int]:
        """A captured variable belongs to the first stage that touches it."""
        owners: dict[int, int] = {}
        for op in self.graph.ops:
            stage = self.labels.get(op.index)
            if stage is None:
                continue
            for value in op.inputs:
                if self.graph.ops[value.op].role == CAPTURE:
                    owners[value.op] = min(owners.get(value.op, stage), stage)
        return owners

    def _earliest(self, free: Sequence[Op], owners: Mapping[int, int]) -> dict[int, int]:
        """The latest stage among an op's inputs; ops of the user's inputs alone have none."""
        found: dict[int, int] = {}
        for op in free:
            stages = [s for v in op.inputs if (s := self._place(v.op, found, owners)) is not None]
            if stages:
                found[op.index] = max(stages)
        return found

    def _place(self, op: int, found: Mapping[int, int], owners: Mapping[int, int]) -> int | None:
        if op in owners:
            return owners[op]
        return self.labels.get(op, found.get(op))

    def _settle(self, op: Op, earliest: Mapping[int, int], needed: Mapping[int, int]) -> None:
        """Readers are settled first (ops come last to first), so the latest possible stage is known.

        What a reader needs before the owner of a variable comes runs without the owner: both hold the variable.
        """
        readers = [
            s for v in op.values for c in self.graph.consumers(v) if (s := self.labels.get(c.index)) is not None
        ]
        latest = min(readers) if readers else len(self.numbers) - 1
        first = earliest.get(op.index)
        if first is not None and first > latest >= needed.get(op.index, 0):
            first = None
        if first is None:
            self.labels[op.index] = latest
        elif first >= latest or not readers or self._reads_variable(op):
            self.labels[op.index] = first
        else:
            late = self._late_is_cheaper(op, first, latest, earliest)
            self.labels[op.index] = latest if late else first

    def _reads_variable(self, op: Op) -> bool:
        return any(self.graph.ops[value.op].role == CAPTURE for value in op.inputs)

    def _late_is_cheaper(self, op: Op, first: int, latest: int, earliest: Mapping[int, int]) -> bool:
        """Compare what would cross: the op's inputs if it runs late, its outputs if it runs early.

        What is made of variables alone runs early where both are alike: it is the same for each micro-batch.
        """
        inputs = sum(
            self.graph.spec(value).nbytes()
            for value in set(op.inputs)
            if self._would_cross(value, op, latest, earliest)
        )
        outputs = sum(self.graph.spec(value).nbytes() for value in op.values if self.graph.consumers(value))
        return inputs < outputs if op.index in self.alone else inputs <= outputs

    def _would_cross(self, value: Value, op: Op, latest: int, earliest: Mapping[int, int]) -> bool:
        source = self.labels.get(value.op, earliest.get(value.op))
        if source is None or source >= latest:
            return False
        others = (c.index for c in self.graph.consumers(value) if c.index != op.index)
        return all(self.labels.get(other, -1) != latest for other in others)


def made_of_variables(graph: Graph) -> frozenset[int]:
    """The ops that are made of variables and constants alone, and of at least one variable: a weight's penalty."""
    found: set[int] = set()
    constant: set[int] = set()
    for op in graph.ops:
        if op.role or (op.stateful and not is_read(op)) or (not op.inputs and op.type != "Const"):
            continue
        read = [v.op for v in op.inputs if v.op not in constant]
        if all(each in found or graph.ops[each].role == CAPTURE for each in read):
            (found if read else constant).add(op.index)
    return frozenset(found)
