"""The planner's decision for a program, with the sources of its predictions and its texts; and how measurements of a
run correct its problem, for a better plan.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from whale_nebula.codec.encoding import NONE
from whale_nebula.hardware import Clusters
from whale_nebula.ir.program import Assignment, Constraints, Stage
from whale_nebula.plan.records import Considered, Predicted, RateCurves
from whale_nebula.planner.chain import Layers
from whale_nebula.planner.cluster_costs import Grounds
from whale_nebula.planner.explanation import (
    describe_need,
    describe_parts,
    describe_sufficient_memory,
    draw_rates,
    explain,
    list_codecs,
    short_names,
    stage_names,
)
from whale_nebula.planner.problem import Candidate, ClusterCosts, Excess, Problem, Shape
from whale_nebula.planner.resizes import PlannedResize, PlanningInput
from whale_nebula.planner.score import score
from whale_nebula.planner.search import search
from whale_nebula.schedule.lines import Line


@dataclass(frozen=True)
class Decision:
    """The planner's decision for a program: candidates, the chosen one first, and the problem that they solve.

    `reasons` are those for which an option was not free to choose, and `constraints` those of the step's scopes.
    `handles` are its variables, by the id of their handle, with their paths; `program` is the step that was planned,
    for `clusters`, which share the cores of one process if they are `emulated`, and some of which have `measured` its
    blocks. `slowness` is the measured computing time of a cluster relative to its rates. A decision that `replaces`
    another one was made while that ran; `replan` allows it to be replaced, and `measured_shapes` has the seconds of
    plans that ran earlier. `purpose` is that of the step's options, for which it was made, and `trains` whether the
    step takes gradients. `planning_input` is what the problem was built from; in an elastic run there are `resizes`,
    the numbers of workers that it may get next. `found_on` is the date on which the candidates were found in advance.
    """

    layers: Layers
    problem: Problem
    candidates: tuple[Candidate, ...]
    grounds: Grounds
    site: str
    reasons: tuple[str, ...] = ()
    handles: Mapping[int, str] = field(default_factory=dict)
    emulated: bool = False
    constraints: Constraints = field(default_factory=Constraints)
    program: str = ""
    clusters: Clusters = field(default_factory=lambda: Clusters(()))
    measured: frozenset[str] = frozenset()
    slowness: Mapping[str, float] = field(default_factory=dict)
    replan: bool = False
    measured_shapes: Mapping[Shape, float] = field(default_factory=dict)
    replaces: Decision | None = None
    purpose: str = ""
    trains: bool = True
    planning_input: PlanningInput | None = None
    resizes: tuple[PlannedResize, ...] = ()
    found_on: str = ""

    @property
    def chosen(self) -> Candidate:
        """The candidate that is run."""
        return self.candidates[0]

    @property
    def seconds_here(self) -> float:
        """Predicted seconds of a step in this process; if clusters share its cores, at least the sum of all stages'
        computing, or those of the step as it was traced.
        """
        chosen, clusters = self.chosen, self.problem.clusters
        if self.emulated and self.uncut:
            return self.predict_traced_step(chosen)
        update = sum(float(clusters[part.cluster].update[part.begin : part.end].sum()) for part in chosen.parts)
        return max(chosen.seconds, (sum(chosen.compute) * chosen.shape.micro_batches + update) * self.emulated)

    def predict_traced_step(self, candidate: Candidate) -> float:
        """Predicted seconds of an uncut step that runs as it was traced: without the call of a stage, and without the
        work of a run of several processes.
        """
        own = self.problem.clusters[candidate.parts[0].cluster]
        return candidate.seconds - own.fused_ratio * own.call - own.step

    @property
    def uncut(self) -> bool:
        """Whether one device computes the whole step without cutting the batch."""
        shape, free = self.chosen.shape, not self.problem.written_stages
        return free and sum(part.worker_count for part in shape.parts) == 1 and shape.micro_batches == 1

    @property
    def splits(self) -> bool:
        """Whether a stage's variables are sharded."""
        return any(part.shards > 1 for part in self.chosen.parts)

    @cached_property
    def assignment(self) -> Assignment:
        """The stages of the chosen candidate, and the variables of each."""
        names = stage_names(self.problem, self.chosen.parts)
        first_workers = self.problem.assign_workers(self.chosen.parts)
        found: dict[str, dict[int, str]] = {}
        for part, name in zip(self.chosen.parts, names, strict=True):
            for block in range(part.begin, part.end):
                for path, reader in self.layers.variables[block]:
                    found.setdefault(path, {}).setdefault(reader, name)  # its value is sent on to later stages
        stages = tuple(
            Stage(
                name, self.problem.clusters[part.cluster].name, self.site, part.replicas, (), part.shards, first=first
            )
            for part, name, first in zip(self.chosen.parts, names, first_workers, strict=True)
        )
        shape = self.chosen.shape
        pipeline = replace(
            self.constraints.pipeline, micro_batch=shape.micro_batches, schedule=self.chosen.schedule,
            in_flight=self.chosen.in_flight, recompute=shape.recompute,
        )  # fmt: skip
        variables = {path: _list_stages(readers) for path, readers in found.items()}
        codecs = list_codecs(self.problem, self.chosen) if len(self.problem.chain.codecs) > 1 else {}  # else by scopes
        crossing = {names[place]: codec for place, codec in codecs.items() if codec != NONE}
        return Assignment(stages, variables, pipeline, crossing)

    @cached_property
    def considered(self) -> tuple[Considered, ...]:
        """Records of the best plans, the chosen one first."""
        return tuple(self._describe(each) for each in self.candidates)

    @property
    def predicted(self) -> Predicted:
        """The predicted costs of a step of the chosen plan."""
        return self.considered[0].predicted

    def is_current(self, decisions: Sequence[object]) -> bool:
        """Whether the decision belongs to the run and was not superseded by a better one."""
        return any(self is each for each in decisions)

    def find_record(self, program: str) -> Decision | Unplanned:
        """The record for the plan of a program: the decision, or a note that the program follows the decision for
        another one, whose seconds do not apply.
        """
        if program == self.program:
            return self
        return Unplanned(
            f"This step runs with the stages that nb.auto_parallel at {self.site} chose for "
            f"{self.program}, which has the same variables. The plan of that program explains them."
        )

    def with_whole_batch(self) -> Decision:
        """The decision with the same stages on one worker each, for a program whose batch cannot be divided."""
        parts = tuple(replace(part, replicas=1) for part in self.chosen.parts)
        whole = replace(self.chosen, shape=replace(self.chosen.shape, parts=parts, micro_batches=1), in_flight=None)
        return replace(self, candidates=(whole, *self.candidates[1:]))

    def list_resize_problems(self) -> list[tuple[PlannedResize, Problem]]:
        """The problems that a start with the next numbers of workers may search: with the user's options, and with what
        the passes have left of them.
        """
        asked = self.problem.options if self.planning_input is None else self.planning_input.options
        options = list(dict.fromkeys([asked, self.problem.options]))
        return [(each, replace(each.problem, options=own)) for each in self.resizes for own in options]

    def _describe(self, candidate: Candidate) -> Considered:
        memory: dict[str, int] = {}
        names = [sorted(f"{each.name}/{number}" for number in range(each.workers)) for each in self.problem.clusters]
        for own, needed in zip(self.problem.workers_of(candidate.parts), candidate.memory, strict=True):
            for cluster, number in own:
                name = names[cluster][number]  # runs sort workers by name
                memory[name] = max(memory.get(name, 0), int(needed))
        crossing = {line: int(size) for line, size in candidate.bytes.items()}
        predicted = Predicted(candidate.seconds, memory, crossing, self.grounds.measured)
        return Considered(
            describe_parts(self.problem, candidate.parts), candidate.shape.micro_batches, candidate.schedule,
            predicted, self._bottleneck_text(candidate),
        )  # fmt: skip

    def _bottleneck_text(self, candidate: Candidate) -> str:
        kind, place, line = candidate.bottleneck
        name = stage_names(self.problem, candidate.parts)[place] if kind == "stage" else line
        return f"{kind} {name}".rstrip()

    def explain(self) -> str:
        """The chosen plan and the next best ones as a table, the sources of predictions, and what would change them."""
        return "\n".join(self.list_lines())

    def list_lines(self) -> Iterator[str]:
        """The lines of the explanation. Those on changes need a search for each change."""
        return explain(self)

    def curves(self) -> RateCurves | None:
        """Seconds of a step by the rate of the links, for the best candidates; None if all links are free."""
        return draw_rates(self)


def _list_stages(readers: Mapping[int, str]) -> tuple[str, ...]:
    """The numbers of the stages that read a variable; a reader outside the chain belongs to the stage before it."""
    found, last = [], readers[min(readers)]
    for number in range(max(readers) + 1):
        last = readers.get(number, last)
        found.append(last)
    return tuple(found) if len(set(found)) > 1 else (found[0],)


@dataclass(frozen=True)
class Unplanned:
    """The record in place of a decision if no plan was searched: the step runs by its scopes, or by the decision for
    another program. `reason` is a sentence.
    """

    reason: str
    considered: tuple[Considered, ...] = ()
    program: str = ""
    replaces: None = None

    def explain(self) -> str:
        """The reason."""
        return self.reason

    def list_lines(self) -> Iterator[str]:
        """The reason as a line."""
        yield self.reason

    def find_record(self, program: str) -> Unplanned:
        """The same record."""
        return self

    def is_current(self, decisions: Sequence[object]) -> bool:
        """True: nothing replaces it."""
        return True

    def curves(self) -> RateCurves | None:
        """None: there are no candidates."""


def describe_excess(excess: Excess | None, problem: Problem, whole: bool = False) -> tuple[str, str, str]:
    """What, why and fix of the error if no plan fits; without an excess, no order of clusters satisfies the scopes.
    `whole` is set if the batch cannot be cut.
    """
    what, why = describe_need(excess, problem)
    if excess is None:
        return what, why, "let the planner choose a cluster or a count"
    return what, why, _suggest_changes(problem, excess, whole)


def _suggest_changes(problem: Problem, excess: Excess, whole: bool) -> str:
    """Changes that would make the program fit, each verified by a search."""
    options, number = problem.options, [cluster.name for cluster in problem.clusters].index(excess.cluster)
    clusters = list(problem.clusters)
    clusters[number] = replace(clusters[number], workers=clusters[number].workers + 1)
    found = [
        (f"one more worker in {excess.cluster}", replace(problem, clusters=tuple(clusters))),
        ("recompute=True", replace(problem, options=replace(options, recompute=True))),
        ("more micro-batches", problem if whole else replace(problem, options=replace(options, micro_batch=None))),
    ]
    suggestions = [describe_sufficient_memory(excess)]
    suggestions += [
        change for change, changed in found if changed != problem and search(changed, 1, relaxed=False).candidates
    ]
    chain, own = problem.chain, range(excess.begin, excess.end)
    held = chain.resident + chain.gradients
    largest = max(own, key=lambda block: held[block])
    lacking, workers = excess.needed - excess.allowed, problem.clusters[number].workers
    count = math.ceil(held[largest] / (held[largest] - lacking)) if held[largest] > lacking else 0
    if 1 < count <= workers:
        name = short_names(chain.names)[largest]
        axis = ", axis=0" if chain.single[largest] else ""
        suggestions.append(f"nb.split({count}{axis}) around {name!r}, so that {count} workers hold a piece each")
    return "; ".join(suggestions) + "; or a smaller batch"


BETTER = 0.05
"""The least reduction of a step's time, as a share of it, for which another plan is offered."""


@dataclass(frozen=True)
class Observation:
    """Measurements of a step: its seconds, the computing seconds of each stage for a micro-batch (empty if stages are
    not timed separately), and the links between two clusters, by their numbers.
    """

    seconds: float
    stages: tuple[float, ...] = ()
    lines: Mapping[tuple[int, int], Line] = field(default_factory=dict)


def find_slowness(problem: Problem, chosen: Candidate, observation: Observation) -> dict[int, float]:
    """Ratio of measured to predicted computing time by cluster number, for clusters that run a stage and clusters with
    the same description. Others keep their previous value.
    """
    predicted, measured = defaultdict[int, float](float), defaultdict[int, float](float)
    for part, own, computed in zip(chosen.parts, chosen.compute, observation.stages, strict=False):
        predicted[part.cluster] += own
        measured[part.cluster] += computed
    found = {
        cluster: measured[cluster] / own for cluster, own in predicted.items() if own > 0.0 and measured[cluster] > 0.0
    }
    alike = {_pace_key(problem.clusters[cluster]): factor for cluster, factor in found.items()}
    for cluster, costs in enumerate(problem.clusters):
        if cluster not in found and _pace_key(costs) in alike:
            found[cluster] = alike[_pace_key(costs)]
    return found


def _pace_key(cluster: ClusterCosts) -> tuple[bytes, ...]:
    return cluster.forward.tobytes(), cluster.backward.tobytes()


def slow_down(problem: Problem, slowness: Mapping[int, float]) -> Problem:
    """The problem with the computing time of clusters multiplied by these factors."""
    clusters = list(problem.clusters)
    for number, times in slowness.items():
        cluster = clusters[number]
        clusters[number] = replace(
            cluster, forward=cluster.forward * times, backward=cluster.backward * times, update=cluster.update * times,
            call=cluster.call * times,
            deferred_backward=None if cluster.deferred_backward is None else cluster.deferred_backward * times,
        )  # fmt: skip
    return replace(problem, clusters=tuple(clusters))


def correct_problem(problem: Problem, chosen: Candidate, observation: Observation) -> Problem:
    """The problem corrected by the measurements of a run of one of its plans."""
    return replace(
        slow_down(problem, find_slowness(problem, chosen, observation)), lines={**problem.lines, **observation.lines}
    )


@dataclass(frozen=True)
class Offer:
    """The best plans of a corrected problem, the best first, with the seconds of a step that measurements suggest."""

    problem: Problem
    candidates: tuple[Candidate, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the best plan."""
        return self.candidates[0].seconds


def find_better_plan(
    problem: Problem, current: Shape, seconds: float, measured_shapes: Mapping[Shape, float] | None = None
) -> Offer | None:
    """A plan of the corrected problem that is better than the running plan `current`, or None. Time that the model does
    not explain is assumed to remain; plans in `measured_shapes` keep their measured time.
    """
    predicted = score(problem, current)
    if not isinstance(predicted, Candidate):
        return None
    measured_shapes, rest = measured_shapes or {}, max(seconds - predicted.seconds, 0.0)
    scale = min(seconds / predicted.seconds, 1.0) if predicted.seconds else 1.0
    others = (each for each in search(problem).candidates if each.shape != current)
    found = [replace(each, seconds=measured_shapes.get(each.shape, each.seconds * scale + rest)) for each in others]
    found.sort(key=lambda each: each.seconds)
    return Offer(problem, tuple(found)) if found and found[0].seconds <= (1.0 - BETTER) * seconds else None
