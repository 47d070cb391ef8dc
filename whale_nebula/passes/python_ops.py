"""Python inside a step (`tf.py_function`, `tf.numpy_function`): it runs, but it cannot be moved.

The function lives in the process that traced it; a cluster's process traces its own. TensorFlow keeps what the
gradient of a `tf.py_function` needs for one call at a time, so no more than one micro-batch may be between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from whale_nebula.ir.graph import Graph, Op
from whale_nebula.ir.program import Program

_CALLED = {"EagerPyFunc": "tf.py_function", "PyFunc": "tf.numpy_function", "PyFuncStateless": "tf.numpy_function"}


def one_in_flight(program: Program) -> Program:
    """The program, with one micro-batch in flight where the gradient of a `tf.py_function` asks for it."""
    graph, pipeline = program.graph, program.pipeline
    backward = {op for request in program.requests for op in request.backward}
    differentiated = any(op.type == "EagerPyFunc" and op.index in backward for op in _each(graph, graph.ops))
    if not differentiated or pipeline.micro_batch < 2 or pipeline.in_flight == 1:
        return program
    return replace(program, pipeline=replace(pipeline, in_flight=1))


def python_notes(program: Program, where: Callable[[int], str]) -> list[str]:
    """A line for each place where a step calls Python."""
    backward = {op for request in program.requests for op in request.backward}
    found: list[str] = []
    for op in program.graph.ops:
        inner = (each for each in _each(program.graph, [op]) if each.type in _CALLED)
        called = next((_CALLED[each.type] for each in inner), None)
        if called is not None and op.index not in backward:
            found.append(f"{called} at {where(op.index)} {_home(program, op)}")
    return list(dict.fromkeys(found))


def _home(program: Program, op: Op) -> str:
    label = program.labels.get(op.index)
    if label is None:
        return "cannot be moved: it runs Python, in the process that traced it"
    stage = program.stages[label]
    return f"cannot be moved out of stage {stage.key!r}: it runs Python, in the process of cluster {stage.cluster!r}"


def _each(graph: Graph, ops: Iterable[Op], seen: set[str] | None = None) -> Iterator[Op]:
    """Ops, and those in the bodies that they call."""
    seen = set() if seen is None else seen
    for op in ops:
        yield op
        for name in op.functions:
            if name not in seen:
                seen.add(name)
                yield from _each(graph, graph.functions[name].ops, seen)
