"""Optimizers of rows: the rules of Keras's optimizers, applied only to rows with a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from whale_nebula.errors import OptionError
from whale_nebula.errors.text import did_you_mean

Rule = Callable[[np.ndarray, np.ndarray, list[np.ndarray], int], None]
"""Updates rows in place: their weights, from gradients, slots and the number of the step, which counts from 1."""


@dataclass(frozen=True)
class RowOptimizer:
    """An update rule, and the initial slots of a new row."""

    name: str
    slots: tuple[float, ...]
    update: Rule


def get_optimizer(optimizer: str | keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The Keras optimizer with this name; an optimizer is returned unchanged."""
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return optimizer
    names = {each.lower(): each for each in _RULES}
    if str(optimizer).lower() not in names:
        raise OptionError(f"{optimizer!r} is not an optimizer of rows", mend=did_you_mean(str(optimizer), list(names)))
    return keras.optimizers.get(str(optimizer).lower())


def make_row_optimizer(optimizer: str | keras.optimizers.Optimizer) -> RowOptimizer:
    """The rule of a Keras optimizer: SGD, Adagrad, Ftrl or Adam, with a constant learning rate.

    Rows without a gradient in a step keep their weights and slots, whatever the optimizer would do. Adam counts all
    steps, not those of a row.
    """
    found = get_optimizer(optimizer)
    kind, config = type(found).__name__, found.get_config()
    if kind not in _RULES:
        raise OptionError(
            f"{kind} is not supported for embedding tables",
            why="the update of a row must depend only on its own gradient and slots",
            mend="optimizer= one of " + ", ".join(f'"{each.lower()}"' for each in _RULES),
        )
    make, known = _RULES[kind]
    plain = type(found)().get_config()
    other = [key for key, value in config.items() if key not in {*known, "name"} and value != plain.get(key)]
    if other:
        raise OptionError(
            f"embedding tables do not support {other[0]}={config[other[0]]!r} of {kind}",
            mend=f"remove {other[0]}; supported are {', '.join(known)}",
        )
    wrong = [key for key in known if not isinstance(config[key], int | float)]
    if wrong:
        raise OptionError(
            f"{wrong[0]} of {kind} is not a number",
            why="schedules are not supported for embedding tables",
            mend=f"{wrong[0]}=0.05",
        )
    return make({key: float(config[key]) for key in known})


def _make_sgd(options: Mapping[str, float]) -> RowOptimizer:
    rate = np.float32(options["learning_rate"])

    def update(weights: np.ndarray, gradients: np.ndarray, slots: list[np.ndarray], step: int) -> None:
        weights -= rate * gradients

    return RowOptimizer("sgd", (), update)


def _make_adagrad(options: Mapping[str, float]) -> RowOptimizer:
    rate, epsilon = np.float32(options["learning_rate"]), np.float32(options["epsilon"])

    def update(weights: np.ndarray, gradients: np.ndarray, slots: list[np.ndarray], step: int) -> None:
        (sums,) = slots
        sums += gradients * gradients
        weights -= rate * gradients / np.sqrt(sums + epsilon)

    return RowOptimizer("adagrad", (options["initial_accumulator_value"],), update)


def _make_ftrl(options: Mapping[str, float]) -> RowOptimizer:
    rate, power = np.float32(options["learning_rate"]), np.float32(-options["learning_rate_power"])
    first = np.float32(options["l1_regularization_strength"])
    second = np.float32(options["l2_regularization_strength"] + options["beta"] / (2 * options["learning_rate"]))
    shrinkage = np.float32(2 * options["l2_shrinkage_regularization_strength"])

    def update(weights: np.ndarray, gradients: np.ndarray, slots: list[np.ndarray], step: int) -> None:
        sums, linear = slots
        more = sums + gradients * gradients
        linear += gradients + shrinkage * weights - (more**power - sums**power) / rate * weights
        weights[...] = (np.clip(linear, -first, first) - linear) / (more**power / rate + 2 * second)
        sums[...] = more

    return RowOptimizer("ftrl", (options["initial_accumulator_value"], 0.0), update)


def _make_adam(options: Mapping[str, float]) -> RowOptimizer:
    rate, epsilon = options["learning_rate"], np.float32(options["epsilon"])
    one, two = options["beta_1"], options["beta_2"]

    def update(weights: np.ndarray, gradients: np.ndarray, slots: list[np.ndarray], step: int) -> None:
        mean, square = slots
        mean += (gradients - mean) * np.float32(1 - one)
        square += (gradients * gradients - square) * np.float32(1 - two)
        alpha = np.float32(rate * np.sqrt(1 - two**step) / (1 - one**step))
        weights -= mean * alpha / (np.sqrt(square) + epsilon)

    return RowOptimizer("adam", (0.0, 0.0), update)


_RULES: dict[str, tuple[Callable[[Mapping[str, Any]], RowOptimizer], tuple[str, ...]]] = {
    "SGD": (_make_sgd, ("learning_rate",)),
    "Adagrad": (_make_adagrad, ("learning_rate", "initial_accumulator_value", "epsilon")),
    "Ftrl": (
        _make_ftrl,
        (
            "learning_rate", "learning_rate_power", "initial_accumulator_value", "l1_regularization_strength",
            "l2_regularization_strength", "l2_shrinkage_regularization_strength", "beta",
        ),
    ),
    "Adam": (_make_adam, ("learning_rate", "beta_1", "beta_2", "epsilon")),
}  # fmt: skip
