"""A problem is corrected by measurements of a run, and a better plan is offered if they show one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.planner.test_explanation import make_problem, make_shape
from whale_nebula.planner.decision import Observation, correct_problem, find_better_plan, find_slowness, slow_down
from whale_nebula.planner.problem import Candidate, Problem, Shape
from whale_nebula.planner.score import score
from whale_nebula.planner.search import search
from whale_nebula.schedule.lines import Line

BEST = search(make_problem()).candidates[0]
"""What is chosen by rates as they are told: the first cluster is twice as fast."""


def observe(problem: Problem, plan_shape: Shape, lost: float = 0.0) -> Observation:
    """What a step of a plan is measured to take where a problem is the truth, and something else takes time."""
    found = score(problem, plan_shape)
    assert isinstance(found, Candidate)
    return Observation(found.seconds + lost, found.compute, problem.lines)


@pytest.mark.parametrize(
    ("times", "rate"),
    [
        *[({0: 6.0}, 7.5e6), ({1: 0.25}, 2e8)],
        *(
            pytest.param(*each, marks=pytest.mark.grid)
            for each in (({0: 6.0}, 2e8), ({1: 0.25}, 7.5e6), ({0: 3.0, 1: 9.0}, 7.5e6), ({0: 3.0, 1: 9.0}, 2e8))
        ),
    ],
)
def test_measured_run_corrects_all_clusters(times: dict[int, float], rate: float) -> None:
    """Whatever was told wrong: the plan that is found with what was measured is the best one by the truth."""
    truth = slow_down(make_problem(rate), times)
    predicted = score(make_problem(), make_shape((0, 0, 3, 1), (1, 3, 5, 2), count=8))
    assert isinstance(predicted, Candidate)
    observed = observe(truth, predicted.shape)
    assert find_slowness(make_problem(), predicted, observed) == pytest.approx(
        {cluster: times.get(cluster, 1.0) for cluster in (0, 1)}
    )
    corrected, best = correct_problem(make_problem(), predicted, observed), search(truth).candidates[0]
    assert score(corrected, predicted.shape).seconds == pytest.approx(observed.seconds)
    better = find_better_plan(corrected, predicted.shape, observed.seconds)
    if best.seconds > 0.95 * observed.seconds:
        assert better is None
    else:
        assert better is not None and score(truth, better.candidates[0].shape).seconds <= 1.02 * best.seconds
        assert better.seconds == pytest.approx(score(truth, better.candidates[0].shape).seconds)


def test_unexplained_seconds_are_added_to_a_better_plan() -> None:
    now, truth = make_shape((0, 0, 5, 1), count=1), make_problem(2e8)
    better = find_better_plan(truth, now, observe(truth, now).seconds)
    lost = find_better_plan(truth, now, observe(truth, now, 0.01).seconds)
    assert better is not None and lost is not None and lost.seconds == pytest.approx(better.seconds + 0.01)
    assert find_better_plan(truth, now, observe(truth, now, 10.0).seconds) is None
    quick = 0.5 * observe(truth, now).seconds  # all of it is faster than the model says
    half = find_better_plan(truth, now, quick)
    assert half is not None and half.seconds == pytest.approx(0.5 * better.seconds)


def test_tried_plan_keeps_its_measured_seconds() -> None:
    now, truth = make_shape((0, 0, 5, 1), count=1), make_problem(2e8)
    seconds = observe(truth, now).seconds
    tried: dict[Shape, float] = {}
    for _ in range(40):
        better = find_better_plan(truth, now, seconds, tried)
        if better is None:
            break
        assert better.candidates[0].shape not in tried
        tried[better.candidates[0].shape] = seconds
    assert tried and better is None
    last = next(iter(tried))
    back = find_better_plan(truth, now, seconds, {last: 0.5 * seconds})
    assert back is not None and back.seconds <= 0.5 * seconds


def test_unused_cluster_is_corrected_like_an_equal_cluster() -> None:
    before = make_problem()
    before = replace(before, clusters=(*before.clusters, replace(before.clusters[0], name="gpu2")))
    predicted = replace(BEST, shape=make_shape((0, 0, 5, 1), count=1), compute=(1e-3,))
    corrected = correct_problem(before, predicted, Observation(0.1, (5e-3,), {(0, 1): Line(rate=1e6, delay=0.2)}))
    for cluster, times in enumerate([5.0, 1.0, 5.0]):
        assert (corrected.clusters[cluster].forward == times * before.clusters[cluster].forward).all()
    assert corrected.line(0, 1) == Line(rate=1e6, delay=0.2) and corrected.line(1, 0) == before.line(1, 0)


def test_slow_cluster_also_slows_weight_gradients() -> None:
    problem = make_problem()
    clusters = tuple(replace(cluster, deferred_backward=0.5 * cluster.backward) for cluster in problem.clusters)
    slow = slow_down(replace(problem, clusters=clusters), {1: 3.0}).clusters
    assert slow[0] is clusters[0]
    assert slow[1].deferred_backward == pytest.approx(0.5 * slow[1].backward)
