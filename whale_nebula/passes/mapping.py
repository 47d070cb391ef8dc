"""Map a program to workers: assign fragments to them, and insert boundaries between them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from whale_nebula.codec.packing import TYPES
from whale_nebula.codec.way import parse_way
from whale_nebula.errors import NotYetError
from whale_nebula.ir.cut import (
    Boundary,
    Crossing,
    Cut,
    Exchange,
    Fragment,
    PhasePlan,
    StagePhase,
    Worker,
)
from whale_nebula.ir.program import Program
from whale_nebula.passes.batch import BatchFolds
from whale_nebula.passes.codec_options import (
    compress_notes,
    ids_of,
    lane_notes,
    mask_of,
    mask_refusal,
    scopes_of,
    skip,
)
from whale_nebula.passes.cut import Cutter, Draft, Key, finish
from whale_nebula.passes.effects import written_handles
from whale_nebula.passes.exchange import clusters_apart, exchanges
from whale_nebula.passes.owners import Homes
from whale_nebula.passes.phases import Parts
from whale_nebula.passes.replicas import devices, orders, running
from whale_nebula.spec import Value

EVERYWHERE = "everywhere"
"""Who is given the tensors that a step returns: every worker, or ("owner") the one that makes them."""


def map_workers(
    program: Program,
    workers: Sequence[Worker],
    parts: Parts,
    folds: BatchFolds,
    results: str,
    apart: Collection[str],
) -> Cut:
    """Make the fragments of each worker, the boundaries between stages and the values that updates exchange."""
    homes = Homes(program, parts, running(len(program.stages), workers), len(workers))
    cutter = Cutter(program, parts, homes, folds.wholes, owner=results != EVERYWHERE, apart=apart)
    return _Builder(program, parts, homes, cutter.run(), cutter, tuple(workers), folds).build()


def list_exchange(
    cut: Cut, parts: Parts, folds: BatchFolds, results: str, apart: Collection[str]
) -> tuple[Exchange, ...]:
    """What updates would exchange if each cluster were a process; nothing where that is not built for this step."""
    workers = clusters_apart(cut.program)
    if len(workers) > len(cut.workers) or (len(cut.workers) == 1 and len(workers) > 1):
        with contextlib.suppress(NotYetError):
            return exchanges(map_workers(cut.program, workers, parts, folds, results, apart))
    return exchanges(cut)


@dataclass
class _Builder:
    program: Program
    parts: Parts
    homes: Homes
    drafts: Mapping[Key, Draft]
    cutter: Cutter
    workers: tuple[Worker, ...]
    folds: BatchFolds
    fused: set[tuple[int, int]] = field(default_factory=set)

    def build(self) -> Cut:
        self.outside = self._outside()
        phases = tuple(self._phase(phase) for phase in range(self.parts.phases))
        names = [worker.name for worker in self.workers]
        variables = self.program.variable_ops
        return Cut(
            program=self.program,
            workers=self.workers,
            devices=devices(self.program, self.workers),
            phases=phases,
            boundaries=self._boundaries(),
            merges={value: self.folds.merge(value) for value in self.cutter.demanded},
            held={v.path: tuple(names[w] for w in sorted(self.homes.variables[op])) for op, v in variables.items()},
            whole=self._once("whole"),
            weight=self._once("weight"),
            forward_written=tuple(sorted(variables[op].path for op in self.parts.forward_written if op in variables)),
            updates=any(written_handles(self.program.graph.ops[op], self.program.graph) for op in self.parts.effects),
            notes=(*self.folds.notes, *([str(self.program.apart)] if self.program.apart else ())),
            owners={value: tuple(names[w] for w in sorted(owned)) for value, owned in self.cutter.owned.items()},
            orders=orders(self.program),
        )

    def _outside(self) -> Mapping[Value, set[tuple[str, int, int]]]:
        """For each value, the fragments that are fed with it: (kind, phase, stage or worker)."""
        found: dict[Value, set[tuple[str, int, int]]] = {}
        for key, draft in self.drafts.items():
            for value in draft.feeds:
                found.setdefault(value, set()).add(key[:3])
        return found

    def _phase(self, phase: int) -> PhasePlan:
        stages = [self._stage(phase, stage) for stage in range(len(self.program.stages))]
        return PhasePlan(
            index=phase,
            requests=tuple(r for r, p in enumerate(self.parts.phase_of) if p == phase),
            stages=tuple(stage for stage in stages if stage is not None),
            prologue=self._once("prologue", phase),
            updates=self._updates(phase),
            crossings=self._crossings(phase),
        )

    def _stage(self, phase: int, stage: int) -> StagePhase | None:
        forward = self.drafts.get(("forward", phase, stage, 0))
        backward = self.drafts.get(("backward", phase, stage, 0))
        if forward is None and backward is None:
            return None
        if backward is not None and not any(v.op in self.program.arrivals for v in backward.feeds):
            return self._replicate_phase(stage, phase, self._fuse(forward or Draft(backward.key), backward), None, True)
        worker = self._worker_name(stage)
        return self._replicate_phase(
            stage, phase, finish(forward, worker) if forward else None, finish(backward, worker) if backward else None,
            False,
        )  # fmt: skip

    def _replicate_phase(
        self, stage: int, phase: int, forward: Fragment | None, backward: Fragment | None, fused: bool
    ) -> StagePhase:
        copies = self.program.stages[stage].replicas > 1
        other, drifting = skip(self.program, forward) if copies else (None, ())
        return StagePhase(stage, phase, forward, backward, fused, other, drifting)

    def _fuse(self, forward: Draft, backward: Draft) -> Fragment:
        """No gradient comes in from outside: forward and backward are one function, and nothing is kept between."""
        _, phase, stage, number = backward.key
        merged = Draft(("fused", phase, stage, number), ops={**forward.ops, **backward.ops})
        merged.feeds = {v: None for v in [*forward.feeds, *backward.feeds] if v.op not in merged.ops}
        merged.fetches = {v: None for v in forward.fetches if self._leaves(v, phase, stage)} | backward.fetches
        return finish(merged, self._worker_name(stage))

    def _leaves(self, value: Value, phase: int, stage: int) -> bool:
        """Whether a value of a stage is read by anything but the stage's own backward in the same phase."""
        own = {("backward", phase, stage)}
        kept = value in self.cutter.demanded or value in self.cutter.masks
        return kept or bool(self.outside.get(value, set()) - own)

    def _worker_name(self, stage: int) -> str:
        return self.workers[self.homes.worker_of(stage)].name

    def _once(self, kind: str, phase: int = 0) -> dict[str, Fragment]:
        """By worker, what it runs once a step."""
        found = {key: draft for key, draft in self.drafts.items() if key[:2] == (kind, phase)}
        return {self.workers[key[2]].name: finish(draft, self.workers[key[2]].name) for key, draft in found.items()}

    def _updates(self, phase: int) -> dict[str, tuple[Fragment, ...]]:
        found: dict[str, list[Fragment]] = {}
        for key in sorted(self.drafts):
            if key[:2] == ("update", phase):
                name = self.workers[key[2]].name
                found.setdefault(name, []).append(finish(self.drafts[key], name))
        return {name: tuple(fragments) for name, fragments in found.items()}

    def _crossings(self, phase: int) -> tuple[Crossing, ...]:
        """Values that one worker's update or result needs of another's."""
        found: dict[tuple[Value, int], list[str]] = {}
        for (value, source, destination), at in self.cutter.crossings.items():
            if at == phase:
                found.setdefault((value, source), []).append(self.workers[destination].name)
        return tuple(
            Crossing(value, phase, self.workers[source].name, tuple(sorted(to)), self._round(value, source))
            for (value, source), to in sorted(found.items())
        )

    def _round(self, value: Value, source: int) -> int:
        """The round after which a value can be sent; -1: before the first."""
        forward = value in self.cutter.demanded or value in self.cutter.told
        return -1 if forward else self.homes.round_of(value.op, source)

    def _boundaries(self) -> tuple[Boundary, ...]:
        made = {value: key for key, draft in self.drafts.items() if key[0] == "forward" for value in draft.fetches}
        returning = {a.boundary for r in self.program.requests for a in r.arrivals}
        found: list[Boundary] = []
        for value, (_, phase, source, _) in sorted(made.items()):
            readers = {k[2] for k in self.outside.get(value, ()) if k[0] in ("forward", "backward")} - {source}
            if readers:
                mask = mask_of(self.program, value, readers)
                there, back = (self._codec(value, readers, direction, mask) for direction in (0, 1))
                reason = mask_refusal(self.program, value, readers) if mask is None else None
                if reason is not None:
                    self.folds.notes.append(f"b{len(found)}: all its rows cross: {reason}")
                found.append(
                    Boundary(
                        slot=len(found), value=value, phase=phase, source=source, destinations=tuple(sorted(readers)),
                        backward=value in returning, codec=there, backward_codec=back,
                        layout=self.folds.layout(value), mask=mask,
                        ids=ids_of(self.program, value, self.folds.layout(value), readers),
                        where=self._where(value, readers),
                    )
                )  # fmt: skip
        self.folds.notes.extend(self._repetition_notes(found))
        self.folds.notes.extend(compress_notes(self.program, found))
        self.folds.notes.extend(lane_notes(self.program, found, self.workers))
        return tuple(found)

    def _repetition_notes(self, boundaries: Sequence[Boundary]) -> Iterator[str]:
        """Boundaries that are the same in each micro-batch: they are computed and sent again for each of them."""
        count, graph = self.program.pipeline.micro_batch, self.program.graph
        for boundary in boundaries:
            if self.folds.folding is None or boundary.layout != "whole" or graph.spec(boundary.value).rank == 0:
                continue
            line = self.folds.where(boundary.value.op)
            made_at = f" ({line})" if line else ""
            yield (
                f"b{boundary.slot}{made_at} does not depend on the batch: it is computed and sent for each of {count} "
                "micro-batches, whole each time. If it has a row for each of the batch's, make as many as the batch "
                "has: tf.shape(x)[0] instead of a fixed number"
            )

    def _codec(self, value: Value, readers: set[int], direction: int, mask: Value | None) -> str:
        """How the innermost compress scope around the producer, else around the first consumer, has it cross."""
        graph, ways = self.program.graph, self.program.compressions
        scope = next(scopes_of(self.program, value, readers), None)
        if scope is None:
            return "none"
        spec, way = graph.spec(value), parse_way(ways[scope][direction])
        if not spec.rank and (spec.rank == 0 or way.coded):
            return "none"
        if spec.floating and mask is None:
            way = replace(way, mask=None)
        if spec.floating:
            return "none" if spec.dtype.startswith("complex") else str(way)
        return "bits" if (way.codec is not None or way.auto) and spec.dtype in TYPES else "none"

    def _where(self, value: Value, readers: set[int]) -> str:
        """The line of that scope."""
        scope = next(scopes_of(self.program, value, readers), None)
        return "" if scope is None else next(iter(self.program.sites[scope : scope + 1]), "")
