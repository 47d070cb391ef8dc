"""The search finds the optimum of exhaustive search; and its plans satisfy the limits."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import cache, partial
from typing import Any

import keras
import numpy as np
import pytest

import whale_nebula as nb
from tests.parity_harness import data
from tests.unit.planner.problems import draw_problem, find_best
from whale_nebula.errors import NebulaWarning
from whale_nebula.planner.problem import Candidate, Chain, ClusterCosts, Options, Part, Problem, Shape
from whale_nebula.planner.score import score
from whale_nebula.planner.search import SearchResult, search
from whale_nebula.runtime import decisions
from whale_nebula.runtime.step.step import Step
from whale_nebula.schedule.lines import Line

SEEDS = {"": (2, 6, 8, 11), "written": (25, 34), "split": (14,)}
MORE = {"": (4, 10, 12, 14, 115, 131), "written": (11, 12, 30, 35, 36, 38, 40, 48), "split": (12, 16, 19, 21, 23)}
"""Problems of each kind, in which all plans are soon tried, and more for the grid; benchmarks/planner tries many."""


@cache
def solve(seed: int, kind: str = "") -> SearchResult:
    """What is found for a drawn problem."""
    return search(draw_problem(seed, kind))


def make_uniform_problem(blocks: int, clusters: int, workers: int, **options: object) -> Problem:
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


def scale_memory(problem: Problem, factor: float) -> Problem:
    clusters = [replace(each, memory=each.memory * factor) for each in problem.clusters]
    return replace(problem, clusters=tuple(clusters))


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *((kind, seed) for kind, seeds in SEEDS.items() for seed in seeds),
        *(pytest.param(kind, seed, marks=pytest.mark.grid) for kind, seeds in MORE.items() for seed in seeds),
    ],
)
def test_search_is_as_fast_as_exhaustive_search(kind: str, seed: int) -> None:
    problem = draw_problem(seed, kind)
    best, found = find_best(problem), solve(seed, kind)
    assert (best is None) == (not found.candidates)
    if best is None:
        assert found.excess is not None
        factor = found.excess.needed / found.excess.allowed
        assert factor > 1.0, "and about the least with which a plan fits"
        assert not search(scale_memory(problem, factor / 1.3)).candidates
        memory = [found.excess.sufficient.get(each.name, each.memory) for each in problem.clusters]
        clusters = tuple(replace(each, memory=m) for each, m in zip(problem.clusters, memory, strict=True))
        assert search(replace(problem, clusters=clusters)).candidates
    else:
        assert found.candidates[0].seconds <= 1.02 * best.seconds
        assert all(problem.admits(each.shape) for each in found.candidates)
    for each in found.candidates:
        assert all(
            needs <= problem.clusters[p.cluster].memory for p, needs in zip(each.parts, each.memory, strict=True)
        )
        assert all(part.end == after.begin for part, after in zip(each.parts, each.parts[1:], strict=False))


def test_sampled_problems_cover_every_kind_of_plan() -> None:
    found = [solve(seed).candidates for seed in SEEDS[""]]
    assert any(not each for each in found)
    assert {len(each[0].parts) for each in found if each} >= {1, 2, 3}
    assert any(part.replicas > 1 for each in found for one in each[:1] for part in one.parts)
    assert any(part.codec for each in found for one in each[:1] for part in one.parts)
    assert {each[0].schedule for each in found if each} == {"eager-1f1b", "zero-bubble"}


def test_slow_links_give_a_plan_of_one_cluster() -> None:
    """Two clusters beyond a line on which a message takes longer than the whole step."""
    problem = replace(make_uniform_problem(4, 2, 1), lines={(0, 1): Line(rate=1e3), (1, 0): Line(rate=1e3)})
    shape = search(problem).candidates[0].shape
    assert [(part.cluster, part.begin, part.end, part.replicas) for part in shape.parts] == [(0, 0, 4, 1)]
    assert shape.micro_batches == 1


def test_equal_clusters_are_used_in_config_order() -> None:
    found = search(make_uniform_problem(12, 3, 1)).candidates[0]
    assert [part.cluster for part in found.parts] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "check"),
    [
        (Options(micro_batch=4), lambda each: each.shape.micro_batches == 4),
        (Options(micro_batch=100), lambda each: each.shape.micro_batches == 32),  # no more than rows
        (Options(replica=2), lambda each: {part.replicas for part in each.parts} == {2}),
        (Options(recompute=True), lambda each: each.shape.recompute),
        (Options(in_flight=2), lambda each: each.in_flight == 2),
    ],
)
def test_search_respects_user_options(options: Options, check: object) -> None:
    found = search(replace(make_uniform_problem(8, 2, 2), options=options)).candidates
    assert found
    assert all(check(each) for each in found)  # type: ignore[operator]


def test_requested_in_flight_limit_counts_in_predicted_seconds_and_memory() -> None:
    problem = make_uniform_problem(8, 2, 1)
    chain = replace(problem.chain, activations=np.full(8, 1e4))
    free, limited = (
        score(replace(problem, chain=chain, options=Options(in_flight=limit)), Shape((Part(0, 0, 4), Part(1, 4, 8)), 8))
        for limit in (None, 1)
    )
    assert isinstance(free, Candidate) and isinstance(limited, Candidate)
    assert limited.seconds > 1.3 * free.seconds and limited.memory[0] < 0.5 * free.memory[0]


def test_search_cuts_only_at_cuttable_edges() -> None:
    problem = make_uniform_problem(6, 3, 2)
    cuttable = np.array([True, False, False, True, False, False, True])
    found = search(replace(problem, chain=replace(problem.chain, cuttable=cuttable))).candidates
    assert {part.begin for each in found for part in each.parts} <= {0, 3}


def test_search_is_deterministic() -> None:
    assert search(draw_problem(11)) == solve(11)


def test_short_memory_forces_more_stages() -> None:
    """Each cluster may hold a third: three stages are needed, and what is in flight is limited."""
    problem = make_uniform_problem(9, 3, 1)
    chain = replace(problem.chain, weights=np.full(9, 1e6), activations=np.full(9, 1e4))
    small_clusters = tuple(replace(cluster, memory=3.2e6 + 9e4) for cluster in problem.clusters)
    found = search(replace(problem, chain=chain, clusters=small_clusters)).candidates[0]
    assert len(found.parts) == 3
    assert max(found.memory) <= 3.2e6 + 9e4 < math.inf


# -------------------- Steps under nb.auto_parallel for which no plan is searched: they run and report why
X, Y = np.ones((40, 8), "float32"), np.ones((40, 1), "float32")
CONFIG = {"clusters": {"gpu": {}, "npu": {}}, "measure": "0s"}


def make_model() -> keras.Model:
    """Two dense layers."""
    inputs = keras.Input((8,))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(8)(inputs)))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps for which an engine was made."""
    names, make = list[str](), Step._make_engine

    def count(step: Step, *given: object, **options: object) -> object:
        names.append(step.name.rpartition(".")[2])
        return make(step, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Step, "_make_engine", count)
    return names


def test_unplanned_step_is_captured_once(made: list[str]) -> None:
    nb.init(CONFIG)
    with nb.auto_parallel():
        with nb.replica(2, sync_every=2):
            found = make_model()
        found.compile("sgd", "mse")
        found.fit(X, Y, 8, verbose=0)
        assert made == ["train_step"]
        plan = nb.plan(found, X, Y)
    assert "does not change the scopes of this step" in plan.explain() and plan.predicted is None


def test_options_of_auto_parallel_determine_the_plan() -> None:
    nb.init({"clusters": {"npu": {}, "gpu": {"workers": ["127.0.0.1:7621", "127.0.0.1:7622"]}}, "measure": "0s"})
    with nb.auto_parallel(clusters=["gpu"], micro_batch=4, replica=1, recompute=True):  # two replicas would be chosen
        found = make_model()
        found.compile("sgd", "mse")
        plan = nb.plan(found, X, Y)
    assert {(each.cluster, each.replicas) for each in plan.stages.values()} == {("gpu", 1)}
    assert plan.micro_batch == 4 and plan.recompute


def test_dependent_step_has_no_predicted_seconds(made: list[str]) -> None:
    nb.init(CONFIG, links="60mbit,1ms")
    with nb.auto_parallel(micro_batch=2):
        found = make_model()
        found.compile("sgd", "mse")
        found.fit(X, Y, 8, verbose=0)
        for _ in range(2):
            found.evaluate(X, Y, 8, verbose=0)
        assert made == ["train_step", "test_step"]
        assert nb.plan(found, X, Y).predicted is not None
        found.compiled = False
        plan = nb.plan(found, X)
    assert plan.predicted is None and "predicted" not in plan.to_text()
    explanation = " ".join(plan.explain().split())
    assert "runs with the stages that" in explanation and "train_step, which has the same variables" in explanation


def test_training_is_planned_after_a_prediction(made: list[str]) -> None:
    """A prediction needs less memory: the stages that are chosen for it are too few for training."""
    nb.init(CONFIG)
    with nb.auto_parallel(memory="10KiB", micro_batch=4):
        layers = [keras.layers.Dense(16) for _ in range(3)]
        found, stages = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)]), []
        found.compile("adam", "mse")
        for run in (found.predict, partial(found.fit, y=Y[:8]), found.predict, found.predict):
            run(X[:8], verbose=0)
            stages.append(len(nb.last_report().stages))
        plan = nb.plan(found, X[:8], Y[:8])
        with warnings.catch_warnings():  # nobody has requested micro-batches
            warnings.simplefilter("error", NebulaWarning)
            found.evaluate(X[:1], Y[:1], verbose=0)
    assert made == ["predict_step", "train_step", "predict_step", "test_step"] and stages == [1, 2, 2, 2]
    assert plan.predicted is not None and max(plan.predicted.memory.values()) <= 10 * 1024


# -------------------- A replicated body and a sharded head on the same workers, as the planner finds them
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


def test_search_shards_only_the_heavy_head() -> None:
    problem = make_problem()
    found = search(problem).candidates
    copied = next(each for each in found if [(p.replicas, p.shards) for p in each.parts] == [(2, 1), (1, 2)])
    divided = next(each for each in found if len(each.parts) == 1)
    assert copied.seconds < 0.9 * divided.seconds and found[0].parts[0].shards == 1
    assert problem.assign_workers(copied.parts) == [0, 0]  # on the same workers, which need memory and time for both
    assert copied.memory[0] == copied.memory[1] <= 29 * MIB
    assert copied.seconds >= copied.shape.micro_batches * (copied.compute[0] / 2 + copied.compute[1])


@pytest.mark.grid
def test_sharded_head_trains_like_the_uncut_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(problem: Problem, *given: Any, **options: Any) -> SearchResult:
        shape = Shape((Part(0, 0, 2, replicas=2), Part(0, 2, 3, shards=2)), 2)
        found = score(problem, shape)
        assert isinstance(found, Candidate)
        return SearchResult((found,))

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
