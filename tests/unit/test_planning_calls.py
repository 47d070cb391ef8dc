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


def model(loss: str | None = "mse", *, own: bool = False, scopes: bool = True) -> Any:
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
def test_a_model_whose_loss_needs_y_says_so(call: Callable[..., Any], name: str) -> None:
    with pytest.raises(OptionError, match="needs y") as caught:
        call(model(), X)
    assert caught.value.mend == f"{name}(model, x, y)"
    assert "test_planning_calls.py" in caught.value.where


def test_a_model_whose_losses_are_its_own_needs_no_y() -> None:
    assert set(nb.plan(model(None, own=True), X).stages) == {"gpu", "npu"}
    assert nb.verify(model(None, own=True), X).ok


def test_what_fails_for_another_reason_is_told_as_it_is() -> None:
    with pytest.raises(NebulaError, match=r"expected shape=\(None, 4\)"):
        nb.plan(model(), X[:, :3])


def test_a_batch_as_one_tuple() -> None:
    with pytest.raises(OptionError, match="got a tuple as x") as caught:
        nb.plan(model(), (X, Y))
    assert caught.value.mend == "nb.plan(model, *batch)"


@pytest.mark.parametrize(
    ("example", "what"),
    [((), "needs an example"), ((X, Y, Y, Y), "4 parts"), (((8, 4), (8, 1)), "no array"), (([1.0], [2.0]), "no array")],
)
def test_examples_that_are_none(example: tuple[Any, ...], what: str) -> None:
    with pytest.raises(OptionError, match=what) as caught:
        nb.plan(model(), *example)
    assert "test_planning_calls.py" in caught.value.where
    assert "nb.plan(model, " in caught.value.mend


@pytest.mark.parametrize(("given", "said"), [("model", "str 'model'"), (lambda x: x, "a plain function")])
def test_what_cannot_be_planned(given: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        nb.plan(given, X)
    assert "test_planning_calls.py" in caught.value.where


def test_what_a_function_returns_has_its_own_names_in_the_plan() -> None:
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


def test_without_names_they_are_the_loss_and_the_result() -> None:
    made = model()
    assert nb.plan(made, X, Y).stages["npu"].outputs == ("loss",)

    @nb.function
    def doubled(x: Any) -> Any:
        with nb.cluster(), nb.stage(cluster="gpu"):
            return 2.0 * x

    assert nb.plan(doubled, X).stages["gpu"].outputs == ("result",)


@pytest.mark.parametrize(("micro_batch", "said"), [pytest.param(1, False, marks=pytest.mark.grid), (2, True)])
def test_dropout_with_micro_batches_is_noted(micro_batch: int, said: bool) -> None:
    inputs = keras.Input((4,))
    with nb.cluster(), nb.pipeline(micro_batch):
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dropout(0.5)(inputs)
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1)(hidden)
    made = keras.Model(inputs, outputs)
    made.compile("sgd", "mse")
    assert any("draws its own random numbers" in note for note in nb.plan(made, X, Y).notes) == said


class Copier(keras.Model):
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


def copier() -> Copier:
    made = Copier()
    made.compile(keras.optimizers.SGD(0.1, name="sgd"))
    return made


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("call", "batch"), [(nb.plan, (X, None)), pytest.param(nb.verify, (X,), marks=pytest.mark.grid)]
)
def test_a_train_step_is_given_x_alone_as_fit_gives_it(call: Callable[..., Any], batch: tuple[Any, ...]) -> None:
    made = copier()
    call(made, *batch)
    assert tuple not in made.seen
    made.fit(X, verbose=0)
    assert tuple not in made.seen


@pytest.mark.parametrize(("parts", "tupled"), [pytest.param(X, False, marks=pytest.mark.grid), ((X,), True)])
def test_a_train_step_is_given_what_its_dataset_gives(parts: Any, tupled: bool) -> None:
    made, dataset = copier(), tf.data.Dataset.from_tensor_slices(parts).batch(4)
    made.unpacks = tupled
    nb.plan(made, dataset)
    assert (tuple in made.seen) == tupled
    made.fit(dataset, verbose=0)
    assert (tuple in made.seen) == tupled


@pytest.mark.grid
def test_the_pin_of_a_train_step_of_x_alone_fits_the_fit(tmp_path: Path) -> None:
    nb.plan(copier(), X).save(tmp_path / "pin.json")
    nb.shutdown()
    with nb.init(plan=str(tmp_path / "pin.json")):
        assert np.isfinite(copier().fit(X, verbose=0).history["loss"])


class Two(keras.Model):
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
def test_a_subclassed_model_of_several_inputs_is_built_by_being_looked_at(given: Any) -> None:
    made = Two()
    made.compile("sgd", "mse")
    assert [*nb.plan(made, given, Y).stages] == ["gpu", "npu"]
    with nb.pipeline(2):
        made = Two()
        made.compile("sgd", "mse")
        made.fit(given, Y, verbose=0)
    assert nb.last_report().micro_batches == 2
