"""Settings of TensorFlow and Keras around a step: supported, with a line in the report, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.error_checks import (
    ROWS,
    assert_same_training,
    build_functional,
    build_subclassed,
    check_error,
    find_marked_line,
    fit,
    make_batch,
    make_two_stage_step,
)
from whale_nebula.errors import UnsupportedError
from whale_nebula.runtime.step import compiled as xla

layers = keras.layers


add_one_in_stages = make_two_stage_step(lambda x: x * 2.0)  # a custom loop's step


# ------------------------------------------------------------------------------------------------ run_eagerly


def test_eager_model_without_scopes_is_unchanged() -> None:
    assert fit(build_subclassed(scoped=False, run_eagerly=True))


@pytest.fixture
def eager_functions() -> Iterator[None]:
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


def test_run_functions_eagerly_is_refused(eager_functions: None) -> None:
    said = "tf.config.run_functions_eagerly(True)"
    check_error(UnsupportedError, lambda: add_one_in_stages(tf.ones([2])), said, "(False)", at=__file__)
    check_error(UnsupportedError, lambda: build_functional().train_on_batch(*make_batch()), said, at="test_settings.py")


# ------------------------------------------------------------------------------------------------ jit_compile


class LoopLayer(layers.Layer):
    """A layer with a loop whose gradient is wanted."""

    def call(self, x: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h)), [0, x])[1]


def test_stage_unsupported_by_xla_runs_without_it() -> None:
    assert_same_training(build_subclassed(LoopLayer(), jit_compile=True), build_subclassed(LoopLayer(), scoped=False))
    assert [note.partition(": ")[0] for note in nb.last_report().notes] == ["stage 'b' is not compiled by XLA"]
    assert "While" in nb.last_report().notes[0]


def test_stage_that_xla_fails_to_compile_runs_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has a kernel and yet cannot compile; here it is made to try what it has none for."""

    def spelled(x: Any) -> Any:
        return x + 0.0 * tf.cast(tf.strings.length(tf.strings.as_string(x)), tf.float32)

    monkeypatch.setattr(xla, "_has_kernel", lambda op: True)
    assert_same_training(build_subclassed(spelled, jit_compile=True), build_subclassed(spelled, scoped=False))
    assert nb.last_report().notes[0].startswith("no stage is compiled by XLA: ")


@tf.function(jit_compile=True)
def compiled_step(x: Any) -> Any:
    return tf.tanh(x) * 2.0


def test_jit_compile_auto_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, jit_compile="auto", which is the default, means True."""
    devices = tf.config.list_physical_devices()
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    with monkeypatch.context() as patched:
        patched.setattr(tf.config, "list_physical_devices", lambda *_: [*devices, gpu])
        model = build_functional()
    assert model.jit_compile is True
    assert_same_training(model, build_functional(scoped=False))


# ------------------------------------------------------------------------------------------------ executions


class StepRecorder(keras.callbacks.Callback):
    """Which steps Keras tells callbacks of."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, int]] = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.steps.append(("train", step))

    def on_predict_batch_end(self, step: int, logs: Any = None) -> None:
        self.steps.append(("predict", step))


def test_steps_per_execution_run_one_by_one() -> None:
    cut, uncut = build_functional(micro=2, steps_per_execution=3), build_functional(scoped=False, steps_per_execution=3)
    seen = {model: StepRecorder() for model in (cut, uncut)}
    for model in (cut, uncut):
        fit(model, rows=5 * ROWS + 3, callbacks=[seen[model]])
    assert nb.last_report().notes == ("steps_per_execution=3: the 3 steps of an execution run separately",)
    for one, other in zip(cut.get_weights(), uncut.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    x, y = make_batch(5 * ROWS + 3)
    predicted = [model.predict(x, batch_size=ROWS, verbose=0, callbacks=[seen[model]]) for model in (cut, uncut)]
    np.testing.assert_allclose(*predicted, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(*(m.evaluate(x, y, batch_size=ROWS, verbose=0) for m in (cut, uncut)), rtol=2e-5)
    assert seen[cut].steps == seen[uncut].steps
    assert len(cut.predict_on_batch(x)) == len(x)


# ------------------------------------------------------------------------------------------------ tf.distribute


def test_strategy_around_a_functional_model_is_refused() -> None:
    def build() -> None:
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            inputs = keras.Input((4,))
            with nb.stage(cluster="a"):  # mark: strategy
                layers.Dense(2)(inputs)

    check_error(
        UnsupportedError, build, "MirroredStrategy", "remove MirroredStrategy.scope()", at=find_marked_line("strategy")
    )


def test_strategy_around_a_subclassed_model_is_refused() -> None:
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model = build_subclassed()
    check_error(UnsupportedError, lambda: fit(model), "OneDeviceStrategy", "scopes determine", at="error_checks.py")


def test_strategy_run_of_a_step_is_refused() -> None:
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    check_error(
        UnsupportedError, lambda: strategy.run(add_one_in_stages, (tf.ones([2]),)), "OneDeviceStrategy.run", at=__file__
    )


def test_model_without_scopes_keeps_its_strategy() -> None:
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        model = build_functional(scoped=False)
    assert fit(model)


# ------------------------------------------------------------------------------------------------ functions


def test_step_inside_a_tf_function_is_refused() -> None:
    @tf.function
    def outer(x: Any) -> Any:
        return add_one_in_stages(x)  # mark: outer

    check_error(
        UnsupportedError,
        lambda: outer(tf.ones([2])),
        "inside a tf.function",
        "@nb.function",
        at=find_marked_line("outer"),
    )


def test_step_in_a_dataset_map_is_refused() -> None:
    dataset = tf.data.Dataset.from_tensors(tf.ones([2]))
    check_error(UnsupportedError, lambda: dataset.map(add_one_in_stages), "map function of a dataset", at=__file__)
