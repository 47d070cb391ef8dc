"""A long chain in groups of neighbouring blocks, among which the search is quick."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from whale_nebula.planner.problem import Array, Chain, Problem, Shape
from whale_nebula.planner.written import group_written

MOST_GROUPS = 240
WIDEST = 72
"""A longer chain is searched in so many groups of blocks first, or in some more where memory is short."""


def group_blocks(problem: Problem) -> tuple[Problem, Sequence[int]]:
    """The problem with neighbouring blocks joined: those between which one may not cut and, of a long chain, those that
    take least; and before which block each cut between groups is, the end among them.
    """
    chain = problem.chain
    starts: Sequence[int] = [0, *(cut for cut in range(1, len(chain)) if chain.cuttable[cut])]
    if len(starts) > WIDEST:
        edges = {edge for each in problem.fixed for edge in (each.begin, each.end)}
        starts = sorted({*_spread(problem, starts), *edges.intersection(starts)})
    ends = [*starts, len(chain)]
    if len(starts) == len(chain):
        return problem, ends

    def add(values: Array) -> Array:
        return np.add.reduceat(values, starts, axis=-1)

    grouped = Chain(
        tuple(chain.names[start] for start in starts), add(chain.weights), add(chain.slots), add(chain.gradients),
        add(chain.held), np.maximum.reduceat(chain.transient, starts), chain.there[ends], chain.back[ends],
        chain.tied[ends], np.ones(len(ends), bool), coded=tuple(
            replace(way, there=way.there[ends], back=way.back[ends], seconds=way.seconds[:, ends])
            for way in chain.coded
        ),
        sent=None if chain.sent is None else chain.sent[ends],
        returned=None if chain.returned is None else chain.returned[ends],
        largest=None if chain.largest is None else np.maximum.reduceat(chain.largest, starts),
    )  # fmt: skip
    sites = tuple(
        replace(site, forward=add(site.forward), backward=add(site.backward), update=add(site.update), later=None)
        for site in problem.sites
    )
    return replace(problem, chain=grouped, sites=sites, fixed=group_written(problem, ends)), ends


def _spread(problem: Problem, starts: Sequence[int]) -> Sequence[int]:
    """Fewer starts, so that groups take about as long as each other, and as much memory; more where that is short."""
    chain, rows = problem.chain, problem.rows
    times = np.max([site.forward.sum(0) * rows + site.backward.sum(0) * rows for site in problem.sites], axis=0)
    size = chain.weights + chain.slots + 2 * chain.gradients + chain.held * problem.rows_of(problem.counts[-1])
    room = min(site.memory for site in problem.sites)
    wanted = min(max(WIDEST, math.ceil(3 * float(size.sum()) / room)), MOST_GROUPS)
    done = np.concatenate([[0.0], np.cumsum(times / max(times.sum(), 1e-30) + size / max(size.sum(), 1.0))])
    kept = np.unique(np.searchsorted(done[starts], np.linspace(0.0, done[-1], wanted + 1)[1:-1]))
    return [0, *(starts[place] for place in kept if 0 < place < len(starts))]


def ungroup_parts(shape: Shape, cuts: Sequence[int]) -> Shape:
    """The same stages, by blocks instead of groups."""
    return replace(shape, parts=tuple(replace(p, begin=cuts[p.begin], end=cuts[p.end]) for p in shape.parts))
