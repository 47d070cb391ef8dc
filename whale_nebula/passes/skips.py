"""What a replica does for a micro-batch that another one takes: it draws the same seeds, and does nothing else.

The seeds of a stage's dropout advance with each micro-batch. A replica that let them stand for those of the others
would draw the numbers of micro-batch 1 for micro-batch 2; so results would depend on how many replicas there are.
"""

from __future__ import annotations

from collections.abc import Collection

from whale_nebula.ir.cut import Fragment
from whale_nebula.ir.program import Program
from whale_nebula.passes.effects import is_effect, written


def skip(program: Program, fragment: Fragment | None) -> tuple[Fragment | None, tuple[str, ...]]:
    """The part of a stage's forward that does not ask which rows it is given, and what it writes; and the paths of the
    variables that it writes from its rows.
    """
    if fragment is None:
        return None, ()
    graph, own = program.graph, frozenset(fragment.ops)
    writes = [op for op in fragment.ops if is_effect(graph.ops[op], graph) and written(graph.ops[op], graph)]
    asks = _asks(program, fragment)
    free = [op for op in writes if asks.isdisjoint(_above([op], program, own))]
    bound = {handle for op in writes if op not in free for handle in written(graph.ops[op], graph)}
    drifting = tuple(sorted(program.variable_ops[handle].path for handle in bound if handle in program.variable_ops))
    if not free:
        return None, drifting
    ops = tuple(sorted(op for op in _above(free, program, own) if op in own))
    read = {value for op in ops for value in graph.ops[op].inputs}
    feeds = tuple(value for value in fragment.feeds if value in read)
    return Fragment("skip", fragment.phase, fragment.stage, fragment.worker, 0, ops, feeds, ()), drifting


def _asks(program: Program, fragment: Fragment) -> frozenset[int]:
    """The ops through which a fragment is fed what differs from one micro-batch to the next."""
    scaled = {program.share, program.grow}
    return frozenset(
        value.op
        for value in fragment.feeds
        if value in scaled
        or value.op in program.of_batch
        or value.op in program.arrivals
        or program.labels.get(value.op, fragment.stage) != fragment.stage
    )


def _above(ops: Collection[int], program: Program, own: Collection[int]) -> set[int]:
    """Ops with all that they read, within a fragment and one step beyond it."""
    graph = program.graph
    found, pending = set(ops), list(ops)
    while pending:
        op = pending.pop()
        before = [value.op for value in graph.ops[op].inputs] + [each for each in graph.ops[op].control if each in own]
        for each in before:
            if each not in found:
                found.add(each)
                if each in own:
                    pending.append(each)
    return found
