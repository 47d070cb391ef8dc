"""Cut the program into fragments, each computing some results from the outputs of other fragments.

Fragments are drafted from the last part of a step to the first, so that when one is walked, everything that later
ones ask of it is known. A value that a fragment may not compute itself is fed to it and asked of its home.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from whale_nebula.errors import NotYetError
from whale_nebula.ir.cut import Fragment
from whale_nebula.ir.graph import CAPTURE, HOLDER, INPUT, Op
from whale_nebula.ir.program import Program
from whale_nebula.passes.codec_options import mask_of
from whale_nebula.passes.effects import is_read, resources
from whale_nebula.passes.owners import Homes
from whale_nebula.passes.phases import FORWARD, PROLOGUE, SMALL, UPDATE, Parts
from whale_nebula.passes.readings import asks_rows
from whale_nebula.spec import Spec, Value

Leaves = frozenset[int]
_NONE: Leaves = frozenset()


@dataclass
class Apart:
    """Answers, for the inputs that `names` lists, who can compute what is made of inputs alone."""

    program: Program
    parts: Parts
    names: Collection[str]
    workers_of: Callable[[int], frozenset[int]]

    def __post_init__(self) -> None:
        apart = {leaf.op for leaf in self.program.leaves if leaf.name in self.names}
        self._touched: dict[int, Leaves] = {op: frozenset({op}) for op in apart}
        self._readers: dict[int, set[int]] = {op: set() for op in apart}
        for op in self.program.graph.ops if apart else ():
            self._look(op)

    def _look(self, op: Op) -> None:
        found = self._inputs(op)
        if not found:
            return
        if op.index in self.parts.pure:
            self._touched[op.index] = found
        if op.index not in self.parts.pure or op.stage is not None:
            staged = op.stage is not None or self.parts.part.get(op.index, 0) % 3 == FORWARD
            label = self.program.labels.get(op.index) if staged else None
            for leaf in found if label is not None else ():
                self._readers[leaf].update(self.workers_of(label or 0))

    def _inputs(self, op: Op) -> Leaves:
        """The inputs apart whose values an op reads, by itself or through what is made of them."""
        graph = self.program.graph
        given = [value for value in op.inputs if value.op in self._touched]
        return _NONE.union(
            *(self._touched[v.op] for v in given if v.op not in self._readers or not asks_rows(graph, op))
        )

    def home(self, value: Value, worker: int) -> int | None:
        """The worker that computes a value for another that is not given what it is made of; None: it does so itself.

        Only what is small crosses; of the rest its pieces may.
        """
        makers = self.makers(value)
        if not makers or worker in makers or not _small(self.program.graph.spec(value)):
            return None
        return min(makers)

    def makers(self, value: Value) -> Leaves:
        """The workers whose stages read all inputs apart that a value is made of; none where it is made of no such."""
        leaves = self._touched.get(value.op, _NONE)
        each = [frozenset(self._readers[leaf]) for leaf in leaves]
        return each[0].intersection(*each[1:]) if each else _NONE


def _small(spec: Spec) -> bool:
    return spec.shape is not None and None not in spec.shape and spec.nbytes() <= SMALL


Key = tuple[str, int, int, int]
"""kind, phase, stage (or worker number), round."""
FIRST = -1
"""The round of an update in which it is only asserted what the micro-batches have made together."""
STAGED = ("forward", "backward")
"""The kinds that belong to a stage; the others belong to a worker."""


@dataclass
class Draft:
    """A fragment in the making: ordered sets as dicts."""

    key: Key
    ops: dict[int, None] = field(default_factory=dict)
    feeds: dict[Value, None] = field(default_factory=dict)
    fetches: dict[Value, None] = field(default_factory=dict)
    roots: dict[int, None] = field(default_factory=dict)


@dataclass
class Cutter:
    """Holds the drafts while they are made. `wholes` are batch-wide values of inputs alone (micro-batches > 1).

    With `owner`, a returned tensor stays where it is made; `owned` then names its workers. Numbers go everywhere.
    `apart` names the inputs that only the clusters of the stages that read them are given.
    """

    program: Program
    parts: Parts
    homes: Homes
    wholes: frozenset[Value] = frozenset()
    owner: bool = False
    apart: Collection[str] = ()
    owned: dict[Value, frozenset[int]] = field(default_factory=dict)
    drafts: dict[Key, Draft] = field(default_factory=dict)
    crossings: dict[tuple[Value, int, int], int] = field(default_factory=dict)
    demanded: dict[Value, set[int]] = field(default_factory=dict)
    told: set[Value] = field(default_factory=set)
    masks: set[Value] = field(default_factory=set)

    def run(self) -> dict[Key, Draft]:
        """Draft everything, last part first."""
        self._apart = Apart(self.program, self.parts, self.apart, self.homes.workers_of)
        workers = range(self.homes.workers)
        for phase in reversed(range(self.parts.phases)):
            self._updates(phase, workers)
            for kind in ("backward", "forward"):
                for stage in reversed(range(len(self.program.stages))):
                    self._add_stage(kind, phase, stage)
            for worker in workers:
                self._prologue(phase, worker)
        weighing = [worker for worker in workers if not self.apart or self._weighs(worker)]
        for worker in workers:
            if worker in weighing:
                self._weights(worker)
            if ("whole", 0, worker, 0) in self.drafts:
                self._walk(self.drafts["whole", 0, worker, 0])
        return {key: draft for key, draft in self.drafts.items() if draft.ops or draft.fetches}

    def draft(self, key: Key) -> Draft:
        """The draft of a key, made on first use."""
        return self.drafts.setdefault(key, Draft(key))

    def ask(self, key: Key, value: Value) -> None:
        """Ask a fragment for a value."""
        self.draft(key).fetches[value] = None

    # ------------------------------------------------------------------ what each fragment starts from
    def _effects(self, part: int) -> list[Op]:
        graph = self.program.graph
        return [graph.ops[e] for e in sorted(self.parts.effects) if self.parts.part[e] == part]

    def _updates(self, phase: int, workers: Sequence[int]) -> None:
        """Walk round after round, the last first: one worker's round asks the earlier rounds of the others."""
        for worker in workers:
            self._update(phase, worker)
        for number in reversed(range(1 + max(self.homes.rounds(phase, worker) for worker in workers))):
            for worker in workers:
                if ("update", phase, worker, number) in self.drafts:
                    self._walk(self.drafts["update", phase, worker, number])
        for worker in workers:
            if ("update", phase, worker, FIRST) in self.drafts:
                self._walk(self.drafts["update", phase, worker, FIRST])

    def _update(self, phase: int, worker: int) -> None:
        effects = [op for op in self._effects(3 * phase + UPDATE) if worker in self.homes.of_effect(op)]
        last = self.homes.rounds(phase, worker)
        for op in effects:
            number = FIRST if self._asserts_first(op, worker) else last
            self.draft(("update", phase, worker, number)).roots[op.index] = None
        if phase == self.parts.phases - 1:
            self._results(worker)

    def _asserts_first(self, check: Op, worker: int) -> bool:
        """Whether a worker can assert something before an update begins: it has all that it needs then."""
        graph, part = self.program.graph, self.parts.part
        if check.index not in self.parts.asserted:
            return False
        above = graph.ascend([check.index], stop=lambda op: part.get(op, UPDATE) % 3 != UPDATE) - {check.index}
        made = [op for op in above if part.get(op, UPDATE) % 3 == UPDATE and not graph.ops[op].role]
        return all(worker in self.homes.of(op) and op not in self.parts.effects for op in made)

    def _results(self, worker: int) -> None:
        """Every worker gives the user the same results."""
        draft = self.draft(("update", self.parts.phases - 1, worker, self.homes.rounds(self.parts.phases - 1, worker)))
        for value in self.program.returns:
            op = self.program.graph.ops[value.op]
            if op.role == INPUT or worker not in self._owners(op, value):
                continue
            home = self._result_home(draft, op, value, worker)
            if home is None or home[0] != "forward":
                self.ask(home or draft.key, value)
            else:
                self.ask(home, value)
                self.demanded.setdefault(value, set()).add(worker)

    def _owners(self, op: Op, value: Value) -> frozenset[int]:
        """The workers that give the user a returned value."""
        if not self.owner or self.program.graph.spec(value).scalar:
            return self.homes.everywhere
        if op.index in self.parts.pure and not self._apart.makers(value):
            return self.homes.everywhere
        part = self._time(op, 3 * self.parts.phases - 3 + UPDATE)
        if op.index in self.parts.pure:
            found = self._apart.makers(value)
        elif not op.role and part % 3 == FORWARD:
            found = self.homes.workers_of(self._label(op.index))
        else:
            found = self.homes.of(op.index)
        if found == self.homes.everywhere:
            found = self.homes.workers_of(len(self.program.stages) - 1)
        self.owned[value] = found
        return found

    def _result_home(self, draft: Draft, op: Op, value: Value, worker: int) -> Key | None:
        """Where a returned value is made, or None: in this worker's last update."""
        if op.role == HOLDER and worker not in self.homes.of(op.index):
            return self._cross(value, draft.key[1], worker)
        return None if op.role or op.type == "Const" else self._in_update(draft, op, value)

    def _add_stage(self, kind: str, phase: int, stage: int) -> None:
        draft = self.draft((kind, phase, stage, 0))
        if kind == "forward":
            self._marks(draft)
            for op in self._effects(3 * phase + FORWARD):
                if self._label(op.index) == stage:
                    draft.roots[op.index] = None
        else:
            for value in self._gradients(phase, stage):
                draft.fetches[value] = None
            draft.roots.update(self._gradient_effects(phase, stage))
        self._walk(draft)

    def _marks(self, draft: Draft) -> None:
        """What marks the rows of what is sent must be there where it is sent."""
        for value in list(draft.fetches):
            mask = mask_of(self.program, value)
            if mask is not None and mask.op not in self.program.leaf_ops and self._include(draft, mask):
                draft.fetches[mask] = None
                self.masks.add(mask)

    def _gradient_effects(self, phase: int, stage: int) -> dict[int, None]:
        """What custom gradients do beside differentiating: they print, count, assert."""
        requests = (r for r in self.program.requests if self.parts.phase_of[r.index] == phase)
        return {op: None for request in requests for own, op in request.effects if own == stage}

    def _gradients(self, phase: int, stage: int) -> Iterable[Value]:
        for request in self.program.requests:
            if self.parts.phase_of[request.index] == phase:
                yield from (flow.gradient for flow in request.flows if flow.stage == stage)
                yield from (v for part in request.parts if part.stage == stage for v in part.values)

    def _prologue(self, phase: int, worker: int) -> None:
        for op in self._effects(3 * phase + PROLOGUE):
            if worker in self.homes.of_effect(op):
                self.draft(("prologue", phase, worker, 0)).roots[op.index] = None
        if ("prologue", phase, worker, 0) in self.drafts:
            self._walk(self.drafts["prologue", phase, worker, 0])

    def _weighs(self, worker: int) -> bool:
        """Whether a worker asks for the weights of micro-batches: its ops do, or it merges what leaves them."""
        scaled = {self.program.share, self.program.grow}
        fed = any(scaled & draft.feeds.keys() for key, draft in self.drafts.items() if self._runs(key, worker))
        return fed or any(worker in self.homes.workers_of(self._label(value.op)) for value in self.demanded)

    def _runs(self, key: Key, worker: int) -> bool:
        kind, _, number, _ = key
        return worker in self.homes.workers_of(number) if kind in STAGED else worker == number

    def _weights(self, worker: int) -> None:
        """What nb.loss_weight was given, for each micro-batch, before the first one starts."""
        for value in self.program.weights if self.program.pipeline.micro_batch > 1 else ():
            if value.op not in self.parts.pure and self.program.graph.ops[value.op].type != "Const":
                raise NotYetError(
                    "nb.loss_weight of a tensor that depends on the model",
                    where=self.program.graph.ops[value.op].name,
                    why="every micro-batch's share must be known before the first one starts",
                    mend="compute the weight from the step's inputs alone: nb.loss_weight(tf.reduce_sum(mask))",
                )
            self.ask(("weight", 0, worker, 0), value)
        if ("weight", 0, worker, 0) in self.drafts:
            self._walk(self.drafts["weight", 0, worker, 0])

    # ------------------------------------------------------------------ the walk
    def _walk(self, draft: Draft) -> None:
        draft.ops.update(draft.roots)
        pending = [v for op in draft.roots for v in self.program.graph.ops[op].inputs]
        pending += list(draft.fetches)
        seen: set[Value] = set()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            if self._include(draft, value) and value.op not in draft.ops:
                draft.ops[value.op] = None
                pending.extend(self.program.graph.ops[value.op].inputs)

    def _include(self, draft: Draft, value: Value) -> bool:
        """Whether the draft computes a value itself; if not, it is fed, and asked of its home."""
        op = self.program.graph.ops[value.op]
        if op.role == CAPTURE:
            return False
        if op.type == "Const" and op.role == "":
            return True
        if op.role:
            draft.feeds[value] = None
            return False
        kind = draft.key[0]
        home = {
            "update": self._in_update,
            "prologue": self._in_prologue,
            "whole": self._in_whole,
            "weight": self._in_whole,
            "forward": self._in_forward,
            "backward": self._in_backward,
        }[kind](draft, op, value)
        if home is None:
            return True
        draft.feeds[value] = None
        for each in self._alike(draft, home) if home != draft.key else ():
            self.ask(each, value)
        return False

    def _alike(self, draft: Draft, home: Key) -> Iterator[Key]:
        """What a stage asks of its own worker, each of its replicas asks of its."""
        own = draft.key[0] in STAGED and home[0] not in STAGED
        kind, phase, worker, number = home
        for each in sorted(self.homes.workers_of(draft.key[2])) if own else (worker,):
            yield (kind, phase, each, number)

    def _in_whole(self, draft: Draft, op: Op, value: Value) -> Key | None:
        return None

    def _in_forward(self, draft: Draft, op: Op, value: Value) -> Key | None:
        _, phase, stage, _ = draft.key
        worker = self.homes.worker_of(stage)
        if value in self.wholes:
            return ("whole", 0, worker, 0)
        return self._forward_home(op, value, phase, stage, worker)

    def _forward_home(self, op: Op, value: Value, phase: int, stage: int, worker: int) -> Key | None:
        """Where a value of the forward is made, or None: right here."""
        label = self._label(op.index, stage)
        if op.index in self.parts.pure:
            return None if op.stage is None or label == stage else ("forward", phase, label, 0)
        part = self.parts.again.get(op.index, -1)
        if part // 3 != phase:
            part = self._time(op, 3 * phase + FORWARD)
        if part % 3 == UPDATE:
            return ("update", part // 3, worker, self.homes.rounds(part // 3, worker))
        once = op.index in self.parts.effects or self._is_pinned(op, 3 * phase + FORWARD)
        if part % 3 == PROLOGUE and once:
            return ("prologue", part // 3, worker, 0)
        home = phase if part % 3 == PROLOGUE else part // 3
        return None if (home, label) == (phase, stage) else ("forward", home, label, 0)

    def _time(self, op: Op, at: int) -> int:
        """The part a value is computed in when `at` asks for it: as late as it may be."""
        own = self.parts.part.get(op.index, 0)
        if op.index in self.parts.batch or op.index in self.parts.effects or own % 3 == UPDATE:
            return own
        return min(at, self.parts.latest.get(op.index, at))

    def _is_pinned(self, op: Op, at: int) -> bool:
        return self.parts.latest.get(op.index, at) < at

    def _in_backward(self, draft: Draft, op: Op, value: Value) -> Key | None:
        _, phase, stage, _ = draft.key
        request = self.program.request_of(op.index)
        if request is not None:
            return None
        if value in self.wholes:
            return ("whole", 0, self.homes.worker_of(stage), 0)
        if self._again(op, value, phase, stage):
            return None
        home = self._forward_home(op, value, phase, stage, self.homes.worker_of(stage))
        return home or ("forward", phase, stage, 0)

    def _again(self, op: Op, value: Value, phase: int, stage: int) -> bool:
        """What a backward computes anew instead of keeping it: reads of variables; with recompute, all it can."""
        if is_read(op) and op.type == "ReadVariableOp":
            return self.parts.forward_written.isdisjoint(resources(op, self.program.graph)) and (
                self.parts.part.get(op.index, 0) // 3 in (0, phase) and not self._is_pinned(op, 3 * phase + FORWARD)
            )
        if not self.program.pipeline.recompute or op.stateful or op.index in self.parts.effects:
            return False
        return self._forward_home(op, value, phase, stage, self.homes.worker_of(stage)) is None

    def _in_prologue(self, draft: Draft, op: Op, value: Value) -> Key | None:
        worker = draft.key[2]
        part = self.parts.part.get(op.index, 0)
        if part % 3 == UPDATE:
            return self._updated_key(op, value, part // 3, worker)
        return None

    def _updated_key(self, op: Op, value: Value, phase: int, worker: int) -> Key:
        """A value of an earlier phase's update: this worker's own, or sent by one that has it."""
        if worker not in self.homes.of(op.index):
            return self._cross(value, phase, worker)
        return ("update", phase, worker, self.homes.rounds(phase, worker))

    def _in_update(self, draft: Draft, op: Op, value: Value) -> Key | None:
        _, phase, worker, number = draft.key
        at = 3 * phase + UPDATE
        if op.index in self.parts.pure:
            return self._input_key(value, phase, worker)
        if op.index in self.parts.late.terms:
            return self._before(value, phase, worker)
        part = self._time(op, at)
        if part % 3 == FORWARD:
            return self._merged_key(op, value, part, phase, worker)
        if part < at and part % 3 == UPDATE:
            return self._updated_key(op, value, part // 3, worker)
        if worker not in self.homes.of(op.index):
            return self._cross(value, phase, worker)
        if part < at and (op.index in self.parts.effects or self._is_pinned(op, at)):
            return ("prologue", part // 3, worker, 0)
        if number == FIRST:
            return None
        made = self.homes.round_of(op.index, worker)
        return None if made == number or self._cheap(op) else ("update", phase, worker, made)

    def _input_key(self, value: Value, phase: int, worker: int) -> Key | None:
        """A value of inputs alone: computed right here, but for a number of inputs that only others are given."""
        home = self._apart.home(value, worker)
        if home is None:
            return None
        self.crossings[value, home, worker] = phase
        self.told.add(value)
        return ("whole", 0, home, 0)

    def _before(self, value: Value, phase: int, worker: int) -> Key:
        """A weight penalty: it is made before the micro-batches, and crosses when their losses do."""
        homes = self.homes.of(value.op)
        home = worker if worker in homes else min(homes)
        if home != worker:
            self.crossings[value, home, worker] = phase
            self.told.add(value)
        return ("prologue", phase, home, 0)

    def _cheap(self, op: Op) -> bool:
        """Reads are made anew in each round: nothing is written before the last."""
        return is_read(op) or not op.inputs

    def _merged_key(self, op: Op, value: Value, part: int, phase: int, worker: int) -> Key:
        """A forward value that an update reads: asked of its stage, and sent on if that is another worker's."""
        stage = self._label(op.index)
        self.demanded.setdefault(value, set()).add(worker)
        if worker not in self.homes.workers_of(stage):
            self.crossings[value, self.homes.worker_of(stage), worker] = phase
        return ("forward", part // 3, stage, 0)

    def _cross(self, value: Value, phase: int, worker: int) -> Key:
        home = min(self.homes.of(value.op))
        self.crossings[value, home, worker] = phase
        number = self.homes.round_of(value.op, home)
        return ("update", phase, home, number)

    def _label(self, op: int, default: int = 0) -> int:
        return self.program.labels.get(op, default)


def finish(draft: Draft, worker: str) -> Fragment:
    """The fragment of a draft, its ops in trace order."""
    kind, phase, stage, number = draft.key
    own = stage if kind in ("forward", "backward", "fused") else None
    fetches = tuple(draft.fetches)
    return Fragment(kind, phase, own, worker, number, tuple(sorted(draft.ops)), tuple(draft.feeds), fetches)
