"""Complete the layouts of stages whose variables are sharded over devices.

A stage's forward, backward and update are completed together: the gradient of a variable has the layout that its
backward produces; it is accumulated over micro-batches and read by the update in that layout. A stage's outputs are
whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from whale_nebula.errors import NotYetError, OptionError, PlanError
from whale_nebula.ir.cut import Cut, Fragment, PhasePlan
from whale_nebula.ir.graph import Op
from whale_nebula.ir.layout import (
    PARTIAL_LAYOUT,
    ROW_GROUPS,
    ROWS_JOINED,
    ROWS_PULLED,
    ROWS_PUSHED,
    SPLIT,
    WHOLE_LAYOUT,
    Layout,
    Layouts,
    Reshard,
    choose_collective,
    count_bytes,
)
from whale_nebula.ir.program import GradientPart, Program, Request, Stage
from whale_nebula.passes.completion import Question, complete_layouts
from whale_nebula.passes.facts import ASSIGNS
from whale_nebula.passes.readings import list_fragments
from whale_nebula.passes.replicas import find_replica_sums, has_one_order
from whale_nebula.passes.rules import Fold, fold
from whale_nebula.spec import Spec, Value


def complete_stages(cut: Cut, where: Callable[[int], str], held_layouts: Mapping[int, Layout]) -> Mapping[int, Layouts]:
    """By the number of a stage, the layouts of its values, or only notes that explain why there are none. An update
    that several stages share is completed with the first of them that has pieces in it. Variables in `held_layouts`
    keep them. A vector among variables of more axes, such as a bias next to the kernel, is in pieces if its readers use
    pieces, unless the requested layout saves bytes.
    """
    program = cut.program
    found: dict[int, Layouts] = {}
    folds: Mapping[Value, Fold] | None = None
    for number, stage in enumerate(program.stages):
        own = {each.variable: Layout(SPLIT, each.axis) for each in program.splits if each.stage == number}
        apart = [op for op in own if not _is_of_stage(cut, number, op)]
        notes = [f"{program.variable_ops[op].path} is not sharded: other stages also hold it" for op in apart]
        own = {op: layout for op, layout in own.items() if op not in apart}
        count, settled = stage.shards, {op for op in program.variable_ops if not _is_of_stage(cut, number, op)}
        given: Mapping[Value, Layout] = {}
        shared = stage.shared_slots and stage.shards == 1
        if shared:
            count = len(cut.workers_of(number)) if len(cut.workers) > 1 else stage.replicas
            slots = dict(_find_slots(cut, number, count))
            readers = {op: kind for op in slots if (kind := _find_whole_reader(cut, op))}
            notes += [
                f"{n} slots are not sharded: {kind} needs each one completely"
                for kind, n in Counter(readers.values()).items()
            ]
            own = {op: layout for op, layout in slots.items() if op not in readers}
            given, why = _find_gradients(cut, number, count, own)
            notes, settled = [*notes, *why], settled | program.variable_ops.keys()
        held = [program.variable_ops[op].path for op in own if held_layouts.get(op) == WHOLE_LAYOUT]
        own |= {op: layout for op, layout in held_layouts.items() if op in own or count > 1}
        if count < 2 or all(layout.kind != SPLIT for layout in (*own.values(), *given.values())):
            notes += [f"{path} is not sharded: an earlier program needs it completely" for path in held]
            found |= {number: Layouts(count, {}, notes=tuple(notes))} if count > 1 and notes else {}
            continue
        if folds is None:
            batched = {leaf.op: 0 for leaf in program.leaves if leaf.batched}
            folds = fold(program.graph, batched, grouped=False).folds
        fragments, sums = list(list_own_fragments(cut, number)), dict(list_accumulated_gradients(program))
        wholes = frozenset(list_whole_values(cut, number, fragments))
        question = Question(
            graph=program.graph,
            ops=list(dict.fromkeys(chain.from_iterable(fragment.ops for fragment in fragments))),
            count=count,
            variables=own,
            parts={} if shared else sums,
            outside_layouts=given,
            wholes=wholes,
            settled=frozenset(settled | held_layouts.keys()),
            kept_whole=frozenset().union(*(layouts.split_ops for layouts in found.values())),
            folds=folds,
            where=where,
        )
        question = _mark_rows(question)
        question = replace(question, shared=question.facts)
        opaque = _find_opaque_readers(cut, question)
        notes += [
            f"{program.variable_ops[op].path} is not sharded: {kind} needs all of it" for op, kind in opaque.items()
        ]
        own |= dict.fromkeys(opaque, WHOLE_LAYOUT)
        question = replace(question, variables=own)
        layouts, given, unlike = _complete_consistently(cut, number, question)
        notes += [_DIFFERENT_UPDATES.format(len(unlike), stage.key)] * bool(unlike)
        vectors = {op for op in own if program.variable_ops[op].spec.rank == 1} - held_layouts.keys()
        vectors -= program.graph.ascend(program.graph.ops[op].inputs[-2].op for op in question.row_calls)
        if vectors and vectors < own.keys() and stage.shards > 1:
            others = {op: layout for op, layout in own.items() if op not in vectors}
            other = complete_layouts(replace(question, variables=others))
            layouts = other if other.nbytes <= layouts.nbytes else layouts
        kept = {value for fragment in fragments for value in fragment.fetches if value in layouts.by_value} - wholes
        kept |= {holder for holder, part in sums.items() if part in kept}
        kept |= given.keys() if len(cut.workers) > 1 else set()  # in one process accumulated gradients are whole
        found[number] = replace(
            layouts,
            handed_on=frozenset(kept),
            notes=(*notes, *layouts.notes),
            sums=tuple(_list_replica_sums(cut, number, count, given)) if shared else (),
        )
    return found


def _find_opaque_readers(cut: Cut, question: Question) -> Mapping[int, str]:
    """Variables that are inputs of an op without a rule for pieces, a loop for example, with the type of that op. Empty
    if nothing else is split: then the scope has no effect, and is refused between processes.
    """
    graph = cut.program.graph
    if not any(_find_whole_reader(cut, op) for op in question.variables):
        return {}
    found = {
        each.value.op: graph.ops[op].type
        for op, reshards in complete_layouts(question).reshards.items()
        for each in reshards
        if graph.spec(each.value).dtype == "resource"
    }
    divided = {op for op, layout in question.variables.items() if layout.kind == SPLIT}
    return {} if divided <= found.keys() else {op: kind for op, kind in found.items() if op in divided}


def _complete_consistently(
    cut: Cut, stage: int, question: Question
) -> tuple[Layouts, Mapping[Value, Layout], set[Value]]:
    """The layouts of a stage, its gradients that arrive in pieces, and the slots and gradients that are whole because
    not all of its workers run the same ops on them.

    A collective for an op that only one worker runs, or in another round than the others, would wait for these.
    """
    graph, whole = cut.program.graph, set[Value]()
    while True:
        given = {each: layout for each, layout in question.outside_layouts.items() if each not in whole}
        own = {op: layout for op, layout in question.variables.items() if Value(op) not in whole}
        layouts = complete_layouts(replace(question, outside_layouts=given, variables=own))
        runs = [set(list_runs(cut, worker, layouts)) for worker in cut.workers_of(stage)]
        unlike = {run[-1] for run in frozenset().union(*runs).difference(frozenset(runs[0]).intersection(*runs))}
        slots = own if cut.program.stages[stage].shared_slots else {}
        pieces = [*given, *(Value(op) for op, layout in slots.items() if layout.kind == SPLIT)]
        more = {each for each in pieces if not unlike.isdisjoint(graph.descend([each.op]))}
        if not more:
            return layouts, given, whole
        whole |= more


def list_runs(cut: Cut, worker: str, layouts: Layouts) -> Iterator[tuple[int, int, bool, int]]:
    """The ops on pieces that a worker runs in its updates, and those whose results it passes on: (phase, round, whether
    it passes a result on, op).
    """
    for phase in cut.phases:
        for fragment in phase.updates.get(worker, ()):
            yield from ((phase.index, fragment.round, False, op) for op in fragment.ops if op in layouts.split_ops)
            given = (value.op for value in fragment.fetches if value in layouts.by_value)
            yield from ((phase.index, fragment.round, True, op) for op in given)


_VARIABLE_READS = frozenset({"ReadVariableOp", "ResourceGather"})
_DIFFERENT_UPDATES = "{} slots and gradients of {!r} are not sharded: its replicas run different updates"


def _find_gradients(cut: Cut, stage: int, count: int, slots: Collection[int]) -> tuple[dict[Value, Layout], list[str]]:
    """The gradients of which each replica of a stage receives a piece of the sum, and the reasons why others are whole.

    They are those of weights that have slots, or with `shared_gradients` all.
    """
    program, sums = cut.program, dict(list_accumulated_gradients(cut.program))
    forms, notes = {program.variable_ops[op].spec for op in slots}, []
    others = _find_late_gradients(cut, cut.workers_of(stage))
    given: dict[Value, Layout] = {}
    for request, part in _list_parts(cut, stage):
        holder = next(each for each in request.holders if each.source == part.source)
        value, origin = holder.values[0], request.origins[part.source]
        spec = program.variable_ops[origin].spec
        axis = _find_axis(spec, count)
        if axis is None or not (program.stages[stage].shared_gradients or spec in forms):
            continue
        reasons = {
            "replicas exchange the rows that they have read": part.sparse or holder.sparse,
            "other stages also hold its weight": not _is_of_stage(cut, stage, origin),
            "it consists of several sums": value not in sums
            or request.merges[part.source : part.source + 1] == ("same",),
            "it is read outside of its update": value in others or value in program.returns,
        }
        why = next((reason for reason, holds in reasons.items() if holds), None)
        if why is None:
            given[value] = Layout(SPLIT, axis)
        else:
            notes.append(f"{_name_gradient(cut, value)} is all-reduced completely: {why}")
    return given, list(dict.fromkeys(notes))


def _list_parts(cut: Cut, stage: int) -> Iterator[tuple[Request, GradientPart]]:
    """The gradients of variables that a stage computes and that have a placeholder."""
    variables = cut.program.variable_ops
    for request in cut.program.requests:
        for part in request.ordered_parts:
            held = any(holder.source == part.source for holder in request.holders)
            if part.stage == stage and held and request.origins[part.source] in variables:
                yield request, part


def _list_replica_sums(cut: Cut, stage: int, count: int, outside_layouts: Mapping[Value, Layout]) -> Iterator[Reshard]:
    """The collectives that add up the dense gradients of a stage over its replicas."""
    places = {part: holder for holder, part in list_accumulated_gradients(cut.program)}
    for request, part in _list_parts(cut, stage):
        if not part.sparse:
            target = outside_layouts.get(places.get(part.values[0], part.values[0]), WHOLE_LAYOUT)
            kind = choose_collective(PARTIAL_LAYOUT, target) or ""
            nbytes = count_bytes(kind, cut.program.variable_ops[request.origins[part.source]].spec.nbytes(), count)
            yield Reshard(part.values[0], PARTIAL_LAYOUT, target, kind, nbytes)


def _name_gradient(cut: Cut, holder: Value) -> str:
    request, place = cut.program.holders[holder.op]
    origin = cut.program.requests[request].origins[place.source]
    return f"the gradient of {cut.program.variable_ops[origin].path}"


def _find_axis(spec: Spec, count: int) -> int | None:
    """The first axis with at least `count` entries; None if there is none, or for unknown sizes or integers."""
    sizes = [axis or 0 for axis in spec.shape or ()]
    known = None not in (spec.shape or ()) and "float" in spec.dtype
    return next((axis for axis, size in enumerate(sizes) if known and size >= count), None)


def _mark_rows(question: Question) -> Question:
    """The question with the identities between which a layer has its rows in groups, divided over devices, and with the
    calls for rows of tables.
    """
    ops = [op for op in map(question.graph.ops.__getitem__, question.ops) if op.type == "Identity"]
    starts, ends = (
        [op for op in ops if op.name.rpartition("/")[2].startswith(name)] for name in (ROW_GROUPS, ROWS_JOINED)
    )
    sizes = {op.index: (op.outputs[0].shape or (None,))[0] or 0 for op in starts}
    found = [op for op, size in sizes.items() if size >= question.count]
    calls = [op.index for op in map(question.graph.ops.__getitem__, question.ops) if _is_row_call(op)]
    return replace(question, row_starts=found, row_ends=[op.index for op in ends] if found else (), row_calls=calls)


def _is_row_call(op: Op) -> bool:
    """Whether an op is a Python call that looks up or updates rows of a table."""
    return op.type == "PyFunc" and op.name.rpartition("/")[2].startswith((ROWS_PULLED, ROWS_PUSHED))


def _find_slots(cut: Cut, stage: int, count: int) -> Iterator[tuple[int, Layout]]:
    """The variables of a weight's form that only the stage's updates touch, split along the first long axis."""
    program = cut.program
    forward = {op for phase in cut.phases for piece in list_stage_fragments(phase, stage) for op in piece.ops}
    read = {value.op for op in forward for value in program.graph.ops[op].inputs}
    own = [(op, each) for op, each in program.variable_ops.items() if _is_of_stage(cut, stage, op)]
    weights = {each.spec for op, each in own if op in read and each.trainable}
    for op, each in own:
        axis = _find_axis(each.spec, count)
        if op not in read and not each.trainable and each.spec in weights and axis is not None:
            yield op, Layout(SPLIT, axis)


def _find_whole_reader(cut: Cut, variable: int) -> str:
    """The type of an op that reads or writes a variable and cannot be sharded; "" if there is none."""
    readers = (op.type for op in cut.program.graph.consumers(Value(variable)))
    return next((kind for kind in readers if kind not in ASSIGNS | _VARIABLE_READS), "")


def _is_of_stage(cut: Cut, stage: int, variable: int) -> bool:
    """Whether only the workers of a stage hold a variable."""
    return set(cut.variable_workers[cut.program.variable_ops[variable].path]) <= set(cut.workers_of(stage))


def list_split_workers(cut: Cut) -> frozenset[str]:
    """The workers that run devices of split stages."""
    return frozenset(worker for stage in cut.layouts for worker in cut.workers_of(stage))


def check_held_layouts(cut: Cut, held_layouts: Mapping[int, Layout]) -> None:
    """Refuse a program that would read variables whole that an earlier one has left in pieces."""
    program = cut.program
    known = {op for layouts in cut.layouts.values() for op in layouts.variables}
    for op, layout in held_layouts.items():
        if layout.kind == SPLIT and op not in known:
            path = program.variable_ops[op].path
            raise PlanError(
                f"an earlier program has sharded {path!r} by nb.split, but this one needs it completely",
                where=path,
                why="variables cannot be moved within a run",
                mend="use the same nb.split(...) around its layer in all programs",
            )


def check_devices(cut: Cut, at: Callable[[int], str], *, collectives: bool) -> None:
    """Between processes, refuse a split stage with nothing in pieces, one without a worker for each of its devices, and
    unsupported features. `at` returns the line of an op.
    """
    for number, stage in enumerate(cut.program.stages):
        if stage.shards > 1 and number not in cut.layouts and len(cut.workers_of(number)) > 1:
            raise _nothing_divided_error(cut, number)
    for number, layouts in cut.layouts.items():
        for op in sorted(layouts.reshards):
            _check_handles(cut.program, op, layouts.reshards[op], at)
        stage, workers = cut.program.stages[number], cut.workers_of(number)
        where = next((split.where for split in cut.program.splits if split.stage == number), stage.where)
        if stage.shards > 1 and len(workers) < stage.replicas * stage.shards:
            raise _worker_count_error(stage, len(workers), where)
        runs = [set(list_runs(cut, worker, layouts)) for worker in workers]
        alone = {op for each in runs for _, _, _, op in each.symmetric_difference(runs[0])}
        if alone:
            raise NotYetError(
                f"an op that one worker of stage {stage.key!r} runs alone, on pieces of a variable",
                where=at(min(alone)) or where,
                why="each worker of nb.split holds a piece, and an op that writes no variable, such as tf.print or "
                "tf.py_function, runs on one of them",
                mend="return the value from the step, and print it there",
            )
        summed = stage.shards > 1 and number in find_replica_sums(cut.program) and not has_one_order(cut, number)
        built = {
            "synchronized moments and nb.split in three or more replicas of a cluster of more than ten workers": summed,
            "nb.split inside nb.replica(shard=) between processes": stage.shards > 1 and stage.shared_slots,
            "nb.split, or nb.replica(shard=), of a model that every cluster trains a copy of": cut.program.local_sgd
            is not None,
        }
        missing = next((feature for feature, asked in built.items() if asked), None)
        if missing is not None:
            raise NotYetError(missing, where=where, mend="remove it there, so that the stage runs unsharded")
        if not collectives:
            raise OptionError(
                f"the devices of stage {stage.key!r} cannot communicate",
                where=where,
                why="they use TensorFlow's collectives, which cannot be enabled after TensorFlow has started",
                mend="call nb.init() before anything that creates a tensor, a variable or a layer",
            )


def _nothing_divided_error(cut: Cut, number: int) -> PlanError:
    """The error for a split stage of whose variables none is in pieces, with the notes on these variables."""
    program, stage = cut.program, cut.program.stages[number]
    splits = [split for split in program.splits if split.stage == number]
    beginnings = tuple(f"{program.variable_ops[split.variable].path} is not sharded: " for split in splits)
    return PlanError(
        f"nb.split divides no variable of stage {stage.key!r}",
        where=next((split.where for split in splits), stage.where),
        why="; ".join(note for note in cut.notes if note.startswith(beginnings)),
        mend="remove nb.split there, or use it around the same layers, which no other stage runs, in all programs",
    )


def _worker_count_error(stage: Stage, there: int, where: str) -> OptionError:
    """The error for a split stage with more devices than its cluster has workers."""
    devices, fewer = f"{stage.shards} devices", f"nb.split({there}), or nb.split() for all workers"
    if stage.replicas > 1:
        devices += f" in each of {stage.replicas} replicas"
        counts = max(1, there // stage.shards), min(stage.shards, there)
        fewer = "nb.replica({}) and nb.split({}), or one of them without a count".format(*counts)
    return OptionError(
        f"nb.split needs {devices}, but cluster {stage.cluster!r} has {there} worker{'s' * (there != 1)}",
        where=where,
        why="each device is a worker of the stage's cluster: collectives never cross a link between clusters",
        mend=f"{fewer}\nor list {stage.shards * stage.replicas} workers of {stage.cluster!r} in the config",
    )


def _check_handles(program: Program, op: int, reshards: Sequence[Reshard], at: Callable[[int], str]) -> None:
    """Refuse an op with a sharded variable as input, if it has no rule for pieces."""
    for each in reshards:
        if program.graph.spec(each.value).dtype == "resource":
            path, kind = program.variable_ops[each.value.op].path, program.graph.ops[op].type
            raise NotYetError(
                f"nb.split of {path!r} between processes, if {kind} has it as an input",
                where=at(op),
                why="each worker holds a piece of it, and there is no rule for the op on pieces",
                mend="exclude it from nb.split, or change it by assign, assign_add, assign_sub or a scatter of rows",
            )


def list_own_fragments(cut: Cut, stage: int) -> Iterator[Fragment]:
    """The fragments of a stage's devices in the order of a step: those of micro-batches, and those that run once."""
    workers = cut.workers_of(stage)
    for phase in cut.phases:
        yield from (phase.prologue[worker] for worker in workers if worker in phase.prologue)
        yield from list_stage_fragments(phase, stage)
        yield from chain.from_iterable(phase.updates.get(worker, ()) for worker in workers)


def list_stage_fragments(phase: PhasePlan, stage: int) -> Iterator[Fragment]:
    """The fragments of a stage in a phase, which run for each micro-batch."""
    for plan in phase.stages:
        if plan.stage == stage:
            yield from plan.fragments


def list_accumulated_gradients(program: Program) -> Iterator[tuple[Value, Value]]:
    """The placeholder of each gradient that is a sum of one dense tensor over micro-batches, and that tensor."""
    for request in program.requests:
        for holder in request.holders:
            parts = [part for part in request.parts if part.source == holder.source]
            by_rows = bool(request.merges) and request.merges[holder.source] == "rows"
            if len(parts) == 1 and len(parts[0].values) == len(holder.values) == 1 and not by_rows:
                yield holder.values[0], parts[0].values[0]


def _find_late_gradients(cut: Cut, workers: Collection[str]) -> frozenset[Value]:
    """The placeholders of gradients that anything but the update of their phase, on these workers, reads: an update
    passes values on whole.
    """
    phases = {request: phase.index for phase in cut.phases for request in phase.requests}
    holders = {value: request for request, each in cut.program.holders.values() for value in each.values}
    return frozenset(
        value
        for fragment in list_fragments(cut)
        for value in fragment.feeds
        if value in holders
        and not (fragment.kind == "update" and fragment.phase == phases[holders[value]] and fragment.worker in workers)
    )


def list_whole_values(cut: Cut, stage: int, fragments: list[Fragment]) -> Iterator[Value]:
    """The results of a stage's fragments that must be whole: those that others than the stage itself read."""
    inside = {value for fragment in fragments if fragment.stage == stage for value in fragment.feeds}
    outside = {value for fragment in list_fragments(cut) if fragment.stage != stage for value in fragment.feeds}
    sums = dict(list_accumulated_gradients(cut.program))
    summed = set(sums.values())
    flows = {flow.gradient for request in cut.program.requests for flow in request.flows}
    late = _find_late_gradients(cut, cut.workers_of(stage))
    flows |= {part for holder, part in sums.items() if holder in late}
    named = {*cut.merges, *(each.mask for each in cut.boundaries), *cut.program.returns, *flows}
    for fragment in fragments:
        for value in fragment.fetches:
            kept = value in inside or value in summed
            if fragment.stage is None or value in outside | named or not kept:
                yield value
