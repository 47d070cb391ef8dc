"""Everything private of Keras's callbacks that we touch, beside `tf_private`: which ones a `fit` calls, and what those
do that write files.

Each function has a contract test in tests/contract.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from whale_nebula.tf.private import python_frames

Method = Callable[..., Any]
BACKUP = keras.callbacks.BackupAndRestore
CHECKPOINT = keras.callbacks.ModelCheckpoint
LOGGERS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))


def of_fit() -> list[Any]:
    """The callbacks of the innermost `fit` of Keras that is running: it has them nowhere else."""
    for frame in python_frames():
        found = frame.f_locals.get("callbacks") if frame.f_code.co_name == "fit" else None
        if isinstance(found, keras.callbacks.CallbackList):
            return list(found.callbacks)
    return []


def exchange(callback: Any, name: str, change: Callable[[Method], Method]) -> None:
    """Let a method of one callback be what `change` makes of it: "begin", "save" or "end"."""
    method = {"begin": "on_train_begin", "save": "_save_model", "end": "on_train_end"}[name]
    setattr(callback, method, change(getattr(callback, method)))


def silence(callback: Any, silent: Callable[[], bool]) -> None:
    """Let a callback do nothing where `silent` says so, and take back what it has written already."""
    for name in _HOOKS:
        setattr(callback, name, _silence_method(getattr(callback, name), silent))
    if isinstance(callback, keras.callbacks.TensorBoard) and silent():
        for writer in callback._writers.values():
            writer.close()
        callback._writers = {}
        for folder in (callback._train_dir, callback._val_dir):
            for path in tf.io.gfile.glob(os.path.join(folder, f"*.tfevents.*.{os.getpid()}.*")):
                tf.io.gfile.remove(path)


def _silence_method(plain: Method, silent: Callable[[], bool]) -> Method:
    @functools.wraps(plain)
    def hook(*args: Any, **kwargs: Any) -> Any:
        return None if silent() else plain(*args, **kwargs)

    return hook


def backup_path(callback: Any) -> str:
    """The file of weights that a backup writes and reads."""
    return str(callback._weights_path)


def make_folder(callback: Any, *args: Any, **kwargs: Any) -> None:
    """Make the folder of what a callback is about to save, with these arguments of its "save"; it may be there."""
    if isinstance(callback, BACKUP):
        folder = str(callback.backup_dir)
    else:
        folder = os.path.dirname(callback._get_file_path(*args, **kwargs))
    if folder:
        tf.io.gfile.makedirs(folder)


def initial_epoch(model: Any) -> int:
    """The epoch that a restored backup lets `fit` begin with; 0 where there was none."""
    return int(model._initial_epoch or 0)
