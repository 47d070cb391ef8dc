"""Worker: trains a copy of a model in each cluster; some are lost in the first start, and return.

`plan` has after which step of the first start the first worker of a cluster is killed, by cluster ("killed"); the step
after which all wait until the file "cut" exists in the folder; the clusters for which the run waits after a step if
it trains without them ("waits", by step); from which step of the first start on a cluster pauses after each step, and
for how many seconds ("pause"); and after which step of the first start a script fails, by cluster ("fails").
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

import whale_nebula as nb
from tests.processes.worker_reports import report_value
from whale_nebula.launch.worker_exit import exit_agreement
from whale_nebula.runtime.run import current_run

ROWS, BATCH, EPOCHS, EVERY = 96, 8, 3, 4
STEPS = ROWS // BATCH


class Absence(keras.callbacks.Callback):
    """Kills workers, and lets the anchor wait until they come again; the others need its data."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        super().__init__()
        self._plan, self._epoch = plan, 0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        here, done = nb.here(), STEPS * self._epoch + batch + 1
        report_value("steps", done)
        if not here.epoch and done == self._plan.get("killed", {}).get(here.cluster):
            os.kill(os.getpid(), signal.SIGKILL)
        if not here.epoch and done == self._plan.get("fails", {}).get(here.cluster):
            raise RuntimeError("the script fails")
        begin, seconds = self._plan.get("pause", {}).get(here.cluster, [done + 1, 0])
        if not here.epoch and done >= begin:
            time.sleep(seconds)
        if not here.epoch and done == self._plan.get("cut", [0])[0]:
            _await(lambda: os.path.exists(self._plan["cut"][1]), "the line is not cut")
        lost = set(self._plan.get("waits", {}).get(str(done), ())) - set(_list_clusters())
        if current_run().attachment.anchor == here.worker:
            for name in sorted(lost):
                _await(lambda name=name: f"{name}/0=1" in (exit_agreement.announcement or ""), f"{name} does not come")


def _await(is_over: Callable[[], bool], failure: str) -> None:
    limit = time.monotonic() + 600
    while not is_over():
        if time.monotonic() > limit:
            raise RuntimeError(failure)
        time.sleep(0.05)


def make_model() -> keras.Model:
    """A linear model with momentum, of which each cluster trains a copy."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def draw_rows() -> tuple[np.ndarray, np.ndarray]:
    """The inputs and the targets."""
    draw = np.random.default_rng(0)
    return draw.normal(size=(ROWS, 6)).astype("float32"), draw.normal(size=(ROWS, 1)).astype("float32")


def train_model(plan: Mapping[str, Any]) -> None:
    """Report where each start resumes, the missed meetings, and the weights at the end."""
    here = nb.here()
    report_value(f"epoch {here.epoch}", [(nb.resumed() or (0,))[0], _list_clusters()])
    model, (x, y) = make_model(), draw_rows()
    options = {"sync_every": EVERY, "delay": plan.get("delay", 0), "outer": plan.get("outer", "average")}
    with nb.cluster(), nb.replica(**options):
        model.fit(
            x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[Absence(plan)],
            validation_data=(x[:BATCH], y[:BATCH]) if plan.get("validates") else None,
        )  # fmt: skip
    report_value("missed", dict(nb.last_report().meetings.missed))
    report_value("report", str(nb.last_report()))
    report_value("weights", [weight.ravel().tolist() for weight in model.get_weights()])


def _list_clusters() -> list[str]:
    return sorted(set(current_run().workers.values()))


if __name__ == "__main__":
    folder, plan = sys.argv[1:]
    options = json.loads(plan)
    with nb.init(checkpoint={"folder": folder, "memory": 1, "every": options.get("every", 3)}):
        train_model(options)
