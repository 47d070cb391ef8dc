"""Plans of an elastic run for its next numbers of workers: the problem of each is that of a start with so many, and the
search of them runs beside the training.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest

import whale_nebula as nb
from tests.unit.planner.test_explanation import MIB, decide, make_problem
from whale_nebula.errors import NebulaWarning
from whale_nebula.hardware import Clusters
from whale_nebula.planner.decision import Decision
from whale_nebula.planner.resizes import PlannedResize, Resize
from whale_nebula.planner.stored_plans import digest_problem, find_stored_plan, format_problem, search_in_advance
from whale_nebula.runtime import decisions
from whale_nebula.runtime.elastic_plans import AdvanceSearch
from whale_nebula.runtime.run import Run, current_run


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nb.shutdown()


def plan_model(workers: int, budget: str) -> tuple[Decision, str]:
    """Plans a model for one worker of gpu, and so many of npu."""
    listed = {"gpu": {"workers": ["127.0.0.1:7101"]}}
    listed |= {"npu": {"workers": [f"127.0.0.1:{7201 + n}" for n in range(workers)], "flops": "2G"}} if workers else {}
    config = {"clusters": listed, "elastic": {"npu": {"min": 0}} if workers else {}, "measure": budget}
    with nb.init(config, links="60mbit,5ms"):
        nb.auto_parallel()
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(48, activation="relu", name=f"dense{number}") for number in range(3)]
        model = keras.Sequential([keras.Input((48,)), *layers], name="model")  # a start's names, like another process's
        model.compile("adam", "mse")
        x = np.zeros((32, 48), "float32")
        text = nb.plan(model, x, x).explain()
        (found,) = current_run().decisions
    return found, text


def test_problem_of_a_resize_is_that_of_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the measurements that the first start has made; the start then neither searches nor measures."""
    before, text = plan_model(2, "2s")
    assert [each.resize.count for each in before.resizes] == [1, 0]
    resizes = {each.resize.count: each.problem for each in before.resizes}
    search_in_advance(format_problem(problem) for problem in resizes.values())
    searched = decisions.search
    monkeypatch.setattr(decisions, "search", None)
    after, explained = plan_model(1, "0s")
    assert digest_problem(after.problem) == digest_problem(resizes[1])
    assert repr(after.candidates) == repr(searched(after.problem).candidates)
    assert "This plan was found in advance, on" in " ".join(explained.split())
    rows = [line.split("  ")[1] for line in text[text.index("elastic") :].splitlines()[1:]]
    assert rows == ["with 1 instead of 2 workers of npu", "without npu"]
    monkeypatch.setattr(decisions, "search", searched)
    alone, _ = plan_model(0, "0s")
    assert digest_problem(replace(alone.problem, lines={})) == digest_problem(resizes[0])


def test_plans_are_searched_beside_the_training() -> None:
    """By another process, which stores them; a number of workers that no plan fits is reported."""
    problem = make_problem()
    small = tuple(replace(cluster, memory=20 * MIB) for cluster in problem.clusters[:1])
    fewer = replace(problem, clusters=small, lines={})
    resizes = [
        PlannedResize(Resize("npu", count, 2, {"gpu": 1, "npu": count}), Clusters(()), own)
        for count, own in ((3, replace(problem, rows=64)), (0, fewer))
    ]
    config, closers = SimpleNamespace(elastic={"npu": 1}), list[Any]()
    run = SimpleNamespace(config=config, alone=False, writes_files=True, closers=closers, close_at_end=closers.append)
    search = AdvanceSearch(cast(Run, run), "model.train_step")
    search.begin(decide(problem, resizes=tuple(resizes)))
    process: Any = search.process
    process.wait(120)
    what = "model.train_step without npu: no plan fits: 98.0 MiB on a worker of gpu, but 20.0 MiB is the limit"
    with pytest.warns(NebulaWarning, match=re.escape(what)) as caught:
        search.poll()
    assert "elastic: {npu: {min: 1}}; or memory of 98.0 MiB for each worker of gpu" in str(caught[0].message)
    assert find_stored_plan(resizes[0].problem)[0] and not find_stored_plan(fewer)[0]
    search.begin(decide(problem, resizes=tuple(resizes)))
    assert search.process is None  # everything is stored
    run.closers[0]()
