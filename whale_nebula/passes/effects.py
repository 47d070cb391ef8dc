"""Classify ops by side effects: lasting effects (writes, prints, Python calls) and checks (assertions)."""

from __future__ import annotations

from collections.abc import Collection

from whale_nebula.ir.graph import CAPTURE, Graph, Op
from whale_nebula.spec import Value

DRAWS = frozenset({
    "RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomUniformInt", "Multinomial", "RandomShuffle",
    "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2",
})  # fmt: skip
"""Ops that draw numbers from a state of their own."""
_HARMLESS = DRAWS | {
    "Placeholder", "Const", "VarHandleOp", "ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp",
    "VariableShape", "_ReadVariablesOp", "LookupTableFindV2", "LookupTableSizeV2", "EmptyTensorList",
    "TensorListReserve",
}  # fmt: skip

_RANDOM = (
    "StatelessRandom", "StatelessTruncated", "StatelessMultinomial", "StatelessParameterized", "StatelessShuffle",
    "StatelessSample",
)  # fmt: skip

SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank"})


def is_effect(op: Op, graph: Graph) -> bool:
    """Whether an op changes state outside the step's values; a loop does if its body does."""
    if op.functions:
        return any(is_effect(inner, graph) for name in op.functions for inner in graph.functions[name].ops)
    return op.stateful and op.type not in _HARMLESS


_CHECKS = frozenset({"Assert", "CheckNumerics", "CheckNumericsV2"})


def is_check(op: Op, graph: Graph, returned: Collection[Value] = ()) -> bool:
    """Whether an op is only an assertion.

    For a tensor, `tf.debugging.assert_less` makes a branch that asserts, whose result is unused.
    """
    if op.type in _CHECKS:
        return True
    bodies = [graph.functions[name] for name in op.functions]
    effects = [(inner, body) for body in bodies for inner in body.ops if is_effect(inner, body)]
    if not effects or _is_read(op, graph, returned):
        return False
    return all(is_check(inner, body, body.returns) for inner, body in effects)


def _is_read(op: Op, graph: Graph, returned: Collection[Value]) -> bool:
    """Whether a value is used other than by an Identity without readers."""
    readers = [reader for value in op.values for reader in graph.consumers(value)]
    read = any(reader.type != "Identity" or _is_read(reader, graph, returned) for reader in readers)
    return read or any(value in returned for value in op.values)


def draws(op: Op) -> bool:
    """Whether an op draws random numbers, different ones in each run."""
    return op.type in DRAWS


def is_random(op: Op) -> bool:
    """Whether an op draws numbers from a seed in its inputs."""
    return op.type.startswith(_RANDOM)


def seeded_by(op: Op, graph: Graph) -> set[int]:
    """The ops that a draw's seed depends on, without those of its shape."""
    whole = [value.op for value in op.inputs if not graph.spec(value).floating]
    return graph.ascend(whole, stop=lambda each: graph.ops[each].type in SHAPES)


def resources(op: Op, graph: Graph) -> tuple[int, ...]:
    """The captured handles that an op touches."""
    return tuple(
        value.op for value in op.inputs if graph.ops[value.op].role == CAPTURE and graph.spec(value).dtype == "resource"
    )


def written_inputs(op: Op, graph: Graph) -> tuple[int, ...]:
    """The positions of the resources that an effect may write; a cond or a loop only reads some of its own."""
    held = [position for position, value in enumerate(op.inputs) if graph.spec(value).dtype == "resource"]
    if not op.functions:
        return tuple(held)
    bodies = [graph.functions[name] for name in op.functions]
    return tuple(position for position in held if any(_writes(body, position - len(op.inputs)) for body in bodies))


def _writes(body: Graph, position: int) -> bool:
    """Whether a body writes one of its arguments, counted from the last."""
    if -position > len(body.arguments):
        return False
    argument = body.arguments[position]
    effects = (op for op in body.ops if is_effect(op, body))
    return any(op.inputs[at].op == argument for op in effects for at in written_inputs(op, body))


def written_handles(op: Op, graph: Graph) -> tuple[int, ...]:
    """The captured handles that an effect may write."""
    handles = (op.inputs[position].op for position in written_inputs(op, graph))
    return tuple(handle for handle in handles if graph.ops[handle].role == CAPTURE)


_PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
_OUTSIDE = _PYTHON | {"ReadFile", "MatchingFiles", "VarHandleOp"}
_SILENT = _CHECKS | {"Print", "PrintV2"}


def touches_outside(op: Op, graph: Graph) -> bool:
    """Whether an op may read or write state without a captured handle: Python's memory, a file, a resource that the
    trace creates by name.
    """
    if op.functions:
        bodies = [graph.functions[name] for name in op.functions]
        return any(touches_outside(inner, body) for body in bodies for inner in body.ops)
    if op.type in _OUTSIDE:
        return True
    held = [value.op for value in op.inputs if graph.spec(value).dtype == "resource"]
    known = any(graph.ops[each].role == CAPTURE or each in graph.arguments for each in held)
    return is_effect(op, graph) and op.type not in _SILENT and not known


def is_read(op: Op) -> bool:
    """Whether an op only reads a variable."""
    return op.type in ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
