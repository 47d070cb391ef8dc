"""Collective methods of a Keras model (`get_weights`, `save` and others), which every process must call together.

They are set on the instance when the first step that reads its variables is created, so Keras itself is not patched.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from whale_nebula.capture.keras_scopes import has_scopes
from whale_nebula.runtime.run import Run, current_run, find_open_run
from whale_nebula.runtime.variables.own_weights import WEIGHTS_SUFFIX, Plain, load_own, name_own_path, save_own
from whale_nebula.runtime.variables.remote import Ledger
from whale_nebula.scopes.compress_options import find_local_sgd_options
from whale_nebula.scopes.frames import open_frames
from whale_nebula.tf import keras_training

WRITES = ("save", "save_weights", "export")
_MEETING_READS = ("get_weights", "save", "save_weights", "export")
_MEETING_WRITES = ("set_weights", "load_weights")
_TRAINS = ("fit", "train_on_batch")
"""Methods that train with local SGD inside the scopes, and write the same values in every process outside them."""


def make_collective(model: Any, ledger: Ledger, writes_here: bool, cluster: str = "", first: bool = True) -> None:
    """Make a model's reads and saves gather it first; only the processes that `writes_here` write files.

    If each cluster keeps its own parts of the weights, its `first` worker saves them, and all of its workers load them.
    """
    _replace(model, "get_weights", functools.partial(_read_whole, ledger, model))
    if ledger.keeps_own_weights:
        _replace(model, "save_weights", functools.partial(save_own, ledger, cluster, first))
        _replace(model, "load_weights", functools.partial(load_own, cluster))
    for name in WRITES:
        _replace(model, name, functools.partial(_write_whole, ledger, writes_here))
    optimizer = getattr(model, "optimizer", None)
    if (
        getattr(optimizer, "use_ema", False) and not ledger.keeps_own_weights
    ):  # `fit` ends by assigning averages to weights
        _replace(optimizer, "finalize_variable_values", functools.partial(_read_whole, ledger, model, slots=True))


def remember_results(model: Any) -> Callable[[Any], Any]:
    """Make a model's `get_metrics_result` work in all processes; returns the function that stores a step's results.

    Keras ends epochs and evaluations with the results of its metrics, read from their variables. Those of a metric
    whose variables some processes do not hold are taken from the last step, whose results every process has.
    """
    plain = model.get_metrics_result
    if hasattr(plain, "nebula_remember"):
        remembered: Callable[[Any], Any] = plain.nebula_remember
        return remembered
    last: list[Any] = []

    @functools.wraps(plain)
    def get_metrics_result() -> Any:
        if not last or not tf.executing_eagerly():
            return plain()
        logs, run = last[0] if isinstance(last[0], dict) else {}, find_open_run()
        return _read_metrics(run.ledger, model.metrics, logs) if logs and run is not None else logs

    def remember(logs: Any) -> Any:
        last[:] = [logs]
        return logs

    get_metrics_result.__dict__.update(nebula_remember=remember, nebula_forget=last.clear)
    object.__setattr__(model, "get_metrics_result", get_metrics_result)
    return remember


def _read_metrics(ledger: Ledger, metrics: Iterable[Any], logs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The results of metrics. Those that some processes cannot read are taken from the last step's results, `logs`, by
    name; without such a name, `logs` are returned.
    """
    found: dict[str, Any] = {}
    for metric in metrics:
        if all(ledger.is_everywhere(getattr(variable, "value", variable)) for variable in metric.variables):
            result = metric.result()
        elif metric.name in logs:
            result = logs[metric.name]
        else:
            return logs
        found |= result if isinstance(result, dict) else {metric.name: result}
    return found


def forget_results(model: Any) -> None:
    """Forget the results of a model's last step: it is trained or evaluated by Keras from now on."""
    getattr(model.get_metrics_result, "nebula_forget", lambda: None)()


def make_all_collective(models: Iterable[Any], run: Run) -> None:
    """Make reads and saves collective for models with variables of this run's programs, if there are other processes.
    With local SGD, a read first synchronises the clusters, and a write restarts the rounds.
    """
    kept = frozenset() if run.alone else run.ledger.variables.keys()
    for model in models:
        if model.built and not kept.isdisjoint(_list_ids(model)):
            make_collective(model, run.ledger, run.writes_files, run.here().cluster, run.first_of_cluster)
        for name in (*_MEETING_READS, *_MEETING_WRITES, *_TRAINS) if run.rounds is not None else ():
            _replace(model, name, functools.partial(_call_after_meeting, name), "meets")


def _call_after_meeting(name: str, plain: Plain, *args: Any, **kwargs: Any) -> Any:
    """Synchronise all clusters, call a model's method, and restart the rounds if it may have written weights. In a
    closed run only call it, and likewise a method that trains if it is inside the scopes of local SGD, or if the model
    was built inside scopes: the step itself synchronises.
    """
    inside = name in _TRAINS and (find_local_sgd_options(open_frames()) or has_scopes(getattr(plain, "__self__", None)))
    run = None if inside else find_open_run()
    if run is not None:
        run.settle()
    found = plain(*args, **kwargs)
    run = None if inside or name in _MEETING_READS else find_open_run()
    if run is not None and run.rounds is not None:
        run.rounds.restart()
    return found


def _list_ids(model: Any, slots: bool = False) -> set[int]:
    variables = [*model.weights, *(model.optimizer.variables if slots else ())]
    return {id(getattr(variable, "value", variable)) for variable in variables}


def _replace(model: Any, name: str, hook: Plain, mark: str = "collective") -> None:
    """Replace a model's method by a hook, which receives the method and its arguments; once for each `mark`."""
    plain = getattr(model, name)
    if not hasattr(plain, f"nebula_{mark}"):
        changed = _call_instead(hook, plain)
        changed.__dict__.update({f"nebula_{mark}": True, "nebula_collective": True})
        object.__setattr__(model, name, changed)


def _call_instead(hook: Plain, plain: Plain) -> Plain:
    return functools.wraps(plain)(functools.partial(hook, plain))


def _read_whole(ledger: Ledger, model: Any, plain: Plain, *args: Any, slots: bool = False, **kwargs: Any) -> Any:
    with ledger.gather(_list_ids(model, slots)):
        return plain(*args, **kwargs)


def _write_whole(ledger: Ledger, writes_here: bool, plain: Plain, *args: Any, **kwargs: Any) -> None:
    """Gather the model and let one process of this host write the file, which is complete on return."""
    with ledger.gather():
        with ledger.session.share_failures():
            if writes_here:
                plain(*args, **kwargs)
        ledger.session.meet(f"the end of {plain.__name__}")


def make_callbacks_collective() -> None:
    """Make the callbacks of the loop of Keras that is about to begin take part in all processes: they write files in
    one process of each host, and swap weights with their averages where all of these are.
    """
    kinds = keras_training.CHECKPOINT | keras_training.BACKUP | keras_training.AVERAGES
    for callback in keras_training.list_loop_callbacks("fit", "evaluate", "predict"):
        if isinstance(callback, keras_training.LOGGERS) and not hasattr(callback, "nebula_shared"):
            callback.nebula_shared = True
            keras_training.silence(callback, functools.partial(_is_written_elsewhere, callback))
            if getattr(callback, "histogram_freq", 0) or getattr(callback, "embeddings_freq", 0):
                log = functools.partial(_log_weights, callback)
                keras_training.replace_method(callback, "log", functools.partial(_call_instead, log))
        if isinstance(callback, kinds) and not hasattr(callback, "nebula_shared"):
            callback.nebula_shared = True
            averages = isinstance(callback, keras_training.AVERAGES)
            hooks = dict.fromkeys(("swap", "finalize"), _swap_averages) if averages else {"save": _save_backup}
            if isinstance(callback, keras_training.BACKUP):
                hooks |= {"begin": _begin_backup, "end": _end_backup}
            for name, hook in hooks.items():
                keras_training.replace_method(
                    callback, name, functools.partial(_call_instead, functools.partial(hook, callback))
                )


def _is_collective(callback: Any) -> bool:
    """Whether all processes train its model: `make_collective` has changed it."""
    return hasattr(callback.model.save_weights, "nebula_collective")


def _is_written_elsewhere(callback: Any) -> bool:
    """Whether another process of this host writes the file of this callback."""
    return _is_collective(callback) and not current_run().writes_files


def _log_weights(callback: Any, plain: Plain, epoch: int, logs: Any = None) -> None:
    """Log an epoch with histograms of the weights where all of them are. Every process takes part in the save for
    embeddings.
    """
    frequencies = (callback.histogram_freq, callback.embeddings_freq)
    histograms, embeddings = (bool(each) and epoch % each == 0 and _is_collective(callback) for each in frequencies)
    with current_run().ledger.gather(_list_ids(callback.model)) if histograms else nullcontext():
        plain(epoch, logs)
        if embeddings and _is_written_elsewhere(callback):
            keras_training.save_embeddings(callback, epoch)


def _swap_averages(callback: Any, plain: Plain) -> None:
    """Swap weights with their averages, or copy them, where all of them are."""
    ids = _list_ids(callback.model, slots=True)
    with current_run().ledger.gather(ids) if _is_collective(callback) else nullcontext():
        plain()


def _save_backup(callback: Any, plain: Plain, *args: Any, **kwargs: Any) -> None:
    """Save a model's file, in a folder that exists on every host, or a backup: one process writes everything but the
    weights. A backup is complete on return.
    """
    if _is_collective(callback):
        keras_training.make_folder(callback, *args, **kwargs)
    if not _is_collective(callback) or not isinstance(callback, keras_training.BACKUP):
        plain(*args, **kwargs)
        return
    run = current_run()
    if run.writes_files:
        with run.share_failures():
            plain()
    else:
        callback.model.save_weights(keras_training.find_backup_path(callback), overwrite=True)
    run.ledger.session.meet("the end of a backup")


def _begin_backup(callback: Any, plain: Plain, logs: Any = None) -> None:
    """Restore a backup: first in the process that may write, which repairs a broken backup; then in all, from the same
    epoch.
    """
    if not _is_collective(callback):
        plain(logs)
        return
    run = current_run()
    session = run.ledger.session
    if run.writes_files:
        with run.share_failures():
            _restore_backup(callback, plain, logs)
    session.meet("the restore of a backup")
    if not run.writes_files:
        _restore_backup(callback, plain, logs)
    epoch = keras_training.find_initial_epoch(callback.model)
    session.exchange(f"a fit that starts at epoch {epoch}", {}, session.links.keys())


def _restore_backup(callback: Any, plain: Plain, logs: Any) -> None:
    """Restore a backup: Keras looks for the file of the whole model; with `weights: own` there are only files of
    clusters.
    """
    run, path = current_run(), keras_training.find_backup_path(callback)
    if (
        run.ledger.keeps_own_weights
        and path.endswith(WEIGHTS_SUFFIX)
        and os.path.exists(name_own_path(path, run.here().cluster))
    ):
        optimizer = callback.model.optimizer
        if optimizer is not None and not optimizer.built:
            keras_training.build_optimizer(optimizer, callback.model.trainable_variables)
        callback.model.load_weights(path)
    plain(logs)


def _end_backup(callback: Any, plain: Plain, logs: Any = None) -> None:
    """Remove the backup when no process is about to write it; on return it is removed for all."""
    if not _is_collective(callback):
        plain(logs)
        return
    run = current_run()
    session = run.ledger.session
    session.meet("the end of a fit with a backup")
    if run.writes_files:
        with run.share_failures():
            plain(logs)
    session.meet("the removal of a backup")
