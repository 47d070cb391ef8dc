"""Which rows of each input a worker reads, in a plan."""

from __future__ import annotations

from whale_nebula.feed.rows import RowsRead
from whale_nebula.ir.cut import Cut, Fragment
from whale_nebula.passes.readings import readings

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
