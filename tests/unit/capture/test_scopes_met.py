"""Warnings about scopes without effect, at the creation of a step.

That nothing is said of others, all tests show: a warning is an error in them.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.unit.capture import built
from tests.unit.capture.built import X, Y, compiled, said, two_stages
from whale_nebula.errors import NebulaWarning, OptionError, StageIdentityError
from whale_nebula.scopes.frames import begin_step

Dense = keras.layers.Dense


def fit(model: keras.Model) -> None:
    model.fit(X, Y, verbose=0)


class TestNeverEntered:
    def test_it_is_said_of_a_model_with_stages_too(self) -> None:
        nb.pipeline(4)
        model = two_stages({"cluster": "gpu"}, {"cluster": "npu"}, name="staged")
        (message,) = said(lambda: fit(model))
        assert "nb.pipeline(micro_batch=4" in message and "is never entered" in message
        assert "step 'staged.train_step' runs without it" in message and "or the call of fit" in message
        assert said(lambda: fit(model)) == []


class Partly(keras.Model):
    """A part of its call stands in `nb.replica`, and no stage anywhere."""

    def __init__(self) -> None:
        super().__init__(name="partly")
        self.front, self.back = Dense(3, name="front"), Dense(3, name="back")

    def call(self, x: Any) -> Any:
        with nb.replica(2):
            hidden = self.front(x)
        return self.back(hidden)


class TestCopies:
    def test_a_part_that_is_to_be_copied_copies_all(self) -> None:
        (message,) = said(lambda: fit(compiled(Partly())))
        assert "nb.replica contains only a part of the step, but the whole step is copied: " in message
        assert "the whole step is copied: 'partly/back/bias' is outside" in message

    def test_one_around_the_step_gives_way_to_the_models_own_and_says_so(self) -> None:
        inputs = keras.Input((4,))
        with nb.cluster(), nb.replica(2):
            outputs = Dense(3)(inputs)
        model = compiled(keras.Model(inputs, outputs))

        def run() -> None:
            with nb.replica(3):
                fit(model)

        (message,) = said(run)
        assert "nb.replica(3) around the step is ignored" in message and "are in nb.replica(2) at" in message
        assert nb.last_report().micro_batches == 2


class TestNames:
    def test_a_cluster_that_is_not_known_is_warned_of(self) -> None:
        nb.init({"clusters": {"gpu": {}, "npu": {}}})
        (message,) = said(lambda: nb.here().runs("npuu"))
        assert ": unknown cluster" in message and "did you mean 'npu'?" in message
        assert "choose one of 'gpu', 'npu'" in said(lambda: nb.here().runs("anything"))[0]
        assert said(lambda: nb.here().runs("npu")) == []

    def test_before_any_is_known_all_are_here(self) -> None:
        found: list[bool] = []
        assert said(lambda: found.append(nb.here().runs("gpu"))) == [] and found == [True]

    def test_those_that_stages_name_are_known(self) -> None:
        fit(two_stages({"cluster": "gpu"}, {"cluster": "npu"}, name="staged"))
        assert said(lambda: nb.here().runs("gpu")) == []
        assert "did you mean 'gpu'?" in said(lambda: nb.here().runs("gpuu"))[0]
        assert said(lambda: nb.here().runs("tpu")) == []  # it may come to be by being named

    def test_what_a_plan_of_a_model_that_is_not_compiled_leaves_out(self) -> None:
        inputs = keras.Input((4,))
        with nb.stage(cluster="gpu"):
            model = keras.Model(inputs, Dense(3)(inputs), name="raw")
        (message,) = said(lambda: nb.plan(model, X, Y))
        assert "nb.plan ignores y: it plans the predict step of model 'raw'" in message
        assert said(lambda: nb.plan(model, X)) == []


# -------------------- All pipelines of a step must agree, as it has one batch; the model's own overrides one aro
def functional(first: dict[str, Any], second: dict[str, Any] | None = None) -> keras.Model:
    """A stage in each of two pipelines, the second as the first where nothing is said of it."""
    said = (first, first if second is None else second)
    return two_stages({"cluster": "a"}, {"cluster": "b"}, around=lambda number: nb.pipeline(**said[number]))


def rows(model: Any) -> tuple[int, ...]:
    found: tuple[int, ...] = nb.plan(model, X, Y).rows
    return found


def test_two_that_differ_are_refused_with_both_lines() -> None:
    model = functional({"micro_batch": 4, "schedule": "gpipe"}, {"micro_batch": 2})
    with pytest.raises(OptionError) as caught:
        model.fit(X, Y, verbose=0)
    error = caught.value
    mine, other = "micro_batch=2, schedule='eager-1f1b'", "micro_batch=4, schedule='gpipe'"
    assert f"has {mine}, and at {built.__file__}:" in error.what
    assert error.what.endswith(f"has {other}")
    assert error.where.startswith(f"{built.__file__}:")
    assert error.where not in error.what
    assert "one nb.pipeline(...) around all stages" in error.mend


@pytest.mark.parametrize("second", [None, {"micro_batch": 4, "in_flight": None}])
def test_two_that_say_the_same_are_one(second: dict[str, Any] | None) -> None:
    assert rows(functional({"micro_batch": 4}, second)) == (2, 2, 2, 2)


def test_the_models_own_goes_before_one_around_fit_and_says_so_once() -> None:
    model = functional({"micro_batch": 4})
    around = r"nb.pipeline\(micro_batch=2\) around the step is ignored"
    with pytest.warns(NebulaWarning, match=around) as caught, nb.pipeline(2):
        model.fit(X, Y, verbose=0)
        model.evaluate(X, Y, verbose=0)
    assert nb.last_report("train_step").micro_batches == 4
    told = [warning for warning in caught if isinstance(warning.message, NebulaWarning)]
    assert len(told) == 1
    assert told[0].filename == __file__
    assert f"the model has its own at {built.__file__}:" in str(told[0].message)


def test_one_around_fit_that_says_the_same_is_no_news() -> None:
    model = functional({"micro_batch": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error", NebulaWarning)
        with nb.pipeline(4):
            model.fit(X, Y, verbose=0)
    assert nb.last_report().micro_batches == 4


# -------------------- One name for two stages on two clusters is refused where both are in one program, whatever
@pytest.mark.parametrize("first", [{"cluster": "a", "name": "s"}, {"cluster": "s"}])
def test_a_functional_model_without_a_block(first: dict[str, Any]) -> None:
    model = two_stages(first, {"cluster": "b", "name": "s"})
    with pytest.raises(StageIdentityError) as caught:
        model.fit(X, Y, verbose=0)
    error = caught.value
    assert error.what.startswith(f"stage 's' is on cluster 'b' at {built.__file__}:")
    assert f", but on '{first['cluster']}' at {built.__file__}:" in error.what
    assert error.mend == "give the second one its own name: nb.stage(cluster='b', name='s_2')"


def test_what_the_mend_says_are_two_stages() -> None:
    model = two_stages({"cluster": "a", "name": "s"}, {"cluster": "b", "name": "s_2"})
    assert {name: stage.cluster for name, stage in nb.plan(model, X, Y).stages.items()} == {"s": "a", "s_2": "b"}


def test_one_that_names_no_cluster_continues_the_stage() -> None:
    nb.init({"clusters": {"a": {}, "b": {}}})
    model = two_stages({"name": "s"}, {"name": "s"})
    assert list(nb.plan(model, X, Y).stages) == ["s"]
    with begin_step():  # as the first stage of a script, whatever tests ran before
        model = two_stages({"name": "s"}, {"name": "s"})
    assert {name: stage.cluster for name, stage in nb.plan(model, X, Y).stages.items()} == {"s": "a"}


def test_two_models_may_use_one_name_as_they_like() -> None:
    for cluster in ("a", "b"):
        model = two_stages({"cluster": cluster, "name": "s"}, {"cluster": "c"})
        assert [stage.cluster for stage in nb.plan(model, X, Y).stages.values()] == [cluster, "c"]


def test_two_blocks_of_one_step_are_one_program() -> None:
    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="a", name="s"):
            x = x * 2.0
        with nb.cluster(), nb.stage(cluster="b", name="s"):
            return x + 1.0

    with pytest.raises(StageIdentityError, match="stage 's' is on cluster 'b'"):
        step(tf.ones([2, 2]))
