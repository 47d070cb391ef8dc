"""Search for a plan: dynamic programming over cuts and clusters proposes shapes, and the simulator ranks them.

Let T(i) be the seconds from the arrival of the first micro-batch at block i until the last gradient leaves it. A stage
that takes the blocks from i to j in t seconds per micro-batch, with m micro-batches and a trip of h to the next stage
and back, gives

    T(i) = max(m * t,  t + h + T(j))

as a stage computes ahead while it waits: later stages are hidden behind its own work, as long as enough micro-batches
may be in flight. Clusters are added from the end of the chain to its start, in each order; within a cluster stages are
added one by one, all with the same number of replicas. Memory bounds what a stage may hold, for several numbers in
flight. The plans found for all numbers and orders are scored by the simulator, and improved by local search.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from whale_nebula.planner.costs import DEEPEST, Costs
from whale_nebula.planner.problem import Array, Candidate, Excess, Parallelism, Part, Problem, Shape
from whale_nebula.planner.score import score
from whale_nebula.planner.space import (
    NeighborMoves,
    Order,
    find_kinds,
    group_blocks,
    list_orders,
    ungroup_parts,
    vary_codec,
)

SCORED = 48
"""The number of candidates that are simulated; in addition the best `FEW` of each number of micro-batches."""
FEW = 8
AFFORDED = 120_000
"""The total number of simulated instructions."""
BY_FORMULA, BY_SIMULATOR = 12, 4
"""The number of best candidates that are improved by local search, with the formula and with the simulator, since the
formula misjudges some if memory is short.
"""
SHARES = (1.3, 0.75, 0.5, 0.25)
"""The shares of memory that are tried for the formula if no plan fits by it: it counts up to a fifth too much, and too
little where a cluster has several stages apart from each other.
"""
HOPELESS = 1.5
"""The ratio to the best known step from which on a number of micro-batches, or of those in flight, is skipped, by a
lower bound.
"""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: candidates, the best first; or, if no plan is feasible, the excess of the one that came
    closest.
    """

    candidates: tuple[Candidate, ...]
    excess: Excess | None = None
    tried: int = 0


def search(problem: Problem, max_candidates: int = 8, *, relaxed: bool = True) -> SearchResult:
    """Find the best plans for a problem, at most `max_candidates` of them. If none fits and `relaxed` is set, plans are
    tried that need too much memory by the formula, and further searches find which limit is violated.
    """
    coarse, cuts = group_blocks(problem)
    orders = list_orders(problem)

    def rank(proposed: Problem) -> SearchResult:
        shapes = [ungroup_parts(shape, cuts) for shape in _propose(proposed, orders)]
        return _Ranking(problem).rank(shapes, max_candidates)

    found = rank(coarse)
    for share in SHARES if relaxed else SHARES[1:]:
        if found.candidates:
            return found
        changed = _scale_memory(coarse, orders, share)
        if changed != coarse:
            found = rank(changed)
    return found if found.candidates or not relaxed else replace(found, excess=_find_excess(problem))


def _propose(problem: Problem, orders: Sequence[Order]) -> Sequence[Shape]:
    """The best shapes by the formula, over all numbers of micro-batches."""
    best, few = _ShapePool(SCORED), list[Shape]()
    for recompute in _list_recompute_options(problem):
        for count in reversed(problem.micro_batch_counts):  # more micro-batches keep more workers busy
            own = _ShapePool(FEW, best)
            _Search(problem, Costs(problem, count, recompute), own).run(orders)
            few += own.shapes()
    return list(dict.fromkeys([*best.shapes(), *few]))


def _scale_memory(problem: Problem, orders: Sequence[Order], share: float) -> Problem:
    """The problem with the memory of workers times `share`: for a share above 1 of all clusters, else of those to which
    the chain comes back, where a worker may run two stages, as the formula counts each stage alone.
    """
    again = {cluster for order in orders for cluster in order if order.count(cluster) > 1}
    clusters = [
        replace(each, memory=each.memory * share) if share > 1.0 or number in again else each
        for number, each in enumerate(problem.clusters)
    ]
    return replace(problem, clusters=tuple(clusters))


def _find_excess(problem: Problem) -> Excess | None:
    """If no plan fits into memory: the excess of the plan that needs about the least additional memory, and memory for
    each cluster with which the search finds a plan.
    """
    low, high, closest, enough = 1.0, 2.0, None, problem
    while high < 2.0**20 and (closest is None or high - low > 0.1 * low):
        more = _add_memory(problem, [high * cluster.memory for cluster in problem.clusters])
        found = search(more, 1, relaxed=False).candidates
        if found:
            closest, enough, high = found[0], more, (low + high) / 2
        else:
            low, high = high, 2 * high if closest is None else high + (high - low) / 2
    if closest is None:
        return None
    part, needed = max(
        zip(closest.parts, closest.memory, strict=True),
        key=lambda each: each[1] / problem.clusters[each[0].cluster].memory,
    )
    exact = [0.0] * len(problem.clusters)
    for own, need in zip(closest.parts, closest.memory, strict=True):
        exact[own.cluster] = max(exact[own.cluster], need)
    attempts = [exact, [1.1 * need for need in exact]]
    if sum(need > cluster.memory for need, cluster in zip(exact, problem.clusters, strict=True)) > 1:
        attempts.insert(0, [need * (number == part.cluster) for number, need in enumerate(exact)])
    for memory in attempts:
        if search(less := _add_memory(problem, memory), 1, relaxed=False).candidates:
            enough = less
            break
    pairs = zip(enough.clusters, problem.clusters, strict=True)
    sufficient = {more.name: more.memory for more, own in pairs if more.memory > own.memory}
    cluster = problem.clusters[part.cluster]
    return Excess(cluster.name, needed, cluster.memory, part.begin, part.end, sufficient)


def _add_memory(problem: Problem, memory: Sequence[float]) -> Problem:
    """The problem with at least this memory for a worker of each cluster."""
    pairs = zip(problem.clusters, memory, strict=True)
    return replace(problem, clusters=tuple(replace(own, memory=max(own.memory, more)) for own, more in pairs))


def _list_recompute_options(problem: Problem) -> Sequence[bool]:
    """Whether to try recomputation of activations in the backward: it costs time, so it is tried only where memory may
    be short.
    """
    asked = problem.options.recompute
    if asked is not None:
        return (asked,)
    everything = Costs(problem, 1).whole_bytes(problem.rows)
    return (False, True) if any(cluster.memory < everything for cluster in problem.clusters) else (False,)


# ---------------------------------------------------------------------- dynamic programming
@dataclass
class _ShapePool:
    """A bounded set of the best shapes by their approximate seconds, without duplicates; shapes also go to the `parent`
    pool.
    """

    most: int
    parent: _ShapePool | None = None
    heap: list[tuple[float, int, Shape]] = field(default_factory=list)
    seconds_by_shape: dict[Shape, float] = field(default_factory=dict)
    counter: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def least(self) -> float:
        """The approximate seconds of the best shape."""
        return -max(self.heap)[0] if self.heap else math.inf

    @property
    def worst(self) -> float:
        """The bound that a new shape has to beat."""
        return -self.heap[0][0] if len(self.heap) >= self.most else math.inf

    def add(self, seconds: float, shape: Shape) -> None:
        """Add a shape if it is one of the best."""
        if self.parent is not None:
            self.parent.add(seconds, shape)
        if seconds >= min(self.worst, self.seconds_by_shape.get(shape, math.inf)):
            return
        if shape in self.seconds_by_shape:  # a lower bound on its longest time was possible
            self.heap = [each for each in self.heap if each[2] != shape]
            heapq.heapify(self.heap)
        self.seconds_by_shape[shape] = seconds
        heapq.heappush(self.heap, (-seconds, next(self.counter), shape))
        if len(self.heap) > self.most:
            del self.seconds_by_shape[heapq.heappop(self.heap)[2]]

    def shapes(self) -> list[Shape]:
        """All shapes, the best first."""
        return [shape for _, _, shape in sorted(self.heap, key=lambda each: (-each[0], each[1]))]


@dataclass
class _Node:
    """Table of the dynamic program for an order of clusters: the best suffix from each cut to the end, by seconds of a
    step and of one micro-batch.

    By cut, `choice_index` is the best number of replicas and of stages in the first cluster, `stage_ends` the end of
    each of those stages, and `codec_index` the codec of the crossing to the next cluster.
    """

    step: Array
    single: Array
    choice_index: np.ndarray
    stage_ends: list[np.ndarray]
    choices: list[tuple[Parallelism, int]]
    codec_index: np.ndarray


@dataclass
class _Search:
    """The dynamic program for one number of micro-batches."""

    problem: Problem
    costs: Costs
    pool: _ShapePool

    def run(self, orders: Sequence[Order]) -> None:
        """Search all orders of clusters and, where memory is short, all limits of micro-batches in flight."""
        clusters = range(len(self.problem.clusters))
        self.ways = [self.costs.list_parallelisms(cluster) for cluster in clusters]
        pieces = max(way.shards for ways in self.ways for way in ways)
        single, step = self.costs.least_seconds
        if self._is_hopeless(max(single / pieces, step)):
            return
        self.copies = {way: self.costs.count_replicas(way.replicas) for ways in self.ways for way in ways}
        self.stage_masks = [self.costs.mask_stages(cluster) for cluster in clusters]
        self.times = [
            {way: self.costs.seconds(cluster, way.shards) for way in self.ways[cluster]} for cluster in clusters
        ]
        self.trips = {(a, b): self._compute_trips(a, b) for a in clusters for b in clusters}
        self.update_seconds = [self._compute_update_seconds(cluster) for cluster in clusters]
        memory = {way: self.costs.bytes(1, way.shards) for way in self.copies}
        for limit in reversed(self._list_limits()):
            if self._is_hopeless(self.costs.micro_batches / limit * single / pieces):
                continue
            self.bands = {
                (s, how): self._compute_band(s, how, limit) for s in clusters for how in self.update_seconds[s]
            }
            self._extend(orders, limit, memory)

    def _is_hopeless(self, seconds: float) -> bool:
        """Whether a lower bound of a step's seconds is far above the best step found so far."""
        return self.pool.parent is not None and seconds > HOPELESS * self.pool.parent.least

    def _list_limits(self) -> list[int]:
        """The limits of micro-batches in flight for which memory is counted; only the number of micro-batches if memory
        is not a constraint.
        """
        count = self.costs.micro_batches
        everything = self.costs.whole_bytes(count)
        if all(everything <= cluster.memory for cluster in self.problem.clusters):
            return [count]
        return sorted({min(limit, count) for limit in (1, 2, 4, 8, count)})

    def _compute_update_seconds(self, cluster: int) -> dict[Parallelism, Array]:
        """Seconds that a stage computes once per step, by its parallelism: the update, and the all-reduce of
        gradients.
        """
        updates = self.costs.updates[cluster]
        update = updates[None, :] - updates[:, None]
        sums = {way: self.costs.allreduce_seconds(cluster, self.copies[way]) for way in self.ways[cluster]}
        return {way: (update + added) / way.shards for way, added in sums.items()}

    def _compute_trips(self, source: int, destination: int) -> list[tuple[Array, Array]]:
        """For each codec and cut: the round-trip seconds of a micro-batch, and the seconds for which it occupies the
        link or the encoder and decoder.
        """
        there, back = self.problem.line(source, destination), self.problem.line(destination, source)
        chain, rows, found = self.problem.chain, self.costs.rows, []
        for way in chain.codec_choices if source != destination else (chain.uncompressed,):
            held = way.sent_bytes * (rows / there.rate), way.returned_bytes * (rows / back.rate)
            trip = held[0] + held[1] + there.delay + back.delay + way.seconds.sum(0) * rows
            if source != destination:
                trip = trip + chain.tied_bytes / min(there.rate, back.rate)
            found.append((trip, np.maximum(*held)))
        return found

    def _cross(self, node: _Node, cluster: int, rest: int) -> tuple[Array, Array, np.ndarray]:
        """The best suffix from each cut, given that the chain changes clusters there, with the best codec for it."""
        count, ways = self.costs.micro_batches, self.trips[cluster, rest]
        single = np.stack([node.single + trip for trip, _ in ways])
        step = np.stack([np.maximum(node.step + t, node.single + t + (count - 1) * holds) for t, holds in ways])
        coded = np.argmin(step, axis=0)
        at = np.arange(step.shape[1])
        return step[coded, at], single[coded, at], coded

    def _extend(self, orders: Sequence[Order], limit: int, last: Mapping[Parallelism, Array]) -> None:
        """Extend orders of clusters from the end of the chain towards its start. Orders with a common suffix share its
        table, and orders with a common first cluster and the same length are computed together.
        """
        known: dict[Order, _Node] = {}
        for (size, cluster), group in itertools.groupby(orders, key=lambda order: (len(order), order[0])):
            alike = list(group)
            crossed = [self._cross(known[order[1:]], cluster, order[1]) for order in alike if size > 1] or [
                self._start_table()
            ]
            step, single, coded = (np.stack(each) for each in zip(*crossed, strict=True))
            nodes = self._prepend_stages(cluster, step, single, limit, None if size > 1 else last)
            for order, node, way in zip(alike, nodes, coded, strict=True):
                known[order] = node
                node.codec_index = way
                if float(node.step[0]) < self.pool.worst:
                    self.pool.add(float(node.step[0]), self._trace(order, known))

    def _start_table(self) -> tuple[Array, Array, np.ndarray]:
        """The initial table of the recurrence: after the last block."""
        cuts = len(self.problem.chain) + 1
        ends = np.arange(cuts) == cuts - 1
        return np.where(ends, 0.0, math.inf), np.where(ends, 0.0, 1e30), np.zeros(cuts, int)

    def _prepend_stages(
        self, cluster: int, step: Array, single: Array, limit: int, last: Mapping[Parallelism, Array] | None
    ) -> list[_Node]:
        """Prepend stages of one cluster to known suffixes, a row each. A `last` stage has nothing after it, so it holds
        few micro-batches.
        """
        count, shape = self.costs.micro_batches, step.shape
        ((trip, holds),) = self.trips[cluster, cluster]
        rows, places = np.arange(shape[0])[:, None], np.arange(shape[1])
        best, alone, took = np.full(shape, math.inf), np.full(shape, 1e30), np.full(shape, -1)
        ways_there, choices = list[np.ndarray](), list[tuple[Parallelism, int]]()
        for how, once in self.update_seconds[cluster].items():
            own, times, held = self.bands[cluster, how]
            after, way = step, single
            depth = min(max(1, self.problem.count_room(cluster) // (how.replicas * how.shards)), DEEPEST)
            for number in range(1, depth + 1):
                if number == 1 and last is not None:
                    goes = np.full(shape, shape[1] - 1)
                    way = np.broadcast_to(self.times[cluster][how][:, -1], shape)
                    turns, may = self._count_turns(cluster, how)
                    fits = (
                        may[:, -1]
                        & (last[how][:, -1] <= self.problem.clusters[cluster].memory)
                        & (places < shape[1] - 1)
                    )
                    after = np.where(fits, turns[:, -1] * way + once[:, -1], math.inf)
                else:
                    if number > 1:
                        way = way + trip
                        after = np.maximum(after + trip, way + (count - 1) * holds)
                    ways = np.maximum(own, times + _slide_windows(after, own.shape[1]))
                    if limit < count:
                        ways = np.maximum(ways, held + _slide_windows(way * (count / limit), own.shape[1]))
                    chosen = np.argmin(ways, axis=2)
                    goes = np.minimum(places + 1 + chosen, shape[1] - 1)
                    after, way = ways[rows, places, chosen], times[places, chosen] + way[rows, goes]
                better = after < best
                if number > 1 and not better.any():
                    break
                took[better] = len(choices)
                best, alone = np.where(better, after, best), np.where(better, way, alone)
                ways_there.append(goes)
                choices.append((how, number))
        return [
            _Node(best[row], alone[row], took[row], [goes[row] for goes in ways_there], choices, took[row])
            for row in range(shape[0])
        ]

    def _count_turns(self, cluster: int, how: Parallelism) -> tuple[Array, np.ndarray]:
        """For stages between each two cuts: micro-batches of each replica, and whether such a stage is allowed."""
        copies = self.copies[how]
        may = self.costs.ranges & self.stage_masks[cluster] & ((copies == 1) | (how.shards == 1))
        may &= self.costs.mask_replicable(how.replicas)
        return np.ceil(self.costs.micro_batches / copies), may

    def _compute_band(self, cluster: int, how: Parallelism, limit: int) -> tuple[Array, Array, Array]:
        """Costs of the stages that fit into memory from each cut, by their number of blocks: seconds of a step, seconds
        of a micro-batch, and seconds of a micro-batch times the factor that `limit` implies. With short memory the band
        is narrow.
        """
        count, once = self.costs.micro_batches, self.update_seconds[cluster][how]
        turns, may = self._count_turns(cluster, how)
        fits = may & (
            self.costs.bytes(np.ceil(limit / self.copies[how]), how.shards) <= self.problem.clusters[cluster].memory
        )
        places, width = np.arange(len(fits))[:, None], max(1, int(fits.sum(1).max()))
        ends = np.minimum(places + np.arange(1, width + 1), len(fits) - 1)
        times = self.times[cluster][how][places, ends]
        own = np.where(fits[places, ends], turns[places, ends] * times + once[places, ends], math.inf)
        own[ends - places < np.arange(1, width + 1)] = math.inf
        return own, times, times * (count / limit)

    def _trace(self, order: Order, known: Mapping[Order, _Node]) -> Shape:
        """Reconstruct the stages of the best solution from the tables."""
        parts: list[Part] = []
        begin = 0
        for place, cluster in enumerate(order):
            node = known[order[place:]]
            choice = int(node.choice_index[begin])
            how, stages = node.choices[choice]
            for number in range(stages):
                end = int(node.stage_ends[choice - number][begin])
                codec = 0 if number or not place else int(known[order[place - 1 :]].codec_index[begin])
                parts.append(Part(cluster, begin, end, int(self.copies[how][begin, end]), how.shards, codec))
                begin = end
        return Shape(tuple(parts), self.costs.micro_batches, self.costs.recompute)


def _slide_windows(values: Array, width: int) -> Array:
    """Sliding windows over each row: at each place the following values, padded with 0.

    >>> _slide_windows(np.array([[1.0, 2.0, 3.0]]), 2).tolist()
    [[[2.0, 3.0], [3.0, 0.0], [0.0, 0.0]]]
    """
    rows, count = values.shape
    padded = np.concatenate([values[:, 1:], np.zeros((rows, width))], axis=1)
    step = padded.itemsize
    return np.ndarray((rows, count, width), buffer=padded, strides=(padded.strides[0], step, step))


# ---------------------------------------------------------------------- by the simulator
@dataclass
class _Ranking:
    """Shapes with their costs, without duplicates: all ranked by the formula, the best of them by the simulator."""

    problem: Problem
    ratings: dict[tuple[Shape, bool], Candidate | Excess] = field(default_factory=dict)
    costs: dict[tuple[int, bool], Costs] = field(default_factory=dict)
    spent: int = 0

    def __post_init__(self) -> None:
        self.kinds = find_kinds(self.problem)
        self.moves = NeighborMoves(self.problem, self.kinds)

    def rank(self, shapes: Sequence[Shape], most: int) -> SearchResult:
        """Score the shapes, improve the best ones by local search, and sort them."""
        for shape in shapes:
            self.score(
                self._order_clusters(shape if self.problem.admits(shape) else self.problem.reduce_replicas(shape))
            )
        for best in self._list_fitting(False)[:BY_FORMULA]:
            self._improve(best, False)
        for each in self._list_fitting(False)[:SCORED]:
            if self._can_afford(each.shape):
                self.score(each.shape, True)
        for best in self._list_distinct()[:BY_SIMULATOR]:
            self._improve(best, True)
        found = map(self._choose_codecs, self._list_distinct()[:most])
        return SearchResult(tuple(sorted(found, key=_preference)), None, len(self.ratings))

    def _list_distinct(self) -> list[Candidate]:
        """The best simulated candidates; of those with the same stages only the best number of micro-batches and
        codecs.
        """
        found: dict[tuple[Part, ...], Candidate] = {}
        for each in self._list_fitting(True):
            found.setdefault(tuple(replace(part, codec=0) for part in each.parts), each)
        return list(found.values())

    def _choose_codecs(self, best: Candidate) -> Candidate:
        """The same stages, with the least lossy codec at each boundary whose step takes hardly longer than with the
        fastest one.
        """
        places, codecs = best.crossing_places, range(len(self.problem.chain.codec_choices))
        for place in places:
            coded = [self.score(shape, True) for shape in vary_codec(best.shape, place, codecs)]
            best = min([best, *(e for e in coded if isinstance(e, Candidate))], key=lambda each: each.seconds)
        most = (1.0 + self.problem.options.slack) * best.seconds
        for place in places:
            milder = codecs[: best.parts[place].codec]
            coded = [self.score(shape, True) for shape in vary_codec(best.shape, place, milder)]
            best = next((e for e in coded if isinstance(e, Candidate) and e.seconds <= most), best)
        return best

    def score(self, shape: Shape, simulated: bool = False) -> Candidate | Excess:
        """Compute the costs of a shape."""
        if (shape, simulated) not in self.ratings:
            key = shape.micro_batches, shape.recompute
            costs = self.costs.setdefault(key, Costs(self.problem, *key))
            self.spent += self._count_instructions(shape) * simulated
            self.ratings[shape, simulated] = score(self.problem, shape, costs, simulated=simulated)
        return self.ratings[shape, simulated]

    def _can_afford(self, shape: Shape) -> bool:
        """Whether the budget of simulated instructions (`AFFORDED`) allows one more simulation. The first is always
        allowed.
        """
        return (
            not self.spent or (shape, True) in self.ratings or self.spent + self._count_instructions(shape) <= AFFORDED
        )

    def _count_instructions(self, shape: Shape) -> int:
        return len(shape.parts) * shape.micro_batches * len(self.problem.options.schedules)

    def _order_clusters(self, shape: Shape) -> Shape:
        """The canonical form of a shape: interchangeable clusters appear in ascending order."""
        left = {kind: [cluster for cluster, k in enumerate(self.kinds) if k == kind] for kind in self.kinds}
        named: dict[int, int] = {}
        for part in shape.parts:
            if part.cluster not in named:
                named[part.cluster] = left[self.kinds[part.cluster]].pop(0)
        return replace(shape, parts=tuple(replace(part, cluster=named[part.cluster]) for part in shape.parts))

    def _list_fitting(self, simulated: bool) -> list[Candidate]:
        known = (each for (_, how), each in self.ratings.items() if how is simulated and isinstance(each, Candidate))
        return sorted(known, key=_preference)

    def _improve(self, best: Candidate, simulated: bool) -> None:
        """Hill climbing: move to the best neighbor until none is better."""
        for _ in range(24):
            near = filter(self.problem.admits, self.moves.list_neighbors(best))
            found = [self.score(shape, simulated) for shape in near if not simulated or self._can_afford(shape)]
            better = [e for e in found if isinstance(e, Candidate) and e.seconds < best.seconds * 0.9999]
            if not better:
                return
            best = min(better, key=lambda each: each.seconds)


def _preference(candidate: Candidate) -> tuple[float, int, int, str]:
    """Sort key of candidates: seconds, then simplicity, then a deterministic tie-break."""
    shape = candidate.shape
    workers = sum(part.worker_count for part in shape.parts)
    return float(f"{candidate.seconds:.4g}"), workers, shape.micro_batches, repr(shape)
