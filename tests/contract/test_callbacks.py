"""Keras's callbacks: where a `fit` has them, and what those do that write files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from whale_nebula.tf import callbacks as tf_callbacks

X, Y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")


def fitted(*callbacks: Any, epochs: int = 1) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(X, Y, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model


def test_of_fit_finds_them_when_the_function_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    make = keras.Model.make_train_function

    def making(model: Any, force: bool = False) -> Any:
        found.extend(tf_callbacks.of_fit())
        return make(model, force)

    monkeypatch.setattr(keras.Model, "make_train_function", making)
    given = keras.callbacks.TerminateOnNaN()
    fitted(given)
    assert given in found and len(found) == 2  # and Keras's own history
    assert tf_callbacks.of_fit() == []


@pytest.mark.parametrize("name", ["begin", "save", "end"])
def test_exchange_changes_what_a_fit_calls(tmp_path: Path, name: str) -> None:
    backup, called = keras.callbacks.BackupAndRestore(tmp_path / "backup"), []

    def change(plain: Any) -> Any:
        return lambda *args, **kwargs: (called.append(name), plain(*args, **kwargs))

    tf_callbacks.exchange(backup, name, change)
    fitted(backup)
    assert called == [name]


def test_backup_path_and_initial_epoch_are_what_keras_restores(tmp_path: Path) -> None:
    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), delete_checkpoint=False)

    first = backup()
    fitted(first, epochs=2)
    assert Path(tf_callbacks.backup_path(first)).exists()
    begun: list[int] = []
    seen = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch))
    model = fitted(backup(), seen, epochs=3)
    assert begun == [2] and tf_callbacks.initial_epoch(model) == 2
    assert tf_callbacks.initial_epoch(keras.Sequential()) == 0


def test_make_folder_is_the_one_that_keras_makes(tmp_path: Path) -> None:
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    saved = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}" / "model.keras"))
    for _ in range(2):
        tf_callbacks.make_folder(backup)
        tf_callbacks.make_folder(saved, 4, None, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "backup"]
    tf_callbacks.make_folder(keras.callbacks.ModelCheckpoint("model.keras"), 0, None, {})


@pytest.mark.parametrize("silent", [True, False])
def test_silence_leaves_no_file_of_a_logger(silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras has called `set_model`, which writes the graph, by the time the function is made."""
    loggers = [keras.callbacks.CSVLogger(tmp_path / "log.csv"), keras.callbacks.TensorBoard(tmp_path / "events")]
    make = keras.Model.make_train_function

    def making(model: Any, force: bool = False) -> Any:
        for callback in loggers:
            tf_callbacks.silence(callback, lambda: silent)
        return make(model, force)

    monkeypatch.setattr(keras.Model, "make_train_function", making)
    fitted(*loggers)
    written = {path.name.split(".")[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert written == (set() if silent else {"log", "events"})
