"""Inputs that only some clusters are given: numbers that are made of them alone cross, where others need them.

How many tokens count is such a number: an update everywhere may ask for it (a metric's), and the input is read in the
one cluster whose stage reads it anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from whale_nebula.ir.graph import Op
from whale_nebula.ir.program import Program
from whale_nebula.passes.parts import FORWARD, SMALL, Parts
from whale_nebula.passes.readings import asks_rows
from whale_nebula.spec import Spec, Value

Leaves = frozenset[int]
_NONE: Leaves = frozenset()


@dataclass
class Apart:
    """Answers, for the inputs that `names` lists, who can compute what is made of inputs alone."""

    program: Program
    parts: Parts
    names: Collection[str]
    workers_of: Callable[[int], frozenset[int]]

    def __post_init__(self) -> None:
        apart = {leaf.op for leaf in self.program.leaves if leaf.name in self.names}
        self._touched: dict[int, Leaves] = {op: frozenset({op}) for op in apart}
        self._readers: dict[int, set[int]] = {op: set() for op in apart}
        for op in self.program.graph.ops if apart else ():
            self._look(op)

    def _look(self, op: Op) -> None:
        found = self._inputs(op)
        if not found:
            return
        if op.index in self.parts.pure:
            self._touched[op.index] = found
        if op.index not in self.parts.pure or op.stage is not None:
            staged = op.stage is not None or self.parts.part.get(op.index, 0) % 3 == FORWARD
            label = self.program.labels.get(op.index) if staged else None
            for leaf in found if label is not None else ():
                self._readers[leaf].update(self.workers_of(label or 0))

    def _inputs(self, op: Op) -> Leaves:
        """The inputs apart whose values an op reads, by itself or through what is made of them."""
        graph = self.program.graph
        given = [value for value in op.inputs if value.op in self._touched]
        return _NONE.union(
            *(self._touched[v.op] for v in given if v.op not in self._readers or not asks_rows(graph, op))
        )

    def home(self, value: Value, worker: int) -> int | None:
        """The worker that computes a value for another that is not given what it is made of; None: it does so itself.

        Only what is small crosses; of the rest its pieces may.
        """
        makers = self.makers(value)
        if not makers or worker in makers or not _small(self.program.graph.spec(value)):
            return None
        return min(makers)

    def makers(self, value: Value) -> Leaves:
        """The workers whose stages read all inputs apart that a value is made of; none where it is made of no such."""
        leaves = self._touched.get(value.op, _NONE)
        each = [frozenset(self._readers[leaf]) for leaf in leaves]
        return each[0].intersection(*each[1:]) if each else _NONE


def _small(spec: Spec) -> bool:
    return spec.shape is not None and None not in spec.shape and spec.nbytes() <= SMALL
