"""The orders in which clusters may stand along a chain."""

from __future__ import annotations

import numpy as np

from whale_nebula.planner.problem import Problem, Site
from whale_nebula.planner.written import follow_written

ALL_ORDERS = 4
"""Up to so many clusters all orders of each subset are tried."""
Order = tuple[int, ...]


def list_orders(problem: Problem) -> list[Order]:
    """The orders in which clusters may stand along the chain, the short ones first.

    All orders of all subsets of a few clusters; of many, for each first one those that follow over the best lines, and
    as many again that prefer fast clusters. Of clusters that nothing tells apart only the first stands for each.
    """
    sites = range(len(problem.sites))
    if written := follow_written(problem):
        return written
    kinds = find_kinds(problem)
    if len(sites) > ALL_ORDERS:
        firsts = [site for site in sites if kinds[site] == site]
        found = {_follow(problem, first, fast) for first in firsts for fast in (False, True)}
        found |= {order[begin:] for order in list(found) for begin in sites}
        return sorted(found, key=lambda order: (len(order), order))
    orders: list[Order] = []
    level: list[Order] = [()]
    for _ in sites:  # each with one cluster more before it
        unlike: dict[tuple[int, ...], Order] = {}
        for order in sorted((site, *rest) for rest in level for site in sites if site not in rest):
            unlike.setdefault(tuple(kinds[site] for site in order), order)
        level = list(unlike.values())
        orders += level
    return orders


def find_kinds(problem: Problem) -> list[int]:
    """A number for each cluster, the same where swapping two of them changes nothing."""
    sites, count = problem.sites, len(problem.sites)

    def alike(a: int, b: int) -> bool:
        one, other = sites[a], sites[b]
        numbers = ("workers", "memory", "call", "inside", "adding", "fused", "crossing", "message", "step")
        same = all(getattr(one, name) == getattr(other, name) for name in numbers)
        costs = ("forward", "backward", "update", "later")
        rest = [site for site in range(count) if site not in (a, b)]
        return (
            same
            and all(each.admits(a) == each.admits(b) for each in problem.fixed)
            and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in costs)
            and problem.line(a, b) == problem.line(b, a)
            and all(problem.line(a, c) == problem.line(b, c) and problem.line(c, a) == problem.line(c, b) for c in rest)
        )

    kinds: list[int] = []
    for site in range(count):
        kinds.append(next((kinds[other] for other in range(site) if alike(other, site)), site))
    return kinds


def _speed(site: Site) -> float:
    return site.workers / max(float(site.forward.sum() + site.backward.sum()), 1e-30)


def _follow(problem: Problem, first: int, fast: bool) -> Order:
    """From one cluster on, always the one with the best line from here, or the fastest."""
    order, left = [first], set(range(len(problem.sites))) - {first}
    while left:

        def merit(site: int) -> tuple[float, ...]:
            line = problem.line(order[-1], site)
            by_line = (min(line.rate, 1e30), -line.delay)
            return (_speed(problem.sites[site]), *by_line, -site) if fast else (*by_line, -site)

        order.append(max(left, key=merit))
        left.remove(order[-1])
    return tuple(order)
