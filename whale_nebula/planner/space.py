"""The search space: blocks grouped so that the search is fast, and the possible orders of clusters along the chain,
within the constraints of stages that the user has written.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from whale_nebula.errors import PlanError
from whale_nebula.ir.program import Constraints, Written
from whale_nebula.planner.chain import Layers
from whale_nebula.planner.problem import Array, Bound, Chain, ClusterCosts, Fixed, Problem, Shape

MOST_GROUPS = 240
WIDEST = 72
"""The number of groups into which a longer chain is merged for the search; some more if memory is short."""


def group_blocks(problem: Problem) -> tuple[Problem, Sequence[int]]:
    """Merge neighbouring blocks where no cut is allowed and, in a long chain, the cheapest ones; also gives the block
    at which each group begins, and the end.
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
        beside=None if chain.beside is None else add(chain.beside),
    )  # fmt: skip
    clusters = tuple(
        replace(
            cluster,
            forward=add(cluster.forward),
            backward=add(cluster.backward),
            update=add(cluster.update),
            later=None,
        )
        for cluster in problem.clusters
    )
    bound = tuple(each._replace(block=bisect_right(starts, each.block) - 1) for each in problem.bound)
    return replace(problem, chain=grouped, clusters=clusters, fixed=group_written(problem, ends), bound=bound), ends


def _spread(problem: Problem, starts: Sequence[int]) -> Sequence[int]:
    """A subset of starts that balances the groups in time and memory; larger if memory is short."""
    chain, rows = problem.chain, problem.rows
    times = np.max(
        [cluster.forward.sum(0) * rows + cluster.backward.sum(0) * rows for cluster in problem.clusters], axis=0
    )
    size = chain.resident + 2 * chain.gradients + chain.held * problem.rows_of(problem.counts[-1])
    room = min(cluster.memory for cluster in problem.clusters)
    wanted = min(max(WIDEST, math.ceil(3 * float(size.sum()) / room)), MOST_GROUPS)
    done = np.concatenate([[0.0], np.cumsum(times / max(times.sum(), 1e-30) + size / max(size.sum(), 1.0))])
    kept = np.unique(np.searchsorted(done[starts], np.linspace(0.0, done[-1], wanted + 1)[1:-1]))
    return [0, *(starts[place] for place in kept if 0 < place < len(starts))]


def ungroup_parts(shape: Shape, cuts: Sequence[int]) -> Shape:
    """Translate a shape's cuts from groups back to blocks."""
    return replace(shape, parts=tuple(replace(p, begin=cuts[p.begin], end=cuts[p.end]) for p in shape.parts))


MOST_ORDERS = 160
"""The maximum number of orders of clusters if the user has written a stage's cluster."""


def follow_written(problem: Problem) -> list[tuple[int, ...]]:
    """The orders of clusters that are compatible with written stages and bound blocks, and the suffixes of these
    orders; none if no cluster is required.
    """
    places = [(each.begin, each.clusters) for each in problem.fixed]
    places += [(each.block, each.clusters) for each in problem.bound]
    written = [clusters[0] for _, clusters in sorted(places) if len(clusters) == 1]
    first = tuple(cluster for cluster, _ in itertools.groupby(written))
    found = [first] if first else []
    for order in found:  # the list grows during the loop
        for cluster, place in itertools.product(range(len(problem.clusters)), range(len(order) + 1)):
            longer = [(*order[:place], cluster, *order[place:])]
            if place < len(order) and written.count(order[place]) > first.count(order[place]):
                longer.append((*order[: place + 1], cluster, *order[place:]))  # between two stages on one cluster
            found += [
                each for each in longer if cluster not in order and each not in found and len(found) < MOST_ORDERS
            ]
    return sorted({order[begin:] for order in found for begin in range(len(order))}, key=lambda o: (len(o), o))


def group_written(problem: Problem, ends: Sequence[int]) -> tuple[Fixed, ...]:
    """Translate written stages from blocks to groups; the last of `ends` is no start."""
    return tuple(
        replace(each, begin=bisect_right(ends, each.begin, hi=len(ends) - 1) - 1, end=bisect_left(ends, each.end))
        for each in problem.fixed
    )


def fix_stages(problem: Problem, layers: Layers, said: Constraints) -> Problem:
    """Add the stages that scopes have declared to the problem."""
    known = {each.key: each for each in said.stages}
    names = [cluster.name for cluster in problem.clusters]
    fixed = tuple(
        Fixed(key, begin, end, _find_clusters(known[key], names), known[key].replicas, known[key].said)
        for key, (begin, end) in layers.written.items()
    )
    return replace(problem, fixed=fixed)


def bind_blocks(problem: Problem, layers: Layers, homes: Mapping[int, Collection[str]]) -> Problem:
    """Add that blocks which read an input run in a cluster that has it. `homes` are the clusters by the number of the
    input, for those that some have not.
    """
    names, allowed = [cluster.name for cluster in problem.clusters], dict[int, set[str]]()
    for number, own in homes.items():
        for block in layers.readers.get(number, ()):
            allowed[block] = allowed.get(block, set(names)) & set(own)
    bound = [Bound(block, tuple(n for n, name in enumerate(names) if name in own)) for block, own in allowed.items()]
    for each in bound:
        if not each.clusters:
            raise PlanError(
                f"no cluster has all inputs that {layers.chain.names[each.block]!r} reads",
                why=f"the planner may give stages to {', '.join(names)}",
                mend="yield these inputs in one of them",
            )
    return replace(problem, bound=tuple(sorted(bound)))


def _find_clusters(stage: Written, names: Sequence[str]) -> tuple[int, ...]:
    """The numbers of the clusters that may run a stage; empty for any."""
    found = tuple(names.index(name) for name in stage.clusters if name in names)
    if stage.clusters and not found:
        raise PlanError(
            f"{stage.said} is on a cluster that takes no part: {' or '.join(stage.clusters)}",
            why=f"the planner may give stages to {', '.join(names)}",
            mend="add it to clusters= of nb.auto_parallel and to nb.cluster, or leave its name out of the stage",
        )
    return found


ALL_ORDERS = 4
"""The number of clusters up to which all orders of each subset are tried."""
Order = tuple[int, ...]


def list_orders(problem: Problem) -> list[Order]:
    """All possible orders of clusters along the chain, the short ones first.

    For a few clusters, all orders of all subsets; for many, from each first cluster the order over the best lines, and
    one that prefers fast clusters. Of interchangeable clusters only the first is used.
    """
    clusters = range(len(problem.clusters))
    if written := follow_written(problem):
        return written
    kinds = find_kinds(problem)
    if len(clusters) > ALL_ORDERS:
        firsts = [cluster for cluster in clusters if kinds[cluster] == cluster]
        found = {_follow(problem, first, fast) for first in firsts for fast in (False, True)}
        found |= {order[begin:] for order in list(found) for begin in clusters}
        return sorted(found, key=lambda order: (len(order), order))
    orders: list[Order] = []
    level: list[Order] = [()]
    for _ in clusters:  # each with one more cluster prepended
        unlike: dict[tuple[int, ...], Order] = {}
        for order in sorted((cluster, *rest) for rest in level for cluster in clusters if cluster not in rest):
            unlike.setdefault(tuple(kinds[cluster] for cluster in order), order)
        level = list(unlike.values())
        orders += level
    return orders


def find_kinds(problem: Problem) -> list[int]:
    """An equivalence class for each cluster: clusters of one class are interchangeable."""
    clusters, count = problem.clusters, len(problem.clusters)

    def alike(a: int, b: int) -> bool:
        one, other = clusters[a], clusters[b]
        numbers = ("workers", "memory", "call", "inside", "adding", "fused", "crossing", "message", "step")
        same = all(getattr(one, name) == getattr(other, name) for name in numbers)
        costs = ("forward", "backward", "update", "later")
        rest = [cluster for cluster in range(count) if cluster not in (a, b)]
        return (
            same
            and all(each.admits(a) == each.admits(b) for each in problem.fixed)
            and all((a in each.clusters) == (b in each.clusters) for each in problem.bound)
            and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in costs)
            and problem.line(a, b) == problem.line(b, a)
            and all(problem.line(a, c) == problem.line(b, c) and problem.line(c, a) == problem.line(c, b) for c in rest)
        )

    kinds: list[int] = []
    for cluster in range(count):
        kinds.append(next((kinds[other] for other in range(cluster) if alike(other, cluster)), cluster))
    return kinds


def _speed(cluster: ClusterCosts) -> float:
    return cluster.workers / max(float(cluster.forward.sum() + cluster.backward.sum()), 1e-30)


def _follow(problem: Problem, first: int, fast: bool) -> Order:
    """A greedy order: from each cluster to the one with the best line or, with equal lines, the fastest."""
    order, left = [first], set(range(len(problem.clusters))) - {first}
    while left:

        def merit(cluster: int) -> tuple[float, ...]:
            line = problem.line(order[-1], cluster)
            by_line = (min(line.rate, 1e30), -line.delay)
            return (_speed(problem.clusters[cluster]), *by_line, -cluster) if fast else (*by_line, -cluster)

        order.append(max(left, key=merit))
        left.remove(order[-1])
    return tuple(order)
