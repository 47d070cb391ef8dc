"""Losses that wait for the update, so that the weight penalties of other stages cross once a step.

A penalty is made of variables, so it is the same number in each micro-batch, and the gradient of a sum reads none of
its terms. The sum of a loss and of another stage's penalty is therefore taken once, of the merged loss::

    stage a              stage b
    penalty ─once a step─▶ loss + penalty ◀─ loss, of each micro-batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from whale_nebula.ir.graph import FEED, Op
from whale_nebula.ir.program import Program
from whale_nebula.passes.label import made_of_variables

_ADDS = frozenset({"Add", "AddV2", "AddN", "Pack"})


class Late(NamedTuple):
    """`sums` are ops that wait for the update; `terms` those that their penalties come of, each made of one stage's
    variables: they are there before the first micro-batch.
    """

    sums: frozenset[int] = frozenset()
    terms: frozenset[int] = frozenset()


def late_sums(program: Program, small: Callable[[Op], bool], each: Callable[[Op], bool]) -> Late:
    """The ops of what is differentiated that may wait, and that add what another stage's variables are made of.

    `small` says of an op that it takes and gives only few numbers of the batch, `each` of a reader that it runs with
    each micro-batch. With `nb.loss_weight` the whole target is what is weighed, so there nothing waits.
    """
    if program.weights or len(program.stages) < 2:
        return Late()
    waiting = _waiting(program, small, each)
    homes = _homes(program) if waiting else {}
    found: set[int] = set()
    for op in program.graph.ops:
        if op.index in waiting and (_penalised(op, program, homes) or any(v.op in found for v in op.inputs)):
            found.add(op.index)
    return _parted(program, found, homes)


def _homes(program: Program) -> dict[int, set[int]]:
    """Of each op that is made of variables alone, the stages of what it is made of."""
    graph, found = program.graph, dict[int, set[int]]()
    alone = made_of_variables(graph)
    for op in graph.ops:
        if op.index in alone:
            above = [found[value.op] for value in op.inputs if value.op in found]
            own = program.labels.get(op.index)
            found[op.index] = set().union(*above) or ({own} if own is not None else set())
    return found


def _parted(program: Program, sums: set[int], homes: dict[int, set[int]]) -> Late:
    """What is made of several stages' variables is a sum, too; its terms are made of one's."""
    terms: set[int] = set()
    stack = [value.op for op in sums for value in program.graph.ops[op].inputs if value.op in homes]
    while stack:
        op = stack.pop()
        if len(homes[op]) < 2:
            terms.add(op)
        elif op not in sums:
            sums.add(op)
            stack += [value.op for value in program.graph.ops[op].inputs if value.op in homes]
    return Late(frozenset(sums), frozenset(terms))


def _waiting(program: Program, small: Callable[[Op], bool], each: Callable[[Op], bool]) -> set[int]:
    """The ops of targets that no gradient reads, and no op of the forward that must be there before the update."""
    graph = program.graph
    aims = graph.ascend(value.op for request in program.requests for value in request.targets)
    read = graph.ascend(_made_by_gradients(program))
    arriving = {arrival.boundary for request in program.requests for arrival in request.arrivals}
    found: set[int] = set()

    def waits(reader: Op) -> bool:
        if program.request_of(reader.index) is not None:
            return reader.index not in read
        return reader.index in found if reader.index in aims else not each(reader)

    for op in reversed(graph.ops):
        fed = any(value in arriving or graph.ops[value.op].role == FEED for value in op.inputs)
        if op.index in aims and not fed and small(op) and all(map(waits, _readers(program, op))):
            found.add(op.index)
    return found


def _made_by_gradients(program: Program) -> Iterator[int]:
    for request in program.requests:
        yield from (flow.gradient.op for flow in request.flows)
        yield from (value.op for part in request.parts for value in part.values)
        yield from (op for _, op in request.effects)


def _readers(program: Program, op: Op) -> Iterator[Op]:
    return (reader for value in op.values for reader in program.graph.consumers(value))


def _penalised(op: Op, program: Program, homes: dict[int, set[int]]) -> bool:
    own = {program.labels.get(op.index, -1)}
    return op.type in _ADDS and any(homes.get(value.op, own) - own for value in op.inputs)
