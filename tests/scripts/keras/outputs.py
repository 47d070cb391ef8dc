"""Several inputs and outputs, losses and weights."""

from __future__ import annotations

import warnings
from typing import Any

import keras
from keras import layers

from tests.parity_harness import Cut
from tests.scripts.keras.script import (
    FitArguments,
    LogRecorder,
    abs_numbers,
    add,
    classes,
    dense,
    fit,
    labels,
    momentum,
    numbers,
    rows,
    script,
    two_parts,
)


def heads(cut: Cut, *, early: bool = False, listed: bool = False) -> Any:
    """Two heads: both at the end, or one in the first stage."""
    inputs = keras.Input((6,))
    with cut.program():
        with cut.at(0):
            hidden = layers.Dense(8, activation="tanh")(inputs)
            size = layers.Dense(1, name="size")(hidden) if early else None
        with cut.at(1):
            hidden = layers.Dense(8, activation="gelu")(hidden)
            kind = layers.Dense(4, activation="softmax", name="kind")(hidden)
            size = layers.Dense(1, name="size")(hidden) if size is None else size
    return keras.Model(inputs, [kind, size] if listed else {"kind": kind, "size": size})


def two_targets(**more: Any) -> FitArguments:
    """A class and a number a row, by name."""
    return {"x": numbers(6), "y": {"kind": classes(4, seed=1), "size": numbers(1, seed=2)}, **more}


def _weights() -> FitArguments:
    return two_targets(sample_weight={"kind": abs_numbers(seed=3), "size": abs_numbers(seed=4)})


_LOSSES = {"kind": "sparse_categorical_crossentropy", "size": "mse"}


@script(two_targets)
def outputs_in_a_dict(cut: Cut) -> Any:
    """Losses, loss weights and metrics by the names of the outputs."""
    model = heads(cut)
    model.compile(
        momentum(),
        _LOSSES,
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae", "mse"]},
    )
    return model


@script(_weights)
def output_in_the_first_stage(cut: Cut) -> Any:
    """An auxiliary head in the first stage, a sample weight for each output, weighted metrics."""
    model = heads(cut, early=True)
    model.compile(momentum(), _LOSSES, weighted_metrics={"kind": ["accuracy"], "size": ["mae"]})
    return model


def _quietly(model: Any, given: FitArguments, watch: LogRecorder) -> None:
    """Keras warns that the head without a loss has no gradients."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Gradients do not exist", category=UserWarning)
        fit(model, given, watch)


@script(two_targets, _quietly)
def output_without_a_loss(cut: Cut) -> Any:
    """One output has no loss, so what makes it has no gradient."""
    model = heads(cut)
    model.compile(momentum(), {"kind": "sparse_categorical_crossentropy", "size": None}, metrics={"kind": "accuracy"})
    return model


@script(lambda: {"x": numbers(6), "y": {"a": numbers(2, seed=1), "b": numbers(2, seed=2)}})
def one_loss_for_all_outputs(cut: Cut) -> Any:
    """`loss="mse"` for every output."""
    heads = {name: layers.Dense(2, name=name) for name in "ab"}
    first = layers.Dense(8, activation="tanh")
    return two_parts(cut, keras.Input((6,)), first, lambda x: {name: head(x) for name, head in heads.items()})


@script(lambda: {"x": {"wide": numbers(4), "deep": numbers(6, seed=5)}, "y": classes(2, 1, seed=1).astype("float32")})
def inputs_in_a_dict(cut: Cut) -> Any:
    """Wide and deep: one input skips the first stage."""
    wide, deep = keras.Input((4,), name="wide"), keras.Input((6,), name="deep")
    with cut.program():
        with cut.at(0):
            hidden = layers.Dense(8, activation="relu")(deep)
        with cut.at(1):
            joined = layers.Concatenate()([layers.Dense(3)(wide), layers.Dense(8)(hidden)])
            outputs = layers.Dense(1, activation="sigmoid")(joined)
    model = keras.Model({"wide": wide, "deep": deep}, outputs)
    model.compile(momentum(), "binary_crossentropy", metrics=["binary_accuracy", "AUC"])
    return model


def _classifier(**compiled: Any) -> Any:
    def build(cut: Cut) -> Any:
        model = dense(cut, 4)
        model.compile(momentum(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), **compiled)
        return model

    return build


_weighted = _classifier(metrics=["accuracy"], weighted_metrics=["accuracy"])
add("class_weight", _weighted, labels(class_weight={0: 0.2, 1: 2.0, 2: 1.0, 3: 0.7}), evaluates=False)
add("sample_weight", _weighted, labels(sample_weight=abs_numbers(seed=3)))


def regression(loss: Any, activation: str | None = None, **data: Any) -> None:
    """A script for a loss of Keras."""

    def build(cut: Cut) -> Any:
        model = dense(cut, activation=activation)
        model.compile(momentum(), loss())
        return model

    add(f"loss_{loss().name}", build, rows(sample_weight=abs_numbers(seed=3), **data), evaluates=False)


for _loss in (
    lambda: keras.losses.MeanSquaredError(reduction="sum", name="sum"),
    lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight", name="mean_with_sample_weight"),
    lambda: keras.losses.MeanSquaredError(reduction="mean", name="mean"),
    keras.losses.Huber,
    keras.losses.LogCosh,
    keras.losses.CosineSimilarity,
    keras.losses.MeanAbsolutePercentageError,
):
    regression(_loss)
regression(keras.losses.BinaryCrossentropy, "sigmoid", y=abs_numbers(3, seed=1) % 1)
regression(keras.losses.KLDivergence, "softmax", y=abs_numbers(3, seed=1) % 1)
regression(keras.losses.CategoricalFocalCrossentropy, "softmax", y=abs_numbers(3, seed=1) % 1)
regression(keras.losses.Hinge)


def _own_loss(y: Any, y_pred: Any) -> Any:
    """A user's own loss: a number for the whole batch."""
    return keras.ops.mean(keras.ops.square(y - y_pred)) + 0.1 * keras.ops.mean(keras.ops.abs(y_pred))


@script(rows())
def loss_is_a_function(cut: Cut) -> Any:
    """A function that gives one number."""
    model = dense(cut)
    model.compile(momentum(), _own_loss, metrics=[_own_loss])
    return model
