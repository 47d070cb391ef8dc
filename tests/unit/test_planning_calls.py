"""`nb.plan` and `nb.verify` with the wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from whale_nebula.errors import NebulaError, OptionError

X, Y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


def build_model(loss: str | None = "mse", *, own: bool = False, scopes: bool = True) -> Any:
    inputs = keras.Input((4,))
    if not scopes:
        made = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    else:
        with nb.cluster(), nb.pipeline(2):
            with nb.stage(cluster="gpu"):
                hidden = keras.layers.Dense(3, activity_regularizer="l2" if own else None)(inputs)
            with nb.stage(cluster="npu"):
                outputs = keras.layers.Dense(1, activity_regularizer="l2" if own else None)(hidden)
        made = keras.Model(inputs, outputs)
    made.compile("sgd", loss)
    return made


@pytest.mark.parametrize(("call", "name"), [(nb.plan, "nb.plan"), (nb.verify, "nb.verify")])
def test_missing_y_is_refused_with_a_fix(call: Callable[..., Any], name: str) -> None:
    with pytest.raises(OptionError, match="needs y") as caught:
        call(build_model(), X)
    assert caught.value.mend == f"{name}(model, x, y)"
    assert "test_planning_calls.py" in caught.value.where


def test_model_with_own_losses_needs_no_y() -> None:
    assert set(nb.plan(build_model(None, own=True), X).stages) == {"gpu", "npu"}
    assert nb.verify(build_model(None, own=True), X).ok


def test_other_trace_errors_are_raised_unchanged() -> None:
    with pytest.raises(NebulaError, match=r"expected shape=\(None, 4\)"):
        nb.plan(build_model(), X[:, :3])


def test_batch_as_a_tuple_is_refused() -> None:
    with pytest.raises(OptionError, match="got a tuple as x") as caught:
        nb.plan(build_model(), (X, Y))
    assert caught.value.mend == "nb.plan(model, *batch)"


@pytest.mark.parametrize(
    ("example", "what"),
    [((), "needs an example"), ((X, Y, Y, Y), "4 parts"), (((8, 4), (8, 1)), "no array"), (([1.0], [2.0]), "no array")],
)
def test_invalid_examples_are_refused(example: tuple[Any, ...], what: str) -> None:
    with pytest.raises(OptionError, match=what) as caught:
        nb.plan(build_model(), *example)
    assert "test_planning_calls.py" in caught.value.where
    assert "nb.plan(model, " in caught.value.mend


@pytest.mark.parametrize(("given", "message"), [("model", "str 'model'"), (lambda x: x, "a plain function")])
def test_plan_refuses_other_objects(given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        nb.plan(given, X)
    assert "test_planning_calls.py" in caught.value.where


def test_outputs_are_named_by_the_returned_dict() -> None:
    weight = tf.Variable(1.0)

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster():
            with nb.stage(cluster="gpu"):
                hidden = x * weight
            with nb.stage(cluster="npu"):
                rec, reg = tf.reduce_mean(hidden), tf.reduce_sum(hidden)
        weight.assign_sub(tape.gradient(rec, weight))
        return {"rec": rec, "reg": reg}

    assert nb.plan(step, X).stages["npu"].outputs == ("rec", "reg")


def test_unnamed_outputs_are_called_loss_or_result() -> None:
    made = build_model()
    assert nb.plan(made, X, Y).stages["npu"].outputs == ("loss",)

    @nb.function
    def doubled(x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="gpu"):
            return 2.0 * x

    assert nb.plan(doubled, X).stages["gpu"].outputs == ("result",)


@pytest.mark.parametrize(("micro_batch", "has_note"), [pytest.param(1, False, marks=pytest.mark.grid), (2, True)])
def test_plan_notes_dropout_with_micro_batches(micro_batch: int, has_note: bool) -> None:
    inputs = keras.Input((4,))
    with nb.cluster(), nb.pipeline(micro_batch):
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dropout(0.5)(inputs)
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1)(hidden)
    made = keras.Model(inputs, outputs)
    made.compile("sgd", "mse")
    assert any("draws its own random numbers" in note for note in nb.plan(made, X, Y).notes) == has_note


class CopyModel(keras.Model):
    """Two stages, and a train step of its own that takes x as `fit(x)` gives it."""

    def __init__(self) -> None:
        super().__init__(name="copier")
        self.first, self.second = keras.layers.Dense(3, name="first"), keras.layers.Dense(4, name="second")
        self.seen: list[type] = []
        self.unpacks = False

    def call(self, x: Any) -> Any:
        with nb.stage(cluster="gpu"):
            hidden = self.first(x)
        with nb.stage(cluster="npu"):
            return self.second(hidden)

    def train_step(self, data: Any) -> dict[str, Any]:
        self.seen.append(type(data))
        x = data[0] if self.unpacks else data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - x) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def build_copier() -> CopyModel:
    made = CopyModel()
    made.compile(keras.optimizers.SGD(0.1, name="sgd"))
    return made


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("call", "batch"), [(nb.plan, (X, None)), pytest.param(nb.verify, (X,), marks=pytest.mark.grid)]
)
def test_plan_passes_x_alone_like_fit(call: Callable[..., Any], batch: tuple[Any, ...]) -> None:
    made = build_copier()
    call(made, *batch)
    assert tuple not in made.seen
    made.fit(X, verbose=0)
    assert tuple not in made.seen


@pytest.mark.parametrize(("parts", "tupled"), [pytest.param(X, False, marks=pytest.mark.grid), ((X,), True)])
def test_plan_passes_dataset_elements_like_fit(parts: Any, tupled: bool) -> None:
    made, dataset = build_copier(), tf.data.Dataset.from_tensor_slices(parts).batch(4)
    made.unpacks = tupled
    nb.plan(made, dataset)
    assert (tuple in made.seen) == tupled
    made.fit(dataset, verbose=0)
    assert (tuple in made.seen) == tupled


@pytest.mark.grid
def test_pin_of_a_step_with_x_alone_matches_fit(tmp_path: Path) -> None:
    nb.plan(build_copier(), X).save(tmp_path / "pin.json")
    nb.shutdown()
    with nb.init(plan=str(tmp_path / "pin.json")):
        assert np.isfinite(build_copier().fit(X, verbose=0).history["loss"])


class TwoInputModel(keras.Model):
    """Two inputs, and no `build`: Keras asks its call for shapes where it is first used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(3), keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        left, right = inputs.values() if isinstance(inputs, dict) else inputs
        with nb.stage(cluster="gpu"):
            hidden = self.first(left) + self.first(right)
        with nb.stage(cluster="npu"):
            return self.second(hidden)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "given", [{"left": X, "right": X}, pytest.param([X, X], marks=pytest.mark.grid)], ids=["dict", "list"]
)
def test_plan_builds_a_subclassed_model_with_several_inputs(given: Any) -> None:
    made = TwoInputModel()
    made.compile("sgd", "mse")
    assert [*nb.plan(made, given, Y).stages] == ["gpu", "npu"]
    with nb.pipeline(2):
        made = TwoInputModel()
        made.compile("sgd", "mse")
        made.fit(given, Y, verbose=0)
    assert nb.last_report().micro_batches == 2
