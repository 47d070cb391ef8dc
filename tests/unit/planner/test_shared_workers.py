"""A replicated body and a sharded head on the same workers, as the planner finds them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from tests.same import data
from whale_nebula.planner.problem import Candidate, Chain, ClusterCosts, Options, Part, Problem, Shape
from whale_nebula.planner.score import score
from whale_nebula.planner.search import Found, search
from whale_nebula.runtime import decisions
from whale_nebula.schedule.lines import Line

MIB = 2.0**20


def make_problem() -> Problem:
    """A body of little weight whose tensors are large, and a head that one worker cannot hold; a slow line inside."""
    weights = np.array([0.1, 0.1, 8.0]) * MIB
    crossing = np.array([0, 1e5, 2e3, 0])
    chain = Chain(
        ("in", "body", "head"), weights, 2 * weights, weights, np.full(3, 1e3), np.zeros(3), crossing, crossing,
        np.zeros(4), np.ones(4, bool),
    )  # fmt: skip
    seconds = np.stack([np.zeros(3), np.full(3, 1e-3)])
    cluster = ClusterCosts("gpu", 2, seconds, 2 * seconds, np.zeros(3), 1e-4, 29 * MIB, Line(rate=1e8, delay=1e-5))
    return Problem(chain, (cluster,), 32, {}, Options(split=None))


def test_it_is_found_where_only_the_head_is_worth_dividing() -> None:
    problem = make_problem()
    found = search(problem).candidates
    copied = next(each for each in found if [(p.replicas, p.shards) for p in each.parts] == [(2, 1), (1, 2)])
    divided = next(each for each in found if len(each.parts) == 1)
    assert copied.seconds < 0.9 * divided.seconds and found[0].parts[0].shards == 1
    assert problem.seat_parts(copied.parts) == [0, 0]  # on the same workers, which need memory and time for both
    assert copied.memory[0] == copied.memory[1] <= 29 * MIB
    assert copied.seconds >= copied.shape.micro_batches * (copied.compute[0] / 2 + copied.compute[1])


@pytest.mark.grid
def test_it_trains_the_same_numbers_and_divides_the_head_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(problem: Problem, *given: Any, **options: Any) -> Found:
        shape = Shape((Part(0, 0, 2, replicas=2), Part(0, 2, 3, shards=2)), 2)
        found = score(problem, shape)
        assert isinstance(found, Candidate)
        return Found((found,))

    def train() -> list[float]:
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(16, "relu"), keras.layers.Dense(16, "relu"), keras.layers.Dense(40, name="head")]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        losses: list[float] = model.fit(data(32, 8), data(32, 40, seed=1), 16, 2, shuffle=False, verbose=0).history[
            "loss"
        ]
        made.append(model)
        return losses

    made: list[keras.Model] = []
    expected = train()
    nb.init({"clusters": {"gpu": {"workers": ["127.0.0.1:7621", "127.0.0.1:7622"]}}, "measure": "0s"})
    monkeypatch.setattr(decisions, "search", choose)
    with nb.auto_parallel():
        assert train() == pytest.approx(expected, rel=1e-4)
        plan = nb.plan(made[-1], data(16, 8), data(16, 40, seed=1))
    paths = {variable.path for variable in made[-1].variables} | {v.path for v in made[-1].optimizer.variables}
    divided = paths & plan.layouts.keys()
    assert len(divided) == 6 and all("head" in path for path in divided), divided
