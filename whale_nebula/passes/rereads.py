"""Variables and lookup tables that are written from the batch and read again in one step, in micro-batches.

Uncut, the read finds what all rows have left. A micro-batch comes to the read before the others have written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.passes.effects import is_effect, resources, written
from whale_nebula.passes.reduce import WHOLE, Folding


def rereads(
    graph: Graph, own: Sequence[Op], each: Collection[int], once: Collection[int], folding: Folding
) -> Iterator[tuple[Op, Op]]:
    """Every write whose value the batch decides, with the first op that reads after it for `each` micro-batch.

    `each` are the ops that are run for every micro-batch, with its rows, or in the backward; what is read for none of
    them can wait. A write that is not done `once` comes before the reads of the next micro-batch, wherever it stands.
    """
    for write in own:
        if is_effect(write, graph) and any(folding.of(value).kind != WHOLE for value in write.inputs):
            handles = set(written(write, graph))
            touching = (op for op in graph.ops if op.outputs and op is not write)
            readers = [op for op in touching if handles.intersection(resources(op, graph))]
            after = graph.descend([write.index], control=True) if readers and write.index in once else None
            due = (op for op in readers if after is None or op.index in after)
            later = (op for op in due if not graph.descend([op.index]).isdisjoint(each))
            read = next(later, None)
            if read is not None:
                yield write, read
