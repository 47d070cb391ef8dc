"""Every optimizer of Keras, and their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers

from tests.parity_harness import Cut
from tests.scripts.keras.masks import TIME, WORDS, sentences
from tests.scripts.keras.script import adam, add, dense, fit, rows, script

optimizers, schedules = keras.optimizers, keras.optimizers.schedules


def optimized(name: str, make: Callable[[], Any], **options: Any) -> None:
    """A small model with an optimizer."""

    def build(cut: Cut) -> Any:
        model = dense(cut)
        model.compile(make(), "mse")
        return model

    add(f"optimizer_{name}", build, rows(), evaluates=False, **options)


for _name, _make in {
    "sgd": lambda: optimizers.SGD(1e-2),
    "momentum": lambda: optimizers.SGD(1e-2, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(1e-2, momentum=0.9, nesterov=True),
    "adam": lambda: adam(),
    "amsgrad": lambda: adam(amsgrad=True),
    "adamw": lambda: optimizers.AdamW(1e-2, weight_decay=0.05, epsilon=1e-3),
    "adamax": lambda: optimizers.Adamax(1e-2, epsilon=1e-3),
    "nadam": lambda: optimizers.Nadam(1e-2, epsilon=1e-3),
    "rmsprop": lambda: optimizers.RMSprop(1e-2, epsilon=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda: optimizers.Adagrad(1e-2, epsilon=1e-3),
    "adadelta": lambda: optimizers.Adadelta(1e-1, epsilon=1e-3),
    "adafactor": lambda: optimizers.Adafactor(1e-2),
    "lion": lambda: optimizers.Lion(1e-3),
    "ftrl": lambda: optimizers.Ftrl(1e-2, l1_regularization_strength=0.01),
    "lamb": lambda: optimizers.Lamb(1e-2, epsilon=1e-3),
    "muon": lambda: optimizers.Muon(1e-2, epsilon=1e-3),
    "schedule_free": lambda: optimizers.ScheduleFreeAdamW(1e-2, epsilon=1e-3),
    "several": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(default_optimizer=optimizers.SGD(1e-2, momentum=0.9), optimizer_map={".*bias": adam()})
    ),
    "clipnorm": lambda: adam(clipnorm=0.1),
    "clipvalue": lambda: adam(clipvalue=0.02),
    "global_clipnorm": lambda: optimizers.SGD(1e-2, global_clipnorm=0.1),
    "weight_decay": lambda: adam(weight_decay=0.1),
    "ema": lambda: adam(use_ema=True, ema_momentum=0.5),
    "ema_overwrites": lambda: adam(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulates": lambda: adam(gradient_accumulation_steps=2),
    "accumulates_and_clips": lambda: optimizers.SGD(
        1e-2, momentum=0.9, gradient_accumulation_steps=4, global_clipnorm=0.1, weight_decay=0.1
    ),
    "scales_the_loss": lambda: adam(loss_scale_factor=64.0),
    "exponential_decay": lambda: adam(schedules.ExponentialDecay(1e-2, 2, 0.5, staircase=True)),
    "cosine_restarts": lambda: adam(schedules.CosineDecayRestarts(1e-2, 2)),
    "warmup": lambda: adam(schedules.CosineDecay(1e-3, 4, warmup_target=1e-2, warmup_steps=3)),
    "piecewise": lambda: adam(schedules.PiecewiseConstantDecay([1, 4], [1e-2, 5e-3, 1e-3])),
}.items():
    optimized(_name, _make)


class Halving(schedules.LearningRateSchedule):
    """A schedule of the user's own."""

    def __call__(self, step: Any) -> Any:
        return 1e-2 * 0.5 ** keras.ops.cast(step, "float32")

    def get_config(self) -> dict[str, Any]:
        return {}


class Own(optimizers.Optimizer):
    """An optimizer of the user's own."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_sub(variable, keras.ops.cast(learning_rate, variable.dtype) * keras.ops.tanh(gradient))


optimized("own_schedule", lambda: adam(Halving()))
optimized("own", lambda: Own(learning_rate=1e-2))


def _embedded(name: str, make: Callable[[], Any]) -> None:
    """Sparse gradients: an embedding in the first stage, tied to the second."""

    def build(cut: Cut) -> Any:
        tokens = keras.Input((TIME,), dtype="int32")
        embedding = layers.Embedding(WORDS, 6)
        with cut.program():
            with cut.at(0):
                hidden = layers.Dense(6, activation="tanh")(embedding(tokens))
            with cut.at(1):
                hidden = layers.Flatten()(hidden + embedding(keras.ops.flip(tokens, axis=1)))
                outputs = layers.Dense(4)(hidden)
        model = keras.Model(tokens, outputs)
        model.compile(make(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    add(f"sparse_{name}", build, sentences, evaluates=False)


_embedded("adam", adam)
_embedded("momentum", lambda: optimizers.SGD(1e-2, momentum=0.9, nesterov=True))
_embedded("clipnorm", lambda: adam(clipnorm=0.05))
_embedded("global_clipnorm", lambda: optimizers.Adagrad(1e-2, global_clipnorm=0.1, epsilon=1e-3))
_embedded("decay_and_ema", lambda: adam(weight_decay=0.1, use_ema=True, ema_overwrite_frequency=3))


@script(rows(), lambda model, given, watch: fit(model, given, watch, epochs=3))
def constraints(cut: Cut) -> Any:
    """Weights that an update must project back."""
    inputs = keras.Input((6,))
    with cut.program():
        with cut.at(0):
            hidden = layers.Dense(8, activation="tanh", kernel_constraint=keras.constraints.MaxNorm(0.5))(inputs)
        with cut.at(1):
            outputs = layers.Dense(3, kernel_constraint="non_neg", bias_constraint="unit_norm")(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(adam(), "mse")
    return model
