"""Worker: trains under `nb.auto_parallel`, and asks for another number of workers of npu once its plan is stored.

`requests` has by epoch after which step how many workers are asked for, and "by" whom, the process that searches.
"""

import json
import sys
import time
from typing import Any

import keras
import numpy as np
import psutil

import whale_nebula as nb
from tests.processes.worker_reports import report_value
from tests.processes.workers.elastic import STEPS, ResizeRequester
from whale_nebula.planner.search import search
from whale_nebula.planner.stored_plans import read_plans
from whale_nebula.runtime.run import current_run

ROWS, BATCH = 96, 16


class PlannedRequester(ResizeRequester):
    """Requests another number of workers when the plans for all next numbers are stored."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        here, done = nb.here(), STEPS * self._epoch + batch + 1
        if here.worker == self._requests["by"] and done == self._requests.get(str(here.epoch), [-1])[0]:
            await_plans()
        super().on_train_batch_end(batch, logs)


def await_plans() -> None:
    """Wait until the search of plans, which this process has begun after its first steps, has ended."""
    limit = time.monotonic() + 240
    while not read_plans() or any(each.status() != psutil.STATUS_ZOMBIE for each in psutil.Process().children()):
        if time.monotonic() > limit:
            raise RuntimeError("no plans are stored")
        time.sleep(0.05)


def build_model() -> Any:
    """A model too large for one worker."""
    hidden = inputs = keras.Input((64,))
    for width in (192, 192, 192, 4):
        hidden = keras.layers.Dense(width, activation="relu")(hidden)
    model = keras.Model(inputs, hidden)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    return model


def train_model(path: str = "", requests: str = "{}") -> None:
    """Report for each start its plan, the plan that a search finds now, and at the end the history."""
    model, here = build_model(), nb.here()
    draw = np.random.default_rng(0)
    x, y = draw.random((ROWS, 64)).astype("float32"), draw.random((ROWS, 4)).astype("float32")
    if path:
        plan = nb.plan(model, x[:BATCH], y[:BATCH])
        (decision,) = current_run().decisions
        found = [each.shape for each in search(decision.problem).candidates]
        is_equal = found == [each.shape for each in decision.candidates]
        is_stored = "found in advance" in " ".join(plan.explain().split())
        workers = [each.workers for each in decision.problem.clusters]
        report_value(f"start {here.epoch} {here.worker}", [workers, is_stored, is_equal, repr(decision.chosen.shape)])
    callbacks = [PlannedRequester(path, json.loads(requests))] if path else []
    history = model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=callbacks)
    report_value("history", history.history)


if __name__ == "__main__":
    folder, memory, *arguments = sys.argv[1:]
    with nb.init(checkpoint={"folder": folder, "memory": 1, "every": 6}):
        nb.auto_parallel(memory=memory)
        train_model(*arguments)
