"""Callbacks of Keras that write files, in a run of several processes: all of them meet, and one of a host writes.

`BackupAndRestore` removes its folder when training ends, and `ModelCheckpoint` makes one: alike in every process, and
so in each other's way. What `CSVLogger` and `TensorBoard` log is the same in every process. They are changed on the
instance, when the `fit` that calls them begins.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from whale_nebula.runtime.own_parts import SUFFIX, own_path
from whale_nebula.runtime.run import current_run
from whale_nebula.tf import callbacks as tf_callbacks

Method = Callable[..., Any]


def share_files() -> None:
    """Let the callbacks of the `fit` that is about to begin write together with those of other processes."""
    kinds = tf_callbacks.CHECKPOINT | tf_callbacks.BACKUP
    for callback in tf_callbacks.of_fit():
        if isinstance(callback, tf_callbacks.LOGGERS) and not hasattr(callback, "nebula_shared"):
            callback.nebula_shared = True
            tf_callbacks.silence(callback, functools.partial(_others_write, callback))
        if isinstance(callback, kinds) and not hasattr(callback, "nebula_shared"):
            callback.nebula_shared = True
            tf_callbacks.exchange(callback, "save", functools.partial(_saving, callback))
            if isinstance(callback, tf_callbacks.BACKUP):
                tf_callbacks.exchange(callback, "begin", functools.partial(_beginning, callback))
                tf_callbacks.exchange(callback, "end", functools.partial(_ending, callback))


def _together(callback: Any) -> bool:
    """Whether all processes train its model: what `make_collective` has changed."""
    return hasattr(callback.model.save_weights, "nebula_collective")


def _others_write(callback: Any) -> bool:
    """Whether another process of this host writes what this callback would write here."""
    return _together(callback) and not current_run().writes_files


def _saving(callback: Any, plain: Method) -> Method:
    @functools.wraps(plain)
    def save(*args: Any, **kwargs: Any) -> None:
        if _together(callback):
            tf_callbacks.make_folder(callback, *args, **kwargs)
        if _together(callback) and isinstance(callback, tf_callbacks.BACKUP):
            _back_up(callback, plain)
        else:
            plain(*args, **kwargs)

    return save


def _back_up(callback: Any, plain: Method) -> None:
    """One process writes what is beside the weights; it is there on return."""
    run = current_run()
    if run.writes_files:
        with run.ledger.told():
            plain()
    else:
        callback.model.save_weights(tf_callbacks.backup_path(callback), overwrite=True)
    run.ledger.session.meet("the end of a backup")


def _beginning(callback: Any, plain: Method) -> Method:
    """Restore: first the process that may write, for it repairs a broken backup; and all from the same epoch."""

    @functools.wraps(plain)
    def begin(logs: Any = None) -> None:
        if not _together(callback):
            plain(logs)
            return
        run = current_run()
        session = run.ledger.session
        if run.writes_files:
            with run.ledger.told():
                _restore(callback, plain, logs)
        session.meet("the restore of a backup")
        if not run.writes_files:
            _restore(callback, plain, logs)
        epoch = tf_callbacks.initial_epoch(callback.model)
        session.exchange(f"a fit that begins with epoch {epoch}", {}, session.links.keys())

    return begin


def _restore(callback: Any, plain: Method, logs: Any) -> None:
    """Keras looks for the file of the whole model; with `weights: own` there are only those of the clusters."""
    run, path = current_run(), tf_callbacks.backup_path(callback)
    if run.ledger.own and path.endswith(SUFFIX) and os.path.exists(own_path(path, run.here().cluster)):
        optimizer = callback.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(callback.model.trainable_variables)
        callback.model.load_weights(path)
    plain(logs)


def _ending(callback: Any, plain: Method) -> Method:
    """Remove the backup when nobody is about to write it; it is gone on return."""

    @functools.wraps(plain)
    def end(logs: Any = None) -> None:
        if not _together(callback):
            plain(logs)
            return
        run = current_run()
        session = run.ledger.session
        session.meet("the end of a fit with a backup")
        if run.writes_files:
            with run.ledger.told():
                plain(logs)
        session.meet("the removal of a backup")

    return end
