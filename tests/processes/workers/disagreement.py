"""Worker: one run after another in which the two processes do not do the same. Its argument is a folder."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.processes.lesson import X, Y, fit, taught
from tests.processes.reopening import reopen
from tests.processes.telling import bits, tell
from whale_nebula.launch import attach

FOLDER, SECOND = Path(sys.argv[1]), attach().worker == "c1/0"


def own(model: keras.Model) -> list[str]:
    """The weights of this process's layer, which it can always read."""
    return bits(model.get_layer("second" if SECOND else "first").weights)


def ended(act: Callable[[], Any]) -> dict[str, Any]:
    """How a scenario ended here."""
    start = time.monotonic()
    try:
        act()
    except BaseException as failure:
        error = {"type": type(failure).__name__, "text": str(failure)}
    else:
        error = {"type": "", "text": ""}
    return {**error, "seconds": time.monotonic() - start}


def seeds() -> None:
    tell("seeds", ended(lambda: reopen(FOLDER, seed=1 + SECOND)))


def order() -> None:
    reopen(FOLDER)
    model = taught()
    before = own(model)
    mine = np.roll(X, 16, axis=0) if SECOND else X
    tell("order", {**ended(lambda: fit(model, mine)), "untouched": own(model) == before})


def rows() -> None:
    reopen(FOLDER)
    model = taught()
    tell("rows", ended(lambda: fit(model, batch_size=8 if SECOND else 16)))


def width() -> None:
    reopen(FOLDER)
    tell("width", ended(lambda: fit(taught(width=9 if SECOND else 8))))


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = SECOND and batch == 1


def stopped_and_read() -> None:
    """The second process stops and goes on with something else."""
    reopen(FOLDER)
    model = taught()

    def act() -> None:
        fit(model, epochs=20, callbacks=[Stop()])
        model.get_weights()

    tell("stopped and read", ended(act))


def stopped_and_left() -> None:
    """The second process stops, and its run ends."""
    reopen(FOLDER)
    model = taught()

    def act() -> None:
        fit(model, epochs=20, callbacks=[Stop()])
        nb.shutdown()

    tell("stopped and left", ended(act))


def asserting() -> None:
    reopen(FOLDER)
    first, second = tf.Variable(tf.ones([6, 4])), tf.Variable(tf.ones([4, 1]))

    @nb.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape, nb.cluster(), nb.pipeline(2):
            with nb.stage(cluster="c0"):
                hidden = x @ first
            with nb.stage(cluster="c1"):
                tf.debugging.assert_less(tf.abs(hidden), 1e6, "the hidden values exploded")
                loss = tf.reduce_mean((hidden @ second) ** 2)
        for variable, gradient in zip((first, second), tape.gradient(loss, [first, second]), strict=True):
            variable.assign_sub(1e-3 * gradient)
        return loss

    step(X[:8])
    mine = second if SECOND else first
    before = bits([mine])
    tell("asserting", {**ended(lambda: step(X[:8] * 1e9)), "untouched": bits([mine]) == before})


def ids() -> None:
    """Only the named input is compared: the other one is c0's alone, and c1 may hold what it likes there."""
    reopen(FOLDER, ids="names")

    @nb.function
    def step(names: Any, x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="c0"):
                hidden = 2.0 * x
            with nb.stage(cluster="c1"):
                return tf.reduce_sum(hidden * tf.cast(names, tf.float32))

    names = np.arange(4, dtype="int32")
    blank = np.zeros(4, "float32") if SECOND else np.ones(4, "float32")
    tell("ids alike", float(step(names, blank)))
    tell("ids unlike", ended(lambda: step(names + SECOND, blank)))


def configs() -> None:
    """The one keeps its weights at home, and the other does not."""
    tell("configs", ended(lambda: reopen(FOLDER, config={"weights": "own"} if SECOND else {})))


def absent() -> None:
    """The second process computes the loss, and was not given what it compares with."""
    reopen(FOLDER, config={"inputs": {"y": {"shape": [None, 3]}}})
    model = taught()
    before = own(model)
    error = ended(lambda: fit(model, y=None if SECOND else Y))
    tell("absent", {**error, "untouched": own(model) == before})


def absent_later() -> None:
    """What a process does not read may come and go; what it reads may not."""
    reopen(FOLDER, config={"inputs": {"names": {"shape": [None]}, "x": {"shape": [None]}}})

    @nb.function
    def step(names: Any, x: Any) -> Any:
        with nb.cluster():
            with nb.stage(cluster="c0"):
                hidden = 2.0 * x
            with nb.stage(cluster="c1"):
                return tf.reduce_sum(hidden * names)

    names, x = np.arange(4, dtype="float32"), np.ones(4, "float32")
    mine = (names, None) if SECOND else (None, x)
    tell("absent and given", [float(step(*given)) for given in (mine, (names, x), mine)])

    def later() -> None:
        with nb.gathered():  # all have read what they were given: a failure would overtake it, and overtakes even this
            pass
        step(None if SECOND else names, x)

    tell("absent later", ended(later))


def uncaught() -> None:
    """The last one: what the script of one process raises reaches the other."""
    reopen(FOLDER)
    model = taught()
    if SECOND:
        raise RuntimeError("no data on this site")
    tell("uncaught", ended(lambda: fit(model)))


SCENARIOS = (
    seeds, order, rows, width, stopped_and_read, stopped_and_left, asserting, ids, configs, absent, absent_later,
    uncaught,
)  # fmt: skip
for scenario in SCENARIOS:
    scenario()
