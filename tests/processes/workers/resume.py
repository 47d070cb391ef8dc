"""Worker: trains with dropout, replicas, a codec with state, and data that is shuffled differently in each epoch. It
saves every two steps, and fails at a given place.
"""

import contextlib
import hashlib
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.processes.worker_reports import enter_worker_folder, report_value
from whale_nebula.faults import FaultPlan, apply_plan
from whale_nebula.launch import attach
from whale_nebula.runtime.run import current_run
from whale_nebula.strategies import OneBitLamb

ROWS, BATCH = 44, 8


class StepReporter(keras.callbacks.Callback):
    """Waits for checkpoints after each step, so that the saved steps do not depend on the machine. With a `pause`,
    reports each step and pauses.
    """

    def __init__(self, pause: float) -> None:
        super().__init__()
        self._pause, self._steps = pause, 0

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if self._pause:
            self._steps += 1
            report_value("step", self._steps)
            time.sleep(self._pause)
        checkpoints = current_run().checkpoints
        for level in [] if checkpoints is None else checkpoints.levels:
            level.read_part(wait=True)
            if level._committing is not None and not level.durable:
                level._committing.result()


class ErrorAtStep(keras.callbacks.Callback):
    """Raises an error at a place of a `fit` after this number of steps."""

    def __init__(self, place: str, step: int) -> None:
        super().__init__()
        self._place, self._step = place, step

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._raise_at("batch")

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self._raise_at("begin")

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self._raise_at("epoch")

    def _raise_at(self, place: str) -> None:
        checkpoints = current_run().checkpoints
        if place == self._place and checkpoints is not None and checkpoints.position.step == self._step:
            raise ValueError(f"the script ends at {place} {self._step}")


def build_pipeline() -> keras.Model:
    """Two replicas of one stage, and another stage behind a codec with state."""
    with nb.cluster(), nb.pipeline(2):
        inputs = keras.Input((6,), name="x")
        with nb.replica(2), nb.stage(cluster="c0"):
            hidden = keras.layers.Dropout(0.25)(keras.layers.Dense(32, activation="relu")(inputs))
            with nb.compress(rank=8, int8=True):
                hidden = keras.layers.Dense(32)(hidden)
        with nb.stage(cluster="c1"):
            outputs = keras.layers.Dense(1)(hidden)
    return keras.Model(inputs, outputs)


def build_local_sgd() -> keras.Model:
    """A copy in each cluster, with local SGD every four steps."""
    return build_copies({"topk": 0.2, "int8": True}, sync_every=4, fragments=2, delay=1)


def build_momentum_exchange() -> keras.Model:
    """A copy in each worker of a cluster."""
    return build_copies(exchange="1bit")


def build_copies(codec: Mapping[str, Any] | None = None, **options: Any) -> keras.Model:
    with nb.cluster(), nb.compress(**codec) if codec else contextlib.nullcontext(), nb.replica(**options):
        inputs = keras.Input((6,), name="x")
        hidden = keras.layers.Dropout(0.25)(keras.layers.Dense(800, activation="relu")(inputs))
        outputs = keras.layers.Dense(1)(hidden)
    return keras.Model(inputs, outputs)


MODELS = {"piped": build_pipeline, "apart": build_local_sgd, "members": build_momentum_exchange}
"""The models by the kind that an argument names."""


def train_model(
    epochs: str = "3", kind: str = "piped", pause: str = "0", error_callbacks: Sequence[keras.callbacks.Callback] = ()
) -> None:
    """Report where the run resumed, the history, and a digest of the weights."""
    report_value("resumed", list(nb.resumed() or ()))
    model = MODELS[kind]()
    one_bit = OneBitLamb(0.02, freeze_step=4, servers=True)
    model.compile(one_bit if kind == "members" else keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(ROWS, 6)).astype("float32"), draw.normal(size=(ROWS, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS).batch(BATCH)
    stopping = keras.callbacks.EarlyStopping(monitor="loss", patience=9)
    history = model.fit(
        data, epochs=int(epochs), verbose=0, callbacks=[stopping, StepReporter(float(pause)), *error_callbacks]
    )
    report_value("history", {name: [float(each).hex() for each in values] for name, values in history.history.items()})
    weights = b"".join(np.ascontiguousarray(each).tobytes() for each in model.get_weights())
    report_value("weights", hashlib.sha256(weights).hexdigest())


def main(folder: str, faults: str, *arguments: str) -> None:
    """`faults` are failpoints; or "WORKER:PLACE@STEP", where that worker's script breaks, or without its name all."""
    launched = attach()
    assert launched is not None
    error_place = re.fullmatch(r"(?:(.+):)?(\w+)@(\d+)", faults)
    error_callbacks = (
        [ErrorAtStep(error_place[2], int(error_place[3]))]
        if error_place and error_place[1] in (None, launched.worker)
        else []
    )
    plan = FaultPlan.parse("" if faults == "-" or error_place else faults, worker=launched.worker)
    if folder != "-" and arguments[1:]:
        folder = enter_worker_folder(folder)
    every = {"every": 6 if arguments[2:] else 1000, "memory": 2} if launched.memory else {"every": 2}
    config = {} if folder == "-" else {"checkpoint": {"folder": folder, **every}}
    with apply_plan(plan), nb.init(config):
        train_model(*arguments, error_callbacks=error_callbacks)


if __name__ == "__main__":
    main(*sys.argv[1:])
