"""Settings of TensorFlow and Keras around a step: supported, with a line in the report, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.error_checks import ROWS, batch, fit, functional, marked, same_training, sub, told, two
from whale_nebula.errors import UnsupportedError
from whale_nebula.runtime.step import compiled as xla

layers = keras.layers


shifted = two(lambda x: x * 2.0)  # a custom loop's step


# ------------------------------------------------------------------------------------------------ run_eagerly


def test_an_eager_model_without_scopes_is_left_alone() -> None:
    assert fit(sub(scoped=False, run_eagerly=True))


@pytest.fixture
def eager() -> Iterator[None]:
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


def test_functions_that_run_eagerly_are_refused(eager: None) -> None:
    said = "tf.config.run_functions_eagerly(True)"
    told(UnsupportedError, lambda: shifted(tf.ones([2])), said, "(False)", at=__file__)
    told(UnsupportedError, lambda: functional().train_on_batch(*batch()), said, at="test_settings.py")


# ------------------------------------------------------------------------------------------------ jit_compile


class Loops(layers.Layer):
    """A layer with a loop whose gradient is wanted."""

    def call(self, x: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h)), [0, x])[1]


def test_a_stage_that_xla_cannot_take_runs_without_it_and_says_so() -> None:
    same_training(sub(Loops(), jit_compile=True), sub(Loops(), scoped=False))
    assert [note.partition(": ")[0] for note in nb.last_report().notes] == ["stage 'b' is not compiled by XLA"]
    assert "While" in nb.last_report().notes[0]


def test_what_xla_refuses_while_it_compiles_is_run_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has a kernel and yet cannot compile; here it is made to try what it has none for."""

    def spelled(x: Any) -> Any:
        return x + 0.0 * tf.cast(tf.strings.length(tf.strings.as_string(x)), tf.float32)

    monkeypatch.setattr(xla, "_has_kernel", lambda op: True)
    same_training(sub(spelled, jit_compile=True), sub(spelled, scoped=False))
    assert nb.last_report().notes[0].startswith("no stage is compiled by XLA: ")


@tf.function(jit_compile=True)
def compiled(x: Any) -> Any:
    return tf.tanh(x) * 2.0


def test_auto_as_keras_resolves_it_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, jit_compile="auto", which is the default, means True."""
    devices = tf.config.list_physical_devices()
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    with monkeypatch.context() as patched:
        patched.setattr(tf.config, "list_physical_devices", lambda *_: [*devices, gpu])
        model = functional()
    assert model.jit_compile is True
    same_training(model, functional(scoped=False))


# ------------------------------------------------------------------------------------------------ executions


class Seen(keras.callbacks.Callback):
    """Which steps Keras tells callbacks of."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, int]] = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.steps.append(("train", step))

    def on_predict_batch_end(self, step: int, logs: Any = None) -> None:
        self.steps.append(("predict", step))


def test_several_steps_per_execution_run_one_by_one() -> None:
    cut, uncut = functional(micro=2, steps_per_execution=3), functional(scoped=False, steps_per_execution=3)
    seen = {model: Seen() for model in (cut, uncut)}
    for model in (cut, uncut):
        fit(model, rows=5 * ROWS + 3, callbacks=[seen[model]])
    assert nb.last_report().notes == ("steps_per_execution=3: the 3 steps of an execution run separately",)
    for one, other in zip(cut.get_weights(), uncut.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    x, y = batch(5 * ROWS + 3)
    predicted = [model.predict(x, batch_size=ROWS, verbose=0, callbacks=[seen[model]]) for model in (cut, uncut)]
    np.testing.assert_allclose(*predicted, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(*(m.evaluate(x, y, batch_size=ROWS, verbose=0) for m in (cut, uncut)), rtol=2e-5)
    assert seen[cut].steps == seen[uncut].steps
    assert len(cut.predict_on_batch(x)) == len(x)


# ------------------------------------------------------------------------------------------------ tf.distribute


def test_a_strategy_around_a_functional_model() -> None:
    def build() -> None:
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            inputs = keras.Input((4,))
            with nb.stage(cluster="a"):  # mark: strategy
                layers.Dense(2)(inputs)

    told(UnsupportedError, build, "MirroredStrategy", "remove MirroredStrategy.scope()", at=marked("strategy"))


def test_a_strategy_around_a_subclassed_model() -> None:
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model = sub()
    told(UnsupportedError, lambda: fit(model), "OneDeviceStrategy", "scopes determine", at="error_checks.py")


def test_a_strategy_that_runs_a_step() -> None:
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    told(UnsupportedError, lambda: strategy.run(shifted, (tf.ones([2]),)), "OneDeviceStrategy.run", at=__file__)


def test_a_model_without_scopes_keeps_its_strategy() -> None:
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model = functional(scoped=False)
    assert fit(model)


# ------------------------------------------------------------------------------------------------ functions


def test_a_step_inside_a_tf_function() -> None:
    @tf.function
    def outer(x: Any) -> Any:
        return shifted(x)  # mark: outer

    told(UnsupportedError, lambda: outer(tf.ones([2])), "inside a tf.function", "@nb.function", at=marked("outer"))


def test_a_step_in_a_datasets_map() -> None:
    dataset = tf.data.Dataset.from_tensors(tf.ones([2]))
    told(UnsupportedError, lambda: dataset.map(shifted), "map function of a dataset", at=__file__)
