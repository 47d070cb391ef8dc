"""The verifier of programs before, between and after the passes.

It detects faults of passes, not of users: passes themselves refuse invalid user code, with its line.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from whale_nebula.ir.cut import Cut, Fragment
from whale_nebula.ir.graph import CAPTURE, Graph
from whale_nebula.ir.program import Leaf, Program, Variable
from whale_nebula.passes.phases import Parts
from whale_nebula.passes.readings import list_fragments
from whale_nebula.spec import Value

if TYPE_CHECKING:
    from whale_nebula.passes.pipeline import Compilation


class InvalidProgramError(ValueError):
    """Raised if a program is invalid after a pass."""


def verify(given: Compilation, name: str) -> None:
    """Raise an `InvalidProgramError` with all faults of a program after the pass of this name."""
    faults = list(find_faults(given))
    if faults:
        raise InvalidProgramError("\n  ".join([f"after pass {name!r} the program is not valid:", *faults]))


def find_faults(given: Compilation) -> Iterator[str]:
    """All faults, a sentence each."""
    yield from _program_faults(given.program)
    if given.phases is not None:
        yield from _phase_faults(given.program, given.phases)
    if given.cut is not None:
        yield from _cut_faults(given.cut)


def _program_faults(program: Program) -> Iterator[str]:
    graph, stages = program.graph, range(len(program.stages))
    for number, op in enumerate(graph.ops):
        if op.index != number:
            yield f"op {number} has the number {op.index}"
        for value in op.inputs:
            if value.op >= number or not _exists(graph, value):
                yield f"op {number} {op.type} reads {value}, which is not made before it"
    for labelled, stage in program.labels.items():
        if labelled not in range(len(graph)) or stage not in stages:
            yield f"op {labelled} is labelled with stage {stage} of {len(stages)}"
    named = chain(program.returns, program.weights, program.masks, program.masks.values())
    for request in program.requests:
        arrivals = (value for each in request.arrivals for value in (each.boundary, each.feed))
        made = chain.from_iterable(each.values for each in request.parts)
        held = chain.from_iterable(each.values for each in request.holders)
        flows = (value for each in request.flows for value in (each.boundary, each.gradient))
        named = chain(named, request.targets, request.given, arrivals, made, held, flows)
        if len(request.merges) not in (0, len(request.sources)):
            yield f"request {request.index} merges {len(request.merges)} of {len(request.sources)} gradients"
        if any(op not in range(len(graph)) for op in request.backward):
            yield f"the backward of request {request.index} has ops that are not there"
    yield from (f"{value} is named, and not there" for value in named if not _exists(graph, value))
    holders: list[Leaf | Variable] = [*program.leaves, *program.variables]
    yield from (f"{each} is held by no op" for each in holders if each.op not in range(len(graph)))


def _exists(graph: Graph, value: Value) -> bool:
    return 0 <= value.op < len(graph) and 0 <= value.out < len(graph.ops[value.op].outputs)


def _phase_faults(program: Program, phases: Parts) -> Iterator[str]:
    if len(phases.phase_of) != len(program.requests):
        yield f"{len(program.requests)} requests, and phases of {len(phases.phase_of)}"
    if list(phases.phase_of) != sorted(phases.phase_of):
        yield f"requests go back from phase to phase: {phases.phase_of}"
    for op, part in phases.part.items():
        if not 0 <= part < 3 * phases.phases:
            yield f"op {op} runs in part {part} of {phases.phases} phases"


def _cut_faults(cut: Cut) -> Iterator[str]:
    workers = {worker.name for worker in cut.workers}
    skipped = (stage.skip for phase in cut.phases for stage in phase.stages if stage.skip is not None)
    for fragment in (*list_fragments(cut), *skipped):
        yield from _fragment_faults(cut.program.graph, fragment)
        if fragment.worker not in workers:
            yield f"{_name(fragment)} runs on {fragment.worker}, which there is not"
    for boundary in cut.boundaries:
        if not boundary.destinations or boundary.source in boundary.destinations:
            yield f"boundary {boundary.slot} goes from stage {boundary.source} to {boundary.destinations}"
        if not _exists(cut.program.graph, boundary.value):
            yield f"boundary {boundary.slot} carries {boundary.value}, which is not there"
    if [boundary.slot for boundary in cut.boundaries] != list(range(len(cut.boundaries))):
        yield "boundaries are not numbered in their order"
    for phase in cut.phases:
        for each in phase.crossings:
            if each.source in each.destinations or not workers.issuperset((each.source, *each.destinations)):
                yield f"{each.value} crosses from {each.source} to {each.destinations}"
            readers = (fragment for worker in each.destinations for fragment in phase.updates.get(worker, ()))
            for fragment in readers:
                if each.value in fragment.feeds and fragment.round <= each.round:
                    yield f"{_name(fragment)} reads {each.value} before it has crossed, in round {fragment.round}"


def _fragment_faults(graph: Graph, fragment: Fragment) -> Iterator[str]:
    inside, fed = set(fragment.ops), set(fragment.feeds)
    if len(inside) != len(fragment.ops):
        yield f"{_name(fragment)} has an op twice"
    for op in fragment.ops:
        for value in graph.ops[op].inputs:
            if value.op not in inside and value not in fed and graph.ops[value.op].role != CAPTURE:
                yield f"{_name(fragment)} reads {value} for op {op}, which it neither makes nor is fed"
    for value in fragment.fetches:
        if value.op not in inside and value not in fed:
            yield f"{_name(fragment)} gives {value}, which it neither makes nor is fed"


def _name(fragment: Fragment) -> str:
    stage = "" if fragment.stage is None else f" of stage {fragment.stage}"
    return f"the {fragment.kind}{stage} in phase {fragment.phase} on {fragment.worker}"
