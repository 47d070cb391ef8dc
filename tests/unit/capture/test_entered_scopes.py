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
from tests.unit.capture import scoped_models
from tests.unit.capture.scoped_models import X, Y, compile_model, list_messages, two_stages
from whale_nebula.errors import NebulaWarning, OptionError, StageIdentityError
from whale_nebula.scopes.frames import begin_step

Dense = keras.layers.Dense


def fit(model: keras.Model) -> None:
    model.fit(X, Y, verbose=0)


class TestNeverEntered:
    def test_scope_never_entered_warns_for_a_model_with_stages(self) -> None:
        nb.pipeline(4)
        model = two_stages({"cluster": "gpu"}, {"cluster": "npu"}, name="staged")
        (message,) = list_messages(lambda: fit(model))
        assert "nb.pipeline(micro_batch=4" in message and "is never entered" in message
        assert "step 'staged.train_step' runs without it" in message and "or the call of fit" in message
        assert list_messages(lambda: fit(model)) == []


class PartlyReplicated(keras.Model):
    """A part of its call stands in `nb.replica`, and no stage anywhere."""

    def __init__(self) -> None:
        super().__init__(name="partly")
        self.front, self.back = Dense(3, name="front"), Dense(3, name="back")

    def call(self, x: Any) -> Any:
        with nb.replica(2):
            hidden = self.front(x)
        return self.back(hidden)


class TestCopies:
    def test_replica_around_a_part_warns_that_the_whole_step_is_copied(self) -> None:
        (message,) = list_messages(lambda: fit(compile_model(PartlyReplicated())))
        assert "nb.replica contains only a part of the step, but the whole step is copied: " in message
        assert "the whole step is copied: 'partly/back/bias' is outside" in message

    def test_replica_of_the_model_overrides_the_outer_one_and_warns(self) -> None:
        inputs = keras.Input((4,))
        with nb.cluster(), nb.replica(2):
            outputs = Dense(3)(inputs)
        model = compile_model(keras.Model(inputs, outputs))

        def run() -> None:
            with nb.replica(3):
                fit(model)

        (message,) = list_messages(run)
        assert "nb.replica(3) around the step is ignored" in message and "are in nb.replica(2) at" in message
        assert nb.last_report().micro_batches == 2


class TestNames:
    def test_unknown_cluster_warns(self) -> None:
        nb.init({"clusters": {"gpu": {}, "npu": {}}})
        (message,) = list_messages(lambda: nb.here().runs("npuu"))
        assert ": unknown cluster" in message and "did you mean 'npu'?" in message
        assert "choose one of 'gpu', 'npu'" in list_messages(lambda: nb.here().runs("anything"))[0]
        assert list_messages(lambda: nb.here().runs("npu")) == []

    def test_any_cluster_is_accepted_without_a_config(self) -> None:
        found: list[bool] = []
        assert list_messages(lambda: found.append(nb.here().runs("gpu"))) == [] and found == [True]

    def test_clusters_named_by_stages_are_known(self) -> None:
        fit(two_stages({"cluster": "gpu"}, {"cluster": "npu"}, name="staged"))
        assert list_messages(lambda: nb.here().runs("gpu")) == []
        assert "did you mean 'gpu'?" in list_messages(lambda: nb.here().runs("gpuu"))[0]
        assert list_messages(lambda: nb.here().runs("tpu")) == []  # it may come to be by being named

    def test_plan_of_an_uncompiled_model_warns_of_ignored_targets(self) -> None:
        inputs = keras.Input((4,))
        with nb.stage(cluster="gpu"):
            model = keras.Model(inputs, Dense(3)(inputs), name="raw")
        (message,) = list_messages(lambda: nb.plan(model, X, Y))
        assert "nb.plan ignores y: it plans the predict step of model 'raw'" in message
        assert list_messages(lambda: nb.plan(model, X)) == []


# -------------------- All pipelines of a step must agree, as it has one batch; the model's own overrides one aro
def functional(first: dict[str, Any], second: dict[str, Any] | None = None) -> keras.Model:
    """A stage in each of two pipelines, the second as the first where nothing is said of it."""
    options = (first, first if second is None else second)
    return two_stages({"cluster": "a"}, {"cluster": "b"}, around=lambda number: nb.pipeline(**options[number]))


def rows(model: Any) -> tuple[int, ...]:
    found: tuple[int, ...] = nb.plan(model, X, Y).rows
    return found


def test_different_pipelines_of_a_step_are_refused_with_both_lines() -> None:
    model = functional({"micro_batch": 4, "schedule": "gpipe"}, {"micro_batch": 2})
    with pytest.raises(OptionError) as caught:
        model.fit(X, Y, verbose=0)
    error = caught.value
    mine, other = "micro_batch=2, schedule='eager-1f1b'", "micro_batch=4, schedule='gpipe'"
    assert f"has {mine}, and at {scoped_models.__file__}:" in error.what
    assert error.what.endswith(f"has {other}")
    assert error.where.startswith(f"{scoped_models.__file__}:")
    assert error.where not in error.what
    assert "one nb.pipeline(...) around all stages" in error.mend


@pytest.mark.parametrize("second", [None, {"micro_batch": 4, "in_flight": None}])
def test_equal_pipelines_of_a_step_are_merged(second: dict[str, Any] | None) -> None:
    assert rows(functional({"micro_batch": 4}, second)) == (2, 2, 2, 2)


def test_pipeline_of_the_model_overrides_the_one_around_fit() -> None:
    model = functional({"micro_batch": 4})
    around = r"nb.pipeline\(micro_batch=2\) around the step is ignored"
    with pytest.warns(NebulaWarning, match=around) as caught, nb.pipeline(2):
        model.fit(X, Y, verbose=0)
        model.evaluate(X, Y, verbose=0)
    assert nb.last_report("train_step").micro_batches == 4
    nebula_warnings = [warning for warning in caught if isinstance(warning.message, NebulaWarning)]
    assert len(nebula_warnings) == 1
    assert nebula_warnings[0].filename == __file__
    assert f"the model has its own at {scoped_models.__file__}:" in str(nebula_warnings[0].message)


def test_equal_pipeline_around_fit_does_not_warn() -> None:
    model = functional({"micro_batch": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error", NebulaWarning)
        with nb.pipeline(4):
            model.fit(X, Y, verbose=0)
    assert nb.last_report().micro_batches == 4


# -------------------- One name for two stages on two clusters is refused where both are in one program, whatever
@pytest.mark.parametrize("first", [{"cluster": "a", "name": "s"}, {"cluster": "s"}])
def test_one_stage_name_on_two_clusters_is_refused(first: dict[str, Any]) -> None:
    model = two_stages(first, {"cluster": "b", "name": "s"})
    with pytest.raises(StageIdentityError) as caught:
        model.fit(X, Y, verbose=0)
    error = caught.value
    assert error.what.startswith(f"stage 's' is on cluster 'b' at {scoped_models.__file__}:")
    assert f", but on '{first['cluster']}' at {scoped_models.__file__}:" in error.what
    assert error.mend == "give the second one its own name: nb.stage(cluster='b', name='s_2')"


def test_suggested_stage_name_makes_two_stages() -> None:
    model = two_stages({"cluster": "a", "name": "s"}, {"cluster": "b", "name": "s_2"})
    assert {name: stage.cluster for name, stage in nb.plan(model, X, Y).stages.items()} == {"s": "a", "s_2": "b"}


def test_equal_stage_name_without_cluster_continues_the_stage() -> None:
    nb.init({"clusters": {"a": {}, "b": {}}})
    model = two_stages({"name": "s"}, {"name": "s"})
    assert list(nb.plan(model, X, Y).stages) == ["s"]
    with begin_step():  # as the first stage of a script, whatever tests ran before
        model = two_stages({"name": "s"}, {"name": "s"})
    assert {name: stage.cluster for name, stage in nb.plan(model, X, Y).stages.items()} == {"s": "a"}


def test_models_may_share_a_stage_name() -> None:
    for cluster in ("a", "b"):
        model = two_stages({"cluster": cluster, "name": "s"}, {"cluster": "c"})
        assert [stage.cluster for stage in nb.plan(model, X, Y).stages.values()] == [cluster, "c"]


def test_stage_names_are_unique_across_cluster_scopes() -> None:
    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="a", name="s"):
            x = x * 2.0
        with nb.cluster(), nb.stage(cluster="b", name="s"):
            return x + 1.0

    with pytest.raises(StageIdentityError, match="stage 's' is on cluster 'b'"):
        step(tf.ones([2, 2]))
