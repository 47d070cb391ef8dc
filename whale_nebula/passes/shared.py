"""State that a forward writes belongs to one stage: between two, nobody could say whose micro-batch comes first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from whale_nebula.errors import PlacementError
from whale_nebula.ir.graph import Op
from whale_nebula.ir.program import Program
from whale_nebula.passes.effects import resources, written
from whale_nebula.passes.parts import FORWARD, UPDATE, Parts


def check_shared(
    program: Program, parts: Parts, workers: Sequence[Collection[int]], where: Callable[[int], str] = lambda op: ""
) -> None:
    """Raise where one stage's forward writes what another's reads: a seed generator in two stages.

    With one micro-batch, and both stages on one of the `workers` (the stages of each), they follow one another as
    in the uncut step, so there it may be.
    """
    writers = {(handle, stage) for op, stage in _forward(program, parts) for handle in _writes(op, program, parts)}
    for op, reader in _forward(program, parts):
        for handle in resources(op, program.graph) if _reads(op, parts) else ():
            for written_by in sorted(stage for other, stage in writers if other == handle and stage != reader):
                together = any(written_by in stages and reader in stages for stages in workers)
                if program.pipeline.micro_batch > 1 or not together:
                    raise _shared(program, handle, written_by, reader, where(op.index) or op.name)


def _forward(program: Program, parts: Parts) -> Iterator[tuple[Op, int]]:
    """The ops of the forward that have a stage."""
    for op in program.graph.ops:
        late = parts.part.get(op.index, 0) % 3 == UPDATE
        if op.index in program.labels and not late and program.request_of(op.index) is None:
            yield op, program.labels[op.index]


def _writes(op: Op, program: Program, parts: Parts) -> tuple[int, ...]:
    each = op.index in parts.effects and parts.part.get(op.index, 0) % 3 == FORWARD
    return written(op, program.graph) if each else ()


def _reads(op: Op, parts: Parts) -> bool:
    """Whether the forward reads through an op; Keras's metrics read before they add, so they count too."""
    return op.index in parts.leading and bool(op.outputs)


def _shared(program: Program, handle: int, writer: int, reader: int, where: str) -> PlacementError:
    name = program.variable_ops[handle].path if handle in program.variable_ops else program.graph.ops[handle].name
    return PlacementError(
        f"{name!r} is written in the forward of stage {program.stages[writer].key!r} and read in that of "
        f"{program.stages[reader].key!r}",
        where=where,
        why="the stages work on different micro-batches at the same time, so the order would be left to chance",
        mend="give each stage its own keras.random.SeedGenerator, tf.random.Generator, metric or layer",
    )
