"""Take bundles of gradients apart: Keras hands all of them through one IdentityN, which ties every stage together.

An IdentityN gives what it gets, so whoever reads one of its outputs may as well read the input. This is done only to
what descends from gradients: in a forward an IdentityN may carry a custom gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import Program
from whale_nebula.spec import Value

Aliases = Mapping[Value, Value]


def unbundle(program: Program) -> tuple[Program, Aliases]:
    """The program without bundles of gradients, and what each bundled value stands for.

    >>> from whale_nebula.ir.text import from_text
    >>> unbundle(Program(from_text("%0 = Const {value=(1,)} int32[]")))[1]
    {}
    """
    held = program.graph.descend(program.holders) if program.holders else set()
    aliases = bundled(program.graph, lambda op: op in held and program.request_of(op) is None)
    if not aliases:
        return program, {}
    returns = tuple(aliases.get(value, value) for value in program.returns)
    return replace(program, graph=rewired(program.graph, aliases), returns=returns), aliases


def bundled(graph: Graph, chosen: Callable[[int], bool]) -> Aliases:
    """What each output of the chosen bundles stands for."""
    found: dict[Value, Value] = {}
    for op in graph.ops:
        if op.type == "IdentityN" and chosen(op.index):
            found.update({out: found.get(given, given) for out, given in zip(op.values, op.inputs, strict=True)})
    return found


def rewired(graph: Graph, aliases: Aliases) -> Graph:
    """The graph in which every op reads what the bundle was given."""
    ops = tuple(replace(op, inputs=tuple(aliases.get(value, value) for value in op.inputs)) for op in graph.ops)
    return Graph(ops, graph.functions, graph.arguments, graph.returns)
