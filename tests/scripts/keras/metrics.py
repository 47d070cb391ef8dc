"""Metrics during training."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from tests.parity_harness import Cut
from tests.scripts.keras.script import abs_numbers, classes, dense, labels, momentum, numbers, rows, script, two_parts


class Within(keras.metrics.Metric):
    """A metric of the user's own: the share of numbers that are close."""

    def __init__(self, name: str = "within", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.hits = self.add_variable((), "zeros", name="hits")
        self.seen = self.add_variable((), "zeros", name="seen")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        close = ops.cast(ops.abs(y_true - y_pred) < 0.8, "float32")
        self.hits.assign_add(ops.sum(close))
        self.seen.assign_add(ops.cast(ops.size(close), "float32"))

    def result(self) -> Any:
        return self.hits / self.seen


@script(rows(sample_weight=abs_numbers(seed=3)))
def metrics_of_numbers(cut: Cut) -> Any:
    """Regression: also one of the user's own, and a function."""
    model = dense(cut)
    found = ["mae", "mape", Within(), keras.metrics.R2Score(), keras.metrics.RootMeanSquaredError()]
    found += ["cosine_similarity", keras.metrics.LogCoshError(), keras.losses.huber]
    weighted = ["mse", keras.metrics.RootMeanSquaredError(name="weighted_rmse")]
    model.compile(momentum(), "mse", metrics=found, weighted_metrics=weighted)
    return model


@script(labels())
def metrics_of_classes(cut: Cut) -> Any:
    """Classes: top-k, mean intersection over union, cross-entropy."""
    kinds = keras.metrics
    found = ["accuracy", kinds.SparseTopKCategoricalAccuracy(2, name="top2"), kinds.SparseCategoricalCrossentropy()]
    found += [kinds.MeanIoU(4, sparse_y_pred=False, name="iou")]
    first, second = layers.Dense(8, activation="tanh"), layers.Dense(4, activation="softmax")
    return two_parts(cut, keras.Input((6,)), first, second, "sparse_categorical_crossentropy", metrics=found)


def _marks() -> dict[str, Any]:
    return {"x": numbers(6), "y": classes(2, 1, seed=1).astype("float32"), "sample_weight": abs_numbers(seed=3)}


@script(_marks, grid_only=True)
def metrics_of_marks(cut: Cut) -> Any:
    """Two classes: AUC, precision, recall and what is counted for them."""
    kinds = keras.metrics
    found = ["accuracy", kinds.AUC(name="auc"), kinds.AUC(curve="PR", name="pr"), kinds.Precision(), kinds.Recall()]
    found += [kinds.F1Score(threshold=0.5), kinds.PrecisionAtRecall(0.5), kinds.TruePositives(), kinds.BinaryIoU()]
    first, second = layers.Dense(8, activation="tanh"), layers.Dense(1, activation="sigmoid")
    return two_parts(
        cut, keras.Input((6,)), first, second, "binary_crossentropy", metrics=found,
        weighted_metrics=[kinds.AUC(name="weighted_auc")],
    )  # fmt: skip


class Measuring(keras.Model):
    """A model with a metric that its `call` feeds."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self.first, self.second = layers.Dense(8, activation="tanh"), layers.Dense(3)
        self.size = keras.metrics.Mean(name="size")

    def call(self, x: Any) -> Any:
        with self.cut.program():
            with self.cut.at(0):
                hidden = self.first(x)
                self.size.update_state(ops.abs(hidden))
            with self.cut.at(1):
                return self.second(hidden)


@script(rows())
def metric_in_a_layer(cut: Cut) -> Any:
    """A mean over activations, kept in the first stage."""
    model = Measuring(cut)
    model.compile(momentum(), "mse", metrics=["mae"])
    return model
