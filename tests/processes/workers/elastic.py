"""Worker: trains with as many replicas as its cluster has workers, and requests other numbers from the launcher.

`requests` has by epoch after which step how many workers of npu are asked for, "by" whom, if not by the lead; "dies" by
epoch which worker ends with its launcher, and after which step; "waits" after which step gpu waits, while workers of
npu are absent, until these have come; "validates" that each epoch ends with an evaluation.
"""

import http.client
import json
import os
import signal
import socket
import sys
import time

import keras
import numpy as np

import whale_nebula as nb
from tests.processes.worker_reports import report_value
from whale_nebula.launch.worker_exit import exit_agreement

ROWS, BATCH, STEPS = 48, 8, 6


class ResizeRequester(keras.callbacks.Callback):
    """Carries out `requests` after steps: requests other numbers of workers, kills a launcher, or waits for workers."""

    def __init__(self, path: str, requests: dict[str, list[int]]) -> None:
        super().__init__()
        self._path, self._requests, self._epoch = path, requests, 0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        here, done = nb.here(), STEPS * self._epoch + batch + 1
        if done == (nb.resumed() or (0,))[0] + 1:
            report_value(f"homes {here.epoch}", {name: each.cluster for name, each in nb.last_report().stages.items()})
        step, count = self._requests.get(str(here.epoch), [-1, 0])
        is_requester = here.worker == self._requests["by"] if "by" in self._requests else here.lead
        if is_requester and done == step:
            report_value("answered", self._send_request("POST", f"/resize?npu={count}"))
        if self._requests.get("dies", {}).get(str(here.epoch)) == [here.worker, done]:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)  # until it is ended with its launcher
        limit = time.monotonic() + 200
        waits = here.cluster == "gpu" and done == self._requests.get("waits")  # the others need its data
        while waits and _count_npu() < 2 and exit_agreement.announcement is None:
            if time.monotonic() > limit:
                raise RuntimeError("npu does not come")
            time.sleep(0.05)

    def on_train_end(self, logs: object = None) -> None:
        if self._path and nb.here().lead:
            report_value("metrics", self._send_request("GET", "/metrics")[1])

    def _send_request(self, method: str, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("run", timeout=30)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(self._path)
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def train_model(path: str = "", requests: str = "{}") -> None:
    """Report for each start its workers and the step where it resumed, and at the end the history."""
    here = nb.here()
    report_value(f"epoch {here.epoch}", [list(nb.resumed() or ())[:1], _count_npu()])
    inputs = keras.Input((6,))
    with nb.cluster(), nb.pipeline(4):
        with nb.stage(cluster="gpu"):
            hidden = keras.layers.Dense(16, activation="relu")(inputs)
        with nb.replica(), nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1)(keras.layers.Dense(16, activation="tanh")(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(ROWS, 6)).astype("float32"), draw.normal(size=(ROWS, 1)).astype("float32")
    options = json.loads(requests)
    validation_data = (x[: 2 * BATCH], y[: 2 * BATCH]) if options.get("validates") else None
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=3,
        verbose=0,
        callbacks=[ResizeRequester(path, options)],
        validation_data=validation_data,
        validation_batch_size=BATCH,
    )
    report_value("history", history.history)


def _count_npu() -> int:
    from whale_nebula.runtime.run import current_run

    return list(current_run().workers.values()).count("npu")


if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    with nb.init(checkpoint={"folder": folder, "memory": 1, "every": 6}):
        train_model(*arguments)
