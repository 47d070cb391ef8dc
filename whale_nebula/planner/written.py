"""Stages that the user has written, as a planner takes them: what of them is open, and where they may stand."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from whale_nebula.errors import PlanError
from whale_nebula.ir.assignment import Constraints, Written
from whale_nebula.planner.chain import Layers
from whale_nebula.planner.problem import Fixed, Problem

MOST_ORDERS = 160
"""So many orders of clusters are tried where the user has written which one a stage is on."""


def follow_written(problem: Problem) -> list[tuple[int, ...]]:
    """The orders of clusters in which stages stand where the user has written it, alone or with others between them,
    and what these end with; none where no cluster was written.
    """
    written = [each.sites[0] for each in problem.fixed if len(each.sites) == 1]
    first = tuple(site for site, _ in itertools.groupby(written))
    found = [first] if first else []
    for order in found:  # it grows meanwhile
        for site, place in itertools.product(range(len(problem.sites)), range(len(order) + 1)):
            longer = [(*order[:place], site, *order[place:])]
            if place < len(order) and written.count(order[place]) > first.count(order[place]):
                longer.append((*order[: place + 1], site, *order[place:]))  # between two that are on one cluster
            found += [each for each in longer if site not in order and each not in found and len(found) < MOST_ORDERS]
    return sorted({order[begin:] for order in found for begin in range(len(order))}, key=lambda o: (len(o), o))


def group_written(problem: Problem, ends: Sequence[int]) -> tuple[Fixed, ...]:
    """The stages that the user has written, by groups of blocks instead of blocks; the last of `ends` is no start."""
    return tuple(
        replace(each, begin=bisect_right(ends, each.begin, hi=len(ends) - 1) - 1, end=bisect_left(ends, each.end))
        for each in problem.fixed
    )


def fix_stages(problem: Problem, layers: Layers, said: Constraints) -> Problem:
    """The problem with the stages that scopes have said."""
    known = {each.key: each for each in said.stages}
    names = [site.name for site in problem.sites]
    fixed = tuple(
        Fixed(key, begin, end, _find_sites(known[key], names), known[key].replicas, known[key].said)
        for key, (begin, end) in layers.written.items()
    )
    return replace(problem, fixed=fixed)


def _find_sites(stage: Written, names: Sequence[str]) -> tuple[int, ...]:
    """The clusters that may run a stage, by their numbers; none where it may be any."""
    found = tuple(names.index(name) for name in stage.clusters if name in names)
    if stage.clusters and not found:
        raise PlanError(
            f"{stage.said} is on a cluster that takes no part: {' or '.join(stage.clusters)}",
            why=f"the planner may give stages to {', '.join(names)}",
            mend="add it to clusters= of nb.auto_parallel and to nb.cluster, or leave its name out of the stage",
        )
    return found
