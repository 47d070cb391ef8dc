"""Codecs between given stages: none, the requested one, or the mildest that hides."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from tests.same import data
from tests.unit.planner.problems import draw_problem
from whale_nebula.codec.packing import PREFIX
from whale_nebula.planner.crossing import Tensor, code_crossings
from whale_nebula.planner.problem import Candidate, Part, Shape
from whale_nebula.planner.score import score
from whale_nebula.planner.search import Found, search
from whale_nebula.runtime import decisions
from whale_nebula.runtime.run import current_run

CLUSTERS = {"clusters": {name: {"flops": "2M"} for name in ("a", "b", "c")}}
WIDTH, COUNT = 32, 4


def model(parts: Any = ()) -> keras.Model:
    """Dense layers, without scopes, or those of each part in a stage on its cluster."""
    keras.utils.set_random_seed(3)
    hidden = inputs = keras.Input((WIDTH,))
    for number in range(COUNT):
        here = next((name for name, begin, end in parts if begin <= number < end), None)
        with contextlib.nullcontext() if here is None else nb.stage(cluster=here):
            hidden = keras.layers.Dense(WIDTH, "relu")(hidden)
    found = keras.Model(inputs, hidden)
    found.compile(keras.optimizers.SGD(0.1), "mse")
    return found


def losses(found: keras.Model) -> list[float]:
    x, y = data(32, WIDTH), data(32, WIDTH, seed=1)
    return found.fit(x, y, 16, epochs=2, shuffle=False, verbose=0).history["loss"]


def planned(compress: str, line: str, train: bool = False) -> tuple[nb.Plan, Any, list[float]]:
    """The plan of a model without scopes, the decision, and the losses if it is trained."""
    nb.shutdown()
    nb.init(CLUSTERS, links=line)
    with nb.auto_parallel(compress=compress):
        found = model()
        plan = nb.plan(found, data(16, WIDTH), data(16, WIDTH))
        return plan, current_run().decisions[0], losses(found) if train else []


def codecs(plan: nb.Plan) -> set[tuple[str, str]]:
    return {(each.codec, each.backward_codec) for each in plan.boundaries}


def test_nothing_is_made_smaller_unless_it_is_asked_for() -> None:
    plan, decision, _ = planned("none", "100kbit,1ms")
    assert codecs(plan) == {("none", "none")} and not decision.problem.chain.coded


def test_what_is_said_crosses_so_as_in_the_same_stages_by_hand() -> None:
    plan, decision, found = planned("fp16", "1mbit,1ms", train=True)
    assert codecs(plan) == {("fp16", "int8")}
    for each in plan.boundaries:
        (destination,) = each.destinations
        count, clusters = plan.micro_batch, [plan.stages[name].cluster for name in (each.source, destination)]
        for size, link in ((each.bytes, clusters), (each.backward_bytes, clusters[::-1])):
            predicted = plan.predicted.bytes["->".join(link)]  # counted for a whole batch, which has one prefix
            assert count * size - predicted in (0, (count - 1) * PREFIX)
    parts = [(decision.problem.clusters[part.cluster].name, part.begin, part.end) for part in decision.chosen.parts]
    nb.shutdown()
    nb.init(CLUSTERS, links="1mbit,1ms")
    with nb.cluster(), nb.pipeline(plan.micro_batch, schedule=plan.schedule), nb.compress(fp16=True):
        by_hand = model(parts)
    assert losses(by_hand) == pytest.approx(found, rel=1e-4)  # gradients are rounded by chance


@pytest.mark.parametrize("cut", [2, *(pytest.param(cut, marks=pytest.mark.grid) for cut in (1, 3, 4))])
def test_bytes_at_each_cut_are_those_that_cross(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a normalisation its input crosses alone, and what it makes of it is computed after the line."""

    def choose(problem: Any, *options: Any) -> Found:
        parts = Part(0, 0, cut), Part(1, cut, len(problem.chain))
        found = score(problem, Shape(parts, 2))
        assert isinstance(found, Candidate)
        return Found((found,))

    monkeypatch.setattr(decisions, "search", choose)
    nb.shutdown()
    nb.init(CLUSTERS, links="1mbit,1ms")
    inputs = keras.Input((8, WIDTH))
    hidden = keras.layers.Dense(WIDTH)(inputs)
    inner = keras.layers.Dense(4 * WIDTH)(keras.layers.LayerNormalization()(hidden))
    with nb.auto_parallel():
        found = keras.Model(inputs, keras.layers.Dense(2)(hidden + keras.layers.Dense(WIDTH)(inner)))
        found.compile("sgd", "mse")
        plan = nb.plan(found, np.zeros((16, 8, WIDTH)), np.zeros((16, 8, 2)))
    crossing = {"a->b": sum(each.step_bytes for each in plan.boundaries)}
    crossing["b->a"] = sum(each.backward_step_bytes or 0 for each in plan.boundaries)
    assert plan.predicted.bytes == pytest.approx(crossing, rel=0.02)


@pytest.mark.parametrize(
    ("line", "expected"),
    [pytest.param("10gbit,0ms", {"none"}, marks=pytest.mark.grid), ("200kbit,1ms", {"int8", "int4"})],
)
def test_of_its_own_it_takes_the_mildest_that_hides(line: str, expected: set[str]) -> None:
    plan, *_ = planned("auto", line)
    assert {codec for codec, _ in codecs(plan)} <= expected and all(there == back for there, back in codecs(plan))
    said = " ".join(plan.explain().split())
    assert all(
        (f"{e.source} to {e.destinations[0]} {e.codec}".replace("none", "as it is")) in said for e in plan.boundaries
    )


@pytest.mark.parametrize("seed", [21, 25, 59])
def test_with_a_milder_codec_a_step_takes_clearly_longer_than_with_the_best(seed: int) -> None:
    problem = draw_problem(seed)
    found = search(replace(problem, options=replace(problem.options, slack=0.02))).candidates

    def by(shape: Shape, codecs: dict[int, int]) -> float:
        parts = tuple(replace(part, codec=codecs.get(place, part.codec)) for place, part in enumerate(shape.parts))
        scored = score(problem, replace(shape, parts=parts))
        return scored.seconds if isinstance(scored, Candidate) else np.inf

    assert any(part.codec for each in found for part in each.parts)
    for each in found:
        places = each.crossed
        every = itertools.product(range(4), repeat=len(places))
        best = min(by(each.shape, dict(zip(places, codecs, strict=True))) for codecs in every)
        assert each.seconds <= 1.02 * best * 1.0001
        milder = [by(each.shape, {place: codec}) for place in places for codec in range(each.parts[place].codec)]
        assert all(seconds > 1.02 * best * 0.9999 for seconds in milder)


def test_seconds_of_codecs_are_those_that_were_measured() -> None:
    tensors = [[], [Tensor("float32", (8, 64), True), Tensor("int32", (8,), False)]]
    _, fp16, int8, _ = code_crossings("auto", tensors, 8, {"int8": 1e-6})
    assert fp16.there.tolist() == [0.0, (8 * 64 * 2 + 8 * 4 + 4) / 8] or fp16.there[1] == pytest.approx(132.0, rel=0.01)
    assert int8.seconds[:, 1].tolist() == pytest.approx([1e-6 * 8 * 64 * 4 / 2 / 8] * 4)
    assert 0.0 < fp16.seconds[0, 1] < int8.seconds[0, 1]
