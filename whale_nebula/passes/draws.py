"""Draws for the rows of each micro-batch, from a seed that is the same for all of them: they would be the same rows."""

from __future__ import annotations

from collections.abc import Sequence

from whale_nebula.ir.cut import Worker
from whale_nebula.ir.graph import Op
from whale_nebula.ir.program import Program
from whale_nebula.passes.batch import BatchFolds
from whale_nebula.passes.effects import is_random, is_read, resources, seeded_by
from whale_nebula.passes.parts import FORWARD, Parts
from whale_nebula.passes.reduce import COUPLED, ROWS, SAME_SEED, Fold


def check_draws(program: Program, parts: Parts, folds: BatchFolds, workers: Sequence[Worker]) -> None:
    """Refuse a draw of rows in the forward whose seed nothing moves on from one micro-batch to the next."""
    if folds.folding is None:
        return
    moving = {op for op in parts.effects if parts.part[op] % 3 == FORWARD}
    _check_replicas(program, moving, folds, workers)
    moved = {handle for op in moving for handle in resources(program.graph.ops[op], program.graph)}
    for op in program.graph.ops:
        each = is_random(op) and parts.part.get(op.index, 0) % 3 == FORWARD
        if not each or all(folds.folding.of(value).kind != ROWS for value in op.values):
            continue
        above = [program.graph.ops[before] for before in seeded_by(op, program.graph)]
        if not any(_moves(before, program, moving, moved) for before in above):
            folds.refuse(Fold(COUPLED, blame=op.index, reason=SAME_SEED), "what is drawn")


def _check_replicas(program: Program, moving: set[int], folds: BatchFolds, workers: Sequence[Worker]) -> None:
    """Refuse a state that moves on by as many rows as are drawn, where several processes run the stage.

    A seed is moved on by every replica for the micro-batches of the others, too: how many rows these have it cannot
    know (see `skips`).
    """
    stages = [stage for worker in workers for stage in set(worker.stages)]
    for op in sorted(moving):
        if program.graph.ops[op].type == "RngReadAndSkip" and stages.count(program.labels.get(op, -1)) > 1:
            folds.refuse(Fold(COUPLED, blame=op, reason=_EACH), "what is drawn", (_FOR_ONE_ANOTHER,))


_EACH = "each replica would count its own draws alone, so that all of them draw the same rows"
_FOR_ONE_ANOTHER = "keras.random.SeedGenerator(...), or a layer such as keras.layers.Dropout, for what is drawn"


def _moves(op: Op, program: Program, moving: set[int], moved: set[int]) -> bool:
    """Whether an op gives each micro-batch something else: it moves a state on, or reads one that is."""
    return op.index in moving or (is_read(op) and not moved.isdisjoint(resources(op, program.graph)))
