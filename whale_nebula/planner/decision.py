"""What the planner has decided for a program, on what ground, and how that is told."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from whale_nebula.ir.assignment import Assignment
from whale_nebula.ir.program import Pipeline, Stage
from whale_nebula.plan.timing import duration
from whale_nebula.planner.chain import Layers
from whale_nebula.planner.problem import Candidate, Excess, Part, Problem
from whale_nebula.planner.score import with_rate
from whale_nebula.planner.search import search
from whale_nebula.planner.sites import Grounds
from whale_nebula.report.records import size


@dataclass(frozen=True)
class Predicted:
    """What a step is predicted to cost: seconds, bytes of memory by worker, bytes by link, and how much of the seconds
    rests on measured rates.
    """

    seconds: float
    memory: Mapping[str, int]
    bytes: Mapping[str, int]
    share_measured: float


@dataclass(frozen=True)
class Considered:
    """One of the best plans: its stages in words, how the batch is cut, its costs, and what its step waits for."""

    stages: str
    micro_batches: int
    schedule: str
    predicted: Predicted
    binds: str


@dataclass(frozen=True)
class Decision:
    """A program's candidates, of which the first was chosen, and what they were found by.

    `reasons` say why something was not free to choose. `handles` are the variables that it is about, by the id of
    their handle, with their paths.
    """

    layers: Layers
    problem: Problem
    candidates: tuple[Candidate, ...]
    grounds: Grounds
    where: str
    reasons: tuple[str, ...] = ()
    handles: Mapping[int, str] = field(default_factory=dict)

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
        names = _stage_names(self.problem, self.chosen.parts)
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
        return (
            f"stage {_stage_names(self.problem, candidate.parts)[int(place)]}" if kind == "stage" else candidate.binds
        )

    def explain(self) -> str:
        """The chosen plan and the next best ones as a table, what they rest on, and what would change them."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        best = self.considered[0]
        how = "it runs uncut" if self.uncut else f"{best.stages}, {_batches(best.micro_batches)}, {best.schedule}"
        yield f"chosen: {how}"
        yield f"  a step is predicted to take {duration(best.predicted.seconds)}; it waits for {best.binds}"
        yield f"  {self.grounds}" + (self.grounds.guessed > 0.5) * ": whale-nebula measure finds the rates of a machine"
        yield from (f"  {reason}" for reason in self.reasons)
        yield ""
        rows = [("", "seconds", "of best", "micro-batches", "most memory", "on lines a step", "waits for", "stages")]
        for number, each in enumerate(self.considered, 1):
            memory, crossing = max(each.predicted.memory.values()), sum(each.predicted.bytes.values())
            rows.append((
                str(number), f"{each.predicted.seconds:.4g}", f"{each.predicted.seconds / best.predicted.seconds:.2f}",
                str(each.micro_batches), size(memory), size(crossing), each.binds, each.stages,
            ))  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        yield ""
        yield "what if"
        yield from (f"  {text}" for text in self.what_if())

    def what_if(self) -> Iterator[str]:
        """The best step where lines were slower or faster, or a cluster had one worker more."""
        now = self.chosen.seconds
        slow = any(line.rate < math.inf for line in self.problem.lines.values())
        factors = (0.25, 0.5, 2.0, 4.0) if slow else ()
        changes = [(f"lines at {factor:g} times their rate", with_rate(self.problem, factor)) for factor in factors]
        for number, site in enumerate(self.problem.sites):
            sites = list(self.problem.sites)
            sites[number] = replace(site, workers=site.workers + 1)
            changes.append((f"one more worker in {site.name}", replace(self.problem, sites=tuple(sites))))
        for what, problem in changes:
            found = search(problem, most=1).candidates
            if found:
                best = found[0]
                same = best.parts == self.chosen.parts
                how = "the same stages" if same else describe_parts(problem, best.parts)
                cut = _batches(best.shape.micro_batches)
                yield f"{what}: {duration(best.seconds)} ({best.seconds / now:.2f}), {how}, {cut}"


def _stage_names(problem: Problem, parts: Sequence[Part]) -> list[str]:
    """A stage is called after its cluster, with a number where that has several."""
    sites = [problem.sites[part.site].name for part in parts]
    seen: dict[str, int] = {}
    names = []
    for site in sites:
        number = seen.get(site, 0)
        seen[site] = number + 1
        names.append(site if sites.count(site) == 1 else f"{site}-{number}")
    return names


def _by_reader(readers: Mapping[int, str]) -> tuple[str, ...]:
    """The stages of a variable's readers by their numbers; one outside the chain goes with the one before."""
    found, last = [], readers[min(readers)]
    for number in range(max(readers) + 1):
        last = readers.get(number, last)
        found.append(last)
    return tuple(found) if len(set(found)) > 1 else (found[0],)


def describe_parts(problem: Problem, parts: Sequence[Part]) -> str:
    """The stages of a plan on one line, by the layers where they begin."""
    said = []
    for part, name in zip(parts, _stage_names(problem, parts), strict=True):
        layers = f" from {_short(problem.chain.names[part.begin])}" if part.begin else ""
        said.append(f"{name}{f' x {part.replicas}' * (part.replicas > 1)}{layers}")
    return " | ".join(said)


def _short(name: str) -> str:
    return "/".join(name.split("/")[-2:])


def _batches(count: int) -> str:
    return f"{count} micro-batches" if count > 1 else "the batch whole"


def describe_excess(excess: Excess, layers: Layers) -> tuple[str, str, str]:
    """What, why and mend of the error for a program that no plan fits."""
    first, last = layers.chain.names[excess.begin], layers.chain.names[excess.end - 1]
    what = f"no plan fits: {size(int(excess.needed))} on a worker of {excess.site}, {size(int(excess.allowed))} allowed"
    why = f"that is what the layers from {_short(first)!r} to {_short(last)!r} need in the plan that comes closest"
    mend = "more memory or one more worker in the config, a smaller batch, or a smaller layer"
    return what, why, mend
