"""The search for a plan: dynamic programming over cuts and clusters, then the best of what it finds by the simulator.

Let T(i) be the seconds from the arrival of the first micro-batch at block i until the last gradient leaves it. A stage
that takes the blocks from i to j in t seconds a micro-batch, with m micro-batches and a trip of h to the next stage and
back, gives

    T(i) = max(m * t,  t + h + T(j))

as a stage runs ahead while it waits: what comes after it is hidden behind its own work, as long as enough micro-batches
may be in flight. Clusters are added from the end of the chain to its begin, in each order; within a cluster stages are
added one by one, all with the same number of replicas. Memory bounds what a stage may hold, for several numbers in
flight. What is found so for all numbers and orders is scored by the simulator, and improved step by step.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from whale_nebula.planner.costs import DEEPEST, Costs
from whale_nebula.planner.problem import Array, Candidate, Chain, Excess, Part, Problem, Shape, Site, Way
from whale_nebula.planner.score import score
from whale_nebula.planner.written import follow_written, group_written

SCORED = 48
"""So many candidates are given to the simulator; and of each number of micro-batches the best `FEW`."""
FEW = 8
AFFORDED = 20_000
"""The simulator is given so many instructions in all."""
MOST_GROUPS = 240
WIDEST = 72
"""A longer chain is searched in so many groups of blocks first, or in some more where memory is short."""
ALL_ORDERS = 4
"""Up to so many clusters all orders of each subset are tried."""
FAR = 8
"""Of more stages than this, cuts are moved only around those that take longest."""


@dataclass(frozen=True)
class Found:
    """The candidates, the best first; or, where there is none, what stands in the way of the one that came closest."""

    candidates: tuple[Candidate, ...]
    excess: Excess | None = None
    tried: int = 0


def search(problem: Problem, most: int = 8, *, relaxed: bool = True) -> Found:
    """The best plans for a problem, at most so many of them; where none fits, `relaxed` asks what stands in the way."""
    coarse, cuts = group_blocks(problem)
    orders = list_orders(problem)
    best, few = _Pool(SCORED), list[Shape]()
    for recompute in _recomputes(coarse):
        for count in problem.counts:
            own = _Pool(FEW, best)
            _Search(coarse, Costs(coarse, count, recompute), own).run(orders)
            few += own.shapes()
    shapes = dict.fromkeys([*best.shapes(), *few])
    found = _Ranking(problem).rank([_ungroup(shape, cuts) for shape in shapes], most)
    return found if found.candidates or not relaxed else replace(found, excess=_find_excess(problem))


def _find_excess(problem: Problem) -> Excess | None:
    """Where nothing fits: what the plan lacks that fits with about the least more memory."""
    low, high, closest = 1.0, 2.0, None
    while high < 2.0**20 and (closest is None or high - low > 0.1 * low):
        sites = tuple(replace(site, memory=site.memory * high) for site in problem.sites)
        found = search(replace(problem, sites=sites), 1, relaxed=False).candidates
        if found:
            closest, high = found[0], (low + high) / 2
        else:
            low, high = high, 2 * high if closest is None else high + (high - low) / 2
    if closest is None:
        return None
    needs = zip(closest.parts, closest.memory, strict=True)
    part, needed = max(needs, key=lambda each: each[1] / problem.sites[each[0].site].memory)
    site = problem.sites[part.site]
    return Excess(site.name, needed, site.memory, part.begin, part.end)


def _recomputes(problem: Problem) -> Sequence[bool]:
    """Whether to compute forwards again: it costs time, and is tried where memory may be short."""
    asked = problem.options.recompute
    if asked is not None:
        return (asked,)
    everything = Costs(problem, 1).whole_bytes(problem.rows)
    return (False, True) if any(site.memory < everything for site in problem.sites) else (False,)


# ---------------------------------------------------------------------- the chain in groups
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
        chain.tied[ends], np.ones(len(ends), bool),
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


def _ungroup(shape: Shape, cuts: Sequence[int]) -> Shape:
    """The same stages, by blocks instead of groups."""
    return replace(shape, parts=tuple(replace(p, begin=cuts[p.begin], end=cuts[p.end]) for p in shape.parts))


# ---------------------------------------------------------------------- orders of clusters
Order = tuple[int, ...]
_ByWay = Mapping[Way, Array]


def list_orders(problem: Problem) -> list[Order]:
    """The orders in which clusters may stand along the chain, the short ones first.

    All orders of all subsets of a few clusters; of many, for each first one those that follow over the best lines, and
    as many again that prefer fast clusters. Of clusters that nothing tells apart only the first stands for each.
    """
    sites = range(len(problem.sites))
    kinds = _kinds(problem)
    if written := follow_written(problem):
        return written
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


def _kinds(problem: Problem) -> list[int]:
    """A number for each cluster, the same where swapping two of them changes nothing."""
    sites, count = problem.sites, len(problem.sites)

    def alike(a: int, b: int) -> bool:
        one, other = sites[a], sites[b]
        numbers, costs = (
            ("workers", "memory", "call", "inside", "adding", "fused", "crossing"),
            ("forward", "backward", "update", "later"),
        )
        same = all(getattr(one, name) == getattr(other, name) for name in numbers)
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


# ---------------------------------------------------------------------- dynamic programming
@dataclass
class _Pool:
    """The best shapes so far by their approximate seconds, each once; they go to a `larger` pool as well."""

    most: int
    larger: _Pool | None = None
    heap: list[tuple[float, int, Shape]] = field(default_factory=list)
    known: dict[Shape, float] = field(default_factory=dict)
    counter: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def worst(self) -> float:
        """What a shape has to beat."""
        return -self.heap[0][0] if len(self.heap) >= self.most else math.inf

    def add(self, seconds: float, shape: Shape) -> None:
        """Keep a shape if it is one of the best."""
        if self.larger is not None:
            self.larger.add(seconds, shape)
        if seconds >= min(self.worst, self.known.get(shape, math.inf)):
            return
        if shape in self.known:  # a lower bound on its longest time was possible
            self.heap = [each for each in self.heap if each[2] != shape]
            heapq.heapify(self.heap)
        self.known[shape] = seconds
        heapq.heappush(self.heap, (-seconds, next(self.counter), shape))
        if len(self.heap) > self.most:
            del self.known[heapq.heappop(self.heap)[2]]

    def shapes(self) -> list[Shape]:
        """The shapes, the best first."""
        return [shape for _, _, shape in sorted(self.heap, key=lambda each: (-each[0], each[1]))]


@dataclass
class _Node:
    """The best way from each cut to the end, over the clusters of an order: of a step, and of one micro-batch.

    `took` says by cut which number of replicas and of stages in the first cluster is best, and `goes` where each of
    those stages ends.
    """

    step: Array
    single: Array
    took: np.ndarray
    goes: list[np.ndarray]
    choices: list[tuple[Way, int]]


@dataclass
class _Search:
    """The search with one number of micro-batches."""

    problem: Problem
    costs: Costs
    pool: _Pool

    def run(self, orders: Sequence[Order]) -> None:
        """Try all orders, and all numbers in flight where memory is short."""
        sites = range(len(self.problem.sites))
        self.copies = {way: self.costs.copies(way.replicas) for site in sites for way in self.costs.list_ways(site)}
        self.open = [self.costs.open_at(site) for site in sites]
        self.times = [
            {way: self.costs.seconds(site, way.shards) for way in self.costs.list_ways(site)} for site in sites
        ]
        self.trips = {(a, b): self._trip(a, b) for a in sites for b in sites}
        self.once = [self._once(site) for site in sites]
        memory = {way: self.costs.bytes(1, way.shards) for way in self.copies}
        for limit in self._limits():
            held = {way: self.costs.bytes(np.ceil(limit / n), way.shards) for way, n in self.copies.items()}
            self._extend(orders, limit, held, memory)

    def _limits(self) -> list[int]:
        """Numbers in flight that memory is counted for: all, where memory is no limit."""
        count = self.costs.micro_batches
        everything = self.costs.whole_bytes(count)
        if all(everything <= site.memory for site in self.problem.sites):
            return [count]
        return sorted({min(limit, count) for limit in (1, 2, 4, 8, count)})

    def _once(self, site: int) -> dict[Way, Array]:
        """By number of replicas, the seconds of what a stage does once a step: its update, and the sum of gradients."""
        updates = self.costs.updates[site]
        update = updates[None, :] - updates[:, None]
        sums = {way: self.costs.reduction(site, self.copies[way]) for way in self.costs.list_ways(site)}
        return {way: (update + added) / way.shards for way, added in sums.items()}

    def _trip(self, source: int, destination: int) -> tuple[Array, Array]:
        """At each cut the seconds that a micro-batch is on its way, there and back, and that it holds the line."""
        there, back = self.problem.line(source, destination), self.problem.line(destination, source)
        held = self.costs.there / there.rate, self.costs.back / back.rate
        trip = held[0] + held[1] + there.delay + back.delay
        if source != destination:
            trip = trip + self.problem.chain.tied / min(there.rate, back.rate)
        return trip, np.maximum(*held)

    def _extend(self, orders: Sequence[Order], limit: int, held: _ByWay, last: _ByWay) -> None:
        """Add clusters from the end of each order on; orders that end alike share that end."""
        cuts, count = len(self.problem.chain) + 1, self.costs.micro_batches
        known: dict[Order, _Node] = {}
        end = np.where(np.arange(cuts) == cuts - 1, 0.0, math.inf)
        for order in orders:
            site, rest = order[0], order[1:]
            if rest:
                trip, holds = self.trips[site, rest[0]]
                node = known[rest]
                single = node.single + trip
                step = np.maximum(node.step + trip, single + (count - 1) * holds)
            else:
                step, single = end, np.where(np.arange(cuts) == cuts - 1, 0.0, 1e30)
            known[order] = found = self._stages(site, step, single, limit, held, None if rest else last)
            seconds = float(found.step[0])
            if seconds < self.pool.worst:
                self.pool.add(seconds, self._trace(order, known))

    def _stages(self, site: int, step: Array, single: Array, limit: int, held: _ByWay, last: _ByWay | None) -> _Node:
        """Put stages of one site before what is known; where nothing comes after it, the `last` one holds little."""
        allowed, room = self.problem.sites[site].memory, self.problem.room(site)
        count, cuts = self.costs.micro_batches, len(step)
        trip, holds = self.trips[site, site]
        places = np.arange(cuts)
        best = _Node(np.full(cuts, math.inf), np.full(cuts, 1e30), np.full(cuts, -1), [], [])
        for how, once in self.once[site].items():
            times, turns = self.times[site][how], np.ceil(count / self.copies[how])
            may = self.open[site] & ((self.copies[how] == 1) | (how.shards == 1))
            own = np.where(may & (held[how] <= allowed), turns * times + once, math.inf)
            after, way = step, single
            depth = min(max(1, room // (how.replicas * how.shards)), DEEPEST)
            for number in range(1, depth + 1):
                if number > 1:
                    way = way + trip
                    after = np.maximum(after + trip, way + (count - 1) * holds)
                ways = np.maximum(own, times + after[None, :])
                if limit < count:
                    ways = np.maximum(ways, (count / limit) * (times + way[None, :]))
                if number == 1 and last is not None:
                    closing = may[:, -1] & (last[how][:, -1] <= allowed)
                    whole = np.where(closing, turns[:, -1] * times[:, -1] + once[:, -1], math.inf)
                    ways[:, -1] = np.where(places < cuts - 1, whole, math.inf)
                goes = np.argmin(ways, axis=1)
                after, way = ways[places, goes], times[places, goes] + way[goes]
                better = after < best.step
                if number > 1 and not better.any():
                    break
                best.took[better] = len(best.choices)
                best.step, best.single = np.where(better, after, best.step), np.where(better, way, best.single)
                best.goes.append(goes)
                best.choices.append((how, number))
        return best

    def _trace(self, order: Order, known: Mapping[Order, _Node]) -> Shape:
        """The stages of the best way."""
        parts: list[Part] = []
        begin = 0
        for place, site in enumerate(order):
            node = known[order[place:]]
            choice = int(node.took[begin])
            how, stages = node.choices[choice]
            for number in range(stages):
                end = int(node.goes[choice - number][begin])
                parts.append(Part(site, begin, end, int(self.copies[how][begin, end]), how.shards))
                begin = end
        return Shape(tuple(parts), self.costs.micro_batches, self.costs.recompute)


# ---------------------------------------------------------------------- by the simulator
@dataclass
class _Ranking:
    """Shapes with their costs, each once: all by the formula, and the best of them by the simulator."""

    problem: Problem
    known: dict[tuple[Shape, bool], Candidate | Excess] = field(default_factory=dict)
    costs: dict[tuple[int, bool], Costs] = field(default_factory=dict)
    spent: int = 0

    def __post_init__(self) -> None:
        chain = self.problem.chain
        self.kinds = _kinds(self.problem)
        self.cuts = [cut for cut in range(1, len(chain)) if chain.cuttable[cut]]

    def rank(self, shapes: Sequence[Shape], most: int) -> Found:
        """Score the shapes, improve the best ones, and sort."""
        for shape in shapes:
            self.score(self._in_order(shape if self.problem.keeps(shape) else self.problem.with_fewest(shape)))
        for best in self._fitting(False)[:4]:
            self._improve(best, False)
        for each in self._fitting(False)[:SCORED]:
            if self._affords(each.shape):
                self.score(each.shape, True)
        for best in self._fitting(True)[:3]:
            self._improve(best, True)
        unlike: dict[tuple[Part, ...], Candidate] = {}  # of the same stages the best number of micro-batches
        for each in self._fitting(True):
            unlike.setdefault(each.parts, each)
        if unlike:
            return Found(tuple(unlike.values())[:most], None, len(self.known))
        return Found((), None, len(self.known))

    def score(self, shape: Shape, simulated: bool = False) -> Candidate | Excess:
        """The costs of a shape."""
        if (shape, simulated) not in self.known:
            key = shape.micro_batches, shape.recompute
            costs = self.costs.setdefault(key, Costs(self.problem, *key))
            self.spent += len(shape.parts) * shape.micro_batches * simulated
            self.known[shape, simulated] = score(self.problem, shape, costs, simulated=simulated)
        return self.known[shape, simulated]

    def _affords(self, shape: Shape) -> bool:
        """Whether the simulator may still be asked: always for one, and then for so many instructions."""
        return (shape, True) in self.known or self.spent + len(shape.parts) * shape.micro_batches <= AFFORDED

    def _in_order(self, shape: Shape) -> Shape:
        """The shape in which clusters that are alike come in their order."""
        left = {kind: [site for site, k in enumerate(self.kinds) if k == kind] for kind in self.kinds}
        named: dict[int, int] = {}
        for part in shape.parts:
            if part.site not in named:
                named[part.site] = left[self.kinds[part.site]].pop(0)
        return replace(shape, parts=tuple(replace(part, site=named[part.site]) for part in shape.parts))

    def _fitting(self, simulated: bool) -> list[Candidate]:
        known = (each for (_, how), each in self.known.items() if how is simulated and isinstance(each, Candidate))
        return sorted(known, key=_preference)

    def _improve(self, best: Candidate, simulated: bool) -> None:
        """Take the best neighbour as long as one is better."""
        for _ in range(24):
            near = [s for s in self._neighbours(best) if self.problem.keeps(s) and (not simulated or self._affords(s))]
            found = [self.score(shape, simulated) for shape in near]
            better = [e for e in found if isinstance(e, Candidate) and e.seconds < best.seconds * 0.9999]
            if not better:
                return
            best = min(better, key=lambda each: each.seconds)

    def _neighbours(self, candidate: Candidate) -> Iterator[Shape]:
        """One cut moved, added or taken away, one replica more or less, or the next number of micro-batches."""
        shape, cuts = candidate.shape, self.cuts
        parts = shape.parts
        slowest = sorted(range(len(parts)), key=lambda place: -candidate.compute[place] / parts[place].replicas)
        near = {place + step for place in slowest[:2] for step in (-1, 0, 1)} if len(parts) > FAR else range(len(parts))
        used = Counter[int]()
        for part in parts:
            used[part.site] += part.seats
        for place in sorted(place for place in near if 0 <= place < len(parts)):
            part, before, after = parts[place], parts[:place], parts[place + 1 :]
            free = self.problem.sites[part.site].workers - used[part.site]
            inside = cuts[bisect_right(cuts, part.begin) : bisect_left(cuts, part.end)]
            if after:
                upper = cuts[bisect_right(cuts, part.end) : bisect_left(cuts, after[0].end)][:1]
                for cut in (*inside[-1:], *upper):
                    moved = replace(part, end=cut), replace(after[0], begin=cut)
                    yield replace(shape, parts=(*before, *moved, *after[1:]))
                if after[0].site == part.site:
                    yield replace(shape, parts=(*before, replace(part, end=after[0].end), *after[1:]))
            if self.problem.options.replica is None and part.shards == 1:
                more = part.replicas + 1 if free > 0 and part.replicas < shape.micro_batches else part.replicas
                for replicas in sorted({more, max(part.replicas - 1, 1)} - {part.replicas}):
                    yield replace(shape, parts=(*before, replace(part, replicas=replicas), *after))
            if free >= part.seats and inside:
                halves = replace(part, end=inside[len(inside) // 2]), replace(part, begin=inside[len(inside) // 2])
                yield replace(shape, parts=(*before, *halves, *after))
        counts = self.problem.counts
        at = counts.index(shape.micro_batches) if shape.micro_batches in counts else -1
        for nearest in (at - 1, at + 1):
            if at >= 0 and 0 <= nearest < len(counts) and counts[nearest] >= max(part.replicas for part in parts):
                yield replace(shape, micro_batches=counts[nearest])


def _preference(candidate: Candidate) -> tuple[float, int, int, str]:
    """Sort by seconds, what is as fast by simplicity, and the rest in the same way everywhere."""
    shape = candidate.shape
    workers = sum(part.seats for part in shape.parts)
    return float(f"{candidate.seconds:.4g}"), workers, shape.micro_batches, repr(shape)
