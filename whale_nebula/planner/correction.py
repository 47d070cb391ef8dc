"""Correct a planning problem by measurements of a run, and search it for a better plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from whale_nebula.planner.problem import Candidate, ClusterCosts, Problem, Shape
from whale_nebula.planner.score import score
from whale_nebula.planner.search import search
from whale_nebula.schedule.lines import Line

BETTER = 0.05
"""The least reduction of a step's time, as a share of it, for which another plan is offered."""


@dataclass(frozen=True)
class Observed:
    """Measurements of a step: its seconds, the computing seconds of each stage for a micro-batch (empty if stages are
    not timed separately), and the lines between two clusters, by their numbers.
    """

    seconds: float
    stages: tuple[float, ...] = ()
    lines: Mapping[tuple[int, int], Line] = field(default_factory=dict)


def find_slowness(problem: Problem, chosen: Candidate, seen: Observed) -> dict[int, float]:
    """Ratio of measured to predicted computing time by cluster number, for clusters that run a stage and clusters with
    the same description. Others keep their previous value.
    """
    predicted, measured = defaultdict[int, float](float), defaultdict[int, float](float)
    for part, own, computed in zip(chosen.parts, chosen.compute, seen.stages, strict=False):
        predicted[part.cluster] += own
        measured[part.cluster] += computed
    found = {
        cluster: measured[cluster] / own for cluster, own in predicted.items() if own > 0.0 and measured[cluster] > 0.0
    }
    alike = {_pace(problem.clusters[cluster]): factor for cluster, factor in found.items()}
    for cluster, told in enumerate(problem.clusters):
        if cluster not in found and _pace(told) in alike:
            found[cluster] = alike[_pace(told)]
    return found


def _pace(cluster: ClusterCosts) -> tuple[bytes, ...]:
    return cluster.forward.tobytes(), cluster.backward.tobytes()


def slow_down(problem: Problem, slowness: Mapping[int, float]) -> Problem:
    """The problem with the computing time of clusters multiplied by these factors."""
    clusters = list(problem.clusters)
    for number, times in slowness.items():
        cluster = clusters[number]
        clusters[number] = replace(
            cluster, forward=cluster.forward * times, backward=cluster.backward * times, update=cluster.update * times,
            call=cluster.call * times, later=None if cluster.later is None else cluster.later * times,
        )  # fmt: skip
    return replace(problem, clusters=tuple(clusters))


def correct(problem: Problem, chosen: Candidate, seen: Observed) -> Problem:
    """The problem corrected by the measurements of a run of one of its plans."""
    return replace(slow_down(problem, find_slowness(problem, chosen, seen)), lines={**problem.lines, **seen.lines})


@dataclass(frozen=True)
class Offer:
    """The best plans of a corrected problem, with the seconds that a step would take by the measurements."""

    problem: Problem
    candidates: tuple[Candidate, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the best plan."""
        return self.candidates[0].seconds


def find_better(
    problem: Problem, now: Shape, seconds: float, tried: Mapping[Shape, float] | None = None
) -> Offer | None:
    """A plan of the corrected problem that is better than the running plan `now`, or None. Time that the model does not
    explain is assumed to remain; plans that were `tried` keep their measured time.
    """
    told = score(problem, now)
    if not isinstance(told, Candidate):
        return None
    tried, rest = tried or {}, max(seconds - told.seconds, 0.0)
    scale = min(seconds / told.seconds, 1.0) if told.seconds else 1.0
    others = (each for each in search(problem).candidates if each.shape != now)
    found = [replace(each, seconds=tried.get(each.shape, each.seconds * scale + rest)) for each in others]
    found.sort(key=lambda each: each.seconds)
    return Offer(problem, tuple(found)) if found and found[0].seconds <= (1.0 - BETTER) * seconds else None
