"""Classify ops: effects (writes, prints, Python calls), checks (assertions), random draws, and reads of variables."""

from __future__ import annotations

from collections.abc import Collection

from whale_nebula.ir.graph import CAPTURE, Graph, Op
from whale_nebula.ir.program import Program
from whale_nebula.spec import Value

STATEFUL_DRAWS = frozenset({
    "RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomUniformInt", "Multinomial", "RandomShuffle",
    "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2",
})  # fmt: skip
"""Ops that draw numbers from a state in their kernel, which is no effect."""
_OPS_WITHOUT_EFFECT = STATEFUL_DRAWS | {
    "Placeholder", "Const", "VarHandleOp", "ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp",
    "VariableShape", "_ReadVariablesOp", "LookupTableFindV2", "LookupTableSizeV2", "EmptyTensorList",
    "TensorListReserve",
}  # fmt: skip

_SEEDED_DRAWS = (
    "StatelessRandom", "StatelessTruncated", "StatelessMultinomial", "StatelessParameterized", "StatelessShuffle",
    "StatelessSample",
)  # fmt: skip

SHAPE_OPS = frozenset({"Shape", "ShapeN", "Size", "Rank"})


def is_effect(op: Op, graph: Graph) -> bool:
    """Whether an op changes state outside the step's values; a loop does if its body does."""
    if op.functions:
        return any(is_effect(inner, graph) for name in op.functions for inner in graph.functions[name].ops)
    return op.stateful and op.type not in _OPS_WITHOUT_EFFECT


_CHECK_OPS = frozenset({"Assert", "CheckNumerics", "CheckNumericsV2"})


def is_check(op: Op, graph: Graph, returned: Collection[Value] = ()) -> bool:
    """Whether an op is only an assertion.

    For a tensor, `tf.debugging.assert_less` makes a branch that asserts, whose result is unused.
    """
    if op.type in _CHECK_OPS:
        return True
    bodies = [graph.functions[name] for name in op.functions]
    effects = [(inner, body) for body in bodies for inner in body.ops if is_effect(inner, body)]
    if not effects or _has_reader(op, graph, returned):
        return False
    return all(is_check(inner, body, body.returns) for inner, body in effects)


def _has_reader(op: Op, graph: Graph, returned: Collection[Value]) -> bool:
    """Whether a result of an op is returned, or read by an op other than an Identity without readers."""
    readers = [reader for value in op.values for reader in graph.consumers(value)]
    read = any(reader.type != "Identity" or _has_reader(reader, graph, returned) for reader in readers)
    return read or any(value in returned for value in op.values)


def is_stateful_draw(op: Op) -> bool:
    """Whether an op draws random numbers from a state in its kernel, different ones in each run."""
    return op.type in STATEFUL_DRAWS


def is_seeded_draw(op: Op) -> bool:
    """Whether an op draws numbers from a seed in its inputs."""
    return op.type.startswith(_SEEDED_DRAWS)


def find_seed_ops(op: Op, graph: Graph) -> set[int]:
    """The ops that a draw's seed depends on, without those of its shape."""
    whole = [value.op for value in op.inputs if not graph.spec(value).floating]
    return graph.ascend(whole, stop=lambda each: graph.ops[each].type in SHAPE_OPS)


def list_resources(op: Op, graph: Graph) -> tuple[int, ...]:
    """The ops of the captured resource handles that an op has as inputs."""
    return tuple(
        value.op for value in op.inputs if graph.ops[value.op].role == CAPTURE and graph.spec(value).dtype == "resource"
    )


def find_written_inputs(op: Op, graph: Graph) -> tuple[int, ...]:
    """The positions of the inputs whose resources an effect may write; of a cond or loop those that a body writes."""
    held = [position for position, value in enumerate(op.inputs) if graph.spec(value).dtype == "resource"]
    if not op.functions:
        return tuple(held)
    written = set[int]()  # positions counted from the last input
    for body in map(graph.functions.__getitem__, op.functions):
        effects = [each for each in body.ops if is_effect(each, body)]
        handles = {each.inputs[at].op for each in effects for at in find_written_inputs(each, body)}
        written.update(n - len(body.arguments) for n, each in enumerate(body.arguments) if each in handles)
    return tuple(position for position in held if position - len(op.inputs) in written)


def find_written_handles(op: Op, graph: Graph) -> tuple[int, ...]:
    """The ops of the captured handles that an effect may write."""
    handles = (op.inputs[position].op for position in find_written_inputs(op, graph))
    return tuple(handle for handle in handles if graph.ops[handle].role == CAPTURE)


def list_written_variables(program: Program) -> frozenset[str]:
    """The paths of the variables that a program may write."""
    effects = (op for op in program.graph.ops if is_effect(op, program.graph))
    written = {handle for op in effects for handle in find_written_handles(op, program.graph)}
    return frozenset(variable.path for op, variable in program.variable_ops.items() if op in written)


_PYTHON_OPS = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
_EXTERNAL_OPS = _PYTHON_OPS | {"ReadFile", "MatchingFiles", "VarHandleOp"}
_IGNORED_OPS = _CHECK_OPS | {"Print", "PrintV2"}


def touches_external_state(op: Op, graph: Graph) -> bool:
    """Whether an op may read or write state without a captured handle: Python's memory, a file, a resource that the
    trace creates by name.
    """
    if op.functions:
        bodies = [graph.functions[name] for name in op.functions]
        return any(touches_external_state(inner, body) for body in bodies for inner in body.ops)
    if op.type in _EXTERNAL_OPS:
        return True
    held = [value.op for value in op.inputs if graph.spec(value).dtype == "resource"]
    known = any(graph.ops[each].role == CAPTURE or each in graph.arguments for each in held)
    return is_effect(op, graph) and op.type not in _IGNORED_OPS and not known


def is_read(op: Op) -> bool:
    """Whether an op only reads a variable."""
    return op.type in ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
