"""Owners of update ops: which workers can compute each, and in how many rounds of scalar exchange.

A variable is held by the workers whose stages touch it; a variable that no stage touches (an optimizer's counter, a
metric's sum) is held by all, unless the value written into it has fewer homes and either is not a scalar or is used for
a stage's variable (an optimizer's slot). So every worker can read a metric's sum, independent of where its addends are
computed. A value is computed by workers that have all its inputs; if none has (a global norm), scalars cross and it is
computed by all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from whale_nebula.errors import NotYetError
from whale_nebula.ir.graph import CAPTURE, HOLDER, INPUT, Op
from whale_nebula.ir.program import Program
from whale_nebula.passes.effects import find_written_handles, is_read, list_resources
from whale_nebula.passes.phases import FORWARD, PROLOGUE, UPDATE, Parts, is_small
from whale_nebula.spec import Value

WorkerSet = frozenset[int]


@dataclass
class Homes:
    """The workers of ops, effects and variables; `stage_workers[s]` are the workers of stage s, one for each replica.
    After the micro-batches all replicas can compute the same, as they hold the same values.

    `min_workers` is the number of workers, if that is greater: one without a stage also takes part in updates and
    results. `where` returns the line of an op for errors. `following` are the ops of updates that are effects or follow
    one.
    """

    program: Program
    parts: Parts
    stage_workers: Sequence[WorkerSet]
    min_workers: int = 1
    where: Callable[[int], str] = lambda op: ""
    variables: dict[int, WorkerSet] = field(default_factory=dict)
    following: set[int] = field(default_factory=set)
    _homes_by_op: dict[int, WorkerSet] = field(default_factory=dict)
    _rounds_by_op: dict[tuple[int, int], int] = field(default_factory=dict)
    _last_rounds: dict[tuple[int, int], int] = field(default_factory=dict)
    _write_rounds: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.workers = max([self.min_workers, *(1 + max(where) for where in self.stage_workers)])
        self.all_workers: WorkerSet = frozenset(range(self.workers))
        pairs = zip(self.program.stages, self.stage_workers, strict=False)
        self._split = [where for stage, where in pairs if stage.shards > 1]
        self.common = self._find_common_variables()
        self.slots = self._find_slots()
        while self._narrow_common_variables():
            pass
        self.mates = self._find_joint_workers()
        self._number_rounds()

    def worker_of(self, stage: int) -> int:
        """The worker that sends a stage's results to others."""
        return min(self.stage_workers[stage])

    def home_of(self, op: int) -> WorkerSet:
        """The workers that can compute an op of an update by themselves."""
        return self._homes_by_op.get(op, self.all_workers)

    def home_of_effect(self, op: Op) -> WorkerSet:
        """The workers that run an effect: all holders of the written variables, or just one if it writes none."""
        found = self._find_holders(op)
        if find_written_handles(op, self.program.graph):
            return found
        return frozenset({min(found & self._find_common_home(op) or found)})

    def _find_holders(self, op: Op) -> WorkerSet:
        """The workers that hold all variables that an op uses; an effect needs all holders of those that it writes."""
        program, own = self.program, self.variables
        written = find_written_handles(op, program.graph)
        used = [each for each in list_resources(op, program.graph) if each in program.variable_ops or each in written]
        found = self.all_workers.intersection(*(own.get(each, self.all_workers) for each in used))
        writers = chain.from_iterable(own[each] for each in written if each not in self.common)
        if op.index in self.parts.effects and not (found and found.issuperset(writers)):
            raise NotYetError(
                "an op that uses variables of several clusters",
                where=f"{op.label}, {self.where(op.index)}",
                why="it cannot be divided, and no cluster holds all variables that it uses",
                mend="read variables of other clusters before it, and write each cluster's in a separate tf.cond",
            )
        return found or self.all_workers

    def last_round(self, phase: int, worker: int) -> int:
        """The number of the last round of a phase's update."""
        return self._last_rounds.get((phase, worker), 0)

    def write_round(self, phase: int, worker: int) -> int:
        """The number of the round of a phase's update before which no variable is written."""
        return self._write_rounds.get((phase, worker), 0)

    def round_of(self, op: int, worker: int) -> int:
        """The round in which a worker computes an op of an update."""
        return self._rounds_by_op.get((op, worker), 0)

    def _find_common_variables(self) -> set[int]:
        """The variables that no stage touches; the others are held by the workers of their stages.

        The forward is walked back from its ops, but not through updates, whose variables do not belong to it.
        """
        program, graph, part, late = self.program, self.program.graph, self.parts.part, self.parts.late.sums
        forward = {op for op in self.parts.leading if part.get(op, 0) % 3 == FORWARD}
        forward |= {value.op for request in program.requests for value in request.targets}
        forward |= {op.index for op in graph.ops if op.stage is not None and op.index not in self.parts.effects}
        found: dict[int, set[int]] = {}
        for index in graph.ascend(forward, stop=lambda op: part.get(op, 0) % 3 == UPDATE and op not in late):
            label = program.labels.get(index)
            for handle in list_resources(graph.ops[index], graph) if label is not None else ():
                found.setdefault(handle, set()).update(self.stage_workers[label or 0])
        common = {op.index for op in graph.ops if op.role == CAPTURE} - found.keys()
        self.variables = {handle: frozenset(where) for handle, where in found.items()}
        self.variables.update(dict.fromkeys(common, self.all_workers))
        return common

    def _narrow_common_variables(self) -> bool:
        """Find the homes of ops, then restrict common variables to the homes of the values written into them."""
        for op in self.program.graph.ops:
            self._homes_by_op[op.index] = self._find_home(op)
        changed = False
        for index in self.parts.effects:
            op = self.program.graph.ops[index]
            together = self.home_of_effect(op)
            if not self._is_shared_scalar(op):  # where its inputs are, too; if nowhere, they cross
                together = together & self._find_common_home(op) or together
            handles = set(find_written_handles(op, self.program.graph))
            if staged := handles - self.common:  # all holders of these run it, and scalars cross to them
                together = self.all_workers.intersection(*(self.variables[handle] for handle in staged))
            for handle in self.common & handles:
                narrow = self.variables[handle] & together
                if narrow and narrow != self.variables[handle]:
                    self.variables[handle], changed = narrow, True
        return changed

    def _find_slots(self) -> set[int]:
        """The common variables that are read for a write of a stage's variable."""
        graph = self.program.graph
        effects = [
            op for op in self.parts.effects if not self.common.issuperset(find_written_handles(graph.ops[op], graph))
        ]
        feeding = (graph.ops[index] for index in graph.ascend(effects))
        return self.common & {op.inputs[0].op for op in feeding if is_read(op)}

    def _is_shared_scalar(self, op: Op) -> bool:
        """Whether an effect writes scalars, which can cross, into variables that all workers hold."""
        specs = [self.program.graph.spec(value) for value in op.inputs]
        numbers = all(spec.scalar for spec in specs if spec.dtype != "resource")
        handles = find_written_handles(op, self.program.graph)
        common = self.common.issuperset(list_resources(op, self.program.graph))
        return numbers and bool(handles) and self.slots.isdisjoint(handles) and common

    def _find_home(self, op: Op) -> WorkerSet:
        program = self.program
        if op.role == HOLDER:
            number, holder = program.holders[op.index]
            request = program.requests[number]
            made = (self.stage_workers[part.stage] for part in request.parts if part.source == holder.source)
            return self.variables.get(request.origins[holder.source], frozenset[int]().union(*made))
        if op.role == CAPTURE:
            return self.variables[op.index]
        if op.index in self.parts.pure or op.index in self.parts.late.sums or not op.inputs:
            return self.all_workers
        if is_read(op):
            return self.variables.get(op.inputs[0].op, self.all_workers)
        if self.parts.part.get(op.index, 0) % 3 == FORWARD:
            return (
                self.all_workers
                if all(map(is_small, op.outputs))
                else self.stage_workers[program.labels.get(op.index, 0)]
            )
        if op.index in self.parts.effects and (self._is_shared_scalar(op) or op.functions):
            return self.home_of_effect(op)
        holders = self._find_holders(op)
        return self._find_common_home(op) & holders or holders

    def _find_common_home(self, op: Op) -> WorkerSet:
        """The workers at which all inputs are available. Scalars cross if necessary; all workers if that does not help.

        They also cross if only some devices of a split stage would compute with values that all of them have, as these
        have to compute together.
        """
        spec = self.program.graph.spec
        given = [value for value in op.inputs if spec(value).dtype != "resource"]
        homes = [self.home_of(value.op) for value in given]
        common = self.all_workers.intersection(*homes)
        own = {home for home in homes if home != self.all_workers or self.all_workers in self._split}
        torn = any(stage <= home and not stage <= common for stage in self._split for home in own)
        if common and not torn:
            return common
        tensors = (self.home_of(value.op) for value in given if not spec(value).scalar)
        return self.all_workers.intersection(*tensors) or self.all_workers

    def _number_rounds(self) -> None:
        """Number the rounds of an update. Effects, and ops that follow one (a metric's result), wait for all other ops
        of their worker; if they read what another worker has after a write, they run in the round after it. Ops without
        a part of their own run where they are read, not before the values that they read have come.
        """
        graph, part, ops = self.program.graph, self.parts.part, self.program.graph.ops
        updating = {op.index for op in ops if part.get(op.index, 0) % 3 == UPDATE}
        bound = self.parts.effects | (self.parts.batch & part.keys())
        following = self.following = graph.descend(self.parts.effects, control=True) & updating
        for op in ops:
            if op.index in updating or not (
                op.role or op.index in bound or self.program.request_of(op.index) is not None
            ):
                ready = self._find_ready_rounds(op, [value for value in op.inputs if value.op not in following])
                self._set_rounds(op, ready)
        self._write_rounds = dict(self._last_rounds)
        for op in map(ops.__getitem__, sorted(following)):
            phase = self.parts.phase(op.index)
            same = 3 * phase + UPDATE
            before = [each for each in op.control if part.get(each, same) == same]
            ready = {
                worker: max(number, self.write_round(phase, worker), *(self.round_of(each, worker) for each in before))
                for worker, number in self._find_ready_rounds(op, op.inputs).items()
            }
            self._set_rounds(op, ready)
        for value in self.program.returns:  # one that is computed where it is read, such as a penalty
            for worker in self.home_of(value.op):
                last = self.parts.phases - 1, worker
                self._last_rounds[last] = max(self.last_round(*last), self.round_of(value.op, worker))

    def _find_ready_rounds(self, op: Op, inputs: Sequence[Value]) -> Mapping[int, int]:
        """By the workers that run an op of an update, the first round in which they have these inputs."""
        part = 3 * self.parts.phase(op.index) + UPDATE
        where = self.home_of(op.index) | (self.home_of_effect(op) if op.index in self.parts.effects else frozenset())
        return {
            worker: max((self._find_ready_round(value, part, worker) for value in inputs), default=0)
            for worker in where
        }

    def _set_rounds(self, op: Op, ready: Mapping[int, int]) -> None:
        """Set the round of an op on each worker; workers of a split stage run the same ops in the same round."""
        phase, kind = divmod(self.parts.part.get(op.index, 0), 3)
        for worker in ready:
            self._rounds_by_op[op.index, worker] = max(ready.get(mate, 0) for mate in self.mates[worker])
            for mate in self.mates[worker] if kind == UPDATE else ():
                last = self._last_rounds.get((phase, mate), 0)
                self._last_rounds[phase, mate] = max(last, self._rounds_by_op[op.index, worker])

    def _find_joint_workers(self) -> list[WorkerSet]:
        """By worker, the workers that run split stages together with it, transitively."""
        mates = [frozenset({worker}) for worker in range(self.workers)]
        for stage in self._split:
            joined = frozenset[int]().union(*(mates[worker] for worker in stage))
            mates = [joined if worker in joined else own for worker, own in enumerate(mates)]
        return mates

    def _find_ready_round(self, value: Value, part: int, worker: int) -> int:
        """The first round in which a worker has a value."""
        if value.op in self.parts.late.terms:
            return 0
        own, home, parts = self.parts.part.get(value.op, PROLOGUE), self.home_of(value.op), self.parts
        if own != part and (own % 3 == UPDATE or self.program.graph.ops[value.op].role == INPUT):
            return 0
        bound = value.op in parts.batch or value.op in parts.effects or parts.latest.get(value.op, part) < part
        if own != part and own % 3 == FORWARD and bound:
            return 0
        return self.round_of(value.op, worker) if worker in home else self.round_of(value.op, min(home)) + 1
