"""The neighbourhood of a plan in the local search."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from whale_nebula.planner.costs import Costs
from whale_nebula.planner.problem import Candidate, Part, Problem, Shape

FAR = 8
"""The number of stages from which on cuts are moved only around the slowest ones."""


@dataclass(frozen=True)
class Moves:
    """A generator of the neighbours of a candidate; `kinds` are the equivalence classes of clusters."""

    problem: Problem
    kinds: Sequence[int]

    def list_near(self, candidate: Candidate) -> Iterator[Shape]:
        """All neighbours: a cut moved, added or removed; a replica more or less; a replicated body with a sharded head;
        another cluster; another codec; the next number of micro-batches.
        """
        shape, parts = candidate.shape, candidate.parts
        slowest = sorted(range(len(parts)), key=lambda place: -candidate.compute[place] / parts[place].replicas)
        near = {place + step for place in slowest[:2] for step in (-1, 0, 1)} if len(parts) > FAR else range(len(parts))
        used = Counter[int]()
        for part in parts:
            used[part.cluster] += part.seats
        free = {part.cluster: self.problem.clusters[part.cluster].workers - used[part.cluster] for part in parts}
        for place in sorted(place for place in near if 0 <= place < len(parts)):
            before, after = parts[:place], parts[place + 1 :]
            for changed, rest in self._change_part(parts[place], after, free, shape.micro_batches):
                yield replace(shape, parts=_code_plainly([*before, *changed, *rest]))
        yield from self._add_cluster(shape)
        for place in candidate.crossed:
            yield from code_otherwise(shape, place, range(len(self.problem.chain.choices)))
        counts = self.problem.counts
        at = counts.index(shape.micro_batches) if shape.micro_batches in counts else -1
        for nearest in (at - 1, at + 1):
            if at >= 0 and 0 <= nearest < len(counts) and counts[nearest] >= max(part.replicas for part in parts):
                yield replace(shape, micro_batches=counts[nearest])

    def _change_part(
        self, part: Part, after: Sequence[Part], free: dict[int, int], count: int
    ) -> Iterator[tuple[Sequence[Part], Sequence[Part]]]:
        """Variants of a stage and of those after it."""
        inside, open_number = self._inside(part), self.problem.options.replica is None
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
        if middle is not None and free[part.cluster] >= part.seats:
            yield [replace(part, end=middle), replace(part, begin=middle)], after
        if self._may_share[part.cluster] and max(part.replicas, part.shards) > 1 and part.seats <= count:
            for cut in self._choose_cuts(part):
                body, head = replace(part, end=cut, replicas=part.seats, shards=1), Part(part.cluster, cut, part.end)
                yield [body, replace(head, shards=part.seats)], after

    def _change_end(
        self, part: Part, after: Sequence[Part], free: dict[int, int]
    ) -> Iterator[tuple[Sequence[Part], Sequence[Part]]]:
        """Variants of the boundary between a stage and the next: moved, removed by merging, or with a new stage in
        between.
        """
        following, inside = after[0], self._inside(part)
        for cut in (*inside[-1:], *self._inside(following)[:1]):
            yield [replace(part, end=cut), replace(following, begin=cut)], after[1:]
        yield [replace(part, end=following.end)], after[1:]
        if following.cluster != part.cluster:
            yield [replace(following, begin=part.begin, codec=part.codec)], after[1:]
        for cut in inside[-1:] if free[following.cluster] >= following.seats else ():
            first = replace(following, begin=cut, end=part.end)
            yield [replace(part, end=cut), first, following], after[1:]

    @cached_property
    def _may_share(self) -> list[bool]:
        """For each cluster: whether its workers may run replicas of one stage and shards of the next."""
        options, costs = self.problem.options, Costs(self.problem, 1)
        free = options.split is None and options.replica is None and not self.problem.fixed
        return [free and costs.split_pays(cluster) for cluster in range(len(self.problem.clusters))]

    def _add_cluster(self, shape: Shape) -> Iterator[Shape]:
        """Give one end of the chain to an unused cluster: one block, half of a stage, or all but one block."""
        used = {part.cluster for part in shape.parts}
        unused = dict.fromkeys(self.kinds[cluster] for cluster in range(len(self.kinds)) if cluster not in used)
        first, last = shape.parts[0], shape.parts[-1]
        for kind in unused:
            cluster = next(s for s, own in enumerate(self.kinds) if own == kind and s not in used)
            for cut in self._choose_cuts(first):
                codec = self._find_quickest(cluster, first.cluster, cut)
                parts = Part(cluster, 0, cut), replace(first, begin=cut, codec=codec), *shape.parts[1:]
                yield replace(shape, parts=parts)
            for cut in self._choose_cuts(last):
                codec = self._find_quickest(last.cluster, cluster, cut)
                parts = *shape.parts[:-1], replace(last, end=cut), Part(cluster, cut, last.end, codec=codec)
                yield replace(shape, parts=parts)

    def _find_quickest(self, source: int, destination: int, cut: int) -> int:
        """The codec with the shortest round trip of a micro-batch and its gradient."""
        there, back = self.problem.line(source, destination), self.problem.line(destination, source)
        trips = [
            float(way.there[cut] / there.rate + way.back[cut] / back.rate + way.seconds[:, cut].sum())
            for way in self.problem.chain.choices
        ]
        return trips.index(min(trips))

    # ------------------------------------------------------------------ cuts
    @cached_property
    def _cuts(self) -> Sequence[int]:
        return [cut for cut in range(1, len(self.problem.chain)) if self.problem.chain.cuttable[cut]]

    def _inside(self, part: Part) -> Sequence[int]:
        """The positions where a stage may be cut."""
        return self._cuts[bisect_right(self._cuts, part.begin) : bisect_left(self._cuts, part.end)]

    def _choose_cuts(self, part: Part) -> Sequence[int]:
        """A sample of these positions: first, middle and last."""
        inside = self._inside(part)
        return sorted({inside[0], inside[len(inside) // 2], inside[-1]}) if inside else []


def _code_plainly(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Remove codecs from boundaries within a cluster."""
    near = [False, *(one.cluster == other.cluster for one, other in pairwise(parts))]
    return tuple(replace(p, codec=0) if same and p.codec else p for p, same in zip(parts, near, strict=True))


def code_otherwise(shape: Shape, place: int, codecs: Sequence[int]) -> Iterator[Shape]:
    """Variants of a shape with each of the codecs at the boundary before a stage."""
    parts = shape.parts
    for codec in codecs:
        if codec != parts[place].codec:
            yield replace(shape, parts=(*parts[:place], replace(parts[place], codec=codec), *parts[place + 1 :]))
