"""The texts of a decision: explanation, sensitivity, and seconds by the rate of the lines. Problems are constructed, so
nothing is captured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.golden.files import check_golden
from whale_nebula.hardware import Clusters
from whale_nebula.plan.timing import duration
from whale_nebula.planner.chain import Layers
from whale_nebula.planner.cluster_costs import Grounds
from whale_nebula.planner.decision import Decision, describe_excess, slow_down
from whale_nebula.planner.explanation import FACTORS, WIDTH, describe_shape, scale_crossing, stage_names
from whale_nebula.planner.problem import Chain, ClusterCosts, Excess, Options, Part, Problem, Shape, WrittenStage
from whale_nebula.planner.resizes import PlannedResize, Resize
from whale_nebula.planner.score import score
from whale_nebula.planner.search import search
from whale_nebula.schedule.lines import Line

NAMES = ("model/embedding", "model/block0/wide", "model/block0/narrow", "model/block1/wide", "model/head")
MIB, ROWS = 2.0**20, 32


def make_problem(rate: float = 7.5e6, memory: float = math.inf, options: Options | None = None) -> Problem:
    """Five layers, two clusters of which the second has two workers, and a line between them."""
    weights, per_row = np.array([8, 2, 2, 2, 4]) * MIB, np.array([0.2, 1, 1, 1, 2]) * 1e-3
    forward = np.stack([np.zeros(5), per_row])
    crossing = np.array([0, 8, 32, 8, 8, 0]) * 256.0
    clusters = (
        ClusterCosts("gpu", 1, forward / 2, forward, weights * 1e-11, call=5e-4, memory=memory),
        ClusterCosts("npu", 2, forward, forward * 2, weights * 1e-11, call=5e-4, inner_line=Line(rate=1e9, delay=5e-5)),
    )
    chain = Chain(
        NAMES, weights, weights * 2, weights, np.full(5, 4096.0), np.zeros(5), crossing, crossing, np.zeros(6),
        np.ones(6, bool),
    )  # fmt: skip
    lines = dict.fromkeys([(0, 1), (1, 0)], Line(rate=rate, delay=0.005))
    return Problem(chain, clusters, ROWS, lines, options or Options(max_micro_batches=8))


def decide(problem: Problem, shapes: tuple[Shape, ...] = (), **options: Any) -> Decision:
    """The decision for a problem: the best candidates, or these."""
    found = tuple(score(problem, shape) for shape in shapes) or search(problem, 6).candidates
    layers = Layers(problem.chain, ROWS, tuple(((name, 0),) for name in NAMES), (), (), ())
    grounds = options.pop("grounds", Grounds(0.25, 0.0, 0.75, 0.0))
    return Decision(layers, problem, found, grounds, "train.py:3", **options)


def make_shape(*parts: tuple[int, int, int, int], count: int = 4, recompute: bool = False) -> Shape:
    return Shape(tuple(Part(*each) for each in parts), count, recompute)


def make_resizes() -> Iterator[PlannedResize]:
    """One worker of npu fewer, and none, so that gpu has too little memory."""
    problem = make_problem(memory=40 * MIB)
    gpu, npu = problem.clusters
    fewer = replace(problem, clusters=(gpu, replace(npu, workers=1)))
    for count, own in ((1, fewer), (0, replace(problem, clusters=(gpu,), lines={}))):
        yield PlannedResize(Resize("npu", count, 2, {"gpu": 1, "npu": count}), Clusters(()), own)


ONE, TWO = make_shape((0, 0, 5, 1), count=1), make_shape((0, 0, 4, 1), (1, 4, 5, 2), count=8)
SLOW, LONG = make_shape((1, 0, 5, 1), count=1), make_shape((1, 0, 2, 1), (1, 2, 4, 1), (0, 4, 5, 1), recompute=True)
SMALL = make_problem(1e6, 60 * MIB, Options(4))
CASES = {
    "a line that is slow": lambda: decide(make_problem(), (TWO, ONE)),
    "lines that are free": lambda: decide(make_problem(math.inf), (TWO, ONE), grounds=Grounds()),
    "little memory": lambda: decide(SMALL, (LONG,), reasons=("the batch is cut into 4: micro_batch= says so",)),
    "other numbers of workers": lambda: decide(make_problem(), (TWO, ONE), resizes=tuple(make_resizes())),
    "candidates that are far slower": lambda: decide(make_problem(1e4), (ONE, TWO, SLOW)),
}


def test_explanation_has_a_paragraph_a_table_and_alternatives(request: pytest.FixtureRequest) -> None:
    decisions = {name: make() for name, make in CASES.items()}
    texts = {name: decision.explain() for name, decision in decisions.items()}
    assert max(len(line) for text in texts.values() for line in text.splitlines()) <= WIDTH
    check_golden(request, "explanations.txt", "\n\n".join(f"== {name}\n{text}" for name, text in texts.items()))
    slow_decision = decisions["candidates that are far slower"]
    assert [each.predicted.seconds > 3 * slow_decision.predicted.seconds for each in slow_decision.considered] == [
        False,
        True,
        False,
    ]
    assert "\n1 more candidate would take over 3 times as long" in slow_decision.explain()


def test_step_that_runs_as_traced_has_no_calls_of_stages() -> None:
    call, step = 5e-4, 3e-3  # the call is that of the problem's clusters
    clusters = tuple(replace(each, step=step) for each in make_problem().clusters)
    problem = replace(make_problem(), clusters=clusters)
    here, apart = (decide(problem, (ONE,), emulated=emulated) for emulated in (True, False))
    assert apart.seconds_here == apart.chosen.seconds == here.chosen.seconds
    assert here.seconds_here == pytest.approx(here.chosen.seconds - call - step)
    assert "as it was traced" in here.explain() and "as it was traced" not in apart.explain()
    slow = decide(slow_down(problem, {0: 2.0}), (ONE,), emulated=True)
    assert slow.seconds_here == pytest.approx(2 * here.seconds_here)
    assert decide(problem, (TWO,), emulated=True).seconds_here >= decide(problem, (TWO,)).chosen.seconds


def test_rest_of_a_short_single_stage_is_named() -> None:
    problem = make_problem()
    gpu, npu = problem.clusters
    found = decide(replace(problem, clusters=(replace(gpu, step=1.0), npu)), (ONE,))
    busy = found.chosen.compute[0]
    assert busy < 0.5 * found.chosen.seconds
    rest = duration(found.chosen.seconds - busy)
    expected = f"Stage gpu computes for {duration(busy)} of it, and updates and calls once per step take {rest}."
    assert expected in " ".join(found.explain().split())


def test_stage_of_a_cluster_is_not_named_like_a_written_stage_of_another() -> None:
    problem = make_problem()
    problem = replace(problem, written_stages=(WrittenStage("gpu", 3, 4), WrittenStage("gpu-2", 4, 5)))
    parts = [Part(0, 0, 3), Part(1, 3, 4), Part(1, 4, 5)]
    assert stage_names(problem, parts[:2]) == ["gpu-3", "gpu"]
    assert stage_names(replace(problem, written_stages=()), parts) == ["gpu", "npu-0", "npu-1"]


def test_memory_is_named_by_the_workers_of_a_run_which_are_sorted_by_name() -> None:
    problem = make_problem()
    problem = replace(problem, clusters=(problem.clusters[0], replace(problem.clusters[1], workers=12)))
    found = decide(problem, (make_shape((0, 0, 3, 1), (1, 3, 4, 4), (1, 4, 5, 8)),))
    few, many = ({f"npu/{number}" for number in numbers} for numbers in ([0, 1, 10, 11], range(2, 10)))
    memory = found.considered[0].predicted.memory
    assert memory.keys() == {"gpu/0"} | few | many
    assert len({memory[name] for name in few}) == len({memory[name] for name in many}) == 1
    assert memory["npu/0"] != memory["npu/2"]


def test_scaled_crossing_halves_the_bytes_of_lines() -> None:
    problem = make_problem()
    whole, half = (score(each, TWO) for each in (problem, scale_crossing(problem, 0.5)))
    assert half.bytes == {line: size / 2 for line, size in whole.bytes.items()} and half.seconds < whole.seconds


def test_rate_curves_include_the_chosen_plan_and_bound_the_others() -> None:
    decision = decide(make_problem())
    curves = decision.curves()
    assert curves.factors == FACTORS and curves.rate == 60e6 and len(curves.plans) == 3
    now = FACTORS.index(1.0)
    chosen = describe_shape(decision.problem, decision.chosen.shape)
    assert curves.plans[chosen][now] == decision.chosen.seconds == curves.best[now]
    assert curves.best_plans[now] == chosen and curves.best[0] > curves.best[-1]
    for seconds in curves.plans.values():
        assert all(a <= b for a, b in zip(curves.best, seconds, strict=True))


def test_free_or_unequal_lines_have_no_curve_rate() -> None:
    assert decide(make_problem(math.inf), (ONE,)).curves() is None
    uneven = replace(make_problem(), lines={(0, 1): Line(rate=7.5e6), (1, 0): Line(rate=1e6)})
    assert decide(uneven, (ONE, TWO)).curves().rate is None


def test_excess_error_names_layers_and_tried_fixes() -> None:
    problem = make_problem()
    clusters = tuple(
        replace(cluster, memory=memory) for cluster, memory in zip(problem.clusters, (20 * MIB, 30 * MIB), strict=True)
    )
    problem = replace(problem, clusters=clusters, options=Options(1))
    found = search(problem)
    assert not found.candidates
    what, why, mend = describe_excess(found.excess, problem)
    assert what == "no plan fits: 48.0 MiB on a worker of npu, but 30.0 MiB is the limit"
    assert "the layer 'embedding' needs" in why
    assert mend == "memory of 48.0 MiB for each worker of npu; or a smaller batch"
    small_problem = make_problem(1e6, 18 * MIB, Options(4, recompute=False))
    excess = Excess("npu", 20 * MIB, 18 * MIB, 0, 3, {"npu": 20 * MIB, "gpu": 19 * MIB})
    _, _, mend = describe_excess(excess, small_problem)
    tried = "one more worker in npu; recompute=True; more micro-batches"
    _, _, whole = describe_excess(excess, small_problem, whole=True)
    assert "micro-batches" not in whole
    split = "nb.split(2) around 'embedding', so that 2 workers hold a piece each"
    memory = "memory of 20.0 MiB for each worker of npu and 19.0 MiB for each worker of gpu"
    assert mend == f"{memory}; {tried}; {split}; or a smaller batch"


def test_excess_error_names_the_scope_of_a_written_stage() -> None:
    scope_line = "nb.stage(cluster='gpu') at train.py:12"
    problem = replace(make_problem(), written_stages=(WrittenStage("gpu", 1, 4, (0,), None, scope_line),))
    what, _, _ = describe_excess(Excess("gpu", 3 * MIB, 2 * MIB, 1, 5), problem)
    assert what == f"{scope_line} needs 3.0 MiB on a worker of gpu, but 2.0 MiB is the limit"


def test_excess_error_rounds_the_needed_memory_up() -> None:
    what, _, mend = describe_excess(Excess("gpu", 3.04 * MIB, 3 * MIB, 1, 5, {"gpu": 3.04 * MIB}), make_problem())
    assert what == "no plan fits: 3.1 MiB on a worker of gpu, but 3.0 MiB is the limit"
    assert mend.startswith("memory of 3.1 MiB for")
    what, _, _ = describe_excess(Excess("gpu", 3.09 * MIB, 3.06 * MIB, 1, 5), make_problem())
    assert what == "no plan fits: 3.1 MiB on a worker of gpu, but 3.0 MiB is the limit"
