"""Random small problems, and the optimum of each by exhaustive search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from whale_nebula.planner.costs import Costs
from whale_nebula.planner.problem import (
    Candidate,
    Chain,
    ClusterCosts,
    CodecCosts,
    Excess,
    Options,
    Part,
    Problem,
    Shape,
    WrittenStage,
)
from whale_nebula.planner.score import score
from whale_nebula.schedule.lines import Line


def draw_problem(seed: int, kind: str = "") -> Problem:
    """Three to five blocks, two or three clusters, unequal lines, short memory, gradients that may come later; with
    codecs to choose from in every second problem, stages that were "written", of which little is open, or much, or
    where variables may be "split".
    """
    draw = np.random.default_rng(seed)
    blocks, clusters = int(draw.integers(3, 6)), int(draw.integers(2, 4))
    seconds, weights = draw.uniform(0.2, 3, blocks) * 1e-3, draw.uniform(0.1, 2, blocks) * 1e6
    crossing = np.concatenate([[0], draw.uniform(0.5, 8, blocks - 1) * 1e3, [0]])
    chain = Chain(
        tuple(map(str, range(blocks))), weights, 2 * weights, weights, draw.uniform(0.02, 0.3, blocks) * 2.5e5,
        draw.uniform(0, 0.05, blocks) * 1e6, crossing, crossing * draw.choice([1.0, 0.25]), np.zeros(blocks + 1),
        np.ones(blocks + 1, bool),
    )  # fmt: skip
    lines = {
        pair: Line(rate=float(draw.choice([7.5e6, 15e6, 1e8])), delay=float(draw.choice([0.001, 0.01, 0.02])))
        for pair in itertools.permutations(range(clusters), 2)
    }
    clusters = tuple(_draw_cluster(draw, number, seconds) for number in range(clusters))
    share = draw.choice([0.0, 0.5, 0.5], blocks)  # of each block's backward what is for gradients of weights alone
    clusters = tuple(replace(cluster, deferred_backward=share * cluster.backward) for cluster in clusters)
    chain = replace(chain, separate_gradients=weights * (share > 0))
    if not kind and seed % 2:
        chain = replace(chain, codecs=tuple(_draw_codecs(draw, chain)))
    problem = Problem(chain, clusters, int(draw.choice([8, 16])), lines, Options(max_micro_batches=8, slack=0.0))
    if kind == "split":
        return replace(problem, options=Options(max_micro_batches=8, split=None, slack=0.0))
    return _draw_written(draw, problem) if kind == "written" else problem


def _draw_written(draw: Any, problem: Problem) -> Problem:
    blocks = len(problem.chain)
    edges = sorted(draw.choice(blocks + 1, 2 * int(draw.integers(1, blocks // 2 + 1)), replace=False).tolist())
    fixed, cuttable = [], problem.chain.cuttable.copy()
    for number, (begin, end) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
        clusters = tuple(draw.permutation(len(problem.clusters))[: int(draw.integers(0, 2))].tolist())
        fixed.append(WrittenStage(f"s{number}", begin, end, clusters, draw.choice([None, 1, 2])))
        cuttable[begin + 1 : end] = False
    return replace(problem, chain=replace(problem.chain, cuttable=cuttable), written_stages=tuple(fixed))


def _draw_codecs(draw: Any, chain: Chain) -> Iterator[CodecCosts]:
    """As it is, and by three codecs that lose more and more, and take longer."""
    yield chain.uncompressed
    for name, share, taken in (("fp16", 0.5, 0.5), ("int8", 0.26, 1.0), ("int4", 0.14, 1.5)):
        seconds = (
            np.stack([chain.sent_bytes, chain.sent_bytes, chain.returned_bytes, chain.returned_bytes])
            * taken
            * draw.choice([1e-10, 3e-9, 3e-8])
        )
        yield CodecCosts(name, chain.sent_bytes * share, chain.returned_bytes * share, seconds)


def _draw_cluster(draw: Any, number: int, seconds: Any) -> ClusterCosts:
    forward = np.stack([draw.uniform(0, 2e-4, len(seconds)), seconds / draw.choice([0.5, 1, 1, 2, 4])])
    memory, rate = float(draw.choice([math.inf, 3e6, 8e6, 14e6])), float(draw.choice([math.inf, 1e9, 1e8]))
    workers = int(draw.integers(1, 3))
    return ClusterCosts(
        f"c{number}", workers, forward, 2 * forward, seconds * 0.2, 5e-4, memory, Line(rate=rate, delay=5e-5)
    )


def find_best(problem: Problem, known: float = math.inf) -> Candidate | None:
    """The fastest of all plans, of those below so many seconds that are `known` to be possible; None where none is.
    Those that cannot be faster than what was found are not simulated.
    """
    best: Candidate | None = None
    for shape, costs in _list_shapes(problem):
        if isinstance(score(problem, shape, costs, simulated=False), Excess):
            continue  # whatever the codecs
        for parts in _list_coded_parts(shape.parts, problem):
            coded = replace(shape, parts=parts)
            if _lower_bound(coded, costs) < (known if best is None else best.seconds):
                found = score(problem, coded, costs)
                if isinstance(found, Candidate) and found.seconds < (known if best is None else best.seconds):
                    best = found
    return best


def _lower_bound(shape: Shape, costs: Costs) -> float:
    """Seconds below which no step of this shape can be: what its busiest stage computes, how long its busiest line is
    held, and how long one micro-batch is on its way without what may come later; and an update.
    """
    problem, alone, held = costs.problem, 0.0, [0.0]
    for part in shape.parts:
        alone += sum(costs.part_seconds(part)) - costs.part_deferred_seconds(part)
    for one, other in itertools.pairwise(shape.parts):
        there, back, _ = costs.size_crossing(one, other)
        for wire, size in (
            (problem.line(one.cluster, other.cluster), there),
            (problem.line(other.cluster, one.cluster), back),
        ):
            alone += wire.seconds(size) + wire.delay
            held.append(shape.micro_batches * wire.seconds(size))
    busy = (math.ceil(shape.micro_batches / part.replicas) * sum(costs.part_seconds(part)) for part in shape.parts)
    return max(alone, *held, *busy) + max(map(costs.part_update, shape.parts))


def _list_shapes(problem: Problem) -> Iterator[tuple[Shape, Costs]]:
    if problem.written_stages:
        yield from _list_written_shapes(problem)
        return
    blocks = len(problem.chain)
    for recompute, count in itertools.product((False, True), problem.micro_batch_counts):
        costs = Costs(problem, count, recompute)
        for order in _list_orders(problem):
            ways = [
                [(stages, d, s) for d, s in _list_seats(costs, cluster) for stages in range(1, n // (d * s) + 1)]
                for cluster, n in ((cluster, problem.clusters[cluster].workers) for cluster in order)
            ]
            for way in itertools.product(*ways):
                homes = [
                    (cluster, d, s) for cluster, (stages, d, s) in zip(order, way, strict=True) for _ in range(stages)
                ]
                for cuts in itertools.combinations(range(1, blocks), len(homes) - 1):
                    ends = itertools.pairwise([0, *cuts, blocks])
                    parts = tuple(Part(cluster, *end, d, s) for (cluster, d, s), end in zip(homes, ends, strict=True))
                    yield Shape(parts, count, recompute), costs


def _list_coded_parts(parts: tuple[Part, ...], problem: Problem) -> Iterator[tuple[Part, ...]]:
    """The same stages with every choice of codecs between clusters."""
    crossed = [n > 0 and part.cluster != parts[n - 1].cluster for n, part in enumerate(parts)]
    for codecs in itertools.product(
        *(range(len(problem.chain.codec_choices) if crosses else 1) for crosses in crossed)
    ):
        yield tuple(replace(part, codec=codec) for part, codec in zip(parts, codecs, strict=True))


def _list_seats(costs: Costs, cluster: int) -> list[tuple[int, int]]:
    """Replicas and pieces of variables that a stage may have on a cluster."""
    workers = costs.problem.clusters[cluster].workers
    split = costs.problem.options.split is None and costs.is_split_worth_trying(cluster)
    return [(d, 1) for d in range(1, min(workers, costs.micro_batches) + 1)] + [(1, 2)] * (split and workers > 1)


def _list_written_shapes(problem: Problem) -> Iterator[tuple[Shape, Costs]]:
    """Every stage on every cluster; tensors come back to one, and workers are shared, where that was written."""
    blocks = len(problem.chain)
    homes = [
        (cluster, d)
        for cluster in range(len(problem.clusters))
        for d in range(1, max(2, problem.clusters[cluster].workers) + 1)
    ]
    for recompute, count in itertools.product((False, True), problem.micro_batch_counts):
        costs = Costs(problem, count, recompute)
        for size in range(1, blocks + 1):
            for cuts in itertools.combinations(range(1, blocks), size - 1):
                for way in itertools.product(homes, repeat=size):
                    ends = itertools.pairwise([0, *cuts, blocks])
                    parts = tuple(Part(cluster, *end, d) for (cluster, d), end in zip(way, ends, strict=True))
                    if problem.admits(shape := Shape(parts, count, recompute)) and _has_room(problem, parts):
                        yield shape, costs


def _has_room(problem: Problem, parts: tuple[Part, ...]) -> bool:
    visits = [cluster for cluster, _ in itertools.groupby(part.cluster for part in parts)]
    for cluster in set(visits):
        own = [part.replicas for part in parts if part.cluster == cluster]
        written = sum(each.clusters == (cluster,) for each in problem.written_stages)
        if sum(own) > max(problem.count_room(cluster), *own) or visits.count(cluster) > max(1, written):
            return False
    return True


def _list_orders(problem: Problem) -> Iterator[tuple[int, ...]]:
    for size in range(1, len(problem.clusters) + 1):
        yield from itertools.permutations(range(len(problem.clusters)), size)
