"""Models that override a step of Keras, or a part of one."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from tests.parity_harness import Cut
from tests.scripts.keras.script import abs_numbers, adam, classes, dense, labels, momentum, numbers, rows, script


class Guided(keras.Model):
    """Keras's own guide: `train_step` in full."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@script(rows())
def own_train_step(cut: Cut) -> Any:
    """The guide's `train_step`: the loss tracker counts steps, not rows."""
    model = dense(cut, kind=Guided)
    model.compile(momentum(), "mse", metrics=["mae"])
    return model


class OwnLoss(keras.Model):
    """The guide's second step: no `compile` loss at all, trackers of its own, gradients clipped and measured."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="loss")
        self.norm = keras.metrics.Mean(name="gradient_norm")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    @property
    def metrics(self) -> Any:
        return [self.tracker, self.norm, self.mae]

    def train_step(self, data: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred, sample_weight=weight)
        gradients = tape.gradient(loss, self.trainable_weights)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        self.norm.update_state(norm)
        self.mae.update_state(y, y_pred, sample_weight=weight)
        return {"loss": self.tracker.result(), "gradient_norm": self.norm.result(), "mae": self.mae.result()}

    def test_step(self, data: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        self.tracker.update_state(self.loss_fn(y, y_pred, sample_weight=weight))
        self.mae.update_state(y, y_pred, sample_weight=weight)
        return {"loss": self.tracker.result(), "mae": self.mae.result()}

    def predict_step(self, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        found = self(x, training=False)
        return {"softmax": tf.nn.softmax(found), "best": tf.argmax(found, axis=-1)}


@script(rows(sample_weight=abs_numbers(seed=3)))
def own_steps(cut: Cut) -> Any:
    """`train_step`, `test_step` and `predict_step` overridden."""
    model = dense(cut, kind=OwnLoss)
    model.compile(momentum())
    return model


class Penalised(keras.Model):
    """The guide's `compute_loss`, with a tracker of its own and a penalty on the outputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="penalised")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        loss = ops.mean(ops.square(y_pred - y)) + 0.1 * ops.mean(ops.abs(y_pred))
        loss = loss + sum(self.losses)
        self.tracker.update_state(loss)
        return loss

    def reset_metrics(self) -> None:
        self.tracker.reset_state()

    @property
    def metrics(self) -> Any:
        return [self.tracker]


@script(rows())
def own_compute_loss(cut: Cut) -> Any:
    """`compute_loss` overridden, as in Keras's documentation."""
    model = dense(cut, kind=Penalised)
    model.compile(momentum())
    return model


class Extended(keras.Model):
    """`compute_loss` and `compute_metrics` that call Keras's own and add to them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spread = keras.metrics.Mean(name="spread")

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *more: Any, **named: Any) -> Any:
        loss = super().compute_loss(x, y, y_pred, *more, **named)
        return loss + 0.01 * ops.mean(ops.square(x)) * ops.mean(ops.square(self.trainable_weights[0]))

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        self.spread.update_state(ops.max(y_pred, axis=-1) - ops.min(y_pred, axis=-1))
        return {**found, "spread": self.spread.result()}


@script(labels(sample_weight=abs_numbers(seed=3)))
def extended_loss_and_metrics(cut: Cut) -> Any:
    """`super().compute_loss(...)` plus a term, `super().compute_metrics(...)` plus a metric."""
    model = dense(cut, 4, Extended)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(momentum(), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


class TwoOptimizers(keras.Model):
    """Two optimizers for two groups of weights, and a persistent tape."""

    def compile(self, second: Any, **options: Any) -> None:
        super().compile(**options)
        self.second = second

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        first, second = self.trainable_weights[:2], self.trainable_weights[2:]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, first), first, strict=True))
        self.second.apply_gradients(zip(tape.gradient(loss, second), second, strict=True))
        return self.compute_metrics(x, y, y_pred)


@script(rows())
def two_optimizers(cut: Cut) -> Any:
    """Two requests for gradients in a step; the second comes after the first one's update."""
    model = dense(cut, kind=TwoOptimizers)
    model.compile(keras.optimizers.SGD(1e-2, momentum=0.9), optimizer=adam(), loss="mse", metrics=["mae"])
    return model


class Autoencoder(keras.Model):
    """Targets are the inputs: `fit(x)` without `y`."""

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=x, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss, "rows": tf.shape(x)[0]}


@script(lambda: {"x": numbers(6)}, evaluates=False)
def autoencoder(cut: Cut) -> Any:
    """No targets, no metrics: the step returns its loss, and how many rows it had."""
    model = dense(cut, 6, Autoencoder)
    model.compile(momentum(), "mse")
    return model


class Distiller(keras.Model):
    """A frozen teacher and a student that learns from it: Keras's distillation example."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self.teacher = keras.Sequential([keras.Input((6,)), layers.Dense(16, activation="tanh"), layers.Dense(4)])
        self.student = keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(4)])
        self.teacher.trainable = False
        self.agreement = keras.losses.KLDivergence()

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, allow_empty: bool = False,
        training: bool = True,
    ) -> Any:  # fmt: skip
        with self.cut.program():
            with self.cut.at(0):
                said = self.teacher(x, training=False)
            with self.cut.at(1):
                student_loss = super().compute_loss(x, y, y_pred, sample_weight)
                soft = self.agreement(ops.softmax(said / 3.0, axis=1), ops.softmax(y_pred / 3.0, axis=1)) * 9.0
        return 0.1 * student_loss + 0.9 * soft

    def call(self, x: Any) -> Any:
        with self.cut.program(), self.cut.at(1):
            return self.student(x)


@script(lambda: {"x": numbers(6), "y": classes(4, seed=1)})
def distiller(cut: Cut) -> Any:
    """The teacher in one cluster, the student in another."""
    model = Distiller(cut)
    model.compile(momentum(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model
