"""Every plan that the planner proposes trains like the uncut model: scripts without scopes or with few options, and
many kinds of clusters.

`make test` runs a sample of the scripts with one plan each; `--grid` all of them with several.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.parity.cases import CASES, FAMILIES
from tests.parity_harness import PARITY, Cut, Outcome, assert_same, run_uncut
from whale_nebula.planner.search import SearchResult, search
from whale_nebula.runtime import decisions
from whale_nebula.runtime.run import current_run

pytestmark = pytest.mark.filterwarnings("ignore:.*that nb.auto_parallel predicted:whale_nebula.errors.NebulaWarning")
SAMPLE = {"zoo": 8, "keras": 144, "loops": 144}
"""Of each family, every n-th script is in the sample. Placed models determine their clusters themselves."""
MORE_SAMPLES = {
    "scales_of_float8": 0,  # gradients that the forward computes, as custom gradients may
    "forwards.a_number_for_all_parts": 3,  # a variable that is read once, for several stages
    "tapes.penalty_across_stages": 1,  # one that a gradient inside the forward reads in a later stage
}
"""Further scripts in the sample, each with the number of a plan."""
PLANS = 4
PARTLY_SCOPED_SAMPLE = 216
"""Of the partly scoped scripts, every n-th is in the sample; of split stages none."""
NOT_PLANNED = {"zoo gan", "zoo adversarial"} | {
    f"loops {name}"
    for name in (
        "shapes.an_extension_type", "shapes.an_iterator", "tapes.persistent_two_losses", "tapes.adversarial_example",
        "edited.projected_conflict", "edited.sharpness_aware",
    )
}  # fmt: skip
"""Partly scoped scripts that run by their scopes alone, because their steps take gradients more than once."""
SLOW = {
    name: {"flops": "1G", "workers": [f"{name}.example:{7000 + number}" for number in range(count)]}
    for name, count in (("c0", 1), ("c1", 2), ("c2", 1))
}


@dataclass(frozen=True)
class PlannedCut(Cut):
    """A cut without scopes; a custom step is under `nb.function`."""

    @contextlib.contextmanager
    def program(self, **options: Any) -> Iterator[None]:
        """No scopes: the planner decides."""
        yield

    def at(self, third: int) -> contextlib.AbstractContextManager[Any]:
        """No scope."""
        return contextlib.nullcontext()


@dataclass(frozen=True)
class PartlyScopedCut(Cut):
    """A cut with few scopes: a stage on any cluster, layers in no stage, and a stage on the last cluster."""

    @contextlib.contextmanager
    def program(self, **options: Any) -> Iterator[None]:
        """A pipeline without a number, and with one where the case has a number for it."""
        with nb.cluster(), nb.pipeline(None if self.micro_batches > 1 else 1, **options):
            yield

    def at(self, third: int) -> contextlib.AbstractContextManager[Any]:
        """One third of a model."""
        return (nb.stage(name="first"), contextlib.nullcontext(), nb.stage(cluster="c2"))[third]


@functools.cache
def run_uncut_case(name: str) -> Outcome:
    """The uncut run, once for all plans."""
    return run_uncut(CASES[name])


def has_several_stages(candidate: Any) -> bool:
    """Whether it has more than one."""
    return len(candidate.parts) > 1


def choose_proposal(
    monkeypatch: pytest.MonkeyPatch, number: int, wanted: Callable[[Any], bool] = has_several_stages
) -> list[Any]:
    """Let the planner choose one of its plans, those that are `wanted` first; returns the list of choices."""
    chosen: list[Any] = []

    def choose(problem: Any, most: int = 8) -> SearchResult:
        cheap = replace(problem, clusters=tuple(replace(each, call=0.0) for each in problem.clusters))
        found = search(cheap, 24).candidates
        assert found, "nothing fits"
        first = [each for each in found if wanted(each)] or list(found)
        chosen.append(first[number % len(first)])
        return SearchResult((chosen[-1], *found))

    monkeypatch.setattr(decisions, "search", choose)
    return chosen


def list_cases() -> Iterator[Any]:
    """A parameter for each script and plan; most are of the grid."""
    for family in SAMPLE:
        for place, name in enumerate(FAMILIES[family]):
            for number in range(PLANS):
                sampled = number == place // SAMPLE[family] % PLANS and place % SAMPLE[family] == SAMPLE[family] // 2
                sampled |= MORE_SAMPLES.get(name) == number
                marks = () if sampled else (pytest.mark.grid,)
                yield pytest.param(f"{family} {name}", number, marks=marks, id=f"{family} {name}: plan {number}")


@pytest.mark.parametrize(("name", "number"), list(list_cases()))
def test_proposed_plan_trains_as_the_uncut_model(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, expected = CASES[name], run_uncut_case(name)
    nb.shutdown()
    nb.init({"clusters": SLOW}, links="1gbit,0ms")
    chosen = choose_proposal(monkeypatch, number)
    with nb.auto_parallel(micro_batch=None if max(case.micro) > 1 else 1):
        found = case.run(PlannedCut(1))
    assert chosen or set(found.stages) <= {"stage0"}, "nothing was planned"
    assert_same(expected, found, case.tolerance, case.length)


def test_program_that_mixes_rows_runs_with_the_whole_batch() -> None:
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Dense(128, activation="tanh")(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")

    @nb.function
    def best(rows: Any) -> Any:
        scores = model(rows)
        return tf.gather(scores, tf.argsort(scores[:, 0]))

    with nb.init({"clusters": SLOW}), nb.auto_parallel(memory="200KiB"):  # of which activations need the most
        assert nb.verify(model, x, x[:, :4]).ok
        assert [each.problem.rows for each in current_run().decisions] == [512]  # the given rows
        assert " micro-batches of " in str(nb.plan(model, x, x[:, :4]))
        model.fit(x, x[:, :4], batch_size=512, verbose=0)
        found = best(x)
        assert "1 micro-batch of " in str(nb.plan(best, x))
    scores = model(x).numpy()
    np.testing.assert_allclose(found, scores[np.argsort(scores[:, 0])], rtol=1e-4, atol=1e-6)


@pytest.mark.grid
def test_memory_requested_by_the_error_is_enough() -> None:
    """Although no plan is found in which batch normalisation could be met: none fits."""

    def plan(memory: str) -> nb.Plan:
        nb.shutdown()
        inputs = hidden = keras.Input((16,))
        with nb.init({"clusters": SLOW}), nb.auto_parallel(memory=memory):
            for _ in range(3):
                hidden = keras.layers.BatchNormalization()(keras.layers.Dense(128)(hidden))
            model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
            model.compile("sgd", "mse")
            return nb.plan(model, np.zeros((512, 16), "float32"), np.zeros((512, 1), "float32"))

    with pytest.raises(nb.errors.PlanError, match=r"the batch is not divided: .*BatchNormalization") as caught:
        plan("1KiB")
    needed = re.findall(r"([\d.]+) MiB for each worker of (\w+)", str(caught.value))
    assert len({cluster for _, cluster in needed}) > 1
    assert len(plan(f"{max(float(memory) for memory, _ in needed)}MiB").stages) > 1


def list_partly_scoped_cases() -> Iterator[Any]:
    """A parameter for each script that can be cut into three stages."""
    names = [f"{family} {name}" for family in SAMPLE for name in FAMILIES[family]]
    names = [name for name in names if 3 in CASES[name].stages]
    for place, name in enumerate(names):
        yield pytest.param(
            name, place % PLANS, marks=() if place % PARTLY_SCOPED_SAMPLE == 3 else (pytest.mark.grid,), id=name
        )


@pytest.mark.parametrize(("name", "number"), list(list_partly_scoped_cases()))
def test_partly_scoped_model_trains_as_the_uncut_one(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, expected = CASES[name], run_uncut_case(name)
    nb.shutdown()
    nb.init({"clusters": SLOW}, links="1gbit,0ms")
    chosen = choose_proposal(monkeypatch, number)
    with nb.auto_parallel():
        found = case.run(PartlyScopedCut(3, min(max(case.micro), 2)))
    assert {"first", "c2"} <= set(found.stages), found.stages
    assert bool(chosen) == (name not in NOT_PLANNED)
    assert_same(expected, found, case.tolerance, case.length)


@pytest.mark.grid
@pytest.mark.parametrize("name", [f"{family} {name}" for family in ("zoo", "keras") for name in FAMILIES[family]])
def test_planned_splits_train_as_the_uncut_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, expected = CASES[name], run_uncut_case(name)
    nb.shutdown()
    nb.init({"clusters": SLOW}, links="1gbit,0ms")
    chosen = choose_proposal(monkeypatch, 0, lambda each: any(part.shards > 1 for part in each.parts))
    with nb.auto_parallel(split=True, micro_batch=1):
        found = case.run(PlannedCut(1))
    assert any(part.shards > 1 for each in chosen for part in each.parts), "nothing is split"
    assert_same(expected, found, case.tolerance if case.tolerance != PARITY else "sums", case.length)
