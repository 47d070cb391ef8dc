"""Cut the program into fragments, each computing some results from the outputs of other fragments.

Fragments are drafted from the last part of a step to the first, so that all values that later ones request from a
fragment are known when it is walked. A value that a fragment may not compute itself is fed, and requested from its
home.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from whale_nebula.errors import NotYetError
from whale_nebula.ir.cut import Fragment
from whale_nebula.ir.graph import CAPTURE, HOLDER, INPUT, Op
from whale_nebula.ir.program import Program
from whale_nebula.passes.codec_options import find_mask
from whale_nebula.passes.effects import SHAPE_OPS, is_read, list_resources
from whale_nebula.passes.owners import Homes
from whale_nebula.passes.phases import FORWARD, PROLOGUE, UPDATE, Parts, is_small
from whale_nebula.passes.readings import needs_only_rows
from whale_nebula.spec import Value

WorkerNumbers = frozenset[int]


@dataclass
class RestrictedInputs:
    """The workers that can compute values of inputs alone, if the inputs `names` are only at their readers."""

    program: Program
    parts: Parts
    names: Collection[str]
    stage_workers: Sequence[WorkerNumbers]

    def __post_init__(self) -> None:
        apart = {leaf.op for leaf in self.program.leaves if leaf.name in self.names}
        self._inputs_by_op: dict[int, WorkerNumbers] = {op: frozenset({op}) for op in apart}
        self._readers: dict[int, set[int]] = {op: set() for op in apart}
        for op in self.program.graph.ops if apart else ():
            self._record_inputs(op)

    def _record_inputs(self, op: Op) -> None:
        """Record the restricted inputs that an op depends on, and the workers of its stage as their readers."""
        given = [value.op for value in op.inputs if value.op in self._inputs_by_op]
        rows_alone = needs_only_rows(self.program.graph, op)
        found = WorkerNumbers().union(
            *(self._inputs_by_op[v] for v in given if v not in self._readers or not rows_alone)
        )
        if found and op.index in self.parts.pure:
            self._inputs_by_op[op.index] = found
        if not self.parts.is_made_by_each_reader(op):
            staged = op.stage is not None or self.parts.part.get(op.index, 0) % 3 == FORWARD
            label = self.program.labels.get(op.index) if staged else None
            for leaf in found if label is not None else ():
                self._readers[leaf].update(self.stage_workers[label or 0])

    def home(self, value: Value, worker: int) -> int | None:
        """The worker that computes a value for another that lacks its inputs; None if each computes it itself.

        Only small values cross; of a large one, small values that it depends on may.
        """
        makers = self.makers(value)
        needed = makers and worker not in makers and is_small(self.program.graph.spec(value))
        return min(makers) if needed else None

    def makers(self, value: Value) -> WorkerNumbers:
        """The workers that read all restricted inputs of a value; empty if it depends on none."""
        each = [frozenset(self._readers[leaf]) for leaf in self._inputs_by_op.get(value.op, ())]
        return each[0].intersection(*each[1:]) if each else WorkerNumbers()


class Key(NamedTuple):
    """Identity of a fragment; `place` is the number of its stage, or of its worker if it belongs to none."""

    kind: str
    phase: int
    place: int
    round: int = 0

    @property
    def staged(self) -> bool:
        """Whether the fragment belongs to a stage rather than to a worker."""
        return self.kind in ("forward", "backward", "fused", "weights")


FIRST_ROUND = -1
"""The round of an update with only the assertions on merged values of the micro-batches."""


@dataclass
class Draft:
    """A fragment under construction: ordered sets as dicts."""

    key: Key
    ops: dict[int, None] = field(default_factory=dict)
    feeds: dict[Value, None] = field(default_factory=dict)
    fetches: dict[Value, None] = field(default_factory=dict)
    roots: dict[int, None] = field(default_factory=dict)

    def finish(self, worker: str) -> Fragment:
        """The fragment, its ops in trace order."""
        kind, phase, place, number = self.key
        stage = place if self.key.staged else None
        return Fragment(
            kind, phase, stage, worker, number, tuple(sorted(self.ops)), tuple(self.feeds), tuple(self.fetches)
        )


@dataclass
class Cutter:
    """The drafts of all fragments. `wholes` are batch-wide values of inputs alone (micro-batches > 1).

    With `keeps_results`, a returned tensor stays on the workers that compute it, which are in `owned`; scalars are sent
    to all.
    `restricted_inputs` names the inputs that only the clusters of the stages that read them receive. `crossings` are
    by (value, source, reader) the phases in which a value goes from one worker to another, `early` the values that
    arrive before the updates. `update_readers` are the workers whose updates read a value of the forward, `masks` those
    of boundaries that forwards compute.
    """

    program: Program
    parts: Parts
    homes: Homes
    wholes: frozenset[Value] = frozenset()
    keeps_results: bool = False
    restricted_inputs: Collection[str] = ()
    owned: dict[Value, WorkerNumbers] = field(default_factory=dict)
    drafts: dict[Key, Draft] = field(default_factory=dict)
    crossings: dict[tuple[Value, int, int], int] = field(default_factory=dict)
    update_readers: dict[Value, set[int]] = field(default_factory=dict)
    early: set[Value] = field(default_factory=set)
    masks: set[Value] = field(default_factory=set)

    def run(self) -> dict[Key, Draft]:
        """Draft all fragments, last part first; returns those that are not empty."""
        self._restrictions = RestrictedInputs(
            self.program, self.parts, self.restricted_inputs, self.homes.stage_workers
        )
        self._workers = range(self.homes.workers)
        for phase in reversed(range(self.parts.phases)):
            self._draft_updates(phase)
            for kind in ("backward", "forward"):
                for stage in reversed(range(len(self.program.stages))):
                    self._draft_stage(Key(kind, phase, stage))
            for worker in self._workers:
                key = Key("prologue", phase, worker)
                self._add_roots(
                    key, [op for op in self._effects(phase, PROLOGUE) if worker in self.homes.home_of_effect(op)]
                )
                self._walk(key)
        weighing = [worker for worker in self._workers if not self.restricted_inputs or self._needs_weights(worker)]
        for worker in self._workers:
            if worker in weighing:
                self._draft_weights(worker)
            self._walk(Key("whole", 0, worker))
        return {key: draft for key, draft in self.drafts.items() if draft.ops or draft.fetches}

    def draft(self, key: Key) -> Draft:
        """The draft of a key, made on first use."""
        return self.drafts.setdefault(key, Draft(key))

    # ------------------------------------------------------------------ starts of fragments
    def _effects(self, phase: int, kind: int) -> list[Op]:
        part = 3 * phase + kind
        return [self.program.graph.ops[e] for e in sorted(self.parts.effects) if self.parts.part[e] == part]

    def _add_roots(self, key: Key, effects: Sequence[Op]) -> None:
        if effects:
            self.draft(key).roots.update({op.index: None for op in effects})

    def _draft_updates(self, phase: int) -> None:
        """Draft the fragments of updates, round by round from the last: one worker's round requests values from earlier
        rounds of others.
        """
        for worker in self._workers:
            last = self.homes.last_round(phase, worker)
            for op in self._effects(phase, UPDATE):
                if worker in self.homes.home_of_effect(op):
                    number = (
                        FIRST_ROUND if self._can_assert_early(op, worker) else self.homes.round_of(op.index, worker)
                    )
                    self._add_roots(Key("update", phase, worker, number), [op])
            if phase == self.parts.phases - 1:
                self._request_results(self.draft(Key("update", phase, worker, last)))
        rounds = 1 + max(self.homes.last_round(phase, worker) for worker in self._workers)
        for number in (*reversed(range(rounds)), FIRST_ROUND):
            for worker in self._workers:
                self._walk(Key("update", phase, worker, number))

    def _can_assert_early(self, check: Op, worker: int) -> bool:
        """Whether a worker can make an assertion before an update begins, as it has all inputs by then."""
        graph, part = self.program.graph, self.parts.part
        if check.index not in self.parts.asserted:
            return False
        above = graph.ascend([check.index], stop=lambda op: part.get(op, UPDATE) % 3 != UPDATE) - {check.index}
        made = [op for op in above if part.get(op, UPDATE) % 3 == UPDATE]
        waits = any(op in self.homes.following or op in self.program.holders for op in made)
        return not waits and all(worker in self.homes.home_of(op) for op in made if not graph.ops[op].role)

    def _request_results(self, draft: Draft) -> None:
        """Let the last update of a worker return the results of the step that the worker gives to the user."""
        worker = draft.key.place
        for value in self.program.returns:
            op = self.program.graph.ops[value.op]
            if op.role == INPUT or worker not in self._find_owners(op, value):
                continue
            home: Key | None = None
            if op.role in ("", HOLDER) and op.type != "Const":
                home = self._place_in_update(draft.key, op, value)
            self.draft(home or draft.key).fetches[value] = None
            if home is not None and home.kind == "forward":
                self.update_readers.setdefault(value, set()).add(worker)

    def _find_owners(self, op: Op, value: Value) -> WorkerNumbers:
        """The workers that return a result to the user; recorded in `owned` if not all do."""
        pure = op.index in self.parts.pure
        makers = self._restrictions.makers(value) if pure else WorkerNumbers()
        if not self.keeps_results or self.program.graph.spec(value).scalar or (pure and not makers):
            return self.homes.all_workers
        part = self._find_part(op, 3 * self.parts.phases - 3 + UPDATE)
        if pure:
            found = makers
        elif not op.role and part % 3 == FORWARD:
            found = self.homes.stage_workers[self._find_stage(op.index)]
        else:
            found = self.homes.home_of(op.index)
        if found == self.homes.all_workers:
            found = self.homes.stage_workers[len(self.program.stages) - 1]
        self.owned[value] = found
        return found

    def _draft_stage(self, key: Key) -> None:
        draft = self.draft(key)
        if key.kind == "forward":
            for mask in filter(None, [find_mask(self.program, value)[0] for value in draft.fetches]):
                # The mask of the rows of a boundary must be available to its sender.
                if mask.op not in self.program.leaf_ops and self._include(draft, mask):
                    draft.fetches[mask] = None
                    self.masks.add(mask)
            self._add_roots(
                key, [op for op in self._effects(key.phase, FORWARD) if self._find_stage(op.index) == key.place]
            )
        else:
            for request in self.program.requests:
                if self.parts.phase_of[request.index] == key.phase:
                    gradients = [flow.gradient for flow in request.flows if flow.stage == key.place]
                    gradients += [v for part in request.parts if part.stage == key.place for v in part.values]
                    draft.fetches.update(dict.fromkeys(gradients))
                    draft.roots.update({op: None for stage, op in request.effects if stage == key.place})
        self._walk(key)

    def _needs_weights(self, worker: int) -> bool:
        """Whether a worker needs the weights of micro-batches, for its ops or for merging."""
        stage_workers, scaled = self.homes.stage_workers, {self.program.share, self.program.grow}
        for key, draft in self.drafts.items():
            runs = worker in stage_workers[key.place] if key.staged else worker == key.place
            if runs and scaled & draft.feeds.keys():
                return True
        return any(worker in stage_workers[self._find_stage(value.op)] for value in self.update_readers)

    def _draft_weights(self, worker: int) -> None:
        """Draft the fragment of nb.loss_weight for each micro-batch, before the first one starts."""
        key = Key("weight", 0, worker)
        for value in self.program.loss_weights if self.program.pipeline.micro_batch > 1 else ():
            op = self.program.graph.ops[value.op]
            if value.op not in self.parts.pure and op.type != "Const":
                raise NotYetError(
                    "nb.loss_weight of a tensor that depends on the model",
                    where=f"{op.label}, {self.homes.where(op.index)}",
                    why="every micro-batch's share must be known before the first one starts",
                    mend="compute the weight from the step's inputs alone: nb.loss_weight(tf.reduce_sum(mask))",
                )
            self.draft(key).fetches[value] = None
        self._walk(key)

    # ------------------------------------------------------------------ the walk
    def _walk(self, key: Key) -> None:
        """Walk back from a draft's results and effects, and add the ops that it computes; others are requested."""
        draft = self.drafts.get(key)
        if draft is None:
            return
        ops = self.program.graph.ops
        draft.ops.update(draft.roots)
        pending = [value for op in draft.roots for value in ops[op].inputs] + list(draft.fetches)
        seen: set[Value] = set()
        while pending:
            value = pending.pop()
            if value not in seen and self._include(draft, value) and value.op not in draft.ops:
                draft.ops[value.op] = None
                pending.extend(ops[value.op].inputs)
            seen.add(value)

    def _include(self, draft: Draft, value: Value) -> bool:
        """Whether the draft computes a value itself; otherwise it is fed, and requested from its home.

        A request of a stage to its own worker is made by each of its replicas to its own.
        """
        op = self.program.graph.ops[value.op]
        if op.role == CAPTURE:
            return False
        if op.role and (op.role != HOLDER or self._has_gradient(draft.key, op)):
            draft.feeds[value] = None
            return False
        home = None if op.type == "Const" else self._find_home(draft.key, op, value)
        if home is None:
            return True
        draft.feeds[value] = None
        if draft.key.staged and not home.staged:
            for worker in sorted(self.homes.stage_workers[draft.key.place]):
                source = home._replace(place=worker)
                if home.kind == "update":  # each replica receives the value, if its own update does not compute it
                    source = self._find_update(op, value, home.phase, worker)
                self.draft(source).fetches[value] = None
        elif home != draft.key:
            self.draft(home).fetches[value] = None
        return False

    def _has_gradient(self, key: Key, op: Op) -> bool:
        """Whether a fragment gets a merged gradient from the backward: updates of its phase, on the workers with it."""
        own = self._find_part(op, 0) == 3 * key.phase + UPDATE
        return own and key.kind == "update" and key.place in self.homes.home_of(op.index)

    def _find_home(self, key: Key, op: Op, value: Value) -> Key | None:
        """The fragment that computes a value for a fragment with this key; None for that fragment itself."""
        if key.kind == "update":
            return self._place_in_update(key, op, value)
        if key.staged:
            return self._place_in_stage(key, op, value)
        phase, kind = divmod(self._find_part(op, PROLOGUE), 3)
        if key.kind == "prologue" and kind == UPDATE:
            return self._find_update(op, value, phase, key.place)
        return None

    def _place_in_stage(self, key: Key, op: Op, value: Value) -> Key | None:
        backward = key.kind == "backward"
        if backward and self.program.request_of(op.index) is not None:
            return key._replace(kind="forward") if self._is_size_alone(op, key) else None
        if value in self.wholes:
            return Key("whole", 0, self.homes.worker_of(key.place))
        home = self._place_in_forward(op, key.phase, key.place)
        if not backward:
            return home
        if self._is_reread(op, key) or (home is None and self._is_recomputed(op)):
            return None
        return home or key._replace(kind="forward")

    def _place_in_forward(self, op: Op, phase: int, stage: int) -> Key | None:
        """The fragment of the forward that computes a value; None for the requesting one."""
        label, worker, at = self._find_stage(op.index, stage), self.homes.worker_of(stage), 3 * phase + FORWARD
        if op.index in self.parts.pure:
            here = label == stage or self.parts.is_made_by_each_reader(op)
            return None if here else Key("forward", phase, label)
        part = self.parts.recomputed_checks.get(op.index, -1)
        home, kind = divmod(part if part // 3 == phase else self._find_part(op, at), 3)
        if kind == UPDATE:
            return Key("update", home, worker, self.homes.last_round(home, worker))
        if kind == PROLOGUE:
            if op.index in self.parts.effects or self._is_pinned(op, at):
                return Key("prologue", home, worker)
            home = phase
        if label != stage and op.index not in self.parts.batch:
            home = self.parts.part.get(op.index, 0) // 3  # it is the same in all phases, and is sent in the first only
        return None if (home, label) == (phase, stage) else Key("forward", home, label)

    def _is_size_alone(self, op: Op, key: Key) -> bool:
        """Whether a backward needs only the size of a forward value, which the forward then passes on instead of it."""
        graph, own = self.program.graph, key._replace(kind="forward")
        if op.type not in SHAPE_OPS or any(graph.ops[value.op].role for value in op.inputs):
            return False
        readers = (reader for value in op.inputs for reader in graph.consumers(value))
        behind = [each for each in readers if self.program.request_of(each.index) is not None]
        makers = [self._place_in_stage(key, graph.ops[value.op], value) for value in op.inputs]
        return all(each.type in SHAPE_OPS for each in behind) and all(home == own for home in makers)

    def _is_recomputed(self, op: Op) -> bool:
        """Whether a backward recomputes a value instead of keeping it from the forward."""
        reads = op.type == "ReadVariableOp"
        return self.program.pipeline.recompute and not (reads or op.stateful or op.index in self.parts.effects)

    def _is_reread(self, op: Op, key: Key) -> bool:
        """Whether a backward reads a variable again instead of keeping the value that its forward has read. What
        another stage has read crosses instead, as its variables may be elsewhere.
        """
        phase = key.phase
        return (
            op.type == "ReadVariableOp"
            and self._find_stage(op.index, key.place) == key.place
            and self.parts.forward_written.isdisjoint(list_resources(op, self.program.graph))
            and self.parts.phase(op.index) in (0, phase)
            and not self._is_pinned(op, 3 * phase + FORWARD)
        )

    def _find_part(self, op: Op, at: int) -> int:
        """The part of the step in which a value is computed when `at` needs it: as late as possible."""
        own = self.parts.part.get(op.index, 0)
        if op.role == HOLDER:
            return 3 * self.parts.phase_of[self.program.holders[op.index][0]] + UPDATE
        if op.index in self.parts.batch or op.index in self.parts.effects or own % 3 == UPDATE:
            return own
        return min(at, self.parts.latest.get(op.index, at))

    def _is_pinned(self, op: Op, at: int) -> bool:
        return self.parts.latest.get(op.index, at) < at

    def _place_in_update(self, key: Key, op: Op, value: Value) -> Key | None:
        _, phase, worker, number = key
        at = 3 * phase + UPDATE
        homes = self.homes.home_of(op.index)
        if op.index in self.parts.pure:  # in place, except for scalars of inputs that only others have
            maker = self._restrictions.home(value, worker)
            return None if maker is None else self._make_early("whole", 0, value, maker, key)
        if op.index in self.parts.late.terms:
            return self._make_early("prologue", phase, value, worker if worker in homes else min(homes), key)
        part = self._find_part(op, at)
        if part % 3 == FORWARD:  # requested from its stage, and sent if that is on another worker
            stage = self._find_stage(op.index)
            self.update_readers.setdefault(value, set()).add(worker)
            if worker not in self.homes.stage_workers[stage]:
                self.crossings[value, self.homes.worker_of(stage), worker] = phase
            return Key("forward", part // 3, stage)
        if part < at and part % 3 == UPDATE:
            return self._find_update(op, value, part // 3, worker)
        if worker not in homes:
            return self._cross(value, phase, worker)
        if part < at and (op.index in self.parts.effects or self._is_pinned(op, at)):
            return Key("prologue", part // 3, worker)
        made = self.homes.round_of(op.index, worker)
        unwritten = number <= self.homes.write_round(phase, worker)
        here = number in (FIRST_ROUND, made) or not op.inputs or (unwritten and is_read(op))
        return None if here else Key("update", phase, worker, made)

    def _make_early(self, kind: str, phase: int, value: Value, maker: int, reader: Key) -> Key:
        """The home of a value that is computed before the micro-batches; it is sent with their losses."""
        if maker != reader.place:
            self.crossings[value, maker, reader.place] = reader.phase
            self.early.add(value)
            self._request_from_mates(Key(kind, phase, maker), value)
        return Key(kind, phase, maker)

    def _find_update(self, op: Op, value: Value, phase: int, worker: int) -> Key:
        """The home of a value of an earlier phase's update: this worker, or one that sends it."""
        if worker not in self.homes.home_of(op.index):
            return self._cross(value, phase, worker)
        return Key("update", phase, worker, self.homes.last_round(phase, worker))

    def _cross(self, value: Value, phase: int, worker: int) -> Key:
        """Let the update of a worker that has a value send it to `worker`; returns the key of that update."""
        home = min(self.homes.home_of(value.op))
        key = Key("update", phase, home, self.homes.round_of(value.op, home))
        self.crossings[value, home, worker] = phase
        self._request_from_mates(key, value)
        return key

    def _request_from_mates(self, key: Key, value: Value) -> None:
        """Request a value of a worker from the others of its split stage, too: they compute it together."""
        for mate in sorted(self.homes.home_of(value.op) & self.homes.mates[key.place] - {key.place}):
            self.draft(key._replace(place=mate)).fetches[value] = None

    def _find_stage(self, op: int, default: int = 0) -> int:
        return self.program.labels.get(op, default)
