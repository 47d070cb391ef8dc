"""Keras's own train step: what it creates before its gradients, and that only a trace of it creates variables."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from whale_nebula.tf import initial_values, keras_training

X, Y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")


def functional() -> Any:
    inputs = keras.Input((3,), name="x")
    model = keras.Model(inputs, keras.layers.Dense(2, name="dense")(inputs), name="model")
    model.compile(keras.optimizers.Adam(name="adam"), "mse", metrics=["mae"], weighted_metrics=["accuracy"])
    return model


def scaled() -> Any:
    model = functional()
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(name="adam"), name="scaled"), "mse")
    return model


def several() -> Any:
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


def subclassed() -> Any:
    model = Lazy()
    model.compile(keras.optimizers.SGD(momentum=0.9, name="sgd"), "mse", metrics=["mae"])
    return model


def variables_of(model: Any) -> list[str]:
    own = [*model.variables, *model.optimizer.variables, *(v for metric in model.metrics for v in metric.variables)]
    return [variable.path for variable in own]


def data(model: Any) -> Any:
    return (X, [Y, Y]) if len(getattr(model, "outputs", [None])) > 1 else (X, Y, np.ones((4,), "float32"))


@pytest.mark.parametrize(
    "make",
    [
        functional,
        pytest.param(several, marks=pytest.mark.grid),
        pytest.param(subclassed, marks=pytest.mark.grid),
        scaled,
    ],
)
def test_create_variables_makes_those_of_the_first_step_and_lacks_variables_says_when(make: Any) -> None:
    trained, created, traces = make(), make(), list[int]()
    first = tf.function(lambda *given: trained.train_step(given), autograph=False)
    given = tf.nest.map_structure(tf.convert_to_tensor, data(trained))
    first(*given)
    assert not keras_training.lacks_optimizer_variables(trained)

    def step(*given: Any) -> Any:
        traces.append(1)
        return created.train_step(given)

    assert keras_training.lacks_optimizer_variables(created)
    made = tf.function(lambda *given: keras_training.create_variables(created, given), autograph=False)
    initial_values.trace_variables(made, given)
    assert not keras_training.lacks_optimizer_variables(created)
    assert variables_of(created) == variables_of(trained)
    tf.function(step, autograph=False)(*given)
    assert len(traces) == 1


def test_trains_as_keras_where_nobody_has_another_train_step() -> None:
    class Own(Lazy):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    assert keras_training.has_keras_train_step(Lazy())
    assert not keras_training.has_keras_train_step(Own())
    assert not keras_training.has_keras_train_step(lambda: None)


def test_trace_variables_traces_once_and_gives_them_values() -> None:
    made: list[tf.Variable] = []
    traces: list[Any] = []

    def body(x: Any) -> None:
        traces.append(x)
        made.append(tf.Variable(lambda: tf.fill([2], 3.0)))

    initial_values.trace_variables(tf.function(body, autograph=False), [tf.TensorSpec([None])])
    assert len(traces) == 1
    assert made[0].numpy().tolist() == [3.0, 3.0]
