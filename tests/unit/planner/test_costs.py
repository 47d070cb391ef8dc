"""Costs of a stage beyond its blocks: calls, and crossings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.planner.problems import draw_problem
from whale_nebula.planner.costs import Costs
from whale_nebula.planner.problem import Bound, Chain, ClusterCosts, Options, Part, Problem, Shape
from whale_nebula.planner.score import score
from whale_nebula.planner.search import search

CALL, MESSAGE, BYTE, STEP = 1e-3, 1e-4, 1e-8, 5e-3


def make_problem() -> Problem:
    """Three blocks; two tensors of 1,000 bytes a row cross at each cut, and one comes back."""
    ones, cuts = np.ones(3), np.array([0.0, 1000, 1000, 0])
    chain = Chain(
        ("a", "b", "c"), ones, ones, ones, ones, ones, cuts, cuts / 2, 0 * cuts, np.ones(4, bool),
        sent=np.array([0.0, 2, 2, 0]), returned=np.array([0.0, 1, 1, 0]),
    )  # fmt: skip
    seconds = np.stack([np.zeros(3), np.full(3, 1e-3)])
    cluster = ClusterCosts(
        "gpu", 1, seconds, 2 * seconds, np.zeros(3), CALL, fused=0.5, crossing=BYTE, message=MESSAGE, step=STEP
    )
    return Problem(chain, (cluster, replace(cluster, name="npu")), 8)


def test_a_last_stage_is_one_call() -> None:
    costs = Costs(make_problem(), 4)
    assert costs.part_seconds(Part(0, 0, 1)) == pytest.approx((2e-3 + CALL, 4e-3 + CALL))
    assert costs.part_seconds(Part(1, 1, 3)) == pytest.approx((0.5 * (4e-3 + CALL), 0.5 * 8e-3))


def test_what_crosses_takes_time_at_both_ends() -> None:
    costs = Costs(make_problem(), 4)
    there, back = 2 * MESSAGE + 2 * 1000 * BYTE, MESSAGE + 2 * 500 * BYTE
    assert costs.part_handling(Part(0, 0, 1)) == pytest.approx((there, back))
    assert costs.part_handling(Part(0, 1, 2)) == pytest.approx((2 * there, 2 * back))  # in the middle


def test_the_matrix_of_the_search_says_the_same() -> None:
    costs = Costs(make_problem(), 4)
    for begin, end in ((0, 1), (0, 3), (1, 2), (1, 3)):
        part = Part(0, begin, end)
        whole = sum(costs.part_seconds(part)) + sum(costs.part_handling(part))
        assert costs.seconds(0)[begin, end] == pytest.approx(whole)


def test_what_a_stage_computes_is_told_without_what_crosses() -> None:
    problem = make_problem()
    found = score(problem, Shape((Part(0, 0, 1), Part(1, 1, 3)), 4))
    quiet = tuple(replace(cluster, crossing=0.0, message=0.0, step=0.0) for cluster in problem.clusters)
    silent = score(replace(problem, clusters=quiet), found.shape)  # type: ignore[union-attr]
    assert found.compute == silent.compute  # type: ignore[union-attr]
    assert found.seconds > silent.seconds + STEP  # type: ignore[union-attr]


@pytest.mark.parametrize("recompute", [False, True])
def test_every_range_needs_what_its_stage_needs(recompute: bool) -> None:
    problem = draw_problem(5)
    costs = Costs(problem, 4, recompute)
    for number, shards in ((1, 1), (3, 1), (4, 2)):
        found = costs.bytes(number, shards)
        for begin, end in zip(*np.nonzero(costs.upper), strict=True):
            assert found[begin, end] == pytest.approx(costs.part_bytes(Part(0, begin, end, 1, shards), number, number))


def test_memory_is_the_most_of_a_backward_and_of_an_update() -> None:
    none, ones = np.zeros(3), np.ones(2)
    chain = Chain(
        ("a", "b"), 100 * ones, 200 * ones, 100 * ones, 10 * ones, 4 * ones, np.array([0.0, 5, 0]), none, none,
        np.ones(3, bool), largest=60 * ones, put_off=7 * ones,
    )  # fmt: skip
    cluster = ClusterCosts("gpu", 2, np.ones((2, 2)), np.ones((2, 2)), ones)

    def needed(count: int, part: Part, *numbers: int, slots: float = 200.0) -> float:
        problem = Problem(replace(chain, slots=slots * ones), (cluster,), 8 * count)
        return Costs(problem, count).part_bytes(part, *numbers)

    first, last, both = Part(0, 0, 1), Part(0, 1, 2), Part(0, 0, 2)
    # 8 rows: a block keeps 80; an update has the gradients, as many more where there are slots, and the largest
    assert needed(1, both, 1) == 600 + 200 + 200 + 60
    assert needed(1, both, 1, slots=0.0) == 200 + max(200 + 60, 160 + 100 + 32, 80 + 200 + 32)
    # a second backward finds sums; all that it has made is there while they are added
    assert needed(8, first, 3) == 300 + 3 * 80 + 2 * 100 + 60
    assert needed(3, first, 3) == 300 + max(3 * 80 + 100 + 32, 2 * 80 + 2 * 100 + 60)
    # the last one keeps nothing from a call to the next but what has come, and what comes later reads
    assert needed(8, last, 1, 3, 2) == 300 + max(2 * 7 * 8 + 3 * 40 + max(80 + 32 + 200, 200 + 60), 260)


def test_rows_of_a_table_take_memory_and_have_one_replica() -> None:
    problem = make_problem()
    beside = np.array([0.0, 5e6, 0.0])
    held = replace(problem, chain=replace(problem.chain, beside=beside))
    more = Costs(held, 4).bytes(1) - Costs(problem, 4).bytes(1)
    begin, end = np.ogrid[:4, :4]
    np.testing.assert_allclose(more, np.where((begin <= 1) & (end >= 2), 5e6, 0.0))
    assert Costs(held, 4).part_bytes(Part(0, 1, 2, shards=2), 1) < 3e6
    clusters = tuple(replace(cluster, workers=2) for cluster in problem.clusters)
    free, tied = (search(replace(each, clusters=clusters)).candidates for each in (problem, held))
    assert any(part.replicas > 1 for each in free for part in each.parts if part.begin <= 1 < part.end)
    assert tied and not any(part.replicas > 1 for each in tied for part in each.parts if part.begin <= 1 < part.end)
    small = tuple(replace(cluster, memory=4e6 if cluster.name == "gpu" else 6e6) for cluster in problem.clusters)
    best = search(replace(held, clusters=small)).candidates
    assert {part.cluster for each in best for part in each.parts if part.begin <= 1 < part.end} == {1}


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_blocks_stay_where_their_inputs_are(share: float) -> None:
    """The first and the last one in npu, which does all of it if it has the memory, although gpu is as fast."""
    problem = make_problem()
    chain = replace(problem.chain, weights=np.full(3, 1e5))
    bound = replace(problem, chain=chain, options=Options(micro_batch=8), bound=(Bound(0, (1,)), Bound(2, (1,))))
    memory = share * Costs(bound, 8).part_bytes(Part(1, 0, 3), 8)
    clusters = tuple(replace(cluster, memory=memory) for cluster in problem.clusters)
    found = search(replace(bound, clusters=clusters)).candidates
    ways = [[part.cluster for part in each.parts] for each in found]
    assert ways and all(way[0] == way[-1] == 1 for way in ways)
    assert [1, 0, 1] in ways and ([1] in ways) == (share == 1.0)


def test_memory_of_stages_that_share_a_worker_is_found_together() -> None:
    """The first and the last of eight blocks are bound to npu, which is far faster, and holds four of them."""
    ones, cuts = np.ones(8), np.array([0.0, *[1000.0] * 7, 0.0])
    chain = Chain(
        tuple("abcdefgh"), 1e6 * ones, ones, ones, ones, ones, cuts, cuts / 2, 0 * cuts, np.ones(9, bool)
    )  # fmt: skip
    seconds = np.stack([np.zeros(8), np.full(8, 1e-3)])
    slow = ClusterCosts("gpu", 1, 5 * seconds, 10 * seconds, np.zeros(8), memory=5.5e6)
    fast = replace(slow, name="npu", forward=seconds, backward=2 * seconds, memory=4.5e6)
    bound = (Bound(0, (1,)), Bound(7, (1,)))
    found = search(Problem(chain, (slow, fast), 8, options=Options(micro_batch=1), bound=bound)).candidates
    assert found and [part.cluster for part in found[0].parts] == [1, 0, 1]
    assert max(found[0].memory) <= 5.5e6
