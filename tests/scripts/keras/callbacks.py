"""Callbacks that control `fit`, and those that record it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras

from tests.parity_harness import Cut
from tests.scripts.keras.script import FitArguments, LogRecorder, adam, add, dense, fit, momentum, numbers, rows


def _model(cut: Cut, optimizer: Any = None) -> Any:
    model = dense(cut)
    model.compile(optimizer or momentum(), "mse", metrics=["mae"])
    return model


def _eager(cut: Cut) -> Any:
    """With a rate that soon leads away."""
    return _model(cut, keras.optimizers.SGD(0.6))


def with_callbacks(*make: Any, **options: Any) -> Any:
    """`fit` with callbacks that are made anew for each run."""

    def train(model: Any, given: FitArguments, watch: LogRecorder) -> None:
        fit(model, given, watch, callbacks=[one() for one in make], **options)

    return train


kinds = keras.callbacks
_held = {"validation_data": (numbers(6, seed=8), numbers(3, seed=9))}

add("scheduler", _model, rows(), with_callbacks(
    lambda: kinds.LearningRateScheduler(lambda epoch, rate: rate * 0.5 if epoch else rate), epochs=3,
))  # fmt: skip
add("early_stopping", _eager, rows(), with_callbacks(
    lambda: kinds.EarlyStopping("val_loss", patience=1, restore_best_weights=True), epochs=6, **_held
), rate=0.6)  # fmt: skip
add("swap_ema", lambda cut: _model(cut, adam(use_ema=True, ema_momentum=0.5)), rows(), with_callbacks(
    lambda: kinds.SwapEMAWeights(swap_on_epoch=True), **_held,
))  # fmt: skip


def _checkpoints(model: Any, given: FitArguments, watch: LogRecorder) -> None:
    """ModelCheckpoint of weights, read back."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "best.weights.h5"))
        saving = kinds.ModelCheckpoint(path, monitor="loss", save_best_only=True, save_weights_only=True)
        fit(model, given, watch, callbacks=[saving])
        model.set_weights([weight * 0.0 for weight in model.get_weights()])
        model.load_weights(path)


add("checkpoints", _model, rows(), _checkpoints)
