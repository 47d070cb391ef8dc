"""Where a `fit` of Keras stands, and how it goes on from there.

The epochs that were trained already are gone through without training, so that the data's random numbers are those that
they would have been; so are the batches of the epoch in which the run ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from whale_nebula.errors import CheckpointError
from whale_nebula.runtime.checkpoint.objects import Put, decode_value, encode_value
from whale_nebula.tf import keras_training

if TYPE_CHECKING:
    from whale_nebula.runtime.checkpoint.checkpoints import Checkpoints

_REMEMBERED: Mapping[type, tuple[str, ...]] = {
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best", "epochs_since_last_save", "_batches_seen_since_last_saving"),
}
"""What Keras's own callbacks remember between epochs. Others are asked by `get_state` and `set_state`, if they have
these.
"""


class FitWatch(keras.callbacks.Callback):
    """Tells a run's checkpoints where a `fit` stands, and lets it begin where the run ended. It is called last."""

    def __init__(self, checkpoints: Checkpoints, fit: keras_training.Fit, model: Any) -> None:
        super().__init__()
        self._checkpoints, self._fit, self._epoch, self._begins = checkpoints, fit, fit.initial_epoch, 0
        checkpoints.fits += 1
        self._number = checkpoints.fits
        resumed = checkpoints.resumed
        self._resumed = resumed if resumed is not None and resumed.fit == checkpoints.fits else None
        checkpoints.known.over = resumed is not None and checkpoints.fits < resumed.fit
        if checkpoints.known.over:
            self._begins = fit.epochs
        elif self._resumed is not None:
            checkpoints.known.restore_again()
            done = self._resumed.ended and fit.epochs <= self._resumed.epochs
            self._begins = fit.epochs if done else self._resumed.epoch
            checkpoints.skips = 0 if self._resumed.ended else self._resumed.batch
            checkpoints.reset_metrics = model.reset_metrics if self._resumed.ended else None
        else:
            checkpoints.position = replace(checkpoints.position, fit=checkpoints.fits, ended=False)
        if self._begins >= fit.epochs > 0:
            _restore_model(checkpoints, model, fit)
        elif self._begins > fit.initial_epoch:
            keras_training.keep_logs(fit)
            keras_training.pass_epochs(fit, self._begins)

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin with the epoch in which the run ended; callbacks remember what they did then."""
        if self._begins:
            keras_training.begin_with(self.model, self._begins)
        if self._resumed is not None:
            self._checkpoints.memories.restore_callbacks(self._fit.callbacks)
        self._checkpoints.memories.restore_history(self._number, self._fit.callbacks)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """An epoch begins, none of whose batches was trained."""
        self._epoch = epoch
        self._checkpoints.begin_epoch(program_of(self.model), epoch, self._fit.callbacks)

    def on_train_end(self, logs: Any = None) -> None:
        """Save where the model ends."""
        if self._begins:
            keras_training.begin_with(self.model, 0)
        if self._begins < self._fit.epochs or not self._begins:
            self._checkpoints.end_fit(self._epoch + 1, self._fit.epochs, self._fit.callbacks)


class PlainStep:
    """The train function of a model without scopes, whose steps Keras runs itself."""

    trains = True

    def __init__(self, checkpoints: Checkpoints, model: Any) -> None:
        self.name = program_of(model)
        self.steps = 0
        self._checkpoints, self._model, self._function = checkpoints, model, model.train_function
        self._known = False

    def __call__(self, iterator: Any) -> Any:
        """Run the steps of an execution, or pass their batches by."""
        steps: int = self._model.steps_per_execution
        batches: list[Any] = []
        if not self._known and self.name in self._checkpoints.position.programs:
            if not isinstance(iterator, tf.data.Iterator):
                batches, iterator = keras_training.draw_batches(iterator, 1)
            keras_training.build_model(self._model, getattr(iterator, "element_spec", batches and batches[0]))
            self._take_in()
        if self._checkpoints.skip_batch(self.name, steps):
            for _ in range(steps):
                next(iterator)
            return to_tensors(self._checkpoints.position.logs)
        if self._checkpoints.needs_batch(self.name):
            batches, iterator = keras_training.draw_batches(iterator, steps)
        self._checkpoints.before_step(self, tf.nest.flatten(batches))
        with self._checkpoints.note_failure():
            logs = self._function(iterator)
        if not self._known:
            self._take_in()
        self.steps += 1
        self._checkpoints.after_step(self, lambda: logs, steps)
        return logs

    def _take_in(self) -> None:
        self._known = True
        _take_model(self._checkpoints, self._model, self.name)
        self.steps = self._checkpoints.position.programs.get(self.name, self.steps)


def to_tensors(logs: Mapping[str, float]) -> dict[str, Any]:
    """Logs as a step gives them."""
    return {name: tf.constant(value) for name, value in logs.items()}


def watch_fit(checkpoints: Checkpoints, model: Any) -> None:
    """Let the `fit` that is about to begin tell where it stands."""
    fit = keras_training.find_fit()
    if fit is not None and not any(isinstance(callback, FitWatch) for callback in fit.callbacks):
        keras_training.add_callback(fit, FitWatch(checkpoints, fit, model), model)


def _restore_model(checkpoints: Checkpoints, model: Any, fit: keras_training.Fit) -> None:
    """Nothing is left to train: give the model its values now, for what comes after `fit`."""
    keras_training.build_model(model, keras_training.batch_spec(fit))
    _take_model(checkpoints, model, program_of(model))


def program_of(model: Any) -> str:
    """The name of the program that trains a model by `fit`."""
    return f"{model.name}.train_step"


def _take_model(checkpoints: Checkpoints, model: Any, program: str) -> None:
    """Know the variables of a model; what it trains has to be in a checkpoint that counts steps of it."""
    counted = program in checkpoints.position.programs
    needed = {each.path for each in model.trainable_variables} if counted else ()
    checkpoints.take_variables(program, variables_of(model), needed)


def variables_of(model: Any) -> dict[str, Any]:
    """The variables of a model, its optimizer and its metrics, by their paths. Metrics of one name are numbered: Keras
    makes two of `metrics=["accuracy"], weighted_metrics=["accuracy"]`.
    """
    optimizer = getattr(model, "optimizer", None)
    of_metrics = [variable for metric in model.metrics for variable in metric.variables]
    every = [*model.variables, *(() if optimizer is None else optimizer.variables), *of_metrics]
    numbered = {id(variable) for variable in of_metrics}
    found: dict[str, Any] = {}
    for variable in {id(each): each for each in every}.values():
        value = getattr(variable, "value", variable)
        path = getattr(variable, "path", value.name)
        if path in found and id(variable) in numbered:
            path = next(name for number in itertools.count(2) if (name := f"{path}#{number}") not in found)
        if found.setdefault(path, value) is not value:
            raise CheckpointError(
                f"two variables of {model.name} are called {path!r}",
                why="by that name a checkpoint has one tensor",
                mend="give their layers names of their own: keras.layers.Dense(..., name=...)",
            )
    return found


def remember_callbacks(callbacks: Sequence[Any], put: Put) -> list[dict[str, Any]]:
    """What callbacks remember, each with its class, as a document."""
    found = []
    for callback in callbacks:
        names = _attributes_of(callback)
        if names:
            state = {name: getattr(callback, name) for name in names if hasattr(callback, name)}
        elif hasattr(callback, "get_state") and hasattr(callback, "set_state"):
            state = callback.get_state()
        else:
            continue
        found.append({"kind": type(callback).__name__, "state": encode_value(state, put)})
    return found


def restore_callbacks(callbacks: Sequence[Any], saved: Sequence[Mapping[str, Any]], get: Callable[[str], Any]) -> None:
    """Let callbacks remember that again: the n-th of a class what the n-th of that class did."""
    due: dict[str, list[Any]] = {}
    for document in saved:
        due.setdefault(document["kind"], []).append(document["state"])
    for callback in callbacks:
        states = due.get(type(callback).__name__)
        if not states:
            continue
        state = decode_value(states.pop(0), get)
        if not _attributes_of(callback):
            callback.set_state(state)
            continue
        for name, value in state.items():
            setattr(callback, name, value)


def _attributes_of(callback: Any) -> tuple[str, ...]:
    return next((names for kind, names in _REMEMBERED.items() if isinstance(callback, kind)), ())
