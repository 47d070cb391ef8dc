"""Steps under nb.auto_parallel for which no plan is searched: they run and report why."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import whale_nebula as nb
from whale_nebula.runtime.step.step import Step

X, Y = np.ones((40, 8), "float32"), np.ones((40, 1), "float32")
CONFIG = {"clusters": {"gpu": {}, "npu": {}}, "measure": "0s"}


def model() -> keras.Model:
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


def test_a_step_that_stays_as_it_is_written_is_captured_once(made: list[str]) -> None:
    nb.init(CONFIG)
    with nb.auto_parallel():
        with nb.replica(2, sync_every=2):
            found = model()
        found.compile("sgd", "mse")
        found.fit(X, Y, 8, verbose=0)
        assert made == ["train_step"]
        plan = nb.plan(found, X, Y)
    assert "leaves this step as its scopes say" in plan.explain() and plan.predicted is None


def test_a_step_that_follows_another_one_has_no_seconds_of_it(made: list[str]) -> None:
    nb.init(CONFIG, links="60mbit,1ms")
    with nb.auto_parallel(micro_batch=2):
        found = model()
        found.compile("sgd", "mse")
        found.fit(X, Y, 8, verbose=0)
        for _ in range(2):
            found.evaluate(X, Y, 8, verbose=0)
        assert made == ["train_step", "test_step"]
        assert nb.plan(found, X, Y).predicted is not None
        found.compiled = False
        plan = nb.plan(found, X)
    assert plan.predicted is None and "predicted" not in plan.to_text()
    said = " ".join(plan.explain().split())
    assert "runs in the stages that" in said and "train_step, which has the same variables" in said
