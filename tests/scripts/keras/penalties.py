"""Losses that layers add: of weights, of activations, and others."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from tests.parity_harness import Cut
from tests.scripts.keras.script import abs_numbers, momentum, rows, script, two_parts


def _model(cut: Cut, first: Any, second: Any) -> Any:
    last = layers.Dense(3)
    return two_parts(cut, keras.Input((6,)), first, lambda x: last(second(x)), metrics=["mae"])


@script(rows())
def penalty_on_kernels(cut: Cut) -> Any:
    """L1 and L2 of kernels and biases, in both stages, and an orthogonal one."""
    first = layers.Dense(8, activation="tanh", kernel_regularizer="l2", bias_regularizer=keras.regularizers.L1(0.1))
    second = layers.Dense(8, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.01))
    return _model(cut, first, second)


@script(rows(sample_weight=abs_numbers(seed=3)))
def penalty_on_activities(cut: Cut) -> Any:
    """Activity regularizers: Keras divides their sum by the rows."""
    first = layers.Dense(8, activation="tanh", activity_regularizer="l2")
    second = layers.Dense(8, activity_regularizer=keras.regularizers.L1L2(0.01, 0.02))
    return _model(cut, first, second)


class Sparse(layers.Layer):
    """Adds a mean over the batch, or a sum over it, to the losses."""

    def __init__(self, how: Any, **options: Any) -> None:
        super().__init__(**options)
        self.how = how
        self.dense = layers.Dense(8, activation="tanh")

    def call(self, x: Any) -> Any:
        hidden = self.dense(x)
        self.add_loss(0.1 * self.how(ops.square(hidden)))
        return hidden


@script(rows())
def penalty_sum_added(cut: Cut) -> Any:
    """`add_loss` of a sum in the first stage, of a mean in the second."""
    return _model(cut, Sparse(ops.sum), Sparse(ops.mean))


class Sampling(layers.Layer):
    """A variational autoencoder's bottleneck: the divergence is added as a loss, noise comes from a seed."""

    def __init__(self, noise: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.mean, self.log_variance = layers.Dense(4), layers.Dense(4)
        self.seed, self.noise = keras.random.SeedGenerator(5), noise

    def call(self, x: Any) -> Any:
        mean, log_variance = self.mean(x), self.log_variance(x)
        divergence = -0.5 * ops.sum(1 + log_variance - ops.square(mean) - ops.exp(log_variance), axis=-1)
        self.add_loss(0.1 * ops.mean(divergence))
        if not self.noise:
            return mean
        return mean + self.noise * ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seed)


@script(rows())
def penalty_divergence(cut: Cut) -> Any:
    """The divergence of a variational autoencoder, without its noise."""
    return _model(cut, Sampling(), layers.Dense(8, activation="relu"))


@script(rows(), micro=(1,))
def penalty_divergence_with_noise(cut: Cut) -> Any:
    """With it: the draw is the uncut one where the batch is whole."""
    return _model(cut, Sampling(1.0), layers.Dense(8, activation="relu"))


class Penalised(keras.Model):
    """A subclassed model that adds a loss in its `call`, outside of every stage."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self.first, self.second = layers.Dense(8, activation="tanh"), layers.Dense(3, kernel_regularizer="l2")

    def call(self, x: Any) -> Any:
        with self.cut.program():
            with self.cut.at(0):
                hidden = self.first(x)
            with self.cut.at(1):
                outputs = self.second(hidden)
        self.add_loss(0.05 * ops.mean(ops.abs(outputs)) + 0.01 * ops.mean(ops.square(hidden)))
        return outputs


@script(rows())
def penalty_in_a_subclass(cut: Cut) -> Any:
    """`add_loss` in a model's own `call`."""
    model = Penalised(cut)
    model.compile(momentum(), "mse")
    return model
