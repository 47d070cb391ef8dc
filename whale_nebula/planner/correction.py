"""Correct a planning problem by measurements of a run, and search it for a better plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from whale_nebula.planner.problem import Candidate, Problem, Shape, Site
from whale_nebula.planner.score import score
from whale_nebula.planner.search import search
from whale_nebula.schedule.lines import Line

BETTER = 0.05
"""The least reduction of a step's time, as a share of it, for which another plan is offered."""


@dataclass(frozen=True)
class Observed:
    """Measurements of a step: its seconds, the computing seconds of each stage for a micro-batch (empty if stages are
    not timed separately), and the lines between two sites, by their numbers.
    """

    seconds: float
    stages: tuple[float, ...] = ()
    lines: Mapping[tuple[int, int], Line] = field(default_factory=dict)


def find_slowness(problem: Problem, chosen: Candidate, seen: Observed) -> dict[int, float]:
    """Ratio of measured to predicted computing time by site number, for sites that run a stage and sites with the same
    description. Others keep their previous value.
    """
    predicted, measured = defaultdict[int, float](float), defaultdict[int, float](float)
    for part, own, computed in zip(chosen.parts, chosen.compute, seen.stages, strict=False):
        predicted[part.site] += own
        measured[part.site] += computed
    found = {site: measured[site] / own for site, own in predicted.items() if own > 0.0 and measured[site] > 0.0}
    alike = {_pace(problem.sites[site]): factor for site, factor in found.items()}
    for site, told in enumerate(problem.sites):
        if site not in found and _pace(told) in alike:
            found[site] = alike[_pace(told)]
    return found


def _pace(site: Site) -> tuple[bytes, ...]:
    return site.forward.tobytes(), site.backward.tobytes()


def slow_down(problem: Problem, slowness: Mapping[int, float]) -> Problem:
    """The problem with the computing time of sites multiplied by these factors."""
    sites = list(problem.sites)
    for number, times in slowness.items():
        site = sites[number]
        sites[number] = replace(
            site, forward=site.forward * times, backward=site.backward * times, update=site.update * times,
            call=site.call * times, later=None if site.later is None else site.later * times,
        )  # fmt: skip
    return replace(problem, sites=tuple(sites))


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
