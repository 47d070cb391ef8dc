"""Steps of the planner's plan are compared with their prediction, and planned again."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest

import whale_nebula as nb
from tests.forced_plans import force_plans
from tests.unit.planner.test_explanation import decide, make_problem
from whale_nebula.errors import NebulaWarning, PlanError
from whale_nebula.planner.decision import Observation, Offer
from whale_nebula.planner.search import search
from whale_nebula.runtime import auto_parallel
from whale_nebula.runtime.elastic_plans import AdvanceSearch
from whale_nebula.runtime.replan import PlanWatch
from whale_nebula.runtime.run import Run, current_run

CLUSTERS = {"clusters": {"gpu": {"flops": "2G"}, "npu": {"flops": "2G"}}}


def train_model(width: int = 48, rows: int = 32, steps: int = 6, **fit: Any) -> dict[str, Any]:
    """Trains a model, and evaluates it on the way; all that is left of it."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    draw = np.random.default_rng(0)
    x, y = draw.random((steps * rows, width)).astype("float32"), draw.random((steps * rows, 3)).astype("float32")
    results = [model.fit(x, y, batch_size=rows, epochs=2, verbose=0, shuffle=False, **fit).history]
    results.append(model.evaluate(x, y, batch_size=rows, verbose=0))
    results.append(model.fit(x, y, batch_size=rows, epochs=1, verbose=0, shuffle=False).history)
    optimizer = [variable.numpy() for variable in model.optimizer.variables]
    return {"results": results, "weights": model.get_weights(), "optimizer": optimizer}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nb.shutdown()
    return tmp_path


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    flat = ([np.asarray(leaf) for leaf in keras.tree.flatten(each)] for each in (found, expected))
    for got, wanted in zip(*flat, strict=True):
        np.testing.assert_allclose(got, wanted, 1e-5, 1e-6)


def test_replanned_training_equals_the_uncut_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages go to the other cluster and the batch is cut, then all of it is one stage, in the middle of a fit. A plan
    that the passes refuse leaves the one before."""
    expected = train_model()
    nb.init(CLUSTERS, links="10gbit,0ms")
    ran = force_plans(monkeypatch.setattr, ["gpu, npu", "npu, gpu: 4", "npu", "gpu, npu: 2"])
    plain = auto_parallel.run_passes

    def run_passes(given: Any) -> Any:
        if given.program.pipeline.micro_batch == 2:
            raise PlanError("rows are coupled")
        return plain(given)

    monkeypatch.setattr(auto_parallel, "run_passes", run_passes)
    with nb.auto_parallel(replan=True):
        found = train_model()
    assert_close(found, expected)
    report = nb.last_report("train_step")
    assert ran[-1] == "gpu, npu: 2" and report.step == 18 and list(report.stages) == ["stage0"]
    assert report.planned is not None and report.planned.steps == 18 - 3 * 3 - 2
    assert [each.cluster for each in current_run().decisions[0].assignment.stages] == ["npu"]


@pytest.mark.parametrize(
    ("pinned_plan", "others", "is_taken"),
    [(None, None, True), ("fit", None, False), (None, "the same", True), (None, "another", False)],
)
def test_better_plan_is_taken_only_if_unpinned_and_agreed(
    pinned_plan: str | None, others: str | None, is_taken: bool
) -> None:
    def share(doing: str, value: Any) -> Any:
        return {"c0/0": value, "c1/0": value if others == "the same" else {"plan": "npu alone"}}

    session = SimpleNamespace(share=share)
    pins = SimpleNamespace(find_pin=lambda name: pinned_plan)
    run = SimpleNamespace(pins=pins, alone=others is None, ledger=SimpleNamespace(session=session))
    problem = make_problem()
    better = Offer(problem, search(problem).candidates)
    watch = PlanWatch("fit", decide(problem, replan=True), cast(Run, run), ())
    assert watch._will_adopt(better) is is_taken and not watch._will_adopt(None)
    stays = replace(watch.decision, replan=False)
    assert not replace(watch, decision=stays)._will_adopt(better)


def test_search_in_advance_of_a_replaced_plan_ends() -> None:
    problem = make_problem()
    first = decide(problem, replan=True)
    run = SimpleNamespace(decisions=[first])
    watch, ended = PlanWatch("fit", first, cast(Run, run), ()), []
    watch.advance = cast(AdvanceSearch, SimpleNamespace(end=lambda: ended.append(True)))
    watch._adopt(Offer(problem, search(problem).candidates), first.chosen, Observation(1.0), {})
    assert ended and run.decisions[0].replaces is first


@pytest.mark.filterwarnings("ignore:.*that nb.auto_parallel predicted:whale_nebula.errors.NebulaWarning")
def test_stage_of_an_uncut_step_has_the_prediction_of_the_step(cache: Path) -> None:
    nb.init(CLUSTERS)
    with nb.auto_parallel(clusters=["gpu"]):
        train_model()
    planned = nb.last_report("train_step").planned
    assert planned is not None and current_run().decisions[0].uncut
    (stage,) = planned.stages.values()
    assert (stage.measured, stage.predicted) == (planned.seconds.measured, planned.seconds.predicted)


@pytest.mark.grid
def test_wrong_configured_flops_are_reported_and_corrected(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that is told a thousand times too fast: the sentence names it, the report has both numbers, and the
    next run plans with what was measured."""
    wrong = {"clusters": {"gpu": {"flops": "1T"}, "npu": {"flops": "500T"}}}
    size = {"width": 512, "rows": 1024, "steps": 5}  # a step computes for long beside all that it does besides
    nb.init(wrong)
    with (
        nb.auto_parallel(micro_batch=1),
        pytest.warns(NebulaWarning, match="than the .* nb.auto_parallel predicted") as recorded,
    ):
        train_model(**size)
    (warning,) = {str(each.message) for each in recorded}
    assert "stage npu computes" in warning and "if gpu computes as fast as configured" in warning
    assert re.search("mend: .*gpu.* would take", warning) and "nb.auto_parallel(replan=True)" in warning
    planned = nb.last_report("train_step").planned
    assert (
        planned is not None and planned.steps >= 8 and planned.stages["npu"].measured > 1.5 * planned.seconds.predicted
    )
    assert re.search("better: .*gpu", str(nb.last_report("train_step")))
    nb.shutdown()
    nb.init(wrong)
    with nb.auto_parallel(micro_batch=1, replan=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", NebulaWarning)
        train_model(**size)
    first = current_run().decisions[0]
    while first.replaces is not None:
        first = first.replaces
    assert "gpu" in [each.cluster for each in first.assignment.stages]
    assert first.reasons[0].startswith("cluster npu computes") and "in an earlier run" in first.reasons[0]
