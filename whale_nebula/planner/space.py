"""The search space: blocks grouped so that the search is fast, the possible orders of clusters along the chain, within
the constraints of stages that the user has written, and the neighborhood of a plan in the local search.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from whale_nebula.errors import PlanError
from whale_nebula.ir.program import Constraints, ScopedStage
from whale_nebula.planner.chain import Layers
from whale_nebula.planner.costs import Costs
from whale_nebula.planner.problem import (
    Array,
    Candidate,
    Chain,
    ClusterCosts,
    Part,
    PinnedBlock,
    Problem,
    Shape,
    WrittenStage,
)

MOST_GROUPS = 240
WIDEST = 72
"""The number of groups into which a longer chain is merged for the search; some more if memory is short."""


def group_blocks(problem: Problem) -> tuple[Problem, Sequence[int]]:
    """Merge neighboring blocks where no cut is allowed and, in a long chain, the cheapest ones; also gives the block at
    which each group begins, and the end.
    """
    chain = problem.chain
    starts: Sequence[int] = [0, *(cut for cut in range(1, len(chain)) if chain.cuttable[cut])]
    if len(starts) > WIDEST:
        edges = {edge for each in problem.written_stages for edge in (each.begin, each.end)}
        starts = sorted({*_balance_starts(problem, starts), *edges.intersection(starts)})
    ends = [*starts, len(chain)]
    if len(starts) == len(chain):
        return problem, ends

    def add(values: Array) -> Array:
        return np.add.reduceat(values, starts, axis=-1)

    grouped = Chain(
        tuple(chain.names[start] for start in starts), add(chain.weights), add(chain.slots), add(chain.gradients),
        add(chain.activations), np.maximum.reduceat(chain.transient, starts), chain.sent_bytes[ends],
        chain.returned_bytes[ends], chain.tied_bytes[ends], np.ones(len(ends), bool), codecs=tuple(
            replace(
                way, sent_bytes=way.sent_bytes[ends], returned_bytes=way.returned_bytes[ends],
                seconds=way.seconds[:, ends],
            )
            for way in chain.codecs
        ),
        sent_tensors=None if chain.sent_tensors is None else chain.sent_tensors[ends],
        returned_tensors=None if chain.returned_tensors is None else chain.returned_tensors[ends],
        largest_gradient=(
            None if chain.largest_gradient is None else np.maximum.reduceat(chain.largest_gradient, starts)
        ),
        object_bytes=None if chain.object_bytes is None else add(chain.object_bytes),
        update_temporaries=chain.update_temporaries,
    )  # fmt: skip
    clusters = tuple(
        replace(
            cluster,
            forward=add(cluster.forward),
            backward=add(cluster.backward),
            update=add(cluster.update),
            deferred_backward=None,
        )
        for cluster in problem.clusters
    )
    pinned = tuple(each._replace(block=bisect_right(starts, each.block) - 1) for each in problem.pinned_blocks)
    return replace(
        problem, chain=grouped, clusters=clusters, written_stages=group_written(problem, ends), pinned_blocks=pinned
    ), ends


def _balance_starts(problem: Problem, starts: Sequence[int]) -> Sequence[int]:
    """A subset of starts that balances the groups in time and memory; larger if memory is short."""
    chain, rows = problem.chain, problem.rows
    times = np.max(
        [cluster.forward.sum(0) * rows + cluster.backward.sum(0) * rows for cluster in problem.clusters], axis=0
    )
    size = chain.resident + 2 * chain.gradients + chain.activations * problem.rows_of(problem.micro_batch_counts[-1])
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


def list_written_orders(problem: Problem) -> list[tuple[int, ...]]:
    """The orders of clusters that are compatible with written stages and pinned blocks, and the suffixes of these
    orders; none if no cluster is required.
    """
    places = [(each.begin, each.clusters) for each in problem.written_stages]
    places += [(each.block, each.clusters) for each in problem.pinned_blocks]
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


def group_written(problem: Problem, ends: Sequence[int]) -> tuple[WrittenStage, ...]:
    """Translate written stages from blocks to groups; the last of `ends` is not a start."""
    return tuple(
        replace(each, begin=bisect_right(ends, each.begin, hi=len(ends) - 1) - 1, end=bisect_left(ends, each.end))
        for each in problem.written_stages
    )


def add_written_stages(problem: Problem, layers: Layers, constraints: Constraints) -> Problem:
    """Add the stages that scopes have declared to the problem."""
    known = {each.key: each for each in constraints.stages}
    names = [cluster.name for cluster in problem.clusters]
    fixed = tuple(
        WrittenStage(key, begin, end, _find_clusters(known[key], names), known[key].replicas, known[key].scope_text)
        for key, (begin, end) in layers.written_ranges.items()
    )
    return replace(problem, written_stages=fixed)


def pin_blocks(problem: Problem, layers: Layers, homes: Mapping[int, Collection[str]]) -> Problem:
    """Constrain blocks that read an input to clusters that have it. `homes` are the clusters by the number of the
    input, for inputs that some clusters lack.
    """
    names, allowed = [cluster.name for cluster in problem.clusters], dict[int, set[str]]()
    for number, own in homes.items():
        for block in layers.readers.get(number, ()):
            allowed[block] = allowed.get(block, set(names)) & set(own)
    pinned = [
        PinnedBlock(block, tuple(n for n, name in enumerate(names) if name in own)) for block, own in allowed.items()
    ]
    for each in pinned:
        if not each.clusters:
            raise PlanError(
                f"no cluster has all inputs that {layers.chain.names[each.block]!r} reads",
                why=f"the planner may use the clusters {', '.join(names)}",
                mend="provide these inputs in one of them",
            )
    return replace(problem, pinned_blocks=tuple(sorted(pinned)))


def _find_clusters(stage: ScopedStage, names: Sequence[str]) -> tuple[int, ...]:
    """The numbers of the clusters that may run a stage; empty for any."""
    found = tuple(names.index(name) for name in stage.clusters if name in names)
    if stage.clusters and not found:
        raise PlanError(
            f"{stage.scope_text} is on a cluster that is not used: {' or '.join(stage.clusters)}",
            why=f"the planner may use the clusters {', '.join(names)}",
            mend="add it to clusters= of nb.auto_parallel and to nb.cluster, or remove cluster= from the stage",
        )
    return found


ALL_ORDERS = 4
"""The number of clusters up to which all orders of each subset are tried."""
Order = tuple[int, ...]


def list_orders(problem: Problem) -> list[Order]:
    """All possible orders of clusters along the chain, the short ones first.

    For a few clusters, all orders of all subsets; for many, from each first cluster the order over the best links, and
    one that prefers fast clusters. Of interchangeable clusters only the first is used.
    """
    clusters = range(len(problem.clusters))
    if written := list_written_orders(problem):
        return written
    kinds = find_kinds(problem)
    if len(clusters) > ALL_ORDERS:
        firsts = [cluster for cluster in clusters if kinds[cluster] == cluster]
        found = {_order_greedily(problem, first, fast) for first in firsts for fast in (False, True)}
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

    def are_interchangeable(a: int, b: int) -> bool:
        one, other = clusters[a], clusters[b]
        numbers = (
            "workers", "memory", "call", "inner_line", "accumulation", "fused_ratio", "crossing", "message", "step",
        )  # fmt: skip
        same = all(getattr(one, name) == getattr(other, name) for name in numbers)
        costs = ("forward", "backward", "update", "deferred_backward")
        rest = [cluster for cluster in range(count) if cluster not in (a, b)]
        return (
            same
            and all(each.admits(a) == each.admits(b) for each in problem.written_stages)
            and all((a in each.clusters) == (b in each.clusters) for each in problem.pinned_blocks)
            and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in costs)
            and problem.line(a, b) == problem.line(b, a)
            and all(problem.line(a, c) == problem.line(b, c) and problem.line(c, a) == problem.line(c, b) for c in rest)
        )

    kinds: list[int] = []
    for cluster in range(count):
        kinds.append(next((kinds[other] for other in range(cluster) if are_interchangeable(other, cluster)), cluster))
    return kinds


def _cluster_speed(cluster: ClusterCosts) -> float:
    return cluster.workers / max(float(cluster.forward.sum() + cluster.backward.sum()), 1e-30)


def _order_greedily(problem: Problem, first: int, fast: bool) -> Order:
    """A greedy order: from each cluster to the one with the best link or, with equal links, the fastest."""
    order, left = [first], set(range(len(problem.clusters))) - {first}
    while left:

        def rank_cluster(cluster: int) -> tuple[float, ...]:
            line = problem.line(order[-1], cluster)
            by_line = (min(line.rate, 1e30), -line.delay)
            return (_cluster_speed(problem.clusters[cluster]), *by_line, -cluster) if fast else (*by_line, -cluster)

        order.append(max(left, key=rank_cluster))
        left.remove(order[-1])
    return tuple(order)


FAR = 8
"""The number of stages from which on cuts are moved only around the slowest ones."""


@dataclass(frozen=True)
class NeighborMoves:
    """A generator of the neighbors of a candidate; `kinds` are the equivalence classes of clusters."""

    problem: Problem
    kinds: Sequence[int]

    def list_neighbors(self, candidate: Candidate) -> Iterator[Shape]:
        """All neighbors: a cut moved, added or removed; a replica more or less; a replicated body with a sharded head;
        another cluster; another codec; the next number of micro-batches.
        """
        shape, parts = candidate.shape, candidate.parts
        slowest = sorted(range(len(parts)), key=lambda place: -candidate.compute[place] / parts[place].replicas)
        near = {place + step for place in slowest[:2] for step in (-1, 0, 1)} if len(parts) > FAR else range(len(parts))
        used = Counter[int]()
        for part in parts:
            used[part.cluster] += part.worker_count
        free = {part.cluster: self.problem.clusters[part.cluster].workers - used[part.cluster] for part in parts}
        for place in sorted(place for place in near if 0 <= place < len(parts)):
            before, after = parts[:place], parts[place + 1 :]
            for changed, rest in self._change_part(parts[place], after, free, shape.micro_batches):
                yield replace(shape, parts=_drop_inner_codecs([*before, *changed, *rest]))
        yield from self._add_cluster(shape)
        for place in candidate.crossing_places:
            yield from vary_codec(shape, place, range(len(self.problem.chain.codec_choices)))
        counts = self.problem.micro_batch_counts
        at = counts.index(shape.micro_batches) if shape.micro_batches in counts else -1
        for nearest in (at - 1, at + 1):
            if at >= 0 and 0 <= nearest < len(counts) and counts[nearest] >= max(part.replicas for part in parts):
                yield replace(shape, micro_batches=counts[nearest])

    def _change_part(
        self, part: Part, after: Sequence[Part], free: dict[int, int], count: int
    ) -> Iterator[tuple[Sequence[Part], Sequence[Part]]]:
        """Variants of a stage and of those after it."""
        inside, open_number = self._list_cuts(part), self.problem.options.replica is None
        middle = inside[len(inside) // 2] if inside else None
        if after:
            yield from self._change_end(part, after, free)
        if open_number and part.shards == 1:
            more = part.replicas + 1 if free[part.cluster] > 0 and part.replicas < count else part.replicas
            for replicas in sorted({more, max(part.replicas - 1, 1)} - {part.replicas}):
                yield [replace(part, replicas=replicas)], after
        if middle is not None and open_number and part.replicas > 1:
            fewer = part.replicas // 2
            first = replace(part, end=middle, replicas=part.replicas - fewer)
            yield [first, replace(part, begin=middle, replicas=fewer)], after
        if middle is not None and free[part.cluster] >= part.worker_count:
            yield [replace(part, end=middle), replace(part, begin=middle)], after
        if self._may_share[part.cluster] and max(part.replicas, part.shards) > 1 and part.worker_count <= count:
            for cut in self._choose_cuts(part):
                body, head = (
                    replace(part, end=cut, replicas=part.worker_count, shards=1),
                    Part(part.cluster, cut, part.end),
                )
                yield [body, replace(head, shards=part.worker_count)], after

    def _change_end(
        self, part: Part, after: Sequence[Part], free: dict[int, int]
    ) -> Iterator[tuple[Sequence[Part], Sequence[Part]]]:
        """Variants of the boundary between a stage and the next: moved, removed by merging, or with a new stage in
        between.
        """
        following, inside = after[0], self._list_cuts(part)
        for cut in (*inside[-1:], *self._list_cuts(following)[:1]):
            yield [replace(part, end=cut), replace(following, begin=cut)], after[1:]
        yield [replace(part, end=following.end)], after[1:]
        if following.cluster != part.cluster:
            yield [replace(following, begin=part.begin, codec=part.codec)], after[1:]
        for cut in inside[-1:] if free[following.cluster] >= following.worker_count else ():
            first = replace(following, begin=cut, end=part.end)
            yield [replace(part, end=cut), first, following], after[1:]

    @cached_property
    def _may_share(self) -> list[bool]:
        """For each cluster: whether its workers may run replicas of one stage and shards of the next."""
        options, costs = self.problem.options, Costs(self.problem, 1)
        free = options.split is None and options.replica is None and not self.problem.written_stages
        return [free and costs.is_split_worth_trying(cluster) for cluster in range(len(self.problem.clusters))]

    def _add_cluster(self, shape: Shape) -> Iterator[Shape]:
        """Give one end of the chain to an unused cluster: one block, half of a stage, or all but one block."""
        used = {part.cluster for part in shape.parts}
        unused = dict.fromkeys(self.kinds[cluster] for cluster in range(len(self.kinds)) if cluster not in used)
        first, last, replicas = shape.parts[0], shape.parts[-1], self.problem.options.replica or 1
        for kind in unused:
            cluster = next(s for s, own in enumerate(self.kinds) if own == kind and s not in used)
            for cut in self._choose_cuts(first):
                codec = self._find_quickest(cluster, first.cluster, cut)
                parts = Part(cluster, 0, cut, replicas), replace(first, begin=cut, codec=codec), *shape.parts[1:]
                yield replace(shape, parts=parts)
            for cut in self._choose_cuts(last):
                codec = self._find_quickest(last.cluster, cluster, cut)
                parts = *shape.parts[:-1], replace(last, end=cut), Part(cluster, cut, last.end, replicas, codec=codec)
                yield replace(shape, parts=parts)

    def _find_quickest(self, source: int, destination: int, cut: int) -> int:
        """The codec with the shortest round trip of a micro-batch and its gradient."""
        there, back = self.problem.line(source, destination), self.problem.line(destination, source)
        trips = [
            float(way.sent_bytes[cut] / there.rate + way.returned_bytes[cut] / back.rate + way.seconds[:, cut].sum())
            for way in self.problem.chain.codec_choices
        ]
        return trips.index(min(trips))

    # ------------------------------------------------------------------ cuts
    @cached_property
    def _cuts(self) -> Sequence[int]:
        return [cut for cut in range(1, len(self.problem.chain)) if self.problem.chain.cuttable[cut]]

    def _list_cuts(self, part: Part) -> Sequence[int]:
        """The positions where a stage may be cut."""
        return self._cuts[bisect_right(self._cuts, part.begin) : bisect_left(self._cuts, part.end)]

    def _choose_cuts(self, part: Part) -> Sequence[int]:
        """A sample of these positions: first, middle and last."""
        inside = self._list_cuts(part)
        return sorted({inside[0], inside[len(inside) // 2], inside[-1]}) if inside else []


def _drop_inner_codecs(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Remove codecs from boundaries within a cluster."""
    near = [False, *(one.cluster == other.cluster for one, other in pairwise(parts))]
    return tuple(replace(p, codec=0) if same and p.codec else p for p, same in zip(parts, near, strict=True))


def vary_codec(shape: Shape, place: int, codecs: Sequence[int]) -> Iterator[Shape]:
    """Variants of a shape with each of the codecs at the boundary before a stage."""
    parts = shape.parts
    for codec in codecs:
        if codec != parts[place].codec:
            yield replace(shape, parts=(*parts[:place], replace(parts[place], codec=codec), *parts[place + 1 :]))
