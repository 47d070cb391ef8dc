"""Map a program to workers: assign fragments, and insert boundaries between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from whale_nebula.errors import NotYetError
from whale_nebula.ir.cut import Boundary, Crossing, Cut, Fragment, PhasePlan, StagePhase, Worker
from whale_nebula.ir.program import Program
from whale_nebula.passes.backward_split import BackwardSplitter
from whale_nebula.passes.batch import BatchFolds
from whale_nebula.passes.checks import check_held_variables, check_tables_and_queues
from whale_nebula.passes.codec_options import (
    choose_codec,
    find_ids,
    find_mask,
    find_scope,
    find_scope_line,
    list_scope_notes,
    list_state_notes,
)
from whale_nebula.passes.cut import Cutter, Draft, Key
from whale_nebula.passes.effects import find_written_handles, is_effect
from whale_nebula.passes.exchange import list_cluster_workers
from whale_nebula.passes.owners import Homes
from whale_nebula.passes.phases import Parts
from whale_nebula.passes.replicas import list_devices, list_orders, list_stage_workers
from whale_nebula.schedule.schedules import SPLIT_BACKWARD
from whale_nebula.spec import Value

EVERYWHERE = "everywhere"
"""The receivers of the tensors that a step returns: every worker, or ("owner") those that compute them."""


def map_workers(
    program: Program,
    workers: Sequence[Worker],
    parts: Parts,
    folds: BatchFolds,
    results: str,
    restricted_inputs: Collection[str],
    where: Callable[[int], str] = lambda op: "",
) -> Cut:
    """The cut with the fragments of each worker, the boundaries between stages and the values that updates exchange;
    `where` returns the line of an op for errors.
    """
    homes = Homes(program, parts, list_stage_workers(len(program.stages), workers), len(workers), where)
    cutter = Cutter(
        program, parts, homes, folds.wholes, keeps_results=results != EVERYWHERE, restricted_inputs=restricted_inputs
    )
    cut = _Builder(program, parts, homes, cutter.run(), cutter, tuple(workers), folds).build()
    check_held_variables(cut, where)
    check_tables_and_queues(cut, parts.effects, where)
    return cut


def divide_clusters(cut: Cut, parts: Parts, folds: BatchFolds, results: str, restricted_inputs: Collection[str]) -> Cut:
    """The cut mapped to a process for each cluster (`list_cluster_workers`), if one process runs several; unchanged if
    that is not supported for this step.
    """
    workers = list_cluster_workers(cut.program)
    if len(workers) > len(cut.workers) or (len(cut.workers) == 1 and len(workers) > 1):
        with contextlib.suppress(NotYetError):
            return map_workers(cut.program, workers, parts, folds, results, restricted_inputs)
    return cut


@dataclass
class _Builder:
    program: Program
    parts: Parts
    homes: Homes
    drafts: Mapping[Key, Draft]
    cutter: Cutter
    workers: tuple[Worker, ...]
    folds: BatchFolds

    def build(self) -> Cut:
        program, graph, variables = self.program, self.program.graph, self.program.variable_ops
        self.keys_by_feed: dict[Value, set[Key]] = {}
        for key, draft in self.drafts.items():
            for value in draft.feeds:
                self.keys_by_feed.setdefault(value, set()).add(key)
        phases = tuple(self._build_phase(phase) for phase in range(self.parts.phases))
        return Cut(
            program=program,
            workers=self.workers,
            devices=list_devices(program, self.workers),
            phases=phases,
            boundaries=self._build_boundaries(),
            merges={value: self.folds.merge(value) for value in self.cutter.update_readers},
            variable_workers={each.path: self._list_names(self.homes.variables[op]) for op, each in variables.items()},
            batch_fragments=self._finish_fragments("whole"),
            weight_fragments=self._finish_fragments("weight"),
            forward_written=tuple(sorted(variables[op].path for op in self.parts.forward_written if op in variables)),
            updates=any(find_written_handles(graph.ops[op], graph) for op in self.parts.effects),
            notes=(*self.folds.notes, *([str(program.local_sgd)] if program.local_sgd else ())),
            owners={value: self._list_names(owned) for value, owned in self.cutter.owned.items()},
            orders=list_orders(program),
        )

    def _list_names(self, workers: Collection[int]) -> tuple[str, ...]:
        return tuple(self.workers[worker].name for worker in sorted(workers))

    def _finish_fragments(self, kind: str, phase: int = 0) -> dict[str, Fragment]:
        """By worker, the fragments of a kind that belong to no stage."""
        found = {self.workers[key.place].name: each for key, each in self.drafts.items() if key[:2] == (kind, phase)}
        return {name: draft.finish(name) for name, draft in found.items()}

    def _build_phase(self, phase: int) -> PhasePlan:
        stages = (self._build_stage(phase, stage) for stage in range(len(self.program.stages)))
        updates: dict[str, list[Fragment]] = {}
        for key in sorted(self.drafts):
            if key[:2] == ("update", phase):
                name = self.workers[key.place].name
                updates.setdefault(name, []).append(self.drafts[key].finish(name))
        return PhasePlan(
            index=phase,
            requests=tuple(r for r, p in enumerate(self.parts.phase_of) if p == phase),
            stages=tuple(stage for stage in stages if stage is not None),
            prologue=self._finish_fragments("prologue", phase),
            updates={name: tuple(fragments) for name, fragments in updates.items()},
            crossings=self._list_crossings(phase),
        )

    def _build_stage(self, phase: int, stage: int) -> StagePhase | None:
        first, second = (self.drafts.get(Key(kind, phase, stage)) for kind in ("forward", "backward"))
        if first is None and second is None:
            return None
        fused = second is not None and not any(value.op in self.program.arrivals for value in second.feeds)
        if second is not None and fused:
            first, second = self._fuse(first or Draft(second.key), second), None
        weights: Draft | None = None
        if self.program.pipeline.schedule in SPLIT_BACKWARD:
            first, second, weights = self._separate_weights(first, second)
        worker = self.workers[self.homes.worker_of(stage)].name
        forward, backward, later = (None if d is None else d.finish(worker) for d in (first, second, weights))
        skipped: Fragment | None = None
        drifting: tuple[str, ...] = ()
        if forward is not None and self.program.stages[stage].replicas > 1:
            skipped, drifting = _find_skipped_part(self.program, forward)
        return StagePhase(stage, phase, forward, backward, fused, skipped, drifting, later)

    def _separate_weights(
        self, first: Draft | None, second: Draft | None
    ) -> tuple[Draft | None, Draft | None, Draft | None]:
        """Separate gradients of weights from a backward, or from a function with forward and backward."""
        whole = second or first
        if whole is None or whole.key.kind == "forward":
            return first, second, None
        splitter = BackwardSplitter(self.program, self.parts, whole, self.folds.where)
        found = splitter.run()
        self.folds.notes.extend([splitter.note] * bool(splitter.note))
        if found is None:
            return first, second, None
        return (first, *found) if second is not None else (found[0], None, found[1])

    def _fuse(self, forward: Draft, backward: Draft) -> Draft:
        """Merge a forward and a backward without gradients from other stages into one function, which keeps nothing."""
        own, kept = backward.key, self.cutter.update_readers.keys() | self.cutter.masks
        merged = Draft(own._replace(kind="fused"), ops={**forward.ops, **backward.ops})
        merged.roots = {**forward.roots, **backward.roots}
        merged.feeds = {v: None for v in [*forward.feeds, *backward.feeds] if v.op not in merged.ops}
        leaving = {v: None for v in forward.fetches if v in kept or self.keys_by_feed.get(v, set()) - {own}}
        merged.fetches = leaving | backward.fetches
        return merged

    def _list_crossings(self, phase: int) -> tuple[Crossing, ...]:
        """Values that one worker's update or result needs from another's, with the round after which each can be sent;
        -1: before the first.
        """
        found: dict[tuple[Value, int], list[str]] = {}
        for (value, source, destination), at in self.cutter.crossings.items():
            if at == phase:
                found.setdefault((value, source), []).append(self.workers[destination].name)
        early = self.cutter.update_readers.keys() | self.cutter.early
        rounds = {key: -1 if key[0] in early else self.homes.round_of(key[0].op, key[1]) for key in found}
        return tuple(
            Crossing(value, phase, self.workers[source].name, tuple(sorted(to)), rounds[value, source])
            for (value, source), to in sorted(found.items())
        )

    def _build_boundaries(self) -> tuple[Boundary, ...]:
        program, notes = self.program, self.folds.notes
        made = {
            value: key
            for key in sorted(self.drafts, reverse=True)
            if key.kind == "forward"
            for value in self.drafts[key].fetches
        }
        returning = {a.boundary for r in program.requests for a in r.arrivals}
        found: list[Boundary] = []
        for value, key in sorted(made.items()):
            readers = {each.place for each in self.keys_by_feed.get(value, ()) if each.staged} - {key.place}
            if not readers or self.parts.is_made_by_each_reader(program.graph.ops[value.op]):
                continue
            layout, scope = self.folds.layout(value), find_scope(program, value, readers)
            mask, reason = find_mask(program, value, readers)
            codec, backward_codec = (choose_codec(program, value, scope, way, mask) for way in (0, 1))
            if reason is not None:
                notes.append(f"b{len(found)}: all rows are sent: {reason}")
            boundary = Boundary(
                slot=len(found), value=value, phase=key.phase, source=key.place, destinations=tuple(sorted(readers)),
                backward=value in returning, codec=codec, backward_codec=backward_codec, layout=layout, mask=mask,
                ids=find_ids(program, value, layout, readers), where=find_scope_line(program, scope),
            )  # fmt: skip
            found.append(boundary)
        notes.extend(self._list_repetition_notes(found))
        notes.extend(list_scope_notes(program, found))
        notes.extend(list_state_notes(program, found, self.workers))
        return tuple(found)

    def _list_repetition_notes(self, boundaries: Sequence[Boundary]) -> Iterator[str]:
        """Notes on boundaries with the same value in each micro-batch, which is computed and sent for each."""
        count, graph = self.program.pipeline.micro_batch, self.program.graph
        for boundary in boundaries if self.folds.folding is not None else ():
            if boundary.layout != "whole" or graph.spec(boundary.value).rank == 0:
                continue
            line = self.folds.where(boundary.value.op)
            made_at = f" ({line})" if line else ""
            yield (
                f"b{boundary.slot}{made_at} does not depend on the batch: it is computed and sent for each of {count} "
                "micro-batches. If it should have one row per row of the batch, create as many rows as the batch "
                "has: tf.shape(x)[0] instead of a fixed number"
            )


def _find_skipped_part(program: Program, fragment: Fragment) -> tuple[Fragment | None, tuple[str, ...]]:
    """The part of a stage's forward that does not depend on the rows, with its writes; and the paths of the variables
    that the stage writes from its rows.
    """
    graph, variables, own = program.graph, program.variable_ops, frozenset(fragment.ops)
    scaled = {program.share, program.grow}
    differing = {  # between micro-batches
        value.op
        for value in fragment.feeds
        if value in scaled
        or value.op in program.batch_dependent_ops
        or value.op in program.arrivals
        or program.labels.get(value.op, fragment.stage) != fragment.stage
    }
    writes = [
        op for op in fragment.ops if is_effect(graph.ops[op], graph) and find_written_handles(graph.ops[op], graph)
    ]
    free = [op for op in writes if differing.isdisjoint(_ascend_within(program, own, [op]))]
    bound = {handle for op in writes if op not in free for handle in find_written_handles(graph.ops[op], graph)}
    drifting = tuple(sorted(variables[handle].path for handle in bound if handle in variables))
    if not free:
        return None, drifting
    ops = tuple(sorted(own.intersection(_ascend_within(program, own, free))))
    read = {value for op in ops for value in graph.ops[op].inputs}
    feeds = tuple(value for value in fragment.feeds if value in read)
    return Fragment("skip", fragment.phase, fragment.stage, fragment.worker, 0, ops, feeds, ()), drifting


def _ascend_within(program: Program, own: frozenset[int], ops: Collection[int]) -> set[int]:
    """Ops with all their predecessors within a fragment, and the predecessors one step beyond it."""
    found, pending = set(ops), list(ops)
    while pending:
        op = program.graph.ops[pending.pop()]
        fresh = {*(value.op for value in op.inputs), *own.intersection(op.control)} - found
        found |= fresh
        pending += fresh & own
    return found
