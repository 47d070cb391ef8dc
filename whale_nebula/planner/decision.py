"""What the planner has decided for a program, on what ground, and how that is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from whale_nebula.hardware import Clusters
from whale_nebula.ir.assignment import Assignment
from whale_nebula.ir.program import Pipeline, Stage
from whale_nebula.plan.records import Considered, Predicted, RateCurves
from whale_nebula.planner.chain import Layers
from whale_nebula.planner.explanation import describe_parts, draw_rates, explain, short_names, stage_names
from whale_nebula.planner.problem import Candidate, Excess, Problem, Shape
from whale_nebula.planner.sites import Grounds
from whale_nebula.report.records import size


@dataclass(frozen=True)
class Decision:
    """A program's candidates, of which the first was chosen, and what they were found by.

    `reasons` say why something was not free to choose. `handles` are the variables that it is about, by the id of
    their handle, with their paths; `program` is the step that was planned, for `clusters`. By cluster, `slowness` is
    how many times as long as its rates say it was seen to compute. A decision that `replaces` another one was made
    while that ran; with `replan` one may be, and `tried` has the seconds of those that ran before.
    """

    layers: Layers
    problem: Problem
    candidates: tuple[Candidate, ...]
    grounds: Grounds
    where: str
    reasons: tuple[str, ...] = ()
    handles: Mapping[int, str] = field(default_factory=dict)
    program: str = ""
    clusters: Clusters = field(default_factory=lambda: Clusters(()))
    slowness: Mapping[str, float] = field(default_factory=dict)
    replan: bool = False
    tried: Mapping[Shape, float] = field(default_factory=dict)
    replaces: Decision | None = None

    @property
    def chosen(self) -> Candidate:
        """The candidate that is run."""
        return self.candidates[0]

    @property
    def uncut(self) -> bool:
        """Whether one device does all of it at once."""
        shape = self.chosen.shape
        return len(shape.parts) == 1 and shape.parts[0].replicas == 1 and shape.micro_batches == 1

    @cached_property
    def assignment(self) -> Assignment:
        """The stages of the chosen candidate, and the variables of each."""
        names = stage_names(self.problem, self.chosen.parts)
        found: dict[str, dict[int, str]] = {}
        for part, name in zip(self.chosen.parts, names, strict=True):
            for block in range(part.begin, part.end):
                for path, reader in self.layers.variables[block]:
                    found.setdefault(path, {})[reader] = name
        stages = tuple(
            Stage(name, self.problem.sites[part.site].name, self.where, replicas=part.replicas)
            for part, name in zip(self.chosen.parts, names, strict=True)
        )
        shape = self.chosen.shape
        pipeline = Pipeline(shape.micro_batches, self.chosen.schedule, self.chosen.in_flight, shape.recompute)
        return Assignment(stages, {path: _by_reader(readers) for path, readers in found.items()}, pipeline)

    @cached_property
    def considered(self) -> tuple[Considered, ...]:
        """The best plans that were found, the chosen one first."""
        return tuple(self._tell(each) for each in self.candidates)

    @property
    def predicted(self) -> Predicted:
        """What a step of the chosen plan is predicted to cost."""
        return self.considered[0].predicted

    def _tell(self, candidate: Candidate) -> Considered:
        memory: dict[str, int] = {}
        taken: dict[str, int] = {}
        for part, needed in zip(candidate.parts, candidate.memory, strict=True):
            site = self.problem.sites[part.site].name
            for _ in range(part.replicas):
                number = taken.get(site, 0)
                taken[site] = number + 1
                memory[f"{site}/{number}"] = int(needed)
        crossing = {line: int(size) for line, size in candidate.bytes.items()}
        predicted = Predicted(candidate.seconds, memory, crossing, self.grounds.measured)
        return Considered(
            describe_parts(self.problem, candidate.parts), candidate.shape.micro_batches, candidate.schedule,
            predicted, self._binding(candidate),
        )  # fmt: skip

    def _binding(self, candidate: Candidate) -> str:
        kind, _, place = candidate.binds.partition(" ")
        return f"stage {stage_names(self.problem, candidate.parts)[int(place)]}" if kind == "stage" else candidate.binds

    def explain(self) -> str:
        """The chosen plan and the next best ones as a table, what they rest on, and what would change them."""
        return "\n".join(explain(self))

    def curves(self) -> RateCurves | None:
        """Seconds of a step by the rate of the lines, of the best candidates; None where all lines are free."""
        return draw_rates(self)


def _by_reader(readers: Mapping[int, str]) -> tuple[str, ...]:
    """The stages of a variable's readers by their numbers; one outside the chain goes with the one before."""
    found, last = [], readers[min(readers)]
    for number in range(max(readers) + 1):
        last = readers.get(number, last)
        found.append(last)
    return tuple(found) if len(set(found)) > 1 else (found[0],)


def describe_excess(excess: Excess, layers: Layers) -> tuple[str, str, str]:
    """What, why and mend of the error for a program that no plan fits."""
    names = short_names(layers.chain.names)
    first, last = names[excess.begin], names[excess.end - 1]
    what = f"no plan fits: {size(int(excess.needed))} on a worker of {excess.site}, {size(int(excess.allowed))} allowed"
    why = f"that is what the layers from {first!r} to {last!r} need in the plan that comes closest"
    mend = "more memory or one more worker in the config, a smaller batch, or a smaller layer"
    return what, why, mend
