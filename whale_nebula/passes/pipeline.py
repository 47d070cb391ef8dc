"""The pipeline of passes, which turns a captured program and a list of workers into a Cut.

Each pass maps a valid Compilation to a valid one. `verify` checks this after each pass in the project's tests, and
whenever WHALE_NEBULA_VERIFY_PASSES is set. `whale-nebula show --after NAME` prints the program after a pass.

Before these passes the capture has assigned every op to a stage (`passes.label`) and split conditions by clusters
(`passes.branches`), as it needs both to differentiate.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Protocol

from whale_nebula.errors import OptionError
from whale_nebula.errors.text import did_you_mean
from whale_nebula.ir.canonical import canonical_lines, digest_lines
from whale_nebula.ir.cut import Cut, Fragment, Worker
from whale_nebula.ir.graph import CAPTURE, HOLDER, Graph
from whale_nebula.ir.layout import Layout
from whale_nebula.ir.program import Leaf, Program, Variable
from whale_nebula.ir.text import to_text
from whale_nebula.passes.batch import BatchFolds, add_merges, fold_batch
from whale_nebula.passes.checks import (
    check_draws,
    check_order,
    check_shared_state,
    limit_in_flight,
    list_python_notes,
)
from whale_nebula.passes.codec_options import check_crossable
from whale_nebula.passes.effects import list_resources
from whale_nebula.passes.exchange import list_crossings, list_exchanges
from whale_nebula.passes.mapping import EVERYWHERE, divide_clusters, map_workers
from whale_nebula.passes.phases import Parts, split_parts
from whale_nebula.passes.readings import list_fragments
from whale_nebula.passes.replicas import list_batch_sum_notes as sum_notes
from whale_nebula.passes.split import complete_stages
from whale_nebula.spec import Value


def list_program(program: Program) -> Iterator[str]:
    """The text of a program: digest, stages of ops, and ops without properties that differ between traces."""

    def in_order(found: re.Match[str]) -> str:
        return "".join(f" ^%{number}" for number in sorted(map(int, re.findall(r"\d+", found[0]))))

    yield f"canonical digest {digest_lines(canonical_lines(program))}"
    yield f"labels {' '.join(f'%{op}:{stage}' for op, stage in sorted(program.labels.items()))}"
    text = re.sub(r"CustomGradient-\d+", "CustomGradient", to_text(program.graph, names=False))
    yield re.sub(r"(?: \^%\d+)+", in_order, text)


def list_folds(folds: BatchFolds) -> Iterator[str]:
    """The fold of each op's outputs, and the ops that wait for all micro-batches."""
    yield from list_fields(folds, ["deferred_ops", "checks", "wholes"])
    if folds.folding is not None:
        for op in folds.program.graph.ops:
            if op.outputs:
                yield f"%{op.index} {op.type}: {' | '.join(str(folds.folding.fold_of(value)) for value in op.values)}"
    yield from (f"note: {note}" for note in folds.notes)


def list_fields(found: Any, names: Iterable[str] = ()) -> Iterator[str]:
    """The fields of a record, one per line: those with these names, or all."""
    for name in names or [each.name for each in fields(found)]:
        value = getattr(found, name)
        if isinstance(value, set | frozenset):
            value = " ".join(str(each) for each in sorted(value)) or "none"
        elif isinstance(value, Mapping):
            value = " ".join(f"{key}:{value[key]}" for key in sorted(value)) or "none"
        yield f"{name}: {value}"


def list_cut(cut: Cut, number: Callable[[int], int] = int) -> Iterator[str]:
    """The fragments of every phase, the crossings between them, and the holders of variables;
    `number` numbers the ops.
    """
    program, stages = cut.program, cut.program.stages

    def name(value: Value) -> str:
        return str(Value(number(value.op), value.out))

    def describe(fragment: Fragment, indent: str = "") -> Iterator[str]:
        stage = "" if fragment.stage is None else f" of {stages[fragment.stage].key}"
        turn = f" round {fragment.round}" if fragment.kind == "update" else ""
        ops = ", ".join(f"%{number(op)} {program.graph.ops[op].type}" for op in fragment.ops)
        yield f"{indent}{fragment.kind}{stage}{turn} on {fragment.worker}"
        yield f"{indent}  fed {', '.join(map(name, sorted(fragment.feeds))) or 'nothing'}"
        yield f"{indent}  ops {ops or 'none'}"
        yield f"{indent}  gives {', '.join(map(name, sorted(fragment.fetches))) or 'nothing'}"

    for fragment in cut.batch_fragments.values():
        yield from describe(fragment)
    for phase in cut.phases:
        yield f"phase {phase.index}, requests {list(phase.requests)}"
        staged = (fragment for stage in phase.stages for fragment in stage.fragments)
        for fragment in (*phase.prologue.values(), *staged, *chain.from_iterable(phase.updates.values())):
            yield from describe(fragment, "  ")
        for each in phase.crossings:
            when = "before the updates" if each.round < 0 else f"after round {each.round}"
            yield f"  {name(each.value)} crosses {each.source} -> {', '.join(each.destinations)} {when}"
    for b in cut.boundaries:
        to = ", ".join(stages[destination].key for destination in b.destinations)
        back = f"its gradient as {b.backward_codec}" if b.backward else "no gradient"
        source, value = stages[b.source].key, name(b.value)
        yield f"boundary {b.slot}: {value} {source} -> {to} as {b.codec}, {back}, {b.layout}, phase {b.phase}"
    yield from (f"merge {name(value)}: {rule}" for value, rule in sorted(cut.merges.items()))
    yield from (f"held {path}: {', '.join(workers)}" for path, workers in cut.variable_workers.items())


def list_layouts(cut: Cut, stage: int) -> Iterator[str]:
    """The layouts of a split stage's values that are not whole, and the reshards between them."""
    layouts, graph = cut.layouts[stage], cut.program.graph
    yield f"stage {cut.program.stages[stage].key} on {layouts.count} devices"
    for each in layouts.sums:
        yield f"  {each.kind} of {each.value} {each.source} -> {each.target} over replicas, {each.nbytes:.0f} bytes"
    for value, layout in sorted(layouts.by_value.items()):
        yield f"  {value} {graph.ops[value.op].type} {graph.spec(value)}: {layout}"
    for op, reshards in sorted(layouts.reshards.items()):
        for each in reshards:
            reader = "the end" if op < 0 else f"%{op} {graph.ops[op].type}"
            yield f"  {each.kind} of {each.value} {each.source} -> {each.target} for {reader}, {each.nbytes:.0f} bytes"
    if layouts.joint_ops:
        yield f"  computed together: {', '.join(f'%{op} {graph.ops[op].type}' for op in sorted(layouts.joint_ops))}"


VERIFY = bool(os.environ.get("WHALE_NEBULA_VERIFY_PASSES"))
CAPTURED = "capture"
"""The name of the program before the first pass."""


def _find_no_line(op: int) -> str:
    return ""


@dataclass(frozen=True)
class Compilation:
    """A program in compilation, with the results of earlier passes.

    `where` returns the user's line of an op; `results` are the receivers of the tensors that the step returns;
    `restricted_inputs` names the inputs that only the workers whose stages read them receive; `held_layouts` are the
    layouts of variables that earlier programs have touched. With `follows_inputs` the dependences of crossing values on
    inputs are determined. `folds` has the relation of each value to the batch, `phases` the phase and part of each op.
    `divided` is the cut with a process for each cluster, if one process runs several.
    """

    program: Program
    workers: tuple[Worker, ...]
    where: Callable[[int], str] = _find_no_line
    results: str = EVERYWHERE
    restricted_inputs: Collection[str] = ()
    held_layouts: Mapping[int, Layout] = field(default_factory=dict)
    follows_inputs: bool = False
    folds: BatchFolds | None = None
    phases: Parts | None = None
    cut: Cut | None = None
    divided: Cut | None = None

    def require(self, what: str) -> Any:
        """The result of an earlier pass ("folds", "phases" or "cut"); raises a `LookupError` if it has not run."""
        found = getattr(self, what)
        if found is None:
            raise LookupError(f"no pass has computed {what} yet: the order of PIPELINE is wrong")
        return found


class Pass(Protocol):
    """One step of the compilation; a frozen dataclass."""

    @property
    def name(self) -> str:
        """The pass's name in `show --after`."""

    def apply(self, compilation: Compilation) -> Compilation:
        """The program after the pass, or an error that names the user's line."""

    def describe(self, found: Compilation) -> Iterable[str]:
        """The result of the pass as lines of text."""


@dataclass(frozen=True)
class BuiltinPass:
    """A built-in pass, defined by its functions."""

    name: str
    apply: Callable[[Compilation], Compilation]
    describe: Callable[[Compilation], Iterable[str]]


def _fold_batch(compilation: Compilation) -> Compilation:
    """Determine how each value depends on the batch; refuse programs whose results would change by micro-batches."""
    folds = fold_batch(compilation.program, compilation.where)
    folds.notes.extend([*list_python_notes(compilation.program, compilation.where), *sum_notes(compilation.program)])
    return replace(compilation, folds=folds)


def _split_phases(compilation: Compilation) -> Compilation:
    """Assign a phase, and a part of it, to each op; check that random draws keep their order."""
    folds = compilation.require("folds")
    phases = split_parts(compilation.program, folds.deferred_ops, folds.checks, folds.added)
    check_draws(compilation.program, phases, folds, compilation.workers)
    return replace(compilation, phases=phases)


def _check_stages(compilation: Compilation) -> Compilation:
    """Refuse cycles of stages, and variables or seeds that workers would disagree on."""
    program, phases = compilation.program, compilation.require("phases")
    check_order(program.graph, program.labels, program.stages, phase_of=phases.phase, where=compilation.where)
    check_shared_state(program, phases, [set(worker.stages) for worker in compilation.workers], compilation.where)
    return compilation


def _cut_program(compilation: Compilation) -> Compilation:
    """Cut the program into fragments for workers, with the boundaries between them."""
    phases, folds = compilation.require("phases"), compilation.require("folds")
    cut = map_workers(
        compilation.program, compilation.workers, phases, folds, compilation.results, compilation.restricted_inputs,
        compilation.where,
    )  # fmt: skip
    check_crossable(cut, compilation.where)
    return replace(compilation, cut=cut)


def _complete_layouts(compilation: Compilation) -> Compilation:
    """Complete the layouts of stages that are split over devices."""
    cut = compilation.require("cut")
    found = complete_stages(cut, compilation.where, compilation.held_layouts)
    layouts = {stage: each for stage, each in found.items() if each.by_value or each.sums}
    notes = dict.fromkeys([*cut.notes, *chain.from_iterable(each.notes for each in found.values())])
    return replace(compilation, cut=replace(cut, layouts=layouts, notes=tuple(notes))) if found else compilation


def _list_exchange(compilation: Compilation) -> Compilation:
    """List the exchanges between clusters for updates and, on request, the dependences of crossing values on inputs."""
    cut = compilation.require("cut")
    parted = divide_clusters(
        cut,
        compilation.require("phases"),
        compilation.require("folds"),
        compilation.results,
        compilation.restricted_inputs,
    )
    crossings = list_crossings(parted) if compilation.follows_inputs else ()
    cut_with_exchanges = replace(cut, exchanges=list_exchanges(parted), input_crossings=crossings)
    return replace(compilation, cut=cut_with_exchanges, divided=None if parted is cut else parted)


PIPELINE: tuple[Pass, ...] = (
    BuiltinPass(
        "in-flight",
        lambda compilation: replace(compilation, program=limit_in_flight(compilation.program)),
        lambda found: [f"in flight: {found.program.pipeline.in_flight or 'by schedule'}"],
    ),
    BuiltinPass("fold", _fold_batch, lambda found: list_folds(found.require("folds"))),
    BuiltinPass("phases", _split_phases, lambda found: list_fields(found.require("phases"))),
    BuiltinPass(
        "merges",
        lambda compilation: replace(compilation, program=add_merges(compilation.program, compilation.require("folds"))),
        lambda found: [f"request {each.index} merges {' '.join(each.merges)}" for each in found.program.requests],
    ),
    BuiltinPass("order", _check_stages, lambda found: ()),
    BuiltinPass("cut", _cut_program, lambda found: list_cut(found.require("cut"))),
    BuiltinPass(
        "layouts",
        _complete_layouts,
        lambda found: chain.from_iterable(
            list_layouts(found.require("cut"), stage) for stage in found.require("cut").layouts
        ),
    ),
    BuiltinPass("exchange", _list_exchange, lambda found: map(str, found.require("cut").exchanges)),
)
"""All passes, in their order."""


def run_passes(compilation: Compilation, passes: Sequence[Pass] | None = None) -> Compilation:
    """Run passes in order, by default PIPELINE."""
    if VERIFY:
        verify(compilation, CAPTURED)
    for each in PIPELINE if passes is None else passes:
        compilation = each.apply(compilation)
        if VERIFY:
            verify(compilation, each.name)
    return compilation


def cut_program(
    program: Program,
    workers: Sequence[Worker],
    where: Callable[[int], str] = _find_no_line,
    *,
    results: str = EVERYWHERE,
    restricted_inputs: Collection[str] = (),
    held_layouts: Mapping[int, Layout] | None = None,
) -> Cut:
    """Map a program to workers by all passes; for the options see `Compilation`."""
    found: Cut = run_passes(
        Compilation(program, tuple(workers), where, results, restricted_inputs, held_layouts or {})
    ).require("cut")
    return found


def text_after(name: str, compilation: Compilation) -> str:
    """The text of a program after the pass of this name, or as it was captured.

    >>> from whale_nebula.ir.graph import Graph
    >>> text_after("cutt", Compilation(Program(Graph(())), ()))
    Traceback (most recent call last):
        ...
    whale_nebula.errors.OptionError: NB-104 no pass is called 'cutt'
      mend: did you mean 'cut'?
    """
    names = [CAPTURED, *(each.name for each in PIPELINE)]
    if name not in names:
        raise OptionError(f"no pass is called {name!r}", mend=did_you_mean(name, names))
    passes = PIPELINE[: names.index(name)]
    found = run_passes(compilation, passes)
    return "\n".join([f"== {name}", *(passes[-1].describe(found) if passes else list_program(found.program))])


class InvalidProgramError(ValueError):
    """Raised if a program is invalid after a pass."""


def verify(compilation: Compilation, name: str) -> None:
    """Raise an `InvalidProgramError` with all faults of a program after the pass of this name."""
    faults = list(find_faults(compilation))
    if faults:
        raise InvalidProgramError("\n  ".join([f"after pass {name!r} the program is not valid:", *faults]))


def find_faults(compilation: Compilation) -> Iterator[str]:
    """All faults of a program and of the results of its passes, one sentence each."""
    yield from _find_program_faults(compilation.program)
    if compilation.phases is not None:
        yield from _find_phase_faults(compilation.program, compilation.phases)
    if compilation.cut is not None:
        yield from _find_cut_faults(compilation.cut)
    if compilation.divided is not None:
        yield from (f"{each}, with a process for each cluster" for each in _find_cut_faults(compilation.divided))


def _find_program_faults(program: Program) -> Iterator[str]:
    graph, stages = program.graph, range(len(program.stages))
    for number, op in enumerate(graph.ops):
        if op.index != number:
            yield f"op {number} has the number {op.index}"
        for value in op.inputs:
            if value.op >= number or not _exists(graph, value):
                yield f"op {number} {op.type} reads {value}, which is not computed before it"
    for labelled, stage in program.labels.items():
        if labelled not in range(len(graph)) or stage not in stages:
            yield f"op {labelled} is labelled with stage {stage} of {len(stages)}"
    named = chain(program.returns, program.loss_weights, program.masks, program.masks.values())
    for request in program.requests:
        arrivals = (value for each in request.arrivals for value in (each.boundary, each.feed))
        made = chain.from_iterable(each.values for each in request.parts)
        placeholders = chain.from_iterable(each.values for each in request.holders)
        flows = (value for each in request.flows for value in (each.boundary, each.gradient))
        named = chain(named, request.targets, request.output_gradients, arrivals, made, placeholders, flows)
        if len(request.merges) not in (0, len(request.sources)):
            yield f"request {request.index} merges {len(request.merges)} of {len(request.sources)} gradients"
        if any(op not in range(len(graph)) for op in request.backward):
            yield f"the backward of request {request.index} has ops that do not exist"
    yield from (f"{value} is named, but does not exist" for value in named if not _exists(graph, value))
    holders: list[Leaf | Variable] = [*program.leaves, *program.variables]
    yield from (f"{each} is held by no op" for each in holders if each.op not in range(len(graph)))


def _exists(graph: Graph, value: Value) -> bool:
    return 0 <= value.op < len(graph) and 0 <= value.out < len(graph.ops[value.op].outputs)


def _find_phase_faults(program: Program, phases: Parts) -> Iterator[str]:
    if len(phases.phase_of) != len(program.requests):
        yield f"{len(program.requests)} requests, and phases of {len(phases.phase_of)}"
    if list(phases.phase_of) != sorted(phases.phase_of):
        yield f"requests go back from phase to phase: {phases.phase_of}"
    for op, part in phases.part.items():
        if not 0 <= part < 3 * phases.phases:
            yield f"op {op} runs in part {part} of {phases.phases} phases"


def _find_cut_faults(cut: Cut) -> Iterator[str]:
    workers = {worker.name for worker in cut.workers}
    skipped = (stage.skip for phase in cut.phases for stage in phase.stages if stage.skip is not None)
    for fragment in (*list_fragments(cut), *skipped):
        yield from _find_fragment_faults(cut.program.graph, fragment)
        if fragment.worker not in workers:
            yield f"{_name_fragment(fragment)} runs on {fragment.worker}, which does not exist"
    for boundary in cut.boundaries:
        if not boundary.destinations or boundary.source in boundary.destinations:
            yield f"boundary {boundary.slot} goes from stage {boundary.source} to {boundary.destinations}"
        if not _exists(cut.program.graph, boundary.value):
            yield f"boundary {boundary.slot} carries {boundary.value}, which does not exist"
    if [boundary.slot for boundary in cut.boundaries] != list(range(len(cut.boundaries))):
        yield "boundaries are not numbered in order"
    for phase in cut.phases:
        for fragments in phase.updates.values():
            yield from _find_order_faults(cut.program.graph, fragments)
        for each in phase.crossings:
            if each.source in each.destinations or not workers.issuperset((each.source, *each.destinations)):
                yield f"{each.value} crosses from {each.source} to {each.destinations}"
            readers = (fragment for worker in each.destinations for fragment in phase.updates.get(worker, ()))
            for fragment in readers:
                if each.value in fragment.feeds and each.round >= max(0, fragment.round):  # -1: before all of them
                    name = _name_fragment(fragment)
                    yield f"{name} reads {each.value} before it has crossed, in round {fragment.round}"
    yield from _find_absent_values(cut)


def _find_absent_values(cut: Cut) -> Iterator[str]:
    """Values that fragments are fed, but that their workers do not have."""
    known: dict[str, set[Value]] = {worker.name: set() for worker in cut.workers}
    for fragment in list_fragments(cut):
        for name in (fragment.worker,) if fragment.stage is None else cut.workers_of(fragment.stage):
            known[name].update(value for value in fragment.fetches if value.op in fragment.ops)
    for boundary in cut.boundaries:
        for stage in boundary.destinations:
            for name in cut.workers_of(stage):
                known[name].add(boundary.value)
    for each in chain.from_iterable(phase.crossings for phase in cut.phases):
        for name in each.destinations:
            known[name].add(each.value)
    for request in cut.program.requests:
        for holder in request.holders:
            variable = cut.program.variable_ops.get(request.origins[holder.source])
            makers = (cut.workers_of(part.stage) for part in request.parts if part.source == holder.source)
            for name in cut.variable_workers[variable.path] if variable is not None else chain.from_iterable(makers):
                known[name].update(holder.values)
    for fragment in list_fragments(cut):
        for value in fragment.feeds:
            if cut.program.graph.ops[value.op].role in ("", HOLDER) and value not in known[fragment.worker]:
                yield f"{_name_fragment(fragment)} is fed {value}, which {fragment.worker} does not have"


def _find_order_faults(graph: Graph, fragments: Sequence[Fragment]) -> Iterator[str]:
    """Ops of an update that run in an earlier round than an op on the same variable that they must follow."""
    rounds: dict[int, list[int]] = {}
    for fragment in fragments:
        for op in fragment.ops:
            rounds.setdefault(op, []).append(fragment.round)
    for op, own in rounds.items():
        for before in graph.ops[op].control:
            shared = set(list_resources(graph.ops[op], graph)).intersection(list_resources(graph.ops[before], graph))
            if shared and max(rounds.get(before, [-1])) > min(own):
                yield f"op {op} runs in round {min(own)} on {fragments[0].worker}, but follows op {before}"


def _find_fragment_faults(graph: Graph, fragment: Fragment) -> Iterator[str]:
    inside, fed = set(fragment.ops), set(fragment.feeds)
    if len(inside) != len(fragment.ops):
        yield f"{_name_fragment(fragment)} has an op twice"
    for op in fragment.ops:
        for value in graph.ops[op].inputs:
            if value.op not in inside and value not in fed and graph.ops[value.op].role != CAPTURE:
                yield f"{_name_fragment(fragment)} reads {value} for op {op}, which it neither computes nor is fed"
    for value in fragment.fetches:
        if value.op not in inside and value not in fed:
            yield f"{_name_fragment(fragment)} returns {value}, which it neither computes nor is fed"


def _name_fragment(fragment: Fragment) -> str:
    stage = "" if fragment.stage is None else f" of stage {fragment.stage}"
    return f"the {fragment.kind}{stage} in phase {fragment.phase} on {fragment.worker}"
