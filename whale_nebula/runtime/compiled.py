"""A plan's fragments as functions, for the stages of one worker, with what feeds each worked out once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from whale_nebula.ir.cut import Boundary, Cut, Fragment, PhasePlan, StagePhase
from whale_nebula.passes.exchange import Bundle, bundles
from whale_nebula.passes.mates import Told, told
from whale_nebula.runtime.fragment_function import Function, Workshop
from whale_nebula.runtime.whereabouts import Whereabouts
from whale_nebula.spec import Value


class Feed(NamedTuple):
    """Where a function's input comes from.

    `kind` is leaf, share, grow, arrival, holder, boundary, once or local; `what` a leaf's number or a value.
    """

    kind: str
    what: Any


@dataclass(frozen=True)
class Piece:
    """A function and where its inputs come from."""

    function: Function
    feeds: tuple[Feed, ...]

    @property
    def fragment(self) -> Fragment:
        """What the function is made of."""
        return self.function.fragment

    @property
    def fetches(self) -> tuple[Value, ...]:
        """What the function gives."""
        return self.function.fragment.fetches


@dataclass(frozen=True)
class StagePieces:
    """One stage in one phase: `forward` does all where `fused`."""

    plan: StagePhase
    forward: Piece | None
    backward: Piece | None
    skip: Piece | None = None


@dataclass
class Compiled:
    """Everything that one worker runs of a plan."""

    cut: Cut
    worker: str
    workshop: Workshop
    _pieces: dict[Fragment, Piece] = field(default_factory=dict)
    _bundles: dict[int, tuple[Bundle, ...]] = field(default_factory=dict)
    _told: dict[int, tuple[Told, ...]] = field(default_factory=dict)
    _later: dict[tuple[int, int], frozenset[Value]] = field(default_factory=dict)
    _made_once: dict[int, frozenset[Value]] = field(default_factory=dict)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stages of this worker."""
        return next(w.stages for w in self.cut.workers if w.name == self.worker)

    @cached_property
    def whereabouts(self) -> Whereabouts:
        """Where ops stand in the user's code, for when they fail."""
        return Whereabouts(self.workshop.graph, self.cut.program.stages, len(self.cut.phases))

    @cached_property
    def boundaries(self) -> Mapping[Value, Boundary]:
        """Boundaries by their value."""
        return {boundary.value: boundary for boundary in self.cut.boundaries}

    @cached_property
    def masks(self) -> frozenset[Value]:
        """What marks rows of boundaries."""
        return frozenset(boundary.mask for boundary in self.cut.boundaries if boundary.mask is not None)

    @cached_property
    def flows(self) -> Mapping[Value, tuple[tuple[int, Value], ...]]:
        """For the placeholder of a boundary's gradient: (stage, value) of each share, in stage order."""
        found: dict[Value, tuple[tuple[int, Value], ...]] = {}
        for request in self.cut.program.requests:
            for arrival in request.arrivals:
                shares = [(f.stage, f.gradient) for f in request.flows if f.boundary == arrival.boundary]
                found[arrival.feed] = tuple(sorted(shares))
        return found

    @cached_property
    def flow_targets(self) -> Mapping[Value, int]:
        """For a share of a boundary's gradient: the stage that it goes to."""
        labels = self.cut.program.labels
        return {f.gradient: labels.get(f.boundary.op, 0) for r in self.cut.program.requests for f in r.flows}

    def stage(self, phase: PhasePlan, stage: int) -> StagePieces | None:
        """The functions of a stage in a phase, or None where it has nothing to do."""
        plan = next((s for s in phase.stages if s.stage == stage), None)
        if plan is None:
            return None
        return StagePieces(plan, *map(self._made, (plan.forward, plan.backward, plan.skip)))

    def prologue(self, phase: PhasePlan) -> Piece | None:
        """What runs once before the micro-batches of a phase."""
        return self._made(phase.prologue.get(self.worker))

    def bundles(self, phase: PhasePlan) -> tuple[Bundle, ...]:
        """What the updates of a phase send one another."""
        if phase.index not in self._bundles:
            self._bundles[phase.index] = bundles(self.cut, phase)
        return self._bundles[phase.index]

    def told(self, phase: PhasePlan) -> tuple[Told, ...]:
        """What replicas of stages tell one another in a phase."""
        if phase.index not in self._told:
            self._told[phase.index] = told(self.cut, phase)
        return self._told[phase.index]

    def updates(self, phase: PhasePlan) -> Sequence[Piece]:
        """What runs once after them, in rounds."""
        return [piece for f in phase.updates.get(self.worker, ()) if (piece := self._made(f)) is not None]

    @cached_property
    def whole(self) -> Piece | None:
        """Values of the inputs alone that are computed on the whole batch."""
        return self._made(self.cut.whole.get(self.worker))

    @cached_property
    def weight(self) -> Piece | None:
        """What nb.loss_weight was given, for one micro-batch."""
        return self._made(self.cut.weight.get(self.worker))

    def _made(self, fragment: Fragment | None) -> Piece | None:
        if fragment is None:
            return None
        if fragment not in self._pieces:
            feeds = tuple(self._feed(fragment, value) for value in fragment.feeds)
            self._pieces[fragment] = Piece(self.workshop.make(fragment), feeds)
        return self._pieces[fragment]

    def _feed(self, fragment: Fragment, value: Value) -> Feed:
        program = self.cut.program
        if value.op in program.leaf_ops:
            return Feed("leaf", program.leaf_ops[value.op])
        if value in (program.share, program.grow):
            return Feed("share" if value == program.share else "grow", value)
        if value.op in program.arrivals:
            return Feed("arrival", value)
        if value.op in program.holders:
            return Feed("holder", value)
        if fragment.stage is None or value in self._once(fragment.phase):
            return Feed("once", value)
        boundary = self.boundaries.get(value)
        crosses = boundary is not None and boundary.source != fragment.stage
        return Feed("boundary" if crosses else "local", value)

    def _once(self, phase: int) -> frozenset[Value]:
        """Values made once a step, from the whole batch or by a prologue or update, before a phase's forward."""
        if phase not in self._made_once:
            fragments = [self.cut.whole.get(self.worker)]
            for earlier in self.cut.phases[: phase + 1]:
                fragments += [earlier.prologue.get(self.worker)]
                fragments += earlier.updates.get(self.worker, ()) if earlier.index < phase else ()
            fetches = (value for f in fragments if f is not None for value in f.fetches if value not in f.feeds)
            self._made_once[phase] = frozenset(fetches)
        return self._made_once[phase]

    def needed_after(self, phase: PhasePlan, stage: int) -> frozenset[Value]:
        """Local values of a stage that a later phase reads."""
        key = (phase.index, stage)
        if key not in self._later:
            fragments = [
                fragment
                for later in self.cut.phases[phase.index + 1 :]
                for plan in later.stages
                if plan.stage == stage
                for fragment in (plan.forward, plan.backward)
                if fragment is not None
            ]
            self._later[key] = frozenset(value for fragment in fragments for value in fragment.feeds)
        return self._later[key]
