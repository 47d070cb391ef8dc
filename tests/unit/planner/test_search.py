"""The search finds the optimum of exhaustive search; and its plans satisfy the limits."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.unit.planner.problems import draw_problem, find_best
from whale_nebula.planner.problem import Chain, ClusterCosts, Options, Problem
from whale_nebula.planner.search import Found, search
from whale_nebula.schedule.lines import Line

SEEDS = {"": (2, 6, 8, 11), "written": (25, 34), "split": (14,)}
MORE = {"": (4, 10, 12, 14, 115, 131), "written": (11, 12, 30, 35, 36, 38, 40, 48), "split": (12, 16, 19, 21, 23)}
"""Problems of each kind, in which all plans are soon tried, and more for the grid; benchmarks/planner tries many."""


@cache
def solve(seed: int, kind: str = "") -> Found:
    """What is found for a drawn problem."""
    return search(draw_problem(seed, kind))


def alike(blocks: int, clusters: int, workers: int, **options: object) -> Problem:
    """Blocks and clusters that are alike, without memory to keep to unless `options` of a cluster say one."""
    seconds = np.stack([np.full(blocks, 1e-5), np.full(blocks, 1e-3)])
    ones, cuts = np.ones(blocks), np.full(blocks + 1, 1e3)
    chain = Chain(
        tuple(map(str, range(blocks))), ones, ones, ones, ones, ones, cuts, cuts, 0 * cuts, np.ones(blocks + 1, bool)
    )
    costs = ClusterCosts("", workers, seconds, 2 * seconds, 0 * ones, 1e-4)
    every = tuple(replace(costs, name=f"c{n}", **options) for n in range(clusters))
    lines = {(a, b): Line(rate=7.5e6, delay=0.01) for a in range(clusters) for b in range(clusters) if a != b}
    return Problem(chain, every, 32, lines)


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *((kind, seed) for kind, seeds in SEEDS.items() for seed in seeds),
        *(pytest.param(kind, seed, marks=pytest.mark.grid) for kind, seeds in MORE.items() for seed in seeds),
    ],
)
def test_a_plan_is_as_fast_as_the_best_of_all(kind: str, seed: int) -> None:
    problem = draw_problem(seed, kind)
    best, found = find_best(problem), solve(seed, kind)
    assert (best is None) == (not found.candidates)
    if best is None:
        assert found.excess is not None
        assert found.excess.needed > found.excess.allowed
    else:
        assert found.candidates[0].seconds <= 1.02 * best.seconds
        assert all(problem.keeps(each.shape) for each in found.candidates)
    for each in found.candidates:
        assert all(
            needs <= problem.clusters[p.cluster].memory for p, needs in zip(each.parts, each.memory, strict=True)
        )
        assert all(part.end == after.begin for part, after in zip(each.parts, each.parts[1:], strict=False))


def test_the_sample_has_problems_of_each_kind() -> None:
    found = [solve(seed).candidates for seed in SEEDS[""]]
    assert any(not each for each in found)
    assert {len(each[0].parts) for each in found if each} >= {1, 2, 3}
    assert any(part.replicas > 1 for each in found for one in each[:1] for part in one.parts)
    assert any(part.codec for each in found for one in each[:1] for part in one.parts)
    assert {each[0].schedule for each in found if each} == {"eager-1f1b", "zero-bubble"}


def test_one_cluster_that_nothing_helps_does_all() -> None:
    """Two clusters beyond a line on which a message takes longer than the whole step."""
    problem = replace(alike(4, 2, 1), lines={(0, 1): Line(rate=1e3), (1, 0): Line(rate=1e3)})
    shape = search(problem).candidates[0].shape
    assert [(part.cluster, part.begin, part.end, part.replicas) for part in shape.parts] == [(0, 0, 4, 1)]
    assert shape.micro_batches == 1


def test_clusters_that_are_alike_come_in_their_order() -> None:
    found = search(alike(12, 3, 1)).candidates[0]
    assert [part.cluster for part in found.parts] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "check"),
    [
        (Options(micro_batch=4), lambda shape: shape.micro_batches == 4),
        (Options(micro_batch=100), lambda shape: shape.micro_batches == 32),  # no more than rows
        (Options(replica=2), lambda shape: {part.replicas for part in shape.parts} == {2}),
        (Options(recompute=True), lambda shape: shape.recompute),
    ],
)
def test_what_the_user_says_holds(options: Options, check: object) -> None:
    found = search(replace(alike(8, 2, 4), options=options)).candidates
    assert found
    assert all(check(each.shape) for each in found)  # type: ignore[operator]


def test_where_one_may_not_cut_no_plan_does() -> None:
    problem = alike(6, 3, 2)
    cuttable = np.array([True, False, False, True, False, False, True])
    found = search(replace(problem, chain=replace(problem.chain, cuttable=cuttable))).candidates
    assert {part.begin for each in found for part in each.parts} <= {0, 3}


def test_the_same_problem_has_the_same_plan() -> None:
    assert search(draw_problem(11)) == solve(11)


def test_memory_is_what_makes_a_chain_long() -> None:
    """Each cluster may hold a third: three stages are needed, and what is in flight is limited."""
    problem = alike(9, 3, 1)
    chain = replace(problem.chain, weights=np.full(9, 1e6), held=np.full(9, 1e4))
    tight = tuple(replace(cluster, memory=3.2e6 + 9e4) for cluster in problem.clusters)
    found = search(replace(problem, chain=chain, clusters=tight)).candidates[0]
    assert len(found.parts) == 3
    assert max(found.memory) <= 3.2e6 + 9e4 < math.inf
