"""Metrics that are no sum over rows: named as what they are, with a way out that leaves the micro-batches alone."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import whale_nebula as nb
from tests.scripts.refusals.telling import batch, fit, functional, marked, told
from whale_nebula.errors import BatchCoupledError


class Largest(keras.metrics.Metric):
    """The largest number of the last batch."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.seen = self.add_weight(name="seen", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign_add(tf.reduce_max(y_pred))  # mark: max

    def result(self) -> Any:
        return self.seen


def test_a_metric_of_ones_own_is_named_with_its_line() -> None:
    model = functional(micro=2, metrics=[Largest()])
    said = ("what the step writes into metric 'largest'", "Max over the batch is neither a sum nor a mean")
    mend = "leave 'largest' out of model.compile(metrics=[...])"
    told(BatchCoupledError, lambda: fit(model), *said, mend, at=marked("max"))
    told(BatchCoupledError, lambda: nb.plan(model, *batch()), *said, mend, at=marked("max"))


@pytest.mark.parametrize("weighted", [False, True])
def test_one_of_keras_is_named(weighted: bool) -> None:
    """A correlation along the batch."""
    option = "weighted_metrics" if weighted else "metrics"
    model = functional(micro=2, **{option: [keras.metrics.PearsonCorrelation(axis=0, name="pearson")]})
    told(BatchCoupledError, lambda: fit(model), "into metric 'pearson'", "leave 'pearson' out of")


def test_without_it_or_with_one_micro_batch_all_is_well() -> None:
    assert np.isfinite(fit(functional(micro=2, metrics=["mae"]))["mae"]).all()
    assert np.isfinite(fit(functional(micro=1, metrics=[Largest()]))["largest"]).all()


def test_other_writes_are_not_called_metrics() -> None:
    seen, weight = tf.Variable(0.0, trainable=False), tf.Variable(2.0)

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.pipeline(2), nb.stage(cluster="a"):
            seen.assign(tf.reduce_max(x * weight))
            return x + 1.0

    told(BatchCoupledError, lambda: step(tf.ones([4, 2])), "what the step writes: ", "micro_batch=1")
