"""Stages follow one another: within a phase no tensor goes back to an earlier stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from whale_nebula.errors import StageOrderError
from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import Stage


def check_order(
    graph: Graph,
    labels: Mapping[int, int],
    stages: tuple[Stage, ...],
    *,
    phase_of: Callable[[int], int] = lambda op: 0,
    where: Callable[[int], str] = lambda op: "",
) -> None:
    """Raise where an op of a stage reads what a later stage makes in the same phase."""
    for op in graph.ops:
        stage = labels.get(op.index)
        if stage is None:
            continue
        for value in op.inputs:
            source = labels.get(value.op, stage)
            if source > stage and phase_of(value.op) == phase_of(op.index):
                raise _cycle(graph, stages[source], stages[stage], value.op, op.index, where)


def _cycle(
    graph: Graph, later: Stage, earlier: Stage, source: int, reader: int, where: Callable[[int], str]
) -> StageOrderError:
    made, read = graph.ops[source], graph.ops[reader]
    return StageOrderError(
        f"stage {later.key!r} feeds stage {earlier.key!r}, which comes before it",
        where=where(reader) or read.name,
        why=f"op {read.name!r} ({read.type}) of {earlier.key!r} reads {made.name!r} of {later.key!r}: "
        "stages must follow one another, and entering a stage again continues it",
        mend=f"give the second a name: nb.stage(cluster={earlier.cluster!r}, name={earlier.key + '_2'!r})",
    )
