"""The parts of the user's batch that each worker of a plan reads.

An op that asks for the number of rows reads nothing of an input: every process can answer that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from whale_nebula.feed.checks import absent_error
from whale_nebula.feed.rows import RowsRead
from whale_nebula.ir.cut import Cut, Fragment
from whale_nebula.ir.graph import Graph, Op


class Reading(NamedTuple):
    """A read of an input's values, or (`rows`) of no more than its number of rows."""

    leaf: int
    op: Op
    fragment: Fragment
    rows: bool


def readings(cut: Cut, worker: str) -> Iterator[Reading]:
    """All that a worker reads of the user's batch."""
    program = cut.program
    yield from _marks(cut, worker)
    yield from _samples(cut, worker)
    for fragment in _fragments(cut, worker):
        own = frozenset(fragment.ops)
        for value in fragment.feeds:
            for op in program.graph.consumers(value) if value.op in program.leaf_ops else ():
                if op.index in own:
                    yield Reading(program.leaf_ops[value.op], op, fragment, asks_rows(program.graph, op))


def _marks(cut: Cut, worker: str) -> Iterator[Reading]:
    """The inputs that mark which rows a stage of this worker sends."""
    program = cut.program
    for boundary in cut.boundaries:
        leaf = None if boundary.mask is None else program.leaf_ops.get(boundary.mask.op)
        stage = next((s for s in cut.phases[boundary.phase].stages if s.stage == boundary.source), None)
        here = boundary.source in _stages(cut, worker)
        if here and leaf is not None and stage is not None and stage.forward is not None:
            yield Reading(leaf, program.graph.ops[boundary.value.op], stage.forward, False)


def _samples(cut: Cut, worker: str) -> Iterator[Reading]:
    """The inputs that name the samples whose differences a stage of this worker sends or takes."""
    program = cut.program
    home = {stage: each.cluster for each in cut.workers for stage in each.stages}
    for boundary in cut.boundaries:
        ends = {boundary.source, *boundary.destinations}
        if boundary.ids is None or len({home[stage] for stage in ends}) < 2:
            continue
        for fragment in _fragments(cut, worker):
            if fragment.stage in ends:
                ends.remove(fragment.stage)
                op = program.graph.ops[boundary.value.op]
                yield Reading(program.leaf_ops[boundary.ids.op], op, fragment, False)


def readers_of(cut: Cut, names: Collection[str]) -> Mapping[str, frozenset[str]]:
    """The workers that read the values of each of the named inputs: nobody else may learn anything of them."""
    readers: dict[str, set[str]] = {leaf.name: set() for leaf in cut.program.leaves if leaf.name in names}
    for worker in cut.workers:
        for reading in readings(cut, worker.name):
            name = cut.program.leaves[reading.leaf].name
            if not reading.rows and name in readers:
                readers[name].add(worker.name)
    return {name: frozenset(workers) for name, workers in readers.items()}


def _fragments(cut: Cut, worker: str) -> Iterator[Fragment]:
    staged = (f for phase in cut.phases for stage in phase.stages for f in (stage.forward, stage.backward))
    here = _stages(cut, worker)
    yield from (fragment for fragment in staged if fragment is not None and fragment.stage in here)
    for once in (cut.whole, cut.weight, *(phase.prologue for phase in cut.phases)):
        if worker in once:
            yield once[worker]
    for phase in cut.phases:
        yield from phase.updates.get(worker, ())


def _stages(cut: Cut, worker: str) -> frozenset[int | None]:
    """The stages that run on a worker."""
    return frozenset(stage for each in cut.workers if each.name == worker for stage in each.stages)


def asks_rows(graph: Graph, op: Op) -> bool:
    """Whether an op asks for a shape of which only the first axis is unknown, or is used."""
    if op.type != "Shape":
        return False
    shape = graph.spec(op.inputs[0]).shape
    if shape is not None and None not in shape[1:]:
        return True
    return all(_first_only(graph, user) for value in op.values for user in graph.consumers(value))


def _first_only(graph: Graph, op: Op) -> bool:
    if op.type != "StridedSlice":
        return False
    begin, end = (graph.ops[value.op].constant for value in op.inputs[1:3])
    return begin == (0,) and end == (1,)


def check_here(cut: Cut, worker: str, absent: Collection[int], where: Callable[[int], str]) -> None:
    """Refuse a plan in which a worker reads an input that it was not given: its number is in `absent`."""
    program, gone = cut.program, frozenset(absent)
    for reading in readings(cut, worker) if gone else ():
        if reading.leaf in gone and not reading.rows:
            reader = _reader(cut, reading.fragment, worker)
            op = reading.op
            raise absent_error(program.leaves[reading.leaf].name, reader, f"{op.name} ({op.type}), {where(op.index)}")
    for value in program.returns:
        number = program.leaf_ops.get(value.op)
        if number in gone:
            raise absent_error(program.leaves[number or 0].name, "what the step returns", "")


def _reader(cut: Cut, fragment: Fragment, worker: str) -> str:
    if fragment.stage is not None:
        stage = cut.program.stages[fragment.stage]
        return f"stage {stage.key!r} of cluster {stage.cluster!r}"
    clusters: Mapping[str, str] = {each.name: each.cluster for each in cut.workers}
    return f"the {_ONCE.get(fragment.kind, fragment.kind)} in cluster {clusters[worker]!r}"


_ONCE = {"whole": "part that is computed from the whole batch", "weight": "weight of a micro-batch"}


_OF_MICRO_BATCHES = frozenset({"forward", "backward", "fused"})


def rows_read(cut: Cut, worker: str) -> tuple[RowsRead, ...]:
    """The rows that a worker reads of each input: those of its micro-batches, where stages alone read them.

    What is computed once of the whole batch (a denominator that is made of a mask) reads all of it.
    """
    program = cut.program
    readers: dict[int, list[Fragment]] = {}
    for reading in readings(cut, worker):
        if not reading.rows:
            readers.setdefault(reading.leaf, []).append(reading.fragment)
    returned = {program.leaf_ops[value.op] for value in program.returns if value.op in program.leaf_ops}
    found = []
    for number, leaf in enumerate(program.leaves):
        readers_of = readers.get(number, [])
        uncut = bool(readers_of) and not leaf.batched
        all_rows = uncut or number in returned or not all(map(_by_rows, readers_of))
        stages = frozenset(each.stage for each in readers_of if each.stage is not None)
        found.append(RowsRead(program.pipeline.micro_batch, cut.routing, worker, stages, all_rows))
    return tuple(found)


def _by_rows(fragment: Fragment) -> bool:
    return fragment.stage is not None and fragment.kind in _OF_MICRO_BATCHES
