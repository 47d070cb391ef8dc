"""The temporary tensors of an update, counted in its ops.

TensorFlow runs an op as soon as its operands exist, and writes a result into the memory of an operand that no other op
reads. The gradient itself is handed over to the update, so that its memory is reused as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.ir.program import Program
from whale_nebula.passes.facts import ASSIGNS
from whale_nebula.spec import Spec, Value

_ALIASES = frozenset({"Identity", "IdentityN", "StopGradient"})
_FREE = _ALIASES | {"ReadVariableOp"}
"""Ops whose results are in the memory of an operand or of a variable."""


def count_update_temporaries(program: Program) -> int | None:
    """The number of tensors of the size of the largest trained variable that its update needs next to its gradient;
    None if no variable has a dense gradient.
    """
    holders = {
        request.origins[holder.source]: holder.values[0]
        for request in program.requests
        for holder in request.holders
        if len(holder.values) == 1
    }
    trained = [op for op in holders if op in program.variable_ops]
    if not trained:
        return None
    largest = max(trained, key=lambda op: program.variable_ops[op].spec.nbytes())
    spec = program.variable_ops[largest].spec
    return count_temporaries(program.graph, holders[largest], largest, spec)


def count_temporaries(graph: Graph, gradient: Value, variable: int, spec: Spec) -> int:
    """The most tensors of a variable's form that exist at once in its update, in addition to its gradient."""
    below = graph.descend([gradient.op])
    written = {op.inputs[0].op for op in graph.ops if op.type in ASSIGNS and op.index in below}
    known = {op for op in written if _reads_form(graph, op, spec)} | {variable}
    writes = [op.index for op in graph.ops if op.type in ASSIGNS and op.inputs[0].op in known]
    ops = [op for op in map(graph.ops.__getitem__, sorted(graph.ascend(writes))) if op.inputs]
    large = {value for op in ops for value, own in zip(op.values, op.outputs, strict=True) if own.shape == spec.shape}
    return _count_peak(graph, ops, large | {gradient}, gradient)


def _reads_form(graph: Graph, variable: int, spec: Spec) -> bool:
    """Whether a variable has this form, by a read of it."""
    reads = (op for op in graph.consumers(Value(variable)) if op.type == "ReadVariableOp")
    return any(op.outputs[0].shape == spec.shape for op in reads)


def _count_peak(graph: Graph, ops: Iterable[Op], large: set[Value], gradient: Value) -> int:
    """The most large tensors that exist at once, less the gradient, if every op runs as soon as it can."""
    owner: dict[Value, Value] = {gradient: gradient}
    levels: dict[int, int] = defaultdict(int)
    readers: dict[Value, list[Op]] = defaultdict(list)
    by_level: dict[int, list[Op]] = defaultdict(list)
    for op in ops:
        takes_time = op.type not in _FREE and not large.isdisjoint((*op.inputs, *op.values))
        levels[op.index] = takes_time + max(levels[each] for each in (*(value.op for value in op.inputs), *op.control))
        if op.type in _ALIASES:
            owner |= {value: owner[given] for value, given in zip(op.values, op.inputs, strict=True) if given in owner}
        elif op.type not in _FREE:
            owner |= {value: value for value in large.intersection(op.values)}
            by_level[levels[op.index]].append(op)
            for value in _list_operands(op, owner):
                readers[value].append(op)
    alive, most = {gradient}, 1
    for level in sorted(by_level):
        freed = {value for value in alive if all(levels[op.index] <= level for op in readers[value])}
        made = [value for op in by_level[level] for value in op.values if owner.get(value) == value]
        counts = Counter(value for op in by_level[level] for value in _list_operands(op, owner))
        free = {value for value in freed if counts[value] == 1}
        reuses = sum(
            not free.isdisjoint(_list_operands(op, owner)) for op in by_level[level] if Value(op.index) in made
        )
        most = max(most, len(alive) + len(made) - reuses)
        alive = (alive - freed) | set(made)
    return most - 1


def _list_operands(op: Op, owner: Mapping[Value, Value]) -> set[Value]:
    """The large tensors that an op reads."""
    return {owner[value] for value in op.inputs if value in owner}
