"""A problem corrected by what a run has measured, and the better plan that may be found in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from whale_nebula.planner.problem import Candidate, Problem, Shape, Site, Wire
from whale_nebula.planner.score import score
from whale_nebula.planner.search import search

BETTER = 0.05
"""A plan is offered where its step takes so much less: a smaller share of it."""


@dataclass(frozen=True)
class Observed:
    """A step as it was measured: its seconds, those that each stage computes for a micro-batch (none where stages are
    not timed apart), and what is known of the lines between two sites, by their numbers.
    """

    seconds: float
    stages: tuple[float, ...] = ()
    lines: Mapping[tuple[int, int], Wire] = field(default_factory=dict)


def find_slowness(problem: Problem, chosen: Candidate, seen: Observed) -> dict[int, float]:
    """How many times as long as predicted sites compute, by their numbers: those that have a stage, and those of which
    the same was told as of one of these. Of others nothing is known but what was.
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
    """The problem with sites that compute so many times as long."""
    sites = list(problem.sites)
    for number, times in slowness.items():
        site = sites[number]
        sites[number] = replace(
            site, forward=site.forward * times, backward=site.backward * times, update=site.update * times,
            call=site.call * times, later=None if site.later is None else site.later * times,
        )  # fmt: skip
    return replace(problem, sites=tuple(sites))


def correct(problem: Problem, chosen: Candidate, seen: Observed) -> Problem:
    """The problem as a run of one of its plans has shown it."""
    return replace(slow_down(problem, find_slowness(problem, chosen, seen)), lines={**problem.lines, **seen.lines})


@dataclass(frozen=True)
class Offer:
    """The best plans of a corrected problem, with the seconds that a step would take by what was measured."""

    problem: Problem
    candidates: tuple[Candidate, ...]

    @property
    def seconds(self) -> float:
        """Those of the best."""
        return self.candidates[0].seconds


def find_better(
    problem: Problem, now: Shape, seconds: float, tried: Mapping[Shape, float] | None = None
) -> Offer | None:
    """A plan of a corrected problem that is better than the one that runs `now` and takes so many seconds; None where
    there is none. What of these the model does not explain is taken to stay; plans that were `tried` take what they
    took.
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
