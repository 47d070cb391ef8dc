"""Keras's own train step: what it creates before its gradients, and that only a trace of it creates variables."""

import contextlib
import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.tf import initial_values, keras_training, threads

X, Y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")


def build_functional() -> Any:
    inputs = keras.Input((3,), name="x")
    model = keras.Model(inputs, keras.layers.Dense(2, name="dense")(inputs), name="model")
    model.compile(keras.optimizers.Adam(name="adam"), "mse", metrics=["mae"], weighted_metrics=["accuracy"])
    return model


def build_scaled() -> Any:
    model = build_functional()
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(name="adam"), name="scaled"), "mse")
    return model


def build_with_two_outputs() -> Any:
    inputs = keras.Input((3,), name="x")
    outputs = [keras.layers.Dense(2, name=name)(inputs) for name in ("a", "b")]
    model = keras.Model(inputs, outputs, name="model")
    model.compile(keras.optimizers.SGD(name="sgd"), ["mse", "mae"], metrics=[["mae"], [keras.metrics.AUC(name="auc")]])
    return model


class Lazy(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="model")
        self.dense = keras.layers.Dense(2, name="dense")

    def call(self, x: Any) -> Any:
        return self.dense(x)


def build_subclassed() -> Any:
    model = Lazy()
    model.compile(keras.optimizers.SGD(momentum=0.9, name="sgd"), "mse", metrics=["mae"])
    return model


def list_variables(model: Any) -> list[str]:
    own = [*model.variables, *model.optimizer.variables, *(v for metric in model.metrics for v in metric.variables)]
    return [variable.path for variable in own]


def make_data(model: Any) -> Any:
    return (X, [Y, Y]) if len(getattr(model, "outputs", [None])) > 1 else (X, Y, np.ones((4,), "float32"))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(build_functional, marks=pytest.mark.grid),
        pytest.param(build_with_two_outputs, marks=pytest.mark.grid),
        pytest.param(build_subclassed, marks=pytest.mark.grid),
        build_scaled,
    ],
)
@pytest.mark.parametrize("is_deferred", [False, True])
def test_create_variables_of_the_first_step_and_lacks_optimizer_variables(make: Any, is_deferred: bool) -> None:
    trained, created, traces = make(), make(), list[int]()
    first = tf.function(lambda *given: trained.train_step(given), autograph=False)
    given = tf.nest.map_structure(tf.convert_to_tensor, make_data(trained))
    first(*given)
    assert not keras_training.lacks_optimizer_variables(trained)

    def step(*given: Any) -> Any:
        traces.append(1)
        return created.train_step(given)

    assert keras_training.lacks_optimizer_variables(created)
    slots = initial_values.InitialValues() if is_deferred else None
    made = tf.function(lambda *given: keras_training.create_variables(created, given, slots), autograph=False)
    initial_values.trace_variables(made, given)
    if slots is not None:
        assert bool(slots.pairs) == (make is not build_with_two_outputs)  # plain SGD has none
        assert not any(initial_values.has_value(variable) for variable, _ in slots.pairs)
        slots.initialize_variables(lambda variable: True)
    assert not keras_training.lacks_optimizer_variables(created)
    assert list_variables(created) == list_variables(trained)
    tf.function(step, autograph=False)(*given)
    assert len(traces) == 1


def test_has_keras_train_step_unless_overridden() -> None:
    class Own(Lazy):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    assert keras_training.has_keras_train_step(Lazy())
    assert not keras_training.has_keras_train_step(Own())
    assert not keras_training.has_keras_train_step(lambda: None)


def test_trace_variables_traces_once_and_initializes() -> None:
    made: list[tf.Variable] = []
    traces: list[Any] = []

    def body(x: Any) -> None:
        traces.append(x)
        made.append(tf.Variable(lambda: tf.fill([2], 3.0)))

    initial_values.trace_variables(tf.function(body, autograph=False), [tf.TensorSpec([None])])
    assert len(traces) == 1
    assert made[0].numpy().tolist() == [3.0, 3.0]


def test_copy_thread_state_gives_another_thread_the_policy_and_the_device() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    found: list[Any] = []
    default = tf.constant(1.0).device.rpartition("device:")[2]
    try:
        with tf.device("/CPU:0"):
            use_state = threads.copy_thread_state()
    finally:
        keras.config.set_dtype_policy("float32")

    def read_state() -> None:
        for around in (contextlib.nullcontext(), use_state(), contextlib.nullcontext()):
            with around:
                place = tf.constant(1.0).device.rpartition("device:")[2]
                found.append((keras.config.dtype_policy().name, place))

    thread = threading.Thread(target=read_state)
    thread.start()
    thread.join()
    assert found == [("float32", default), ("mixed_bfloat16", "CPU:0"), ("float32", default)]


def test_keeps_losses_detects_layers_that_add_losses() -> None:
    layer = keras.layers.ActivityRegularization(0.1)
    assert not threads.keeps_losses([layer])
    layer(tf.ones((2, 2)))
    assert threads.keeps_losses([layer])


@pytest.mark.parametrize(
    ("run", "is_reset"),
    [("fit", False), ("train_on_batch", True), ("test_on_batch", True), ("evaluate", True)],
)
def test_list_reset_variables_within_the_methods_that_reset_metrics(run: str, is_reset: bool) -> None:
    """Their counts are zero then; `fit` may continue an epoch."""
    found: list[list[Any]] = []

    class Watched(Lazy):
        def call(self, x: Any) -> Any:
            found.append(keras_training.list_reset_variables())
            return super().call(x)

    model = Watched()
    model.compile("sgd", "mse", metrics=["mae"], run_eagerly=True)
    model.train_on_batch(X, Y)  # creates the variables
    getattr(model, run)(X, Y, **({} if run.endswith("batch") else {"verbose": 0}))
    own = [variable.value for metric in model.metrics for variable in metric.variables]
    assert own and [id(each) for each in found[-1]] == [id(each) for each in own if is_reset]
    assert keras_training.list_reset_variables() == []
