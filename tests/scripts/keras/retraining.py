"""Changes between two calls of `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.parity_harness import Cut
from tests.scripts.keras.script import (
    FitArguments,
    LogRecorder,
    Train,
    abs_numbers,
    adam,
    add,
    dense,
    evaluate_and_predict,
    fit,
    momentum,
    rows,
)


def _model(cut: Cut) -> Any:
    model = dense(cut)
    model.compile(momentum(), "mse", metrics=["mae"])
    return model


def between(change: Callable[[Any], None]) -> Train:
    """`fit`, a change, and `fit` again; `evaluate` after each."""

    def train(model: Any, given: FitArguments, watch: LogRecorder) -> None:
        fit(model, given, watch)
        evaluate_and_predict(model, given, watch)
        change(model)
        fit(model, given, watch)

    return train


def thaw_and_compile(model: Any) -> None:
    """Keras's transfer learning guide: unfreeze, and compile with a low rate."""
    model.layers[1].trainable = True
    model.layers[2].trainable = True
    model.compile(adam(1e-3), "mse", metrics=["mae"])


def _thaw_build(cut: Cut) -> Any:
    model = dense(cut)
    model.layers[1].trainable = model.layers[2].trainable = False
    model.compile(momentum(), "mse", metrics=["mae"])
    return model


def assign_the_rate(model: Any) -> None:
    """An assignment to the optimizer's rate, and one through its variable."""
    model.optimizer.learning_rate = 5e-3
    model.optimizer.learning_rate.assign(model.optimizer.learning_rate * 0.4)


def keep_the_optimizer(model: Any) -> None:
    """Another loss, the same optimizer with its slots."""
    model.compile(model.optimizer, "huber", metrics=["mae"])


def set_weights(model: Any) -> None:
    """Weights that are put in from outside."""
    model.set_weights([weight * 0.5 for weight in model.get_weights()])


def by_hand(model: Any, given: FitArguments, watch: LogRecorder) -> None:
    """`train_on_batch`, `test_on_batch` and `predict_on_batch`."""
    watch.set_model(model)
    for step, size in enumerate((12, 12, 5)):
        at = slice(12 * step, 12 * step + size)
        logs = model.train_on_batch(given["x"][at], given["y"][at], return_dict=True)
        watch.on_train_batch_end(step, logs)
        logs = model.train_on_batch(given["x"][at], given["y"][at], sample_weight=given["w"][at], return_dict=True)
        watch.on_train_batch_end(step, logs)
    watch.on_epoch_end(0, model.test_on_batch(given["x"], given["y"], return_dict=True))
    watch.found["kept"] = model.predict_on_batch(given["x"])


for _change in (assign_the_rate, keep_the_optimizer, set_weights):
    add(_change.__name__, _model, rows(), between(_change), steps=12)
add("thaw_and_compile", _thaw_build, rows(), between(thaw_and_compile), steps=12)
add("by_hand", _model, lambda: {**rows()(), "w": abs_numbers(seed=3)}, by_hand, evaluates=False)
