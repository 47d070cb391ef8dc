"""How often a loop of a program turns, where the graph itself tells.

A loop over a known number of steps is written with integers: a limit that TensorFlow keeps beside the loop, or a
counter that the condition compares. Both are followed here; a loop that waits for a tensor's value is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.ir.integers import Numbers, Site, integers
from whale_nebula.spec import Value

LOOPS = frozenset({"While", "StatelessWhile"})
MOST = 10_000
_LIMIT, _BODY = 1, 1  # inputs of a loop: its counter, its limit, what it carries; functions: its condition, its body


def turns(op: Op, graph: Graph, numbers: Mapping[Value, Numbers]) -> int | None:
    """How often a loop turns, given the integers that are known outside it."""
    limit = numbers.get(op.inputs[_LIMIT]) if len(op.inputs) > _LIMIT else None
    if limit is not None and len(limit) == 1 and limit[0] > 0:
        return limit[0]
    return _counted(op, graph, [numbers.get(value) for value in op.inputs])


def _counted(op: Op, graph: Graph, state: list[Numbers | None]) -> int | None:
    """Turn the loop with nothing but the integers that its condition asks for."""
    condition, body = graph.functions[op.functions[0]], graph.functions[op.functions[_BODY]]
    asked = _carried(condition, body)
    for turn in range(MOST):
        (goes_on,) = _evaluated(condition, condition.returns[:1], state)
        if goes_on is None:
            return None
        if not goes_on[0]:
            return turn
        after = dict(zip(asked, _evaluated(body, [body.returns[place] for place in asked], state), strict=True))
        state = [after.get(place, before) for place, before in enumerate(state)]
    return None


def _carried(condition: Graph, body: Graph) -> list[int]:
    """The places of what the condition reads, and of what the body makes these from."""
    found = _read(condition, condition.returns[:1])
    while True:
        more = found | _read(body, [body.returns[place] for place in found])
        if more == found:
            return sorted(found)
        found = more


def _read(graph: Graph, values: Sequence[Value]) -> set[int]:
    above = graph.ascend(value.op for value in values)
    return {place for place, argument in enumerate(graph.arguments) if argument in above}


def _evaluated(graph: Graph, values: Sequence[Value], state: Sequence[Numbers | None]) -> list[Numbers | None]:
    known: dict[Value, Numbers] = {}
    given = zip(graph.arguments, state, strict=False)
    known.update({Value(argument): numbers for argument, numbers in given if numbers is not None})
    for index in sorted(graph.ascend(value.op for value in values)):
        op = graph.ops[index]
        shapes = tuple(None if v not in known else (len(known[v]),) for v in op.inputs)
        found = integers(Site(op, shapes, tuple(known.get(value) for value in op.inputs)))
        known.update((value, each) for value, each in zip(op.values, found, strict=False) if each is not None)
    return [known.get(value) for value in values]
