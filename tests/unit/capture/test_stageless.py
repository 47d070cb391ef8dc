"""Warnings about scopes without effect, at the creation of a step.

That nothing is said of others, all tests show: a warning is an error in them.
"""

from __future__ import annotations

from typing import Any

import keras

import whale_nebula as nb
from tests.unit.capture.built import X, Y, compiled, said, two_stages

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
        assert "nb.replica holds a part of the step, and all of it is copied: " in message
        assert "all of it is copied: 'partly/back/bias' stands outside" in message

    def test_one_around_the_step_gives_way_to_the_models_own_and_says_so(self) -> None:
        inputs = keras.Input((4,))
        with nb.cluster(), nb.replica(2):
            outputs = Dense(3)(inputs)
        model = compiled(keras.Model(inputs, outputs))

        def run() -> None:
            with nb.replica(3):
                fit(model)

        (message,) = said(run)
        assert "nb.replica(3) around the step does not count" in message and "stands in nb.replica(2) at" in message
        assert nb.last_report().micro_batches == 2


class TestNames:
    def test_a_cluster_that_is_not_known_is_warned_of(self) -> None:
        nb.init({"clusters": {"gpu": {}, "npu": {}}})
        (message,) = said(lambda: nb.here().runs("npuu"))
        assert "asks for a cluster that is not known" in message and "did you mean 'npu'?" in message
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
        assert "nb.plan leaves y out: it plans the predict step of model 'raw'" in message
        assert said(lambda: nb.plan(model, X)) == []
