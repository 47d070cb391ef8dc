"""Bytes that clusters exchange per step, computed before a step has run.

The gradient of a table that is looked up lists a row for every index: that are more rows than the batch has where a
row of the batch looks up several. The indices are followed through the graph from the leaves of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from whale_nebula.ir.cut import Cut, Exchange
from whale_nebula.ir.integers import Shape
from whale_nebula.ir.program import GradientPart, Leaf, PartKey, Variable
from whale_nebula.ir.sizes import Sizes
from whale_nebula.spec import Spec, Value

_CHOOSES = frozenset({
    "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "Where", "DynamicPartition", "ListDiff",
    "StringSplitV2", "SparseFillEmptyRows",
})  # fmt: skip
"""Ops that give as many rows as their input's values say, at most as many as it has."""


@dataclass
class Exchanged:
    """Sizes of what a Cut exchanges; `shapes` are those of a batch's leaves, where one is at hand."""

    cut: Cut
    shapes: Sequence[tuple[int, ...]] = ()
    _rows: dict[tuple[Value, int], int | None] = field(default_factory=dict)

    def nbytes(self, each: Exchange, counts: Sequence[int]) -> int | None:
        """Bytes of it in a step whose micro-batches have `counts` rows; None where only the step knows."""
        if each.part is None:
            return _open(each.spec, sum(counts))
        part, variable = self._part(each.part)
        if not part.sparse:
            return _dense(each.spec, variable)
        rows = self._list_size(part, counts)
        width = _width(each.spec, variable if each.piece == 0 else None)
        return None if rows is None or width is None else rows * width

    def at_most(self, each: Exchange) -> bool:
        """Whether there may be less of it than `nbytes` says, because values decide how many rows there are."""
        if each.part is None:
            return False
        part, _ = self._part(each.part)
        graph = self.cut.program.graph
        return part.sparse and any(graph.ops[op].type in _CHOOSES for op in graph.ascend([part.values[1].op]))

    def _part(self, key: PartKey) -> tuple[GradientPart, Variable | None]:
        program, (request, source, *_) = self.cut.program, key
        return program.gradient_parts[key], program.variable_ops.get(program.requests[request].origins[source])

    def _list_size(self, part: GradientPart, counts: Sequence[int]) -> int | None:
        """Micro-batches list their rows one after the other; at indices that are always the same they are added."""
        found = [self._of_one(part.values[1], rows) for rows in (counts if part.concatenated else counts[:1])]
        known = [rows for rows in found if rows is not None]
        return sum(known) if len(known) == len(found) else None

    def _of_one(self, indices: Value, rows: int) -> int | None:
        if (indices, rows) not in self._rows:
            self._rows[indices, rows] = self._follow_indices(indices, rows)
        return self._rows[indices, rows]

    def _follow_indices(self, indices: Value, rows: int) -> int | None:
        graph = self.cut.program.graph
        static = graph.spec(indices).shape
        if static and static[0] is not None:
            return static[0]
        above = graph.ascend([indices.op])
        leaves = {leaf.op: self._leaf(number, leaf, rows) for number, leaf in enumerate(self.cut.program.leaves)}
        known = {Value(op): shape for op, shape in leaves.items() if op in above and shape is not None}
        if len(known) < len(above & leaves.keys()):
            return None
        like = {feed: arrival.boundary for feed, (_, arrival) in self.cut.program.arrivals.items()}
        return prod(Sizes(graph, rows, known, like=like).follow(sorted(above)).shape(indices))

    def _leaf(self, number: int, leaf: Leaf, rows: int) -> Shape | None:
        """The shape of a leaf in a micro-batch of so many rows."""
        shape = self.shapes[number] if self.shapes else leaf.spec.shape
        if shape is None:
            return None
        whole = (rows, *shape[1:]) if leaf.batched else tuple(shape)
        known = tuple(axis for axis in whole if axis is not None)
        return known if len(known) == len(whole) else None


def _open(spec: Spec, rows: int) -> int | None:
    """Bytes of a tensor of which the first axis at most is open."""
    if spec.shape is None or None in spec.shape[1:]:
        return None
    return spec.nbytes(unknown=rows)


def _dense(spec: Spec, variable: Variable | None) -> int | None:
    """A gradient has the form of its variable."""
    shape = spec.shape if variable is None else variable.spec.shape
    return None if shape is None or None in shape else Spec(spec.dtype, shape).nbytes()


def _width(spec: Spec, variable: Variable | None) -> int | None:
    """Bytes of one listed row."""
    shape = spec.shape if variable is None else variable.spec.shape
    return None if not shape or None in shape[1:] else Spec(spec.dtype, shape[1:]).nbytes()
