"""Strings and TensorFlow's own objects cannot cross a line: known from the plan, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable

from whale_nebula.errors import PlanError
from whale_nebula.ir.cut import Boundary, Cut
from whale_nebula.wire.tensor import DTYPE_NAMES


def check_crossable(cut: Cut, where: Callable[[int], str]) -> None:
    """Refuse a boundary between clusters whose tensor no frame can carry."""
    stages, graph = cut.program.stages, cut.program.graph
    for boundary in cut.boundaries:
        away = [s for s in boundary.destinations if stages[s].cluster != stages[boundary.source].cluster]
        if away and graph.spec(boundary.value).dtype not in DTYPE_NAMES:
            raise _error(cut, boundary, away[0], where)


def _error(cut: Cut, boundary: Boundary, to: int, where: Callable[[int], str]) -> PlanError:
    op, dtype = cut.program.graph.ops[boundary.value.op], cut.program.graph.spec(boundary.value).dtype
    source, destination = cut.program.stages[boundary.source].key, cut.program.stages[to].key
    return PlanError(
        f"a {dtype} would cross from stage {source!r} to stage {destination!r}",
        where=f"{op.name} ({op.type}), {where(op.index)}",
        why="between clusters go numbers and bools only",
        mend=f"keep it inside one stage: move {op.type} into {destination!r}, "
        f"or let numbers cross (ids, from a StringLookup in {source!r})",
    )
