"""Check the order of stages: within a phase no tensor flows back to an earlier stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from whale_nebula.errors import PlacementError, StageOrderError
from whale_nebula.ir.cut import Worker
from whale_nebula.ir.graph import LAYER, Graph, Op
from whale_nebula.ir.program import Program, Stage
from whale_nebula.passes.batch import BatchFolds
from whale_nebula.passes.effects import is_random, is_read, resources, seeded_by, written_handles
from whale_nebula.passes.phases import FORWARD, UPDATE, Parts
from whale_nebula.passes.rules import COUPLED, ROWS, SAME_SEED, Fold
from whale_nebula.site import Origin


def in_flow_order(graph: Graph, stages: Sequence[str]) -> list[str]:
    """The stages so that tensors go forward, and else as they are; where they go in a circle, all as they are.

    A functional model runs its nodes by depth, so the stage that was written first need not be entered first.

    >>> from whale_nebula.ir.text import from_text
    >>> graph = from_text('''
    ... %0 = Const float32[4]
    ... %1 = Neg(%0) float32[4] @head
    ... %2 = Exp(%0) float32[4] @trunk
    ... %3 = Add(%1, %2) float32[4] @head
    ... ''')
    >>> in_flow_order(graph, ["head", "trunk"])
    ['trunk', 'head']
    """
    feeding = _feeding(graph, stages)
    ordered: list[str] = []
    while len(ordered) < len(stages):
        ready = [key for key in stages if key not in ordered and feeding[key].issubset(ordered)]
        if not ready:
            return list(stages)
        ordered.append(ready[0])
    return ordered


def _feeding(graph: Graph, stages: Sequence[str]) -> dict[str, set[str]]:
    """The stages whose tensors each stage reads, at once or by way of ops that no scope stamped."""
    feeding: dict[str, set[str]] = {key: set() for key in stages}
    above: dict[int, frozenset[str]] = {}
    for op in graph.ops:
        before = frozenset[str]().union(*(above[value.op] for value in op.inputs))
        if op.stage is not None and op.stage in feeding:
            feeding[op.stage] |= before - {op.stage}
            before = frozenset({op.stage})
        above[op.index] = before
    return feeding


def check_order(
    graph: Graph,
    labels: Mapping[int, int],
    stages: tuple[Stage, ...],
    *,
    phase_of: Callable[[int], int] = lambda op: 0,
    where: Callable[[int], str] = lambda op: "",
) -> None:
    """Raise where an op of a stage reads what a later stage makes in the same phase."""
    for op in graph.ops:
        stage = labels.get(op.index)
        if stage is None:
            continue
        for value in op.inputs:
            source = labels.get(value.op, stage)
            if source > stage and phase_of(value.op) == phase_of(op.index):
                placed = _find_placed_layer(graph, labels, op.index), _find_placed_layer(graph, labels, value.op)
                raise _cycle(graph, stages[source], stages[stage], value.op, op.index, where, placed)


def backwards(later: Stage, earlier: Stage, where: str) -> StageOrderError:
    """The error for a gradient that would have to flow from an earlier stage into a later one."""
    second = f"nb.stage(cluster={earlier.cluster!r}, name={earlier.key + '_2'!r})"
    return StageOrderError(
        f"a gradient flows from stage {earlier.key!r} back into {later.key!r}, which comes after it",
        where=where,
        why=f"{earlier.key!r} reads what {later.key!r} made before it, in an earlier part of the step",
        mend=f"give what comes after it a name of its own: {second}, or tf.stop_gradient around what it reads",
    )


def _cycle(
    graph: Graph,
    later: Stage,
    earlier: Stage,
    source: int,
    reader: int,
    where: Callable[[int], str],
    placed: tuple[str, str],
) -> StageOrderError:
    made, read = graph.ops[source], graph.ops[reader]
    second = f"nb.stage(cluster={earlier.cluster!r}, name={earlier.key + '_2'!r})"
    return StageOrderError(
        f"stage {later.key!r} feeds stage {earlier.key!r}, which comes before it",
        where=where(reader) or read.name,
        why=f"{_describe_layer(where(reader)) or f'op {read.name!r} ({read.type})'} of {earlier.key!r} "
        f"reads {_describe_layer(where(source)) or repr(made.name)} of {later.key!r}{_line(where(source))}: "
        "stages must follow one another, and entering a stage again continues it"
        + (f"; nb.place gives {placed[0]} and {placed[1]}" if all(placed) else ""),
        mend=f"give the second a name: {second}" + " in the map of nb.place" * all(placed),
    )


def _describe_layer(origin: str) -> str:
    """The layer that an op lies in, in words."""
    return origin.said if isinstance(origin, Origin) else ""


def _line(origin: str) -> str:
    return f" ({origin})" if _describe_layer(origin) else ""


def _find_placed_layer(graph: Graph, labels: Mapping[int, int], op: int) -> str:
    """Which layer of `nb.place` an op belongs to, or else the nearest one before it in the same stage."""
    queue, seen = [op], {op}
    while queue:
        found = graph.ops[queue.pop(0)]
        if LAYER in found.attributes:
            return str(found.attributes[LAYER])
        before = [value.op for value in found.inputs if labels.get(value.op) == labels.get(op)]
        queue += [each for each in before if each not in seen]
        seen.update(before)
    return ""


def check_draws(program: Program, parts: Parts, folds: BatchFolds, workers: Sequence[Worker]) -> None:
    """Refuse a draw of rows in the forward whose seed nothing moves on from one micro-batch to the next."""
    if folds.folding is None:
        return
    moving = {op for op in parts.effects if parts.part[op] % 3 == FORWARD}
    _check_replicas(program, moving, folds, workers)
    moved = {handle for op in moving for handle in resources(program.graph.ops[op], program.graph)}
    for op in program.graph.ops:
        each = is_random(op) and parts.part.get(op.index, 0) % 3 == FORWARD
        if not each or all(folds.folding.of(value).kind != ROWS for value in op.values):
            continue
        above = [program.graph.ops[before] for before in seeded_by(op, program.graph)]
        if not any(_moves(before, program, moving, moved) for before in above):
            folds.refuse(Fold(COUPLED, blame=op.index, reason=SAME_SEED), "what is drawn")


def _check_replicas(program: Program, moving: set[int], folds: BatchFolds, workers: Sequence[Worker]) -> None:
    """Refuse a state that moves on by as many rows as are drawn, where several processes run the stage.

    A seed is moved on by every replica for the micro-batches of the others, too: how many rows these have it cannot
    know (see `skips`).
    """
    stages = [stage for worker in workers for stage in set(worker.stages)]
    for op in sorted(moving):
        if program.graph.ops[op].type == "RngReadAndSkip" and stages.count(program.labels.get(op, -1)) > 1:
            folds.refuse(Fold(COUPLED, blame=op, reason=_EACH), "what is drawn", (_FOR_ONE_ANOTHER,))


_EACH = "each replica would count its own draws alone, so that all of them draw the same rows"
_FOR_ONE_ANOTHER = "keras.random.SeedGenerator(...), or a layer such as keras.layers.Dropout, for what is drawn"


def _moves(op: Op, program: Program, moving: set[int], moved: set[int]) -> bool:
    """Whether an op gives each micro-batch something else: it moves a state on, or reads one that is."""
    return op.index in moving or (is_read(op) and not moved.isdisjoint(resources(op, program.graph)))


def check_shared(
    program: Program, parts: Parts, workers: Sequence[Collection[int]], where: Callable[[int], str] = lambda op: ""
) -> None:
    """Raise where one stage's forward writes what another's reads: a seed generator in two stages.

    With one micro-batch, and both stages on one of the `workers` (the stages of each), they follow one another as
    in the uncut step, so there it may be.
    """
    writers = {(handle, stage) for op, stage in _forward(program, parts) for handle in _writes(op, program, parts)}
    for op, reader in _forward(program, parts):
        for handle in resources(op, program.graph) if _reads(op, parts) else ():
            for written_by in sorted(stage for other, stage in writers if other == handle and stage != reader):
                together = any(written_by in stages and reader in stages for stages in workers)
                if program.pipeline.micro_batch > 1 or not together:
                    raise _shared_variable_error(program, handle, written_by, reader, where(op.index) or op.name)


def _forward(program: Program, parts: Parts) -> Iterator[tuple[Op, int]]:
    """The ops of the forward that have a stage."""
    for op in program.graph.ops:
        late = parts.part.get(op.index, 0) % 3 == UPDATE
        if op.index in program.labels and not late and program.request_of(op.index) is None:
            yield op, program.labels[op.index]


def _writes(op: Op, program: Program, parts: Parts) -> tuple[int, ...]:
    each = op.index in parts.effects and parts.part.get(op.index, 0) % 3 == FORWARD
    return written_handles(op, program.graph) if each else ()


def _reads(op: Op, parts: Parts) -> bool:
    """Whether the forward reads through an op; Keras's metrics read before they add, so they count too."""
    return op.index in parts.leading and bool(op.outputs)


def _shared_variable_error(program: Program, handle: int, writer: int, reader: int, where: str) -> PlacementError:
    name = program.variable_ops[handle].path if handle in program.variable_ops else program.graph.ops[handle].name
    return PlacementError(
        f"{name!r} is written in the forward of stage {program.stages[writer].key!r} and read in that of "
        f"{program.stages[reader].key!r}",
        where=where,
        why="the stages work on different micro-batches at the same time, so the order would be left to chance",
        mend="give each stage its own keras.random.SeedGenerator, tf.random.Generator, metric or layer",
    )


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
