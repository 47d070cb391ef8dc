"""Take bundles of gradients apart: Keras hands all of them through one IdentityN, which ties every stage together.

An IdentityN gives what it gets, so whoever reads one of its outputs may as well read the input. This is done only to
what descends from gradients: in a forward an IdentityN may carry a custom gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from whale_nebula.ir.graph import Graph
from whale_nebula.ir.program import Program
from whale_nebula.ir.spec import Value

Aliases = Mapping[Value, Value]


def unbundle(program: Program) -> tuple[Program, Aliases]:
    """The program without bundles of gradients, and what each bundled value stands for.

    >>> from whale_nebula.ir.text import from_text
    >>> unbundle(Program(from_text("%0 = Const {value=(1,)} int32[]")))[1]
    {}
    """
    aliases = _aliases(program)
    if not aliases:
        return program, {}
    ops = tuple(
        replace(op, inputs=tuple(aliases.get(value, value) for value in op.inputs)) for op in program.graph.ops
    )
    graph = Graph(ops, program.graph.functions, program.graph.arguments, program.graph.returns)
    returns = tuple(aliases.get(value, value) for value in program.returns)
    return replace(program, graph=graph, returns=returns), aliases


def _aliases(program: Program) -> dict[Value, Value]:
    held = program.graph.descend(program.holders) if program.holders else set()
    found: dict[Value, Value] = {}
    for op in program.graph.ops:
        if op.type == "IdentityN" and op.index in held and program.request_of(op.index) is None:
            found.update({out: found.get(given, given) for out, given in zip(op.values, op.inputs, strict=True)})
    return found
