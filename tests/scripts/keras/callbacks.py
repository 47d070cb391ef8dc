"""Callbacks that steer `fit`, and those that write down what it did."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tests.same import Cut
from tests.scripts.keras.script import Given, Watch, adam, add, dense, fit, numbers, rows


def _model(cut: Cut, optimizer: Any = None) -> Any:
    model = dense(cut)
    model.compile(optimizer or adam(), "mse", metrics=["mae"])
    return model


def _eager(cut: Cut) -> Any:
    """With a rate that soon leads away."""
    return _model(cut, keras.optimizers.SGD(0.6))


def with_callbacks(*make: Any, **options: Any) -> Any:
    """`fit` with callbacks that are made anew for each run."""

    def train(model: Any, given: Given, watch: Watch) -> None:
        fit(model, given, watch, callbacks=[one() for one in make], **options)

    return train


kinds = keras.callbacks
_held = {"validation_data": (numbers(6, seed=8), numbers(3, seed=9))}

add("scheduler", _model, rows(), with_callbacks(
    lambda: kinds.LearningRateScheduler(lambda epoch, rate: rate * 0.5 if epoch else rate), epochs=3,
))  # fmt: skip
add("plateau", _model, rows(), with_callbacks(
    lambda: kinds.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=0, min_delta=10.0, cooldown=0), epochs=3,
))  # fmt: skip
add("early_stopping", _eager, rows(), with_callbacks(
    lambda: kinds.EarlyStopping("val_loss", patience=1, restore_best_weights=True), epochs=6, **_held
), rate=0.6)  # fmt: skip
add("swap_ema", lambda cut: _model(cut, adam(use_ema=True, ema_momentum=0.5)), rows(), with_callbacks(
    lambda: kinds.SwapEMAWeights(swap_on_epoch=True), **_held,
))  # fmt: skip


def _broken() -> Given:
    x = numbers(6)
    x[14] = np.nan
    return {"x": x, "y": numbers(3, seed=1)}


add("terminate_on_nan", _model, _broken, with_callbacks(kinds.TerminateOnNaN, epochs=3), looks=False)


def _writes(model: Any, given: Given, watch: Watch) -> None:
    """CSVLogger, LambdaCallback and a callback of the user's own that reads weights and stops."""
    seen: list[float] = []

    class Stop(kinds.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.append(float(np.abs(self.model.layers[-1].get_weights()[0]).sum()))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = len(seen) == 5

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "log.csv"))
        ends = kinds.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(float(logs["mae"])))
        fit(model, given, watch, epochs=3, callbacks=[kinds.CSVLogger(path), ends, Stop()])
        with open(path, encoding="utf-8") as file:
            found = [0.0 if cell == "NA" else float(cell) for line in list(csv.reader(file))[1:] for cell in line]
    watch.found["kept"] = [np.array(seen), np.array(found)]


add("callbacks_that_write", _model, rows(), _writes)


def _checkpoints(model: Any, given: Given, watch: Watch) -> None:
    """ModelCheckpoint of weights, read back."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "best.weights.h5"))
        saving = kinds.ModelCheckpoint(path, monitor="loss", save_best_only=True, save_weights_only=True)
        fit(model, given, watch, callbacks=[saving])
        model.set_weights([weight * 0.0 for weight in model.get_weights()])
        model.load_weights(path)


add("checkpoints", _model, rows(), _checkpoints)
