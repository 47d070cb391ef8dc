"""A batch with fewer rows than there are to be micro-batches: each row is one, and the rest is not there."""

from __future__ import annotations

import warnings

from whale_nebula.errors import NebulaWarning
from whale_nebula.ir.program import Program
from whale_nebula.site import script_site


def tell_if_few(program: Program, name: str, made: int, rows: int) -> None:
    """Warn where a first batch of so many rows `made` fewer micro-batches than the step called `name` asks for."""
    if max(made, rows) < program.pipeline.micro_batch:  # replicas that add up on the way are one in one process
        site = script_site()
        warnings.warn_explicit(_warning(program, name, rows), NebulaWarning, site.file, site.line)


def _warning(program: Program, name: str, rows: int) -> NebulaWarning:
    asked = f"{_who(program)} for {program.pipeline.micro_batch} micro-batches"
    if not any(leaf.batched for leaf in program.leaves):
        return NebulaWarning(
            f"{asked}, and the step has no batch: it runs as one, and its results are right",
            where=name,
            why="no argument of the step has rows to cut",
            mend="give the step its batch as arguments, for batch in dataset: step(*batch), not the iterator; where it "
            "has none, leave nb.pipeline out",
        )
    return NebulaWarning(
        f"{asked}, and the first batch has {rows} row{'s' * (rows != 1)}",
        where=name,
        why="a micro-batch has at least one row",
        mend=f"{_fewer(program, max(1, rows))}, or a larger batch",
    )


def _who(program: Program) -> str:
    """Who asks: the replicas, where there are as many, or where they have shares by speed and nobody gave a number."""
    most = max(program.stages, key=lambda stage: stage.replicas)
    asked = program.pipeline.micro_batch
    if most.replicas == asked > 1:
        return f"the {asked} replicas of stage {most.key!r} ask"
    shared = any(stage.speeds for stage in program.stages)
    return "nb.pipeline, or shares by speed, ask" if shared else "nb.pipeline asks"


def _fewer(program: Program, rows: int) -> str:
    most = max(stage.replicas for stage in program.stages)
    asked = [f"nb.replica({rows})"] * (most > rows) + [f"nb.pipeline(micro_batch={rows})"] * (
        most < program.pipeline.micro_batch
    )
    return " and ".join(asked)
