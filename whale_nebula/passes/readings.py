"""The parts of the user's batch that each worker of a plan reads.

An op that needs only the number of rows does not read an input, as every process has that number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from whale_nebula.feed.checks import absent_error
from whale_nebula.feed.rows import WorkerRows
from whale_nebula.ir.cut import Cut, Fragment
from whale_nebula.ir.graph import Graph, Op
from whale_nebula.spec import Value


class Reading(NamedTuple):
    """A read of an input's values, or (`rows`) of only its number of rows."""

    leaf: int
    op: Op
    fragment: Fragment
    rows: bool


def list_readings(cut: Cut, worker: str) -> Iterator[Reading]:
    """All reads of the user's batch by a worker."""
    program, graph = cut.program, cut.program.graph
    here = frozenset(stage for each in cut.workers if each.name == worker for stage in each.stages)
    fragments = [
        each for each in list_fragments(cut) if each.stage in here or (each.stage, each.worker) == (None, worker)
    ]
    yield from _list_mask_and_id_readings(cut, fragments)
    for fragment in fragments:
        own = frozenset(fragment.ops)
        for value in fragment.feeds:
            for op in graph.consumers(value) if value.op in program.leaf_ops else ():
                if op.index in own:
                    yield Reading(program.leaf_ops[value.op], op, fragment, needs_only_rows(graph, op))


def _list_mask_and_id_readings(cut: Cut, fragments: Sequence[Fragment]) -> Iterator[Reading]:
    """The inputs that are masks of the rows that a stage of a worker sends, and those with the ids of samples whose
    differences it sends or receives.
    """
    leaves = cut.program.leaf_ops
    home = {stage: each.cluster for each in cut.workers for stage in each.stages}
    for boundary in cut.boundaries:
        op = cut.program.graph.ops[boundary.value.op]
        ends = {boundary.source, *boundary.destinations}
        for fragment in fragments:
            made_in = boundary.phase, boundary.source
            forward = fragment.kind in ("forward", "fused") and (fragment.phase, fragment.stage) == made_in
            if forward and boundary.mask is not None and boundary.mask.op in leaves:
                yield Reading(leaves[boundary.mask.op], op, fragment, False)
            if boundary.ids is not None and fragment.stage in ends and len({home[stage] for stage in ends}) > 1:
                yield Reading(leaves[boundary.ids.op], op, fragment, False)


def find_readers(cut: Cut, names: Collection[str]) -> Mapping[str, frozenset[str]]:
    """For each of the named inputs, the workers that read its values; the input must not be sent to others."""
    readers: dict[str, set[str]] = {leaf.name: set() for leaf in cut.program.leaves if leaf.name in names}
    for worker in cut.workers:
        for reading in list_readings(cut, worker.name):
            name = cut.program.leaves[reading.leaf].name
            if not reading.rows and name in readers:
                readers[name].add(worker.name)
    return {name: frozenset(workers) for name, workers in readers.items()}


def list_fragments(cut: Cut) -> Iterator[Fragment]:
    """All fragments of a step, those of stages first."""
    yield from (fragment for phase in cut.phases for stage in phase.stages for fragment in stage.fragments)
    for by_worker in (cut.batch_fragments, cut.weight_fragments, *(phase.prologue for phase in cut.phases)):
        yield from by_worker.values()
    for phase in cut.phases:
        yield from chain.from_iterable(phase.updates.values())


def needs_only_rows(graph: Graph, op: Op) -> bool:
    """Whether an op uses nothing of its input but the number of rows."""
    if op.type != "Shape":
        return False
    shape = graph.spec(op.inputs[0]).shape
    if shape is not None and None not in shape[1:]:
        return True
    users = (user for value in op.values for user in graph.consumers(value))
    first = [(0,), (1,)]
    return all(u.type == "StridedSlice" and [graph.ops[v.op].constant for v in u.inputs[1:3]] == first for u in users)


def bind_readers(
    graph: Graph, leaves: Sequence[int], homes: Mapping[int, Collection[str]], clusters: Sequence[str]
) -> dict[int, frozenset[int]]:
    """The stages that may run each op that reads an input, by the clusters of the stages and those that have the input:
    `homes`, by the number of the input. `leaves` are the ops of inputs.
    """
    found: dict[int, frozenset[int]] = {}
    for number, holders in homes.items():
        allowed = frozenset(stage for stage, cluster in enumerate(clusters) if cluster in holders)
        for op in graph.consumers(Value(leaves[number])):
            if not needs_only_rows(graph, op):
                found[op.index] = found.get(op.index, allowed) & allowed
    return found


def check_absent_inputs(cut: Cut, worker: str, absent: Collection[int], where: Callable[[int], str]) -> None:
    """Refuse a plan in which a worker reads an input that it does not have: its number is in `absent`."""
    program, gone = cut.program, frozenset(absent)
    for reading in list_readings(cut, worker) if gone else ():
        if reading.leaf in gone and not reading.rows:
            op, reader = reading.op, _describe_reader(cut, reading.fragment, worker)
            raise absent_error(program.leaves[reading.leaf].name, reader, f"{op.label}, {where(op.index)}")
    for value in program.returns:
        number = program.leaf_ops.get(value.op)
        if number in gone:
            raise absent_error(program.leaves[number or 0].name, "the return value of the step", "")


def _describe_reader(cut: Cut, fragment: Fragment, worker: str) -> str:
    if fragment.stage is not None:
        stage = cut.program.stages[fragment.stage]
        return f"stage {stage.key!r} of cluster {stage.cluster!r}"
    cluster = next(each.cluster for each in cut.workers if each.name == worker)
    return f"the {_FRAGMENT_NAMES.get(fragment.kind, fragment.kind)} in cluster {cluster!r}"


_FRAGMENT_NAMES = {"whole": "part that is computed from the whole batch", "weight": "weight of a micro-batch"}


def find_rows_read(cut: Cut, worker: str) -> tuple[WorkerRows, ...]:
    """The rows that a worker reads of each input: those of its micro-batches, if only stages read the input.

    Values that are computed once from the whole batch (a denominator from a mask) read all of it.
    """
    program = cut.program
    readers: dict[int, list[Fragment]] = {}
    for reading in list_readings(cut, worker):
        if not reading.rows:
            readers.setdefault(reading.leaf, []).append(reading.fragment)
    returned = {program.leaf_ops[value.op] for value in program.returns if value.op in program.leaf_ops}
    found = []
    for number, leaf in enumerate(program.leaves):
        own = readers.get(number, [])
        all_rows = number in returned or bool(own and not leaf.batched) or any(each.stage is None for each in own)
        stages = frozenset(each.stage for each in own if each.stage is not None)
        found.append(WorkerRows(program.pipeline.micro_batch, cut.routings[worker], worker, stages, all_rows))
    return tuple(found)
