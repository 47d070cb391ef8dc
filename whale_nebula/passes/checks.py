"""Checks of a labelled program: the order of stages, random draws, state that stages share, and calls of Python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from whale_nebula.errors import NotYetError, PlacementError, StageOrderError
from whale_nebula.errors.text import list_names
from whale_nebula.ir.cut import Cut, Worker
from whale_nebula.ir.graph import LAYER, Graph, Op
from whale_nebula.ir.program import Program, Stage
from whale_nebula.passes.batch import BatchFolds
from whale_nebula.passes.effects import find_seed_ops, find_written_handles, is_read, is_seeded_draw, list_resources
from whale_nebula.passes.phases import FORWARD, UPDATE, Parts
from whale_nebula.passes.readings import list_fragments
from whale_nebula.passes.rules import COUPLED, ROWS, SAME_SEED, Fold
from whale_nebula.site import Origin


def order_stages(graph: Graph, stages: Sequence[str]) -> list[str]:
    """The stages sorted so that tensors flow forward, otherwise stable; unchanged if there is a cycle.

    A functional model runs its nodes by depth, so the first stage in the script may not be entered first.

    >>> from whale_nebula.ir.text import from_text
    >>> graph = from_text('''
    ... %0 = Const float32[4]
    ... %1 = Neg(%0) float32[4] @head
    ... %2 = Exp(%0) float32[4] @trunk
    ... %3 = Add(%1, %2) float32[4] @head
    ... ''')
    >>> order_stages(graph, ["head", "trunk"])
    ['trunk', 'head']
    """
    feeding = _find_feeding_stages(graph, stages)
    ordered: list[str] = []
    while len(ordered) < len(stages):
        ready = [key for key in stages if key not in ordered and feeding[key].issubset(ordered)]
        if not ready:
            return list(stages)
        ordered.append(ready[0])
    return ordered


def _find_feeding_stages(graph: Graph, stages: Sequence[str]) -> dict[str, set[str]]:
    """The stages whose tensors each stage reads, directly or through unstamped ops. A placeholder is no stage's result:
    that of a weight has the stamp of the stage that reads it first.
    """
    feeding: dict[str, set[str]] = {key: set() for key in stages}
    above: dict[int, frozenset[str]] = {}
    for op in graph.ops:
        before = frozenset[str]().union(*(above[value.op] for value in op.inputs))
        if op.stage is not None and op.stage in feeding and op.type != "Placeholder":
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
    """Raise if an op of a stage reads the result of a later stage in the same phase."""
    for op in graph.ops:
        stage = labels.get(op.index, -1)
        for value in op.inputs if stage >= 0 else ():
            source = labels.get(value.op, stage)
            if source <= stage or phase_of(value.op) != phase_of(op.index):
                continue
            later, earlier, made = stages[source], stages[stage], graph.ops[value.op]
            reader, maker = where(op.index), where(value.op)
            line = f" ({maker})" if _describe_layer(maker) else ""
            read_by, read_of = (_find_placed_layer(graph, labels, each) for each in (op.index, value.op))
            placed = bool(read_by and read_of)
            raise StageOrderError(
                f"stage {earlier.key!r} reads from stage {later.key!r}, which comes after it",
                where=reader or op.name,
                why=f"{_describe_layer(reader) or f'op {op.name!r} ({op.type})'} of {earlier.key!r} "
                f"reads {_describe_layer(maker) or repr(made.name)} of {later.key!r}{line}: "
                "data must flow from earlier to later stages, and entering a stage again continues it"
                + (f"; nb.place assigns {read_by} and {read_of}" if placed else ""),
                mend=f"give the second one its own name: {_name_second(earlier)}" + " in the map of nb.place" * placed,
            )


def backward_flow_error(later: Stage, earlier: Stage, where: str) -> StageOrderError:
    """The error for a gradient that would have to flow from an earlier stage into a later one."""
    return StageOrderError(
        f"a gradient flows from stage {earlier.key!r} back into {later.key!r}, which comes after it",
        where=where,
        why=f"{earlier.key!r} reads a value that {later.key!r} computed in an earlier part of the step",
        mend="give the later part its own name: "
        f"{_name_second(earlier)}, or wrap the value that it reads in tf.stop_gradient",
    )


def _name_second(stage: Stage) -> str:
    return f"nb.stage(cluster={stage.cluster!r}, name={stage.key + '_2'!r})"


def _describe_layer(origin: str) -> str:
    """The layer of an op, in words."""
    return origin.layer_description if isinstance(origin, Origin) else ""


def _find_placed_layer(graph: Graph, labels: Mapping[int, int], op: int) -> str:
    """The layer of `nb.place` that an op belongs to, or else the nearest one before it in the same stage."""
    queue, seen = [op], {op}
    while queue:
        nearest = graph.ops[queue.pop(0)]
        if LAYER in nearest.attributes:
            return str(nearest.attributes[LAYER])
        before = [value.op for value in nearest.inputs if labels.get(value.op) == labels.get(op)]
        queue += [each for each in before if each not in seen]
        seen.update(before)
    return ""


def check_draws(program: Program, parts: Parts, folds: BatchFolds, workers: Sequence[Worker]) -> None:
    """Refuse random draws of rows in the forward whose seed is the same for each micro-batch; and states that advance
    with the number of rows drawn, if several processes run the stage.

    Every replica also advances a seed for the micro-batches of the others, whose numbers of rows are unknown to it
    (see `StagePhase.skip`).
    """
    if folds.folding is None:
        return
    graph = program.graph
    moving = {op for op in parts.effects if parts.part[op] % 3 == FORWARD}
    stages = [stage for worker in workers for stage in set(worker.stages)]
    for number in sorted(moving):
        if graph.ops[number].type == "RngReadAndSkip" and stages.count(program.labels.get(number, -1)) > 1:
            folds.refuse(Fold(COUPLED, blame=number, reason=_OWN_DRAWS_REASON), "random numbers", (_GENERATOR_FIX,))
    moved = {handle for number in moving for handle in list_resources(graph.ops[number], graph)}

    def moves(op: Op) -> bool:
        """Whether an op's result differs between micro-batches: it advances a state, or reads one that advances."""
        return op.index in moving or (is_read(op) and not moved.isdisjoint(list_resources(op, graph)))

    for op in graph.ops:
        drawn = is_seeded_draw(op) and parts.part.get(op.index, 0) % 3 == FORWARD
        rows = drawn and any(folds.folding.fold_of(value).kind == ROWS for value in op.values)
        if rows and not any(moves(graph.ops[before]) for before in find_seed_ops(op, graph)):
            folds.refuse(Fold(COUPLED, blame=op.index, reason=SAME_SEED), "random numbers")


_OWN_DRAWS_REASON = "each replica would count only its own draws, so all replicas would draw the same rows"
_GENERATOR_FIX = "draw with keras.random.SeedGenerator(...), or with a layer such as keras.layers.Dropout"


def check_shared_state(
    program: Program, parts: Parts, workers: Sequence[Collection[int]], where: Callable[[int], str] = lambda op: ""
) -> None:
    """Raise if one stage's forward writes a variable that another's reads: a seed generator in two stages.

    With one micro-batch, and both stages on one of the `workers` (the stages of each), they run in sequence as in the
    uncut step, so it is allowed. Keras's metrics read before they add, so their writes also count as reads.
    """
    graph, part, labels = program.graph, parts.part, program.labels
    forward = [
        op
        for op in graph.ops
        if op.index in labels and part.get(op.index, 0) % 3 != UPDATE and program.request_of(op.index) is None
    ]
    writes = (op for op in forward if op.index in parts.effects and part.get(op.index, 0) % 3 == FORWARD)
    writers = {(handle, labels[op.index]) for op in writes for handle in find_written_handles(op, graph)}
    for op in forward:
        reader = labels[op.index]
        for handle in list_resources(op, graph) if op.index in parts.leading and op.outputs else ():
            for writer in sorted(stage for other, stage in writers if other == handle and stage != reader):
                together = any(writer in stages and reader in stages for stages in workers)
                if program.pipeline.micro_batch > 1 or not together:
                    known = program.variable_ops.get(handle)
                    line = where(op.index) or op.name
                    name = graph.ops[handle].name if known is None else known.path
                    raise PlacementError(
                        f"{name!r} is written in the forward of stage "
                        f"{program.stages[writer].key!r} and read in that of {program.stages[reader].key!r}",
                        where=line,
                        why="the stages work on different micro-batches at the same time, so the order of reads and "
                        "writes would be undefined",
                        mend="give each stage its own keras.random.SeedGenerator, tf.random.Generator, metric or layer",
                    )


def check_held_variables(cut: Cut, where: Callable[[int], str]) -> None:
    """Raise if a worker would use a variable that it does not hold, such as one of another cluster that a write before
    the forward, or a branch, reads.
    """
    graph, variables = cut.program.graph, cut.program.variable_ops
    for fragment in list_fragments(cut):
        for op in map(graph.ops.__getitem__, fragment.ops):
            for variable in (variables[handle] for handle in list_resources(op, graph) if handle in variables):
                holders = cut.variable_workers[variable.path]
                if fragment.worker not in holders:
                    raise NotYetError(
                        f"a use of variable {variable.path!r} on worker {fragment.worker!r}",
                        where=f"{op.label}, {where(op.index)}",
                        why=f"only {list_names(holders)} would have it: variables of other clusters are sent after the "
                        "gradients, and not into a branch or loop",
                        mend="read it after the gradients, outside of branches and loops",
                    )


_CHANGES = {
    "a lookup table": ("LookupTableInsert", "LookupTableImport", "LookupTableRemove"),
    "a queue": ("QueueEnqueue", "QueueDequeue"),
}
"""The ops that change what the script holds beside variables, by how their types begin."""


def check_tables_and_queues(cut: Cut, effects: Collection[int], where: Callable[[int], str]) -> None:
    """Raise if one of the `effects` of a step of several workers changes a lookup table or a queue of the script: each
    process has its own, and only that of the worker that runs the op would change. What another one reads later, in a
    step or outside, would be old.
    """
    graph = cut.program.graph
    for op in [graph.ops[index] for index in sorted(effects)] if len(cut.workers) > 1 else ():
        types = [each.type for each in graph.with_bodies([op])]
        changed = [kind for kind, begin in _CHANGES.items() if any(each.startswith(begin) for each in types)]
        if changed and find_written_handles(op, graph):
            raise NotYetError(
                f"{changed[0]} that a step changes, between processes",
                where=f"{op.label}, {where(op.index)}",
                why="each process has one of its own, and only that of one worker would change",
                mend="keep the numbers in a tf.Variable; or change it in the script, in every process: pass what the "
                "step takes from it as an argument, and return what the step puts into it",
            )


_PYTHON_CALLS = {"EagerPyFunc": "tf.py_function", "PyFunc": "tf.numpy_function", "PyFuncStateless": "tf.numpy_function"}


def limit_in_flight(program: Program) -> Program:
    """The program with one micro-batch in flight if the gradient of a `tf.py_function` requires it."""
    graph, pipeline = program.graph, program.pipeline
    python = (op for op in graph.with_bodies(graph.ops) if op.type == "EagerPyFunc")
    differentiated = any(program.request_of(op.index) is not None for op in python)
    if not differentiated or pipeline.micro_batch < 2 or pipeline.in_flight == 1:
        return program
    return replace(program, pipeline=replace(pipeline, in_flight=1))


def list_python_notes(program: Program, where: Callable[[int], str]) -> list[str]:
    """A line for each place where a step calls Python."""
    found: dict[str, None] = {}
    for op in program.graph.ops:
        types = (each.type for each in program.graph.with_bodies([op]))
        called = next((_PYTHON_CALLS[each] for each in types if each in _PYTHON_CALLS), None)
        if called is None or program.request_of(op.index) is not None:
            continue
        moved = "cannot be moved: it runs Python in the process that traced it"
        if op.index in program.labels:
            stage = program.stages[program.labels[op.index]]
            key, cluster = stage.key, stage.cluster
            moved = f"cannot be moved out of stage {key!r}: it runs Python in the process of cluster {cluster!r}"
        found[f"{called} at {where(op.index)} {moved}"] = None
    return list(found)
