"""Assign each op to a phase, and to its prologue, its forward or its update.

A phase has a *prologue*, a *forward* and an *update*; their numbers are 3p, 3p+1 and 3p+2. The rules, each from a
trap that a real training step set:

* what descends from a gradient is update;
* an effect that ignores the batch (a counter, a weight decay, a number drawn) runs once: in the update, or in the
  prologue where the forward reads what it wrote;
* a seed of the forward advances with each micro-batch: it belongs to the forward. What is written outside of stages
  after the last draw is no part of a draw: an update;
* a metric's write waits for the update, unless the forward needs it: so a failing forward leaves metrics alone;
* a loss that adds another stage's weight penalty waits too, where no gradient reads it: so the penalty, which no
  micro-batch changes, crosses once a step;
* a forward op that depends on an update belongs to the next phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from whale_nebula.ir.graph import CAPTURE, FEED, HOLDER, INPUT, Op
from whale_nebula.ir.program import Program
from whale_nebula.passes.effects import draws, is_check, is_effect, is_random, is_read, resources, seeded_by
from whale_nebula.passes.label import made_of_variables
from whale_nebula.spec import Spec

_ADDS = frozenset({"Add", "AddV2", "AddN", "Pack"})


class Late(NamedTuple):
    """`sums` are ops that wait for the update; `terms` those that their penalties come of, each made of one stage's
    variables: they are there before the first micro-batch.
    """

    sums: frozenset[int] = frozenset()
    terms: frozenset[int] = frozenset()


def late_sums(program: Program, small: Callable[[Op], bool], each: Callable[[Op], bool]) -> Late:
    """The ops of what is differentiated that may wait, and that add what another stage's variables are made of.

    `small` says of an op that it takes and gives only few numbers of the batch, `each` of a reader that it runs with
    each micro-batch. With `nb.loss_weight` the whole target is what is weighed, so there nothing waits.
    """
    if program.weights or len(program.stages) < 2:
        return Late()
    waiting = _waiting(program, small, each)
    homes = _homes(program) if waiting else {}
    found: set[int] = set()
    for op in program.graph.ops:
        if op.index in waiting and (_is_penalty(op, program, homes) or any(v.op in found for v in op.inputs)):
            found.add(op.index)
    return _split_penalties(program, found, homes)


def _homes(program: Program) -> dict[int, set[int]]:
    """Of each op that is made of variables alone, the stages of what it is made of."""
    graph, found = program.graph, dict[int, set[int]]()
    alone = made_of_variables(graph)
    for op in graph.ops:
        if op.index in alone:
            above = [found[value.op] for value in op.inputs if value.op in found]
            own = program.labels.get(op.index)
            found[op.index] = set().union(*above) or ({own} if own is not None else set())
    return found


def _split_penalties(program: Program, sums: set[int], homes: dict[int, set[int]]) -> Late:
    """What is made of several stages' variables is a sum, too; its terms are made of one's."""
    terms: set[int] = set()
    stack = [value.op for op in sums for value in program.graph.ops[op].inputs if value.op in homes]
    while stack:
        op = stack.pop()
        if len(homes[op]) < 2:
            terms.add(op)
        elif op not in sums:
            sums.add(op)
            stack += [value.op for value in program.graph.ops[op].inputs if value.op in homes]
    return Late(frozenset(sums), frozenset(terms))


def _waiting(program: Program, small: Callable[[Op], bool], each: Callable[[Op], bool]) -> set[int]:
    """The ops of targets that no gradient reads, and no op of the forward that must be there before the update."""
    graph = program.graph
    aims = graph.ascend(value.op for request in program.requests for value in request.targets)
    read = graph.ascend(_made_by_gradients(program))
    arriving = {arrival.boundary for request in program.requests for arrival in request.arrivals}
    found: set[int] = set()

    def waits(reader: Op) -> bool:
        if program.request_of(reader.index) is not None:
            return reader.index not in read
        return reader.index in found if reader.index in aims else not each(reader)

    for op in reversed(graph.ops):
        fed = any(value in arriving or graph.ops[value.op].role == FEED for value in op.inputs)
        if op.index in aims and not fed and small(op) and all(map(waits, _readers(program, op))):
            found.add(op.index)
    return found


def _made_by_gradients(program: Program) -> Iterator[int]:
    for request in program.requests:
        yield from (flow.gradient.op for flow in request.flows)
        yield from (value.op for part in request.parts for value in part.values)
        yield from (op for _, op in request.effects)


def _readers(program: Program, op: Op) -> Iterator[Op]:
    return (reader for value in op.values for reader in program.graph.consumers(value))


def _is_penalty(op: Op, program: Program, homes: dict[int, set[int]]) -> bool:
    own = {program.labels.get(op.index, -1)}
    return op.type in _ADDS and any(homes.get(value.op, own) - own for value in op.inputs)


PROLOGUE, FORWARD, UPDATE = 0, 1, 2
SMALL = 4096
"""Bytes up to which a forward's value may go to every worker: metrics are made of such."""
_HOLDS = frozenset({INPUT, CAPTURE, HOLDER, FEED})


@dataclass(frozen=True)
class Parts:
    """What the pass found. `part` numbers ops that have a time of their own; others run wherever they are read.

    `late` is what of a loss waits for the update; `again` are ops of an update that a check of an earlier part
    computes besides, and which part that is; `asserted` are checks of what all micro-batches make together.
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
    late: Late = field(default_factory=Late)
    again: Mapping[int, int] = field(default_factory=dict)
    asserted: frozenset[int] = frozenset()

    def phase(self, op: int) -> int:
        """The phase an op runs in."""
        return self.part.get(op, 0) // 3


def split_parts(program: Program, once: frozenset[int] = frozenset(), checks: frozenset[int] = frozenset()) -> Parts:
    """Give every op of the user's own its part; `once` are ops that must wait for merged values.

    `checks` do not: they compute what they read for their own micro-batch.
    """
    return _Splitter(program, once, checks).run()


@dataclass
class _Splitter:
    program: Program
    once: frozenset[int]
    checks: frozenset[int] = frozenset()
    again: dict[int, int] = field(default_factory=dict)
    part: dict[int, int] = field(default_factory=dict)
    level: dict[int, int] = field(default_factory=dict)
    phase_of: list[int] = field(default_factory=list)

    def run(self) -> Parts:
        program, graph = self.program, self.program.graph
        self.backward = {op for request in program.requests for op in request.backward}
        self.own = [op for op in graph.ops if op.index not in self.backward and op.role not in _HOLDS]
        self.batch = graph.descend(program.leaf_ops, skip=self._elsewhere)
        self.held = graph.descend(program.holders, skip=self._elsewhere)
        once = {op.index for op in self.own if draws(op)} - self.batch
        self.effects = once | {op.index for op in self.own if is_effect(op, graph)}
        self.targets = graph.ascend(v.op for request in program.requests for v in request.targets)
        self.leading = self._leading()
        self.seeds = self._seed_variables()
        self.pure = self._pure()
        self.row_made = self._row_made()
        self._levels()
        single = max(self.phase_of, default=0) == 0
        self.late = late_sums(self.program, self._may_wait, self._each) if single else Late()
        self.checked = graph.ascend(self.checks) & self.once - self.held - self.effects
        for op in self.own:
            self._place(op)
        return self._collect_parts()

    def _elsewhere(self, op: int) -> bool:
        return op in self.backward

    def _seed_variables(self) -> dict[int, int]:
        """A variable whose value seeds a draw of the forward, and the last such draw; those that only give it a shape
        do not.

        A single number that goes into a seed is a count of steps: it counts them, whatever is drawn with it.
        """
        graph = self.program.graph
        found: dict[int, int] = {}
        for op in self.own:
            if is_random(op) and op.index in self.leading:
                above = [graph.ops[each] for each in seeded_by(op, graph)]
                read = {handle for each in above if is_read(each) for handle in resources(each, graph)}
                found.update((handle, op.index) for handle in read if not self._is_count(handle))
        return found

    def _is_count(self, handle: int) -> bool:
        variable = self.program.variable_ops.get(handle)
        return variable is not None and variable.spec.scalar

    def _is_seed_write(self, op: Op) -> bool:
        """Whether an op touches a seed as a part of a draw: in a stage, or before something is drawn from it."""
        seeds = [handle for handle in resources(op, self.program.graph) if handle in self.seeds]
        return any(op.stage is not None or op.index < self.seeds[handle] for handle in seeds)

    def _leading(self) -> set[int]:
        """Ops that something of the forward depends on: a stage's op, a target of a gradient, an effect that stays, or
        a write that the backward reads after it.
        """
        graph = self.program.graph
        found = {before for op in self.backward if resources(graph.ops[op], graph) for before in graph.ops[op].control}
        for op in reversed(self.own):
            staged = op.stage is not None and op.index not in self.effects and op.type != "Const"
            base = op.index in self.targets or staged
            if base or op.index in found:
                found.update(value.op for value in op.inputs)
                found.update(op.control)
            elif self._stays(op):
                found.update(value.op for value in op.inputs)
        return found

    def _stays(self, op: Op) -> bool:
        """Whether an effect happens with each micro-batch: it prints, checks, or writes what cannot be merged."""
        each = op.index in self.effects & self.batch and op.index not in self.once
        cut = self.program.pipeline.micro_batch > 1
        return each and (cut or not resources(op, self.program.graph))

    def _pure(self) -> set[int]:
        """Ops of the user's inputs alone: they can be computed at any time, from the whole batch."""
        found: set[int] = set(self.program.leaf_ops)
        consts = {op.index for op in self.own if op.type == "Const"}
        for op in self.own:
            alone = all(v.op in found or v.op in consts for v in op.inputs)
            if alone and op.inputs and not op.stateful and (op.stage is None or _is_number(op)):
                found.add(op.index)
        return found & self.batch

    def _levels(self) -> None:
        """The last phase whose update an op depends on, by data or by order; requests get their phase on the way."""
        waiting = list(self.program.requests)
        for op in self.own:
            while waiting and op.index >= waiting[0].start:
                self._enter(waiting.pop(0).index)
            before = [self._level(v.op) for v in op.inputs] + [self._level(c) for c in op.control]
            level = max(before, default=-1)
            late = op.index in self.effects and op.index not in self.batch and not self._is_seed_write(op)
            self.level[op.index] = max(level, self.phase_of[-1]) if late and self.phase_of else level
        for request in waiting:
            self._enter(request.index)

    def _level(self, op: int) -> int:
        if op in self.program.holders:
            request, _ = self.program.holders[op]
            return self.phase_of[request]
        return self.level.get(op, -1)

    def _enter(self, request: int) -> None:
        targets = self.program.requests[request].targets
        above = self.program.graph.ascend(v.op for v in targets)
        self.phase_of.append(1 + max((self._level(op) for op in above), default=-1))

    def _place(self, op: Op) -> None:
        early = self._early(op)
        if op.index in self.checked:
            self.again[op.index] = _next(self._early(op, self.again), FORWARD)
        if op.index in self.effects:
            self.part[op.index] = self._effect(op, early)
        elif op.index in self.held or op.index in self.once:
            self.part[op.index] = _next(early, UPDATE)
        elif op.index in self.batch and op.index not in self.pure:
            forward = op.index in self.leading or op.index in self.targets or op.stage is not None
            waits = self._accumulates(op) and op.index not in self.row_made
            once = op.index in self.late.sums or (not forward and (early % 3 == UPDATE or waits))
            self.part[op.index] = _next(early, UPDATE if once else FORWARD)
        elif early or op.index in self.late.sums:
            self.part[op.index] = _next(early, UPDATE) if op.index in self.late.sums else early

    def _may_wait(self, op: Op) -> bool:
        """Whether an op of the forward that nobody there reads could as well run once, afterwards."""
        if op.stage is not None or op.index not in self.batch or op.index in self.effects | self.pure | self.held:
            return False
        return self._accumulates(op) and op.index not in self.row_made

    def _each(self, op: Op) -> bool:
        """Whether an op runs with each micro-batch."""
        return op.index in self.leading or op.stage is not None or self._stays(op)

    def _accumulates(self, op: Op) -> bool:
        """Numbers of the forward that no stage needs: a metric's sum, a returned loss. They can wait."""
        given = [value for value in op.inputs if value.op in self.batch and value.op not in self.pure]
        specs = [self.program.graph.spec(value) for value in given or op.values]
        return all(map(_has_known_size, specs)) and sum(spec.nbytes() for spec in specs) <= SMALL

    def _row_made(self) -> set[int]:
        """Ops that rows of the batch are made of: the shape that a sample weight is broadcast to is one, too."""
        found: set[int] = set()
        each = self.batch - self.pure - self.effects - self.held
        for op in reversed(self.own):
            if op.index in found or (op.index in each and not all(map(_has_known_size, op.outputs))):
                found.update(value.op for value in op.inputs)
        return found

    def _early(self, op: Op, again: Mapping[int, int] | None = None) -> int:
        again = self.again if op.index in self.checks else again or {}
        found = [again.get(value.op, self._time(value.op)) for value in op.inputs]
        if op.index in self.effects or is_read(op) or op.functions:
            found += [self.part[c] for c in op.control if c in self.effects and c in self.part and not self._late(c)]
        return max(found, default=0)

    def _late(self, op: int) -> bool:
        """Whether an op is an assertion that waits for merged values: what comes after it need not wait, too."""
        return op in self.once and op in self.batch and is_check(self.program.graph.ops[op], self.program.graph)

    def _time(self, op: int) -> int:
        if op in self.program.holders:
            return 3 * self.phase_of[self.program.holders[op][0]] + UPDATE
        return self.part.get(op, 0)

    def _effect(self, op: Op, early: int) -> int:
        last = self._last_phase(op)
        update = _next(max(early, 3 * max(last, 0) + UPDATE), UPDATE)
        leads = op.index in self.leading
        if op.index in self.held:
            return _next(early, UPDATE)
        if self._is_seed_write(op):
            return _next(early, FORWARD)
        if op.index in self.batch:
            stays = self._stays(op) or (leads and not self._late(op.index))
            return _next(early, FORWARD) if stays else update
        if last >= 0 or not leads:
            return update
        return _next(early, FORWARD if early % 3 == FORWARD else PROLOGUE)

    def _last_phase(self, op: Op) -> int:
        """The phase of the last request before an op, or -1."""
        asked = [self.phase_of[r.index] for r in self.program.requests if r.start <= op.index]
        return max(asked, default=-1)

    def _collect_parts(self) -> Parts:
        graph = self.program.graph
        times = [self.part.get(op, 0) for op in self.part]
        phases = max([0, *(time // 3 for time in times), *self.phase_of]) + 1
        forward = {e for e in self.effects if self.part[e] % 3 != UPDATE}
        return Parts(
            part=dict(self.part),
            phase_of=tuple(self.phase_of),
            phases=phases,
            effects=frozenset(self.effects),
            pure=frozenset(self.pure),
            batch=frozenset(self.batch),
            seeds=frozenset(self.seeds),
            latest=self._latest(),
            leading=frozenset(self.leading | self.targets),
            late=self.late,
            forward_written=frozenset(h for e in forward for h in resources(graph.ops[e], graph)),
            again=dict(self.again),
            asserted=frozenset(op for op in self.effects if self._late(op)),
        )

    def _latest(self) -> dict[int, int]:
        """A read must not run after a write that followed it in the trace."""
        found: dict[int, int] = {}
        for op in self.own:
            if op.index not in self.effects:
                continue
            for before in op.control:
                if is_read(self.program.graph.ops[before]):
                    found[before] = min(found.get(before, self.part[op.index]), self.part[op.index])
        return found


def _next(early: int, kind: int) -> int:
    """The first part of a kind that is not before `early`."""
    return early + (kind - early) % 3


def _is_number(op: Op) -> bool:
    """Whether an op gives sizes, counts and sums: the rows of a stage's own ops stay with the stage."""
    return all(_has_known_size(spec) and spec.nbytes() <= SMALL for spec in op.outputs)


def _has_known_size(spec: Spec) -> bool:
    """Whether the size does not depend on the batch."""
    return spec.shape is not None and None not in spec.shape
