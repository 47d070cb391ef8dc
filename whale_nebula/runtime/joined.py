"""Replicas of one process: after the micro-batches, what each of them has made counts for their stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from whale_nebula.ir.cut import PhasePlan
from whale_nebula.ir.program import PartKey
from whale_nebula.passes.mates import parts_of
from whale_nebula.runtime.gradients import Sums
from whale_nebula.runtime.stage_run import StageRun


def joined(phase: PhasePlan, runs: Sequence[StageRun]) -> Sequence[StageRun]:
    """One run for each stage: values by micro-batch, and gradients that are added in the order of the replicas."""
    by_stage: dict[int, list[StageRun]] = {}
    for run in runs:
        by_stage.setdefault(run.stage, []).append(run)
    return [own[0] if len(own) == 1 else _one(phase, own) for own in by_stage.values()]


def _one(phase: PhasePlan, runs: Sequence[StageRun]) -> StageRun:
    first = runs[0]
    kept: dict[Any, dict[int, Any]] = {}
    sums = Sums(first.sums.program)
    for run in runs:
        for value, by_number in run.kept.items():
            kept.setdefault(value, {}).update(by_number)
        run.kept.clear()
    for key, part in parts_of(first.compiled.cut, phase, first.stage):
        rows = _rows(key, len(part.values), runs)
        if rows:
            sums.put(key, rows)
    return replace(first, kept=kept, sums=sums, turns=tuple(sorted(m for run in runs for m in run.turns)))


def _rows(key: PartKey, pieces: int, runs: Sequence[StageRun]) -> list[tuple[Any, ...]]:
    """The rows of every micro-batch in its order, or a sum of each replica."""
    found: list[tuple[int, tuple[Any, ...]]] = []
    for run in runs:
        if run.turns and run.sums.has(key):
            columns = [run.sums.pieces(key, piece, run.turns) for piece in range(pieces)]
            found += [(m, tuple(column[m] for column in columns)) for m in columns[0]]
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]
