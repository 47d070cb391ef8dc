"""The form of a small Keras script in these tests: a model's builder, the arguments of `fit`, and how to read its
results.

Every script runs the same with `Cut(0)`, which omits the scope lines: that run is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

import whale_nebula as nb
from tests.parity_harness import Case, Cut, Outcome

FitArguments = dict[str, Any]
ROWS, BATCH = 34, 17
"""Two batches, whose micro-batches have unequal rows. A ragged last batch is what scripts of `feeding` have."""


class LogRecorder(keras.callbacks.Callback):
    """Keeps the logs of every batch and epoch, over several calls of `fit`, and the weights after the first step."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = bool(cut.stages)
        self.steps: list[float] = []
        self.history: dict[str, list[float]] = {}
        self.first: list[np.ndarray] = []
        self.stages: tuple[str, ...] = ()
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += [float(logs[key]) for key in sorted(logs) if np.ndim(logs[key]) == 0]
        self.stages = tuple(nb.last_report().stages) if self.cut else ()
        if not self.first:
            self.first = [np.array(v) for v in self.model.trainable_variables]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for key, value in (logs or {}).items():
            self.history.setdefault(key, []).append(value)


Train = Callable[[Any, FitArguments, LogRecorder], None]


def fit(model: Any, given: FitArguments, watch: LogRecorder, **options: Any) -> None:
    """`model.fit` on what the script gives; `options` have the last word."""
    given = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **given, **options}
    callbacks = [*given.pop("callbacks", ()), watch]
    model.fit(**given, callbacks=callbacks)


def evaluate_and_predict(model: Any, given: FitArguments, watch: LogRecorder) -> None:
    """`evaluate` and `predict` on the data of the training."""
    shown = {key: given[key] for key in ("x", "y", "sample_weight") if key in given}
    size = (
        {} if "batch_size" in given and given["batch_size"] is None else {"batch_size": given.get("batch_size", BATCH)}
    )
    for key, value in model.evaluate(**shown, **size, verbose=0, return_dict=True).items():
        watch.history.setdefault(f"evaluate_{key}", []).append(value)
    watch.found["predict"] = model.predict(given["x"], **size, verbose=0)


@dataclass(frozen=True)
class Script:
    """How a case is run: build, train; with `evaluates`, `evaluate` and `predict` too."""

    build: Callable[[Cut], Any]
    data: Callable[[], FitArguments]
    train: Train = fit
    evaluates: bool = True

    def __call__(self, cut: Cut) -> Outcome:
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(7)
        watch = LogRecorder(cut)
        model = self.build(cut)
        self.train(model, self.data(), watch)
        if self.evaluates:
            evaluate_and_predict(model, self.data(), watch)
        return _outcome(model, watch)


def _outcome(model: Any, watch: LogRecorder) -> Outcome:
    found = Outcome(losses=watch.steps, history=watch.history, stages=watch.stages)
    with nb.gathered():
        state = [*model.non_trainable_variables, *getattr(model.optimizer, "variables", ())]
        found.weights = [*watch.first, *map(_array, model.trainable_variables)]
        found.outputs = [_array(v) for v in state if "seed" not in v.path]
    kept = keras.tree.flatten([watch.found.get(key, ()) for key in ("predict", "kept")])
    found.outputs += [np.asarray(tensor, "float32") for tensor in kept]
    return found


def _array(variable: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable), "float32")


SCRIPTS: dict[str, Case] = {}
"""Every script by its name."""


def script(data: Callable[[], FitArguments], *args: Any, **options: Any) -> Callable[[Callable[[Cut], Any]], Any]:
    """Register a builder as the script of its own name."""

    def register(build: Callable[[Cut], Any]) -> Callable[[Cut], Any]:
        add(build.__name__, build, data, *args, **options)
        return build

    return register


def add(
    name: str, build: Callable[[Cut], Any], data: Callable[[], FitArguments], train: Train = fit, *,
    evaluates: bool = True, stages: tuple[int, ...] = (1, 2), **options: Any
) -> None:  # fmt: skip
    """Register a script whose builder is made on the way; `options` are those of a case."""
    if name in SCRIPTS:
        raise ValueError(f"two scripts are named {name!r}")
    SCRIPTS[name] = Case(Script(build, data, train, evaluates), stages, **({"steps": 6} | options))


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers, the same each time; the first axis is rows."""
    return np.random.default_rng(seed).standard_normal((ROWS, *shape)).astype("float32")


def abs_numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers above zero, for weights."""
    return np.abs(numbers(*shape, seed=seed))


def classes(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Class numbers."""
    return np.random.default_rng(seed).integers(0, count, (ROWS, *shape))


def rows(**more: Any) -> Callable[[], FitArguments]:
    """Six features and three targets a row."""
    return lambda: {"x": numbers(6), "y": numbers(3, seed=1), **more}


def labels(**more: Any) -> Callable[[], FitArguments]:
    """Six features and one class of four a row."""
    return lambda: {"x": numbers(6), "y": classes(4, seed=1), **more}


def adam(rate: float = 1e-2, **options: Any) -> Any:
    """Adam whose epsilon is large enough that noise in a zero gradient stays noise."""
    return keras.optimizers.Adam(rate, epsilon=1e-3, **options)


def momentum(rate: float = 1e-2) -> Any:
    """What trains a script that is not about optimizers: Adam takes longer to trace, and sees no scale."""
    return keras.optimizers.SGD(rate, momentum=0.9)


def two_parts(cut: Cut, inputs: Any, first: Any, second: Any, loss: Any = "mse", **compiled: Any) -> Any:
    """A functional model of what two functions do to its inputs, each in its part, compiled."""
    with cut.program():
        with cut.at(0):
            hidden = first(inputs)
        with cut.at(1):
            outputs = second(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(momentum(), loss, **compiled)
    return model


def dense(cut: Cut, outputs: int = 3, kind: Any = keras.Model, activation: str | None = None, **options: Any) -> Any:
    """A small functional model in three parts, of one's own kind or Keras's, not compiled."""
    inputs = keras.Input((6,))
    with cut.program(**options):
        with cut.at(0):
            hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        with cut.at(1):
            hidden = keras.layers.Dense(8, activation="gelu")(hidden)
        with cut.at(2):
            found = keras.layers.Dense(outputs, activation=activation)(hidden)
    return kind(inputs, found)
