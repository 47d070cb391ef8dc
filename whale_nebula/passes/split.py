"""Complete the layouts of stages whose variables are split over devices.

A stage's forward, backward and update are one question: the gradient of a variable lies as its backward leaves it, is
added up so over micro-batches, and the update begins from there. What leaves the stage is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

from whale_nebula.errors import NotYetError, OptionError, PlanError
from whale_nebula.ir.cut import Cut, Fragment, PhasePlan
from whale_nebula.ir.layout import ROW_GROUPS, ROWS_JOINED, SPLIT, Layout, Layouts
from whale_nebula.ir.program import Program
from whale_nebula.passes.layouts import Question, complete_layouts
from whale_nebula.passes.readings import list_fragments
from whale_nebula.passes.rules import Fold, fold
from whale_nebula.spec import Value


def complete_stages(cut: Cut, where: Callable[[int], str], held: Mapping[int, Layout]) -> Mapping[int, Layouts]:
    """By the number of a stage, the layouts of its values. An update that several stages share goes by the first of
    them for which it sees pieces. A variable that is `held` stays as it is.
    """
    program = cut.program
    found: dict[int, Layouts] = {}
    folds: Mapping[Value, Fold] | None = None
    for number, stage in enumerate(program.stages):
        own = {each.variable: Layout(SPLIT, each.axis) for each in program.splits if each.stage == number}
        apart = [op for op in own if not _is_of_stage(cut, number, op)]
        notes = [f"{program.variable_ops[op].path} is not divided: other stages hold it, too" for op in apart]
        own = {op: layout for op, layout in own.items() if op not in apart}
        count, settled = stage.shards, {op for op in program.variable_ops if not _is_of_stage(cut, number, op)}
        if stage.shared_slots and stage.shards == 1:
            count = len(cut.workers_of(number)) if len(cut.workers) > 1 else stage.replicas
            own = dict(_find_slots(cut, number, count))
            settled |= program.variable_ops.keys()
        own |= {op: layout for op, layout in held.items() if op in own or count > 1}
        if count < 2 or all(layout.kind != SPLIT for layout in own.values()):
            continue
        if folds is None:
            folds = fold(program.graph, {leaf.op: 0 for leaf in program.leaves if leaf.batched}).folds
        fragments, sums = list(list_own_fragments(cut, number)), dict(list_sums(program))
        wholes = frozenset(list_wholes(cut, number, fragments))
        question = Question(
            graph=program.graph,
            ops=list(dict.fromkeys(chain.from_iterable(fragment.ops for fragment in fragments))),
            count=count,
            variables=own,
            parts=sums,
            wholes=wholes,
            settled=frozenset(settled | held.keys()),
            kept_whole=frozenset().union(*(layouts.touched for layouts in found.values())),
            folds=folds,
            where=where,
        )
        layouts = complete_layouts(_mark_rows(question))
        kept = {value for fragment in fragments for value in fragment.fetches if value in layouts.of} - wholes
        kept |= {holder for holder, part in sums.items() if part in kept}
        found[number] = replace(layouts, handed_on=frozenset(kept), notes=(*notes, *layouts.notes))
    return found


def _mark_rows(question: Question) -> Question:
    """The question with the identities between which a layer has its rows in groups, where each device has some."""
    ops = [op for op in map(question.graph.ops.__getitem__, question.ops) if op.type == "Identity"]
    starts, ends = (
        [op for op in ops if op.name.rpartition("/")[2].startswith(name)] for name in (ROW_GROUPS, ROWS_JOINED)
    )
    sizes = {op.index: (op.outputs[0].shape or (None,))[0] or 0 for op in starts}
    found = [op for op, size in sizes.items() if size >= question.count]
    return replace(question, row_starts=found, row_ends=[op.index for op in ends] if found else ())


def _find_slots(cut: Cut, stage: int, count: int) -> Iterator[tuple[int, Layout]]:
    """The variables of the form of a weight that only the stage's updates touch, along the first axis long enough."""
    program = cut.program
    forward = {op for phase in cut.phases for piece in list_pieces(phase, stage) for op in piece.ops}
    read = {value.op for op in forward for value in program.graph.ops[op].inputs}
    own = [(op, each) for op, each in program.variable_ops.items() if _is_of_stage(cut, stage, op)]
    weights = {each.spec for op, each in own if op in read and each.trainable}
    for op, each in own:
        shape = each.spec.shape or ()
        axis = next((axis for axis, size in enumerate(shape) if size is not None and size >= count), None)
        if op not in read and not each.trainable and each.spec in weights and axis is not None:
            yield op, Layout(SPLIT, axis)


def _is_of_stage(cut: Cut, stage: int, variable: int) -> bool:
    """Whether only the workers of a stage hold a variable."""
    return set(cut.held[cut.program.variable_ops[variable].path]) <= set(cut.workers_of(stage))


def hosts_of_splits(cut: Cut) -> frozenset[str]:
    """The workers that run devices of split stages."""
    return frozenset(worker for stage in cut.layouts for worker in cut.workers_of(stage))


def check_held(cut: Cut, held: Mapping[int, Layout]) -> None:
    """Refuse a program that would read as a whole what an earlier one has left in pieces."""
    program = cut.program
    known = {op for layouts in cut.layouts.values() for op in layouts.variables}
    for op, layout in held.items():
        if layout.kind == SPLIT and op not in known:
            path = program.variable_ops[op].path
            raise PlanError(
                f"an earlier program has divided {path!r} by nb.split, and this one needs it as a whole",
                where=path,
                why="variables do not move within a run",
                mend="the same nb.split(...) around its layer in all programs",
            )


def check_devices(cut: Cut, *, collectives: bool, own_weights: bool) -> None:
    """Between processes, refuse a split stage that has no worker for each of its devices, and what is not built."""
    for number in cut.layouts:
        stage, workers = cut.program.stages[number], cut.workers_of(number)
        where = next((split.where for split in cut.program.splits if split.stage == number), stage.where)
        if len(workers) < stage.shards:
            raise OptionError(
                f"nb.split says {stage.shards} devices, and cluster {stage.cluster!r} has {len(workers)}",
                where=where,
                why="each device is a worker of the stage's cluster: collectives never cross a line between clusters",
                mend=f"nb.split({len(workers)}), or nb.split() for as many as there are",
            )
        built = {
            "nb.split inside nb.replica between processes": stage.replicas > 1 and stage.shards > 1,
            "nb.split, or nb.replica(shard=), of what every cluster trains a copy of": cut.program.apart is not None,
            "nb.split, or nb.replica(shard=), with 'weights: own'": own_weights,
        }
        missing = next((feature for feature, asked in built.items() if asked), None)
        if missing is not None:
            raise NotYetError(missing, where=where, mend="leave it out there: the stage then runs whole")
        if not collectives:
            raise OptionError(
                f"the devices of stage {stage.key!r} cannot reach one another",
                where=where,
                why="they use TensorFlow's collectives, which cannot be opened once TensorFlow has started",
                mend="call nb.init() before anything that makes a tensor, a variable or a layer",
            )


def list_own_fragments(cut: Cut, stage: int) -> Iterator[Fragment]:
    """What the devices of a stage run, in the order of a step: its pieces, and what its worker runs once."""
    workers = cut.workers_of(stage)
    for phase in cut.phases:
        yield from (phase.prologue[worker] for worker in workers if worker in phase.prologue)
        yield from list_pieces(phase, stage)
        yield from chain.from_iterable(phase.updates.get(worker, ()) for worker in workers)


def list_pieces(phase: PhasePlan, stage: int) -> Iterator[Fragment]:
    """What a stage runs for each micro-batch."""
    for plan in phase.stages:
        if plan.stage == stage:
            yield from (fragment for fragment in (plan.forward, plan.backward) if fragment is not None)


def list_sums(program: Program) -> Iterator[tuple[Value, Value]]:
    """The placeholder of each gradient that is a sum of one dense tensor over micro-batches, and that tensor."""
    for request in program.requests:
        for holder in request.holders:
            parts = [part for part in request.parts if part.source == holder.source]
            by_rows = bool(request.merges) and request.merges[holder.source] == "rows"
            if len(parts) == 1 and len(parts[0].values) == len(holder.values) == 1 and not by_rows:
                yield holder.values[0], parts[0].values[0]


def list_wholes(cut: Cut, stage: int, fragments: list[Fragment]) -> Iterator[Value]:
    """What is given by a stage's fragments and read elsewhere than in its own, or by what knows nothing of pieces."""
    inside = {value for fragment in fragments if fragment.stage == stage for value in fragment.feeds}
    outside = {value for fragment in list_fragments(cut) if fragment.stage != stage for value in fragment.feeds}
    summed = {value for _, value in list_sums(cut.program)}
    flows = {flow.gradient for request in cut.program.requests for flow in request.flows}
    named = {*cut.merges, *(each.mask for each in cut.boundaries), *cut.program.returns, *flows}
    for fragment in fragments:
        for value in fragment.fetches:
            kept = value in inside or value in summed
            if fragment.stage is None or value in outside | named or not kept:
                yield value
