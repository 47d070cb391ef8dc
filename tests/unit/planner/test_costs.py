"""What a stage costs besides its blocks: calls, and what crosses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from whale_nebula.planner.costs import Costs
from whale_nebula.planner.problem import Chain, Part, Problem, Shape, Site
from whale_nebula.planner.score import score

CALL, MESSAGE, BYTE, STEP = 1e-3, 1e-4, 1e-8, 5e-3


def make_problem() -> Problem:
    """Three blocks; two tensors of 1,000 bytes a row cross at each cut, and one comes back."""
    ones, cuts = np.ones(3), np.array([0.0, 1000, 1000, 0])
    chain = Chain(
        ("a", "b", "c"), ones, ones, ones, ones, ones, cuts, cuts / 2, 0 * cuts, np.ones(4, bool),
        sent=np.array([0.0, 2, 2, 0]), returned=np.array([0.0, 1, 1, 0]),
    )  # fmt: skip
    seconds = np.stack([np.zeros(3), np.full(3, 1e-3)])
    site = Site("gpu", 1, seconds, 2 * seconds, np.zeros(3), CALL, fused=0.5, crossing=BYTE, message=MESSAGE, step=STEP)
    return Problem(chain, (site, replace(site, name="npu")), 8)


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
    quiet = tuple(replace(site, crossing=0.0, message=0.0, step=0.0) for site in problem.sites)
    silent = score(replace(problem, sites=quiet), found.shape)  # type: ignore[union-attr]
    assert found.compute == silent.compute  # type: ignore[union-attr]
    assert found.seconds > silent.seconds + STEP  # type: ignore[union-attr]
