"""The position of a Keras `fit` in checkpoints, and its resumption. Epochs that are already trained are iterated
without training, so that the data's random numbers are the same, as are the trained batches of the epoch in which the
run stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from whale_nebula.errors import CheckpointError
from whale_nebula.runtime.checkpoint.objects import Put, copy_state, decode_value, encode_value
from whale_nebula.tf import keras_training

if TYPE_CHECKING:
    from whale_nebula.runtime.checkpoint.checkpoints import Checkpoints

BEFORE_CALLBACKS, AFTER_CALLBACKS, BEFORE_STEP = "before callbacks", "after callbacks", "before step"
"""Where in a `fit` a state was taken: before or after the callbacks of the last batch, or before the next step."""
_CALLBACK_STATE: Mapping[type, tuple[str, ...]] = {
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: (
        "best",
        "epochs_since_last_save",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
}
"""The attributes that are the state of Keras's own callbacks. Other callbacks are saved with `get_state` and
`set_state`, if they have these methods.
"""


class FitWatch(keras.callbacks.Callback):
    """Callback that reports the position of a `fit` to the run's checkpoints, and makes it start where the run stopped.
    It is the last callback.
    """

    def __init__(self, checkpoints: Checkpoints, fit: keras_training.Fit, model: Any) -> None:
        super().__init__()
        self._checkpoints, self._fit, self._epoch, self._first_epoch = checkpoints, fit, fit.initial_epoch, 0
        self._skips_batches = self._is_within = False
        checkpoints.count_last()
        checkpoints.fits += 1
        self._number = checkpoints.fits
        resumed = checkpoints.resumed
        self._resumed = resumed if resumed is not None and resumed.fit == checkpoints.fits else None
        checkpoints.known_variables.is_fit_over = resumed is not None and checkpoints.fits < resumed.fit
        if checkpoints.known_variables.is_fit_over:
            self._first_epoch = fit.epochs
            _skip_fit(checkpoints, model, fit, fit.initial_epoch + checkpoints.extra_state.count_epochs(self._number))
        elif self._resumed is not None:
            checkpoints.known_variables.restore_again()
            ended, epoch = self._resumed.ended, self._resumed.epoch
            complete = fit.epochs <= (self._resumed.epochs if ended else epoch)  # the script may ask for fewer epochs
            self._is_within = not ended and not complete
            self._first_epoch = fit.epochs if complete else epoch
            if not complete and self._first_epoch > fit.initial_epoch:
                keras_training.append_logs(fit)
            if self._is_within:
                keras_training.skip_epochs(fit, self._first_epoch)
            else:  # callbacks at the beginning of the next epoch may change the restored variables
                checkpoints.next_batch = ""
                _skip_fit(checkpoints, model, fit, epoch)
            checkpoints.skips = self._resumed.batch if self._is_within else 0
        else:
            checkpoints.position = replace(checkpoints.position, fit=checkpoints.fits, ended=False)

    def on_train_begin(self, logs: Any = None) -> None:
        """Start with the epoch in which the run stopped; callbacks get their saved state."""
        if self._first_epoch:
            keras_training.set_initial_epoch(self.model, self._first_epoch)
        if self._resumed is not None:
            self._checkpoints.extra_state.restore_callbacks(self._fit.callbacks)
            self._skips_batches = self._checkpoints.skips > 0
            for callback in self._fit.callbacks if self._skips_batches else ():
                keras_training.suspend_saving(callback, lambda: self._skips_batches)
            if self._is_within:
                self._checkpoints.known_variables.begin_replay()
                self._checkpoints.resume_at = self.resume_at
        first_epoch = self._fit.initial_epoch
        self._checkpoints.extra_state.restore_history(self._number, self._fit.callbacks, first_epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Record the start of an epoch."""
        self._epoch = epoch
        self._checkpoints.begin_epoch(program_of(self.model), epoch, self._fit.callbacks)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Record that all callbacks before the next step were called."""
        self._checkpoints.script_state.complete()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Restore the saved state if it was taken here, after the callbacks of a batch."""
        self.resume_at(AFTER_CALLBACKS)

    def resume_at(self, place: str) -> None:
        """After the last batch that was already trained, at this `place` in its callbacks or before the next step: if
        the state was saved there, restore the states of callbacks and the variables that callbacks may have changed in
        the meantime. A state of before the next step is also restored after the callbacks of the batch, for those that
        are called before the step.
        """
        checkpoints = self._checkpoints
        saved = checkpoints.extra_state.saved_place
        if checkpoints.resume_at is None or checkpoints.skips:
            return
        if place == saved or (place, saved) == (AFTER_CALLBACKS, BEFORE_STEP):
            self._skips_batches = False
            checkpoints.extra_state.restore_callbacks(self._fit.callbacks)
            checkpoints.known_variables.restore_replayed()
        if place in (saved, BEFORE_STEP):
            checkpoints.resume_at = None
            checkpoints.known_variables.end_replay()

    def on_train_end(self, logs: Any = None) -> None:
        """Save the final model."""
        if self._first_epoch:
            keras_training.set_initial_epoch(self.model, 0)
        if self._first_epoch < self._fit.epochs or not self._first_epoch:
            self._checkpoints.end_fit(self._epoch + 1, self._fit.epochs, self._fit.callbacks)


class EpochEnd(keras.callbacks.Callback):
    """Callback that reports to the run's checkpoints what was trained, before validation and before other callbacks
    change it. It is the first callback, and `watch` the last one.
    """

    def __init__(self, checkpoints: Checkpoints, watch: FitWatch) -> None:
        super().__init__()
        self._checkpoints, self._watch = checkpoints, watch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Hold the state before the callbacks that precede a step."""
        self._checkpoints.hold_batch("on_train_batch_begin", AFTER_CALLBACKS)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Restore the saved state if it was taken here; hold the state before the callbacks of a batch."""
        self._watch.resume_at(BEFORE_CALLBACKS)
        self._checkpoints.hold_batch("on_train_batch_end", BEFORE_CALLBACKS)

    def on_test_begin(self, logs: Any = None) -> None:
        """Keep the state before validation."""
        self._checkpoints.hold_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keep the state before the epoch's callbacks."""
        self._checkpoints.hold_epoch()


def to_tensors(logs: Mapping[str, float]) -> dict[str, Any]:
    """Convert logs to tensors, as a step returns them."""
    return {name: tf.constant(value) for name, value in logs.items()}


def watch_fit(checkpoints: Checkpoints, model: Any) -> None:
    """Make the `fit` that is about to begin report its position."""
    fit = keras_training.find_fit()
    if fit is not None and not any(isinstance(callback, FitWatch) for callback in fit.callbacks):
        watch = FitWatch(checkpoints, fit, model)
        keras_training.add_callback(fit, watch, model)
        keras_training.add_callback(fit, EpochEnd(checkpoints, watch), model, first=True)


def _skip_fit(checkpoints: Checkpoints, model: Any, fit: keras_training.Fit, until: int) -> None:
    """Skip a `fit` that was complete before epoch `until`. The first batches are passed to the step, which restores the
    model when it skips them, for the code that follows.
    """
    position, name = checkpoints.position, program_of(model)
    checkpoints.position = replace(position, program=name, ended=False)
    checkpoints.skips = model.steps_per_execution
    keras_training.skip_epochs(fit, until, lambda iterator: model.train_function(iterator))
    checkpoints.position, checkpoints.skips = position, 0


def program_of(model: Any) -> str:
    """The name of the program that trains a model by `fit`."""
    return f"{model.name}.train_step"


def name_variables(model: Any) -> dict[str, Any]:
    """The variables of a model, its optimizer and its metrics, by path. Equal paths are numbered: Keras creates two
    metrics from `metrics=["accuracy"], weighted_metrics=["accuracy"]`, and gives slots of Adafactor equal paths.
    """
    optimizer = getattr(model, "optimizer", None)
    of_metrics = [variable for metric in model.metrics for variable in metric.variables]
    every = [*model.variables, *(() if optimizer is None else optimizer.variables), *of_metrics]
    found: dict[str, Any] = {}
    used: Counter[str] = Counter()
    for variable in {id(each): each for each in every}.values():
        value = getattr(variable, "value", variable)
        path = getattr(variable, "path", value.name)
        used[path] += 1
        found[path if used[path] == 1 else f"{path}#{used[path]}"] = value
    return found


def variables_of(model: Any) -> dict[str, Any]:
    """The variables of a model, its optimizer and its metrics, by their names in checkpoints. Two variables of the
    model itself with the same path are refused.
    """
    own = Counter(variable.path for variable in model.variables)
    path = next((path for path, count in own.items() if count > 1), None)
    if path is not None:
        raise CheckpointError(
            f"two variables of {model.name} have the same path {path!r}",
            why="a checkpoint stores one tensor for each path",
            mend="give their layers different names: keras.layers.Dense(..., name=...)",
        )
    return name_variables(model)


def encode_callbacks(callbacks: Sequence[Any], put: Put, held: Mapping[int, Any]) -> list[dict[str, Any]]:
    """The states of callbacks, each with its class, as a document: for the places in `held` these states, for all
    others the present ones.
    """
    found = []
    for place, callback in enumerate(callbacks):
        if _has_state(callback):
            state = held[place] if place in held else _read_state(callback)
            found.append({"kind": type(callback).__name__, "state": encode_value(state, put)})
    return found


def copy_callback_states(callbacks: Sequence[Any], hook: str) -> dict[int, Any]:
    """Copies of the states of the callbacks that are called at this hook, by their places."""
    return {
        place: copy_state(_read_state(callback))
        for place, callback in enumerate(callbacks)
        if _has_state(callback) and keras_training.overrides_hook(callback, hook)
    }


def _has_state(callback: Any) -> bool:
    return bool(_attributes_of(callback)) or (hasattr(callback, "get_state") and hasattr(callback, "set_state"))


def _read_state(callback: Any) -> Any:
    names = _attributes_of(callback)
    if not names:
        return callback.get_state()
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}


def restore_callbacks(callbacks: Sequence[Any], saved: Sequence[Mapping[str, Any]], get: Callable[[str], Any]) -> None:
    """Restore the states of callbacks: the n-th of a class gets that of the n-th of that class."""
    by_class: dict[str, list[Any]] = {}
    for document in saved:
        by_class.setdefault(document["kind"], []).append(document["state"])
    for callback in callbacks:
        states = by_class.get(type(callback).__name__)
        if not states:
            continue
        state = decode_value(states.pop(0), get)
        if not _attributes_of(callback):
            callback.set_state(state)
            continue
        for name, value in state.items():
            setattr(callback, name, value)


def _attributes_of(callback: Any) -> tuple[str, ...]:
    return next((names for kind, names in _CALLBACK_STATE.items() if isinstance(callback, kind)), ())
