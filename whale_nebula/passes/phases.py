"""Assign each op to a phase, and to its prologue, its forward or its update.

A phase has a *prologue*, a *forward* and an *update*; their numbers are 3p, 3p+1 and 3p+2. The rules, each from a
case in a real training step:

* an op that depends on a gradient belongs to the update, or, as a part of a later forward, to that;
* an effect that ignores the batch (a counter, a weight decay, a random number) runs once: in the update, or in the
  prologue if the forward reads the written value;
* a seed of the forward advances with each micro-batch: it belongs to the forward. Writes outside of stages after the
  last draw are not part of a draw: they belong to the update;
* a metric's write waits for the update, unless the forward needs it: so a failing forward does not change metrics;
* a loss that adds another stage's weight penalty also waits, if no gradient reads it: so the penalty, which is the
  same for all micro-batches, crosses once a step;
* a forward op that depends on an update belongs to the next phase; an effect that only follows it, to the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, INPUT, Op
from whale_nebula.ir.program import Program, Request
from whale_nebula.passes.effects import (
    find_seed_ops,
    is_check,
    is_effect,
    is_read,
    is_seeded_draw,
    is_stateful_draw,
    list_resources,
)
from whale_nebula.passes.label import find_ops_of_variables
from whale_nebula.spec import Spec

PROLOGUE, FORWARD, UPDATE = 0, 1, 2
MAX_SMALL_BYTES = 4096
"""The most bytes of a forward's value that may be sent to every worker, such as a metric's inputs."""
_HELD_ROLES = frozenset({INPUT, CAPTURE, HOLDER, FEED})
_SUM_OPS = frozenset({"Add", "AddV2", "AddN", "Pack"})


def has_known_size(spec: Spec) -> bool:
    """Whether the size of a tensor is independent of the batch."""
    return spec.shape is not None and None not in spec.shape


def is_small(spec: Spec) -> bool:
    """Whether a tensor has at most `MAX_SMALL_BYTES`, independent of the batch."""
    return has_known_size(spec) and spec.nbytes() <= MAX_SMALL_BYTES


class LateSums(NamedTuple):
    """Sums that wait for the update: `sums` are their ops, `terms` the ops of their penalties, each of one stage's
    variables, which are computed before the first micro-batch.
    """

    sums: frozenset[int] = frozenset()
    terms: frozenset[int] = frozenset()


def find_late_sums(program: Program, small: Callable[[Op], bool], each: Callable[[Op], bool]) -> LateSums:
    """The ops of a differentiated sum that may wait, as they add penalties of another stage's variables.

    `small` is whether an op has only few numbers of the batch as inputs and outputs, `each` whether a reader runs with
    each micro-batch. With `nb.loss_weight` the whole target is weighed, so nothing waits. An op of several stages'
    variables also counts as a sum.
    """
    waiting = set() if program.loss_weights or len(program.stages) < 2 else _find_waiting(program, small, each)
    if not waiting:
        return LateSums()
    homes, graph = _find_penalties(program), program.graph
    sums, terms = set[int](), set[int]()
    for op in graph.ops:
        own = {program.labels.get(op.index, -1)}
        adds = op.type in _SUM_OPS and any(homes.get(value.op, own) - own for value in op.inputs)
        if op.index in waiting and (adds or any(value.op in sums for value in op.inputs)):
            sums.add(op.index)
    stack = [value.op for op in sums for value in graph.ops[op].inputs if value.op in homes]
    while stack:
        number = stack.pop()
        if len(homes[number]) < 2:
            terms.add(number)
        elif number not in sums:
            sums.add(number)
            stack += [value.op for value in graph.ops[number].inputs if value.op in homes]
    return LateSums(frozenset(sums), frozenset(terms))


def _find_penalties(program: Program) -> dict[int, set[int]]:
    """For each op that depends on variables only, the stages of these variables."""
    found: dict[int, set[int]] = {}
    for index in sorted(find_ops_of_variables(program.graph)):
        above = [found[value.op] for value in program.graph.ops[index].inputs if value.op in found]
        own = program.labels.get(index)
        found[index] = set().union(*above) or ({own} if own is not None else set())
    return found


def _find_waiting(program: Program, small: Callable[[Op], bool], each: Callable[[Op], bool]) -> set[int]:
    """The ops of targets that no gradient reads, and no op of the forward that must run before the update."""
    graph, requests = program.graph, program.requests
    aims = graph.ascend(value.op for request in requests for value in request.targets)
    read = graph.ascend(_find_gradients(program) | {op for request in requests for _, op in request.effects})
    arriving = {arrival.boundary for request in requests for arrival in request.arrivals}
    found: set[int] = set()

    def waits(reader: Op) -> bool:
        if program.request_of(reader.index) is not None:
            return reader.index not in read
        return reader.index in found if reader.index in aims else not each(reader)

    for op in reversed(graph.ops):
        fed = any(value in arriving or graph.ops[value.op].role == FEED for value in op.inputs)
        readers = (reader for value in op.values for reader in graph.consumers(value))
        if op.index in aims and not fed and small(op) and all(map(waits, readers)):
            found.add(op.index)
    return found


def _find_gradients(program: Program) -> set[int]:
    """The ops that make gradients: of inputs of stages, and of variables."""
    flows = {flow.gradient.op for request in program.requests for flow in request.flows}
    return flows | {value.op for part in program.gradient_parts.values() for value in part.values}


@dataclass(frozen=True)
class Parts:
    """Result of the pass: `part` has the number of the part of each op that has a fixed one; others run wherever they
    are read. `phase_of` has the phase of each request, `phases` is their number.

    `pure` ops depend on inputs alone, `batch` ops on the batch; `leading` ops are needed by a forward; `seeds` are the
    variables that seed draws of the forward, `forward_written` the handles that a forward or a prologue writes.
    `latest` has the last part in which a read may run, as a write follows it.

    `late` is the part of a loss that waits for the update; `recomputed_checks` are ops of an update that are also
    computed for a check of an earlier part, with that part; `asserted` are checks of merged values of all
    micro-batches.
    """

    part: Mapping[int, int]
    phase_of: tuple[int, ...]
    phases: int
    effects: frozenset[int]
    pure: frozenset[int]
    batch: frozenset[int]
    seeds: frozenset[int]
    latest: Mapping[int, int]
    forward_written: frozenset[int]
    leading: frozenset[int]
    late: LateSums = field(default_factory=LateSums)
    recomputed_checks: Mapping[int, int] = field(default_factory=dict)
    asserted: frozenset[int] = frozenset()

    def phase(self, op: int) -> int:
        """The phase in which an op runs."""
        return self.part.get(op, 0) // 3

    def is_made_by_each_reader(self, op: Op) -> bool:
        """Whether each stage that reads an op's values computes them, from the inputs: they are made in no stage."""
        return op.index in self.pure and op.stage is None


def split_parts(
    program: Program,
    deferred_ops: frozenset[int] = frozenset(),
    checks: frozenset[int] = frozenset(),
    added: frozenset[int] = frozenset(),
) -> Parts:
    """Assign a part to every op of the user's own; `deferred_ops` are ops that must wait for merged values.

    `checks` do not: they recompute their inputs for their own micro-batch, as do ops that are `added` up.
    """
    return _Splitter(program, deferred_ops, checks, added).run()


@dataclass
class _Splitter:
    program: Program
    deferred_ops: frozenset[int]
    checks: frozenset[int]
    added: frozenset[int]
    recomputed_checks: dict[int, int] = field(default_factory=dict)
    part: dict[int, int] = field(default_factory=dict)
    level: dict[int, int] = field(default_factory=dict)
    phase_of: list[int] = field(default_factory=list)

    def run(self) -> Parts:
        """Collect the constraints of the rules, then assign a part to each op."""
        program, graph = self.program, self.program.graph
        self.backward = {op for request in program.requests for op in request.backward}
        self.user_ops = [op for op in graph.ops if op.index not in self.backward and op.role not in _HELD_ROLES]
        self.batch = graph.descend(program.leaf_ops, skip=self.backward.__contains__)
        self.holder_ops = graph.descend(program.holders, skip=self.backward.__contains__)
        drawn = {op.index for op in self.user_ops if is_stateful_draw(op)} - self.batch
        self.effects = drawn | {op.index for op in self.user_ops if is_effect(op, graph)}
        self.targets = graph.ascend(v.op for request in program.requests for v in request.targets)
        self.leading = self._find_leading()
        self.seeds = self._find_seed_variables()
        self.pure = self._find_pure()
        self.micro_batch_ops = self.batch - self.pure - self.effects - self.holder_ops
        self.row_sources = self._find_row_sources()
        self._find_levels()
        single = max(self.phase_of, default=0) == 0
        self.late = find_late_sums(program, self._can_wait, self._runs_with_micro_batch) if single else LateSums()
        self.checked = graph.ascend(self.checks) & self.deferred_ops - self.holder_ops - self.effects
        for op in self.user_ops:
            self._place_op(op)
        return self._collect_parts()

    def _find_seed_variables(self) -> dict[int, int]:
        """The variables whose values seed draws of the forward, and the last such draw.

        A scalar that is used in a seed is a counter of steps: it advances once per step, independent of the draws.
        """
        graph, variables = self.program.graph, self.program.variable_ops
        counts = {handle for handle, variable in variables.items() if variable.spec.scalar}
        found: dict[int, int] = {}
        for op in self.user_ops:
            for each in find_seed_ops(op, graph) if is_seeded_draw(op) and op.index in self.leading else ():
                if is_read(graph.ops[each]):
                    found.update(
                        (handle, op.index) for handle in list_resources(graph.ops[each], graph) if handle not in counts
                    )
        return found

    def _is_seed_write(self, op: Op) -> bool:
        """Whether an op touches a seed as a part of a draw: in a stage, or before the last draw from it."""
        seeds = [handle for handle in list_resources(op, self.program.graph) if handle in self.seeds]
        return any(op.stage is not None or op.index < self.seeds[handle] for handle in seeds)

    def _find_leading(self) -> set[int]:
        """Ops on which the forward depends: on those of stages, targets of gradients, effects that stay, writes that
        the backward reads afterwards, or gradients that a custom gradient computes in the forward.
        """
        graph = self.program.graph
        found = _find_gradients(self.program) - self.backward | {
            before for op in self.backward if list_resources(graph.ops[op], graph) for before in graph.ops[op].control
        }
        for op in reversed(self.user_ops):
            staged = op.stage is not None and op.index not in self.effects and op.type != "Const"
            leads = op.index in self.targets or staged or op.index in found or op.index in self.added
            if leads or self._runs_per_micro_batch(op):
                found.update(value.op for value in op.inputs)
            if leads:
                found.update(op.control)
        return found | self.added

    def _runs_per_micro_batch(self, op: Op) -> bool:
        """Whether an effect runs with each micro-batch: it prints, checks, or writes a value that cannot be merged."""
        waits = op.index in self.deferred_ops or op.index in self.holder_ops
        each = op.index in self.effects and op.index in self.batch and not waits
        return each and (self.program.pipeline.micro_batch > 1 or not list_resources(op, self.program.graph))

    def _find_pure(self) -> set[int]:
        """Ops of the user's inputs alone: they can be computed at any time, from the whole batch. From a stage only
        its sizes, counts and sums: rows stay in the stage.
        """
        found: set[int] = set(self.program.leaf_ops)
        consts = {op.index for op in self.user_ops if op.type == "Const"}
        for op in self.user_ops:
            alone = all(v.op in found or v.op in consts for v in op.inputs)
            if alone and op.inputs and not op.stateful and (op.stage is None or all(map(is_small, op.outputs))):
                found.add(op.index)
        return found & self.batch

    def _find_levels(self) -> None:
        """The last phase whose update an op depends on, by data or order; assigns phases to requests."""
        waiting = list(self.program.requests)
        for op in self.user_ops:
            while waiting and op.index >= waiting[0].start:
                self._assign_phase(waiting.pop(0))
            level = max((self._find_level(each) for each in (*(v.op for v in op.inputs), *op.control)), default=-1)
            once = op.index not in self.batch or op.index in self.deferred_ops or self._follows_alone(op)
            late = op.index in self.effects and once and not self._is_seed_write(op)
            self.level[op.index] = max(level, self.phase_of[-1]) if late and self.phase_of else level
        for request in waiting:
            self._assign_phase(request)

    def _find_level(self, op: int) -> int:
        if op in self.program.holders:
            return self.phase_of[self.program.holders[op][0]]
        return self.level.get(op, -1)

    def _assign_phase(self, request: Request) -> None:
        above = self.program.graph.ascend(v.op for v in request.targets)
        self.phase_of.append(1 + max((self._find_level(op) for op in above), default=-1))

    def _place_op(self, op: Op) -> None:
        early = self._find_earliest(op, self.recomputed_checks if op.index in self.checks else {})
        late_sum = op.index in self.late.sums
        inside = op.index in self.batch and (op.index in self.targets or op.stage is not None)
        forward = inside or op.index in self.leading
        if op.index in self.checked:
            self.recomputed_checks[op.index] = _find_next_part(self._find_earliest(op, self.recomputed_checks), FORWARD)
        if op.index in self.effects:
            self.part[op.index] = self._place_effect(op, early)
        elif op.index in self.deferred_ops or (op.index in self.holder_ops and not inside):
            self.part[op.index] = _find_next_part(early, UPDATE)
        elif op.index in self.batch and op.index not in self.pure:
            once = late_sum or (not forward and (early % 3 == UPDATE or self._accumulates(op)))
            self.part[op.index] = _find_next_part(early, UPDATE if once else FORWARD)
        elif early or late_sum:
            self.part[op.index] = _find_next_part(early, UPDATE) if late_sum else early

    def _can_wait(self, op: Op) -> bool:
        """Whether an op of the forward without readers there may run once, after the micro-batches."""
        return op.stage is None and op.index in self.micro_batch_ops and self._accumulates(op)

    def _runs_with_micro_batch(self, op: Op) -> bool:
        """Whether an op runs with each micro-batch."""
        return op.index in self.leading or op.stage is not None or self._runs_per_micro_batch(op)

    def _accumulates(self, op: Op) -> bool:
        """Whether an op makes numbers that neither a stage nor rows need (a metric's sum, a returned loss)."""
        given = [value for value in op.inputs if value.op in self.batch and value.op not in self.pure]
        specs = [self.program.graph.spec(value) for value in given or op.values]
        few = all(map(has_known_size, specs)) and sum(spec.nbytes() for spec in specs) <= MAX_SMALL_BYTES
        return few and op.index not in self.row_sources

    def _find_row_sources(self) -> set[int]:
        """Ops on which rows of the batch depend, including the shape to which a sample weight is broadcast."""
        found: set[int] = set()
        for op in reversed(self.user_ops):
            if op.index in found or (op.index in self.micro_batch_ops and not all(map(has_known_size, op.outputs))):
                found.update(value.op for value in op.inputs)
        return found

    def _find_earliest(self, op: Op, again: Mapping[int, int]) -> int:
        """The earliest part of an op: the latest of its inputs' parts, with those in `again` for recomputed inputs;
        effects, reads and calls come after earlier effects, and effects after what reads before them.
        """
        holders = self.program.holders
        found = [0]
        for value in op.inputs:
            asked = 3 * self.phase_of[holders[value.op][0]] + UPDATE if value.op in holders else 0
            found.append(again.get(value.op, asked or self.part.get(value.op, 0)))
        writes = op.index in self.effects
        if writes or is_read(op) or op.functions:  # a write waits for earlier branches and lookups of a forward, too
            done = (each for each in op.control if each in self.effects or (writes and each in self.batch))
            found += [self.part[each] for each in done if each in self.part and not self._is_merged_assertion(each)]
        return max(found)

    def _follows_alone(self, op: Op) -> bool:
        """Whether a write outside of the stages, if it follows gradients, can wait for them: with one micro-batch."""
        single = self.program.pipeline.micro_batch < 2
        return single and op.stage is None and bool(list_resources(op, self.program.graph))

    def _is_merged_assertion(self, op: int) -> bool:
        """Whether an op is an assertion on merged values; ops after it need not wait."""
        return op in self.deferred_ops and op in self.batch and is_check(self.program.graph.ops[op], self.program.graph)

    def _waits_for_update(self, op: Op, early: int, asked: bool) -> bool:
        """Whether an effect of the batch that a later forward needs runs in the update: it needs the values of all
        micro-batches; or, with one micro-batch, it comes after an update, or after gradients and outside of the stages.
        """
        if self.program.pipeline.micro_batch > 1:
            return asked and op.index in self.deferred_ops
        return early % 3 == UPDATE or (asked and self._follows_alone(op))

    def _place_effect(self, op: Op, early: int) -> int:
        asked = [self.phase_of[request.index] for request in self.program.requests if request.start <= op.index]
        update = _find_next_part(max(early, 3 * max(asked, default=0) + UPDATE), UPDATE)
        leads = op.index in self.leading
        if op.index in self.holder_ops and not (leads and op.index in self.batch):
            return _find_next_part(early, UPDATE)
        if self._is_seed_write(op):
            return _find_next_part(early, FORWARD)
        if op.index in self.batch:
            waits = self._is_merged_assertion(op.index) or self._waits_for_update(op, early, bool(asked))
            stays = not waits and (leads or self._runs_per_micro_batch(op))
            return _find_next_part(early, FORWARD) if stays else update
        if asked or not leads:
            return update
        return _find_next_part(early, FORWARD if early % 3 == FORWARD else PROLOGUE)

    def _collect_parts(self) -> Parts:
        graph = self.program.graph
        forward = {effect for effect in self.effects if self.part[effect] % 3 != UPDATE}
        latest: dict[int, int] = {}  # a read, or a branch that reads, must not run after a write that followed it
        for op in self.user_ops:
            for before in op.control if op.index in self.effects else ():
                if before not in self.effects and list_resources(graph.ops[before], graph):
                    latest[before] = min(latest.get(before, self.part[op.index]), self.part[op.index])
        return Parts(
            part=self.part,
            phase_of=tuple(self.phase_of),
            phases=max([0, *(part // 3 for part in self.part.values()), *self.phase_of]) + 1,
            effects=frozenset(self.effects),
            pure=frozenset(self.pure),
            batch=frozenset(self.batch),
            seeds=frozenset(self.seeds),
            latest=latest,
            leading=frozenset(self.leading | self.targets),
            late=self.late,
            forward_written=frozenset(handle for op in forward for handle in list_resources(graph.ops[op], graph)),
            recomputed_checks=self.recomputed_checks,
            asserted=frozenset(op for op in self.effects if self._is_merged_assertion(op)),
        )


def _find_next_part(early: int, kind: int) -> int:
    """The first part of a kind that is not before `early`."""
    return early + (kind - early) % 3
