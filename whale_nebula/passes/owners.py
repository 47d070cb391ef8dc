"""Owners of update ops: which workers can compute each, and in how many rounds of scalar exchange.

A variable is held by the workers whose stages touch it; a variable that no stage touches (an optimizer's counter, a
metric's sum) is held by all, unless the value written into it has fewer homes and either is not a scalar or is used for
a stage's variable (an optimizer's slot). So every worker can read a metric's sum, independent of where its addends are
computed. A value is computed by workers that have all its inputs; if none has (a global norm), scalars cross and it is
computed by all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from whale_nebula.errors import NotYetError
from whale_nebula.ir.graph import CAPTURE, HOLDER, Op
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
    results.
    """

    program: Program
    parts: Parts
    stage_workers: Sequence[WorkerSet]
    min_workers: int = 1
    variables: dict[int, WorkerSet] = field(default_factory=dict)
    _homes_by_op: dict[int, WorkerSet] = field(default_factory=dict)
    _rounds_by_op: dict[tuple[int, int], int] = field(default_factory=dict)
    _last_rounds: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.workers = max([self.min_workers, *(1 + max(where) for where in self.stage_workers)])
        self.all_workers: WorkerSet = frozenset(range(self.workers))
        pairs = zip(self.program.stages, self.stage_workers, strict=False)
        self._split = [where for stage, where in pairs if stage.shards > 1]
        self.common = self._find_common_variables()
        self.slots = self._find_slots()
        while self._narrow_common_variables():
            pass
        self._number_rounds()

    def worker_of(self, stage: int) -> int:
        """The worker that sends a stage's results to others."""
        return min(self.stage_workers[stage])

    def home_of(self, op: int) -> WorkerSet:
        """The workers that can compute an op of an update by themselves."""
        return self._homes_by_op.get(op, self.all_workers)

    def home_of_effect(self, op: Op) -> WorkerSet:
        """The workers that run an effect: all holders of the written variables, or just one if it writes none."""
        handles = find_written_handles(op, self.program.graph)
        if not handles:
            return frozenset({min(self._find_common_home(op))})
        found = self.all_workers.intersection(*(self.variables.get(handle, self.all_workers) for handle in handles))
        if not found:
            raise NotYetError(
                "an op that writes variables of several clusters",
                where=op.name,
                why=f"op {op.name!r} ({op.type}) cannot be divided, and no cluster holds all variables that it writes",
                mend="write the variables of each cluster in a separate tf.cond",
            )
        return found

    def last_round(self, phase: int, worker: int) -> int:
        """The number of the last round of a phase's update."""
        return self._last_rounds.get((phase, worker), 0)

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
        once = {op for op in self.parts.effects if part[op] % 3 == PROLOGUE}  # each worker draws the same number itself
        for index in graph.ascend(forward, stop=lambda op: part.get(op, 0) % 3 == UPDATE and op not in late) - once:
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
            if self._is_shared_scalar(op):
                continue
            together = self._find_common_home(op) & self.home_of_effect(op)
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
        return numbers and bool(handles) and self.slots.isdisjoint(handles) and self.common.issuperset(handles)

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
        if self.parts.part.get(op.index, 0) % 3 == FORWARD:
            return (
                self.all_workers
                if all(map(is_small, op.outputs))
                else self.stage_workers[program.labels.get(op.index, 0)]
            )
        if is_read(op):
            return self.variables.get(op.inputs[0].op, self.all_workers)
        if op.index in self.parts.effects and self._is_shared_scalar(op):
            return self.home_of_effect(op)
        return self._find_common_home(op)

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
        """Number the rounds of an update: effects, and ops that follow one (a metric's result), wait for the last
        round. Ops without a part of their own run where they are read, not before the values that they read have come.
        Workers of a split stage run the same ops in the same round.
        """
        graph, mates = self.program.graph, self._find_joint_workers()
        updating = set[int]()
        for op in graph.ops:
            phase, kind = divmod(self.parts.part.get(op.index, 0), 3)
            if kind == UPDATE:
                updating.add(op.index)
            elif op.index in self.parts.part or op.role or self.program.request_of(op.index) is not None:
                continue
            where = self.home_of(op.index) | (
                self.home_of_effect(op) if op.index in self.parts.effects else frozenset()
            )
            ready = {
                worker: max(
                    (self._find_ready_round(value, 3 * phase + UPDATE, worker) for value in op.inputs), default=0
                )
                for worker in where
            }
            for worker in ready:
                self._rounds_by_op[op.index, worker] = max(ready.get(mate, 0) for mate in mates[worker])
                for mate in mates[worker] if op.index in updating else ():
                    last = self._last_rounds.get((phase, mate), 0)
                    self._last_rounds[phase, mate] = max(last, self._rounds_by_op[op.index, worker])
        for value in self.program.returns:  # one without a part of its own, such as a penalty, is computed as a result
            for worker in self.home_of(value.op) if value.op not in self.parts.part else ():
                last = self._last_rounds.get((self.parts.phases - 1, worker), 0)
                self._last_rounds[self.parts.phases - 1, worker] = max(last, self.round_of(value.op, worker))
        self._number_late_ops(graph.descend(self.parts.effects, control=True) & updating)

    def _number_late_ops(self, late: Set[int]) -> None:
        """Let ops that are effects, or follow one, wait for the last round, which comes after that of another worker if
        one of them reads what that has written.
        """
        computing = self._find_computing_workers(late)
        for _ in range(self.workers):
            for index, worker in self._rounds_by_op:
                if index in late:
                    self._rounds_by_op[index, worker] = self._last_rounds[self.parts.phase(index), worker]
            before = dict(self._last_rounds)
            for index, worker in self._rounds_by_op:
                phase = self.parts.phase(index)
                for value in self.program.graph.ops[index].inputs if worker in computing.get(index, ()) else ():
                    home = self.home_of(value.op)
                    if value.op in late and self.parts.phase(value.op) == phase and worker not in home:
                        ready = 1 + self.round_of(value.op, min(home))
                        self._last_rounds[phase, worker] = max(self._last_rounds[phase, worker], ready)
            if self._last_rounds == before:
                return

    def _find_computing_workers(self, late: Set[int]) -> Mapping[int, set[int]]:
        """By op of `late`, the workers that compute it: those at home that run the effect, or compute a reader, or one
        for all others. Workers that could compute it but do not need it do not wait for its inputs.
        """
        graph, found = self.program.graph, dict[int, set[int]]()
        for index in sorted(late, reverse=True):
            op, home = graph.ops[index], self.home_of(index)
            readers = [reader.index for value in op.values for reader in graph.consumers(value)]
            returned = any(value in self.program.returns for value in op.values)
            asked = set(self.all_workers) if returned or any(reader not in late for reader in readers) else set[int]()
            asked = asked.union(*(found.get(reader, ()) for reader in readers))
            found[index] = {worker if worker in home else min(home) for worker in asked}
            found[index] |= self.home_of_effect(op) if index in self.parts.effects else set()
        return found

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
        own, home = self.parts.part.get(value.op, PROLOGUE), self.home_of(value.op)
        if own != part and (own % 3 != PROLOGUE or self.program.graph.ops[value.op].role):
            return 0
        return self.round_of(value.op, worker) if worker in home else self.round_of(value.op, min(home)) + 1
