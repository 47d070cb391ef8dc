"""What the replicas of a stage tell one another after the micro-batches, so that all of them go on alike.

Each has worked on its own micro-batches. Then each is told the sum of all gradients, and what an update or the user
asks of single micro-batches (losses, counts, predictions). So whatever one replica could compute if it had done all of
the work, every one of them can.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from whale_nebula.ir.cut import Cut, PhasePlan
from whale_nebula.ir.program import GradientPart, PartKey
from whale_nebula.spec import Spec, Value


class Told(NamedTuple):
    """One thing that replicas of a stage tell one another; its slot is its number, alike in every process.

    `kind` is "numbers" (all scalars of the own micro-batches in one message), "tensor" (a value that a micro-batch
    gave), "sum" (a piece of the gradients) or "drift" (a variable that the forward wrote from its rows). `key` and
    `piece` say which gradient (request, source, stage), `path` which variable.
    """

    slot: int
    kind: Literal["numbers", "tensor", "sum", "drift"]
    stage: int
    specs: tuple[Spec, ...]
    values: tuple[Value, ...] = ()
    key: PartKey = (-1, -1, -1, -1)
    piece: int = 0
    path: str = ""


def told(cut: Cut, phase: PhasePlan) -> tuple[Told, ...]:
    """All that replicas of stages tell one another in a phase."""
    every = [each for stage in sorted(cut.routing.replicated) for each in _of_stage(cut, phase, stage)]
    return tuple(each._replace(slot=slot) for slot, each in enumerate(every))


def _of_stage(cut: Cut, phase: PhasePlan, stage: int) -> Iterator[Told]:
    spec = cut.program.graph.spec
    plan = next((each for each in phase.stages if each.stage == stage), None)
    if plan is None:
        return
    made = [value for f in (plan.forward, plan.backward) if f is not None for value in f.fetches]
    kept = [value for value in dict.fromkeys(made) if value in cut.merges]
    numbers = tuple(value for value in kept if spec(value).scalar)
    if numbers:
        yield Told(0, "numbers", stage, tuple(map(spec, numbers)), numbers)
    for value in kept:
        if value not in numbers:
            yield Told(0, "tensor", stage, (spec(value),), (value,))
    for key, part in parts_of(cut, phase, stage):
        for piece, value in enumerate(part.values):
            yield Told(0, "sum", stage, (spec(value),), (value,), key, piece)
    for path in plan.drifting:
        variable = next(each for each in cut.program.variables if each.path == path)
        yield Told(0, "drift", stage, (variable.spec,), path=path)


def parts_of(cut: Cut, phase: PhasePlan, stage: int) -> Iterator[tuple[PartKey, GradientPart]]:
    """The gradients that a stage makes in a phase, in one order everywhere."""
    for number in phase.requests:
        request = cut.program.requests[number]
        for part in request.ordered_parts:
            if part.stage == stage:
                yield request.key_of(part), part
