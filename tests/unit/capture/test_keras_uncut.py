"""Models with scopes that run where no step is captured warn; where none should be captured, they do not."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.unit.capture.scoped_models import X, Y, build_late, compile_model, functional, record_warnings, sequential
from whale_nebula.errors import NebulaWarning, UnsupportedError

layers = keras.layers


@keras.saving.register_keras_serializable("uncut")
class Subclass(keras.Model):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first, self.second = layers.Dense(5), layers.Dense(3)

    def call(self, x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="a"):
                hidden = self.first(x)
            with nb.stage(cluster="b"):
                return self.second(hidden)


def subclass() -> keras.Model:
    model = Subclass()
    model(keras.Input((4,)))
    return model


def run_loop(model: keras.Model, decorator: Callable[..., Any]) -> None:
    """Two steps of a custom loop."""
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    @decorator
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    step(tf.constant(X), tf.constant(Y))
    step(tf.constant(X), tf.constant(Y))


SEQUENTIAL = pytest.param(sequential, marks=pytest.mark.grid)  # its nodes bear scopes as those of a functional one do
ALL = [functional, SEQUENTIAL, build_late, subclass]


@pytest.mark.parametrize("build", ALL)
def test_plain_tf_function_around_a_model_with_scopes_warns_once(build: Callable[[], keras.Model]) -> None:
    found = record_warnings(lambda: run_loop(build(), tf.function))
    assert len(found) == 1
    assert "stage 'a' runs uncut" in str(found[0].message)
    assert "use @nb.function instead of @tf.function" in str(found[0].message)
    source = Path(__file__).read_text("utf-8").splitlines()
    line = source[found[0].lineno - 1]
    assert found[0].filename == __file__
    assert ("model(x)" in line) or ('nb.stage(cluster="a")' in line and build is subclass)


@pytest.mark.parametrize("build", ALL)
def test_eager_loop_over_a_model_with_scopes_warns_once(build: Callable[[], keras.Model]) -> None:
    found = record_warnings(lambda: run_loop(build(), lambda step: step))
    assert len(found) == 1
    assert "plain eager code is not captured" in str(found[0].message)


def test_symbolic_calls_by_keras_do_not_warn() -> None:
    def ask() -> None:
        inputs = keras.Input((4,))
        keras.Model(inputs, Subclass()(inputs))
        Subclass().compute_output_spec(keras.KerasTensor((2, 4)))
        functional()(keras.KerasTensor((2, 4)))

    assert record_warnings(ask) == []


@pytest.mark.parametrize("build", [functional, pytest.param(subclass, marks=pytest.mark.grid)])
def test_exporting_does_not_warn(build: Callable[[], keras.Model], tmp_path: Path) -> None:
    model = compile_model(build())
    model.fit(X, Y, verbose=0)
    assert record_warnings(lambda: model.export(str(tmp_path / "keras"), verbose=False)) == []
    assert record_warnings(lambda: tf.saved_model.save(model, str(tmp_path / "tf"))) == []


# ---------------------------------------------------------------- scopes that only a step shows


class ModelWithOwnSteps(keras.Model):
    """No `call`; the scopes are in the step."""

    def __init__(self, scoped: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.scoped = layers.Dense(5), layers.Dense(3), scoped

    def forward(self, x: Any) -> Any:
        if not self.scoped:
            return self.second(self.first(x))
        with nb.cluster():
            with nb.stage(cluster="a"):
                hidden = self.first(x)
            with nb.stage(cluster="b"):
                return self.second(hidden)

    def train_step(self, data: Any) -> Any:
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.forward(x) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}

    def test_step(self, data: Any) -> Any:
        x, y, *_ = data
        return {"loss": tf.reduce_mean((self.forward(x) - y) ** 2)}

    def predict_step(self, data: Any) -> Any:
        return self.forward(data[0] if isinstance(data, tuple) else data)


def make_model_with_own_steps(scoped: bool, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(5)
    model = ModelWithOwnSteps(scoped)
    model.compile("sgd", **{"run_eagerly": not scoped, **options})
    return model


@pytest.mark.parametrize("data", ["arrays", pytest.param("batch", marks=pytest.mark.grid)])
def test_scopes_in_a_train_step_are_captured_in_the_first_step(data: str) -> None:
    histories = []
    for model in (make_model_with_own_steps(False), make_model_with_own_steps(True)):
        if data == "arrays":
            histories.append(model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"])
        else:
            histories.append([float(model.train_on_batch(X, Y)) for _ in range(2)])
    assert tuple(nb.last_report().stages) == ("a", "b")
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-6)


def test_run_eagerly_with_scopes_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="run_eagerly"):
        make_model_with_own_steps(True, run_eagerly=True).fit(X, Y, verbose=0)
    with pytest.raises(UnsupportedError, match="run_eagerly"):
        compile_model(Subclass(), run_eagerly=True).fit(X, Y, verbose=0)


class BuildsInStages(Subclass):
    """Scopes around the build of layers, and none in the call."""

    def build(self, shape: Any) -> None:
        with nb.stage(cluster="a"):
            self.first.build(shape)
        with nb.stage(cluster="b"):
            self.second.build((None, 5))
        self.built = True

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


@pytest.mark.parametrize("build_first", [False, True])
def test_scope_in_build_warns_of_no_effect(build_first: bool) -> None:
    model = compile_model(BuildsInStages())
    with pytest.warns(NebulaWarning, match="the build of a layer is not captured") as caught:
        if build_first:
            model.build((None, 4))
        model.fit(X, Y, verbose=0)
    assert "enter it in call" in str(caught[0].message)
    assert {each.filename for each in caught} == {__file__}


@pytest.mark.parametrize(
    "opened",
    [lambda: nb.cluster(), pytest.param(lambda: nb.pipeline(2), marks=pytest.mark.grid)],
    ids=["cluster", "pipeline"],
)
def test_scopes_without_a_stage_warn(opened: Callable[[], Any]) -> None:
    inputs = keras.Input((4,))
    with opened():
        outputs = layers.Dense(3)(inputs)
    model = compile_model(keras.Model(inputs, outputs))
    with pytest.warns(NebulaWarning, match=r"contains no nb.stage: the whole step is one stage") as caught:
        model.fit(X, Y, verbose=0)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", NebulaWarning)
        model.predict(X, verbose=0)


def test_stage_never_entered_warns_when_the_model_runs() -> None:
    nb.stage(cluster="gpu")
    inputs = keras.Input((4,))
    model = compile_model(keras.Model(inputs, layers.Dense(3)(inputs)))
    with pytest.warns(NebulaWarning, match="is never entered"):
        model.fit(X, Y, verbose=0)
