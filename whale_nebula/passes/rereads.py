"""Variables that are written from the batch and read again in the same step, by what micro-batches compute.

Uncut, the read finds what all rows have left. A micro-batch comes to the read before the others have written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.passes.effects import is_effect, resources, written
from whale_nebula.passes.reduce import Folding


def rereads(graph: Graph, own: Sequence[Op], each: Collection[int], folding: Folding) -> Iterator[tuple[Op, Op]]:
    """Every write whose value the batch decides, with the first op that reads after it for `each` micro-batch.

    `each` are the ops that are run for every micro-batch, with its rows; what is read for none of them can wait.
    """
    for write in own:
        if is_effect(write, graph) and any(folding.of(value).kind != "whole" for value in write.inputs):
            handles = set(written(write, graph))
            readers = [op for op in own if op.outputs and handles.intersection(resources(op, graph))]
            after = graph.descend([write.index], control=True) - {write.index} if readers else ()
            later = (op for op in readers if op.index in after and not graph.descend([op.index]).isdisjoint(each))
            read = next(later, None)
            if read is not None:
                yield write, read
