"""Worker: trains with as many replicas as its cluster has workers, and asks the launcher for others on the way.

`asked` has by epoch after which step how many workers of npu are asked for, "by" whom, if not by the lead; "dies" by
epoch after which step npu/0 ends with its launcher; "waits" after which step gpu waits, while it trains without npu,
until npu has come.
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
from tests.processes.telling import tell
from whale_nebula.launch.worker_exit import exit_agreement

ROWS, BATCH, STEPS = 48, 8, 6


class Asks(keras.callbacks.Callback):
    """In the lead, after the step of an epoch of the run: another number of workers."""

    def __init__(self, path: str, asked: dict[str, list[int]]) -> None:
        super().__init__()
        self._path, self._asked, self._epoch = path, asked, 0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        here, done = nb.here(), STEPS * self._epoch + batch + 1
        if done == (nb.resumed() or (0,))[0] + 1:
            tell(f"homes {here.epoch}", {name: each.cluster for name, each in nb.last_report().stages.items()})
        step, count = self._asked.get(str(here.epoch), [-1, 0])
        asks = here.worker == self._asked["by"] if "by" in self._asked else here.lead
        if asks and done == step:
            tell("answered", self._ask("POST", f"/resize?npu={count}"))
        if here.worker == "npu/0" and self._asked.get("dies", {}).get(str(here.epoch)) == done:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)  # it ends with its launcher
        limit = time.monotonic() + 60
        while done == self._asked.get("waits") and "npu" not in _clusters() and exit_agreement.announcement is None:
            if time.monotonic() > limit:
                raise RuntimeError("npu does not come")
            time.sleep(0.05)

    def on_train_end(self, logs: object = None) -> None:
        if self._path and nb.here().lead:
            tell("metrics", self._ask("GET", "/metrics")[1])

    def _ask(self, method: str, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("run", timeout=30)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(self._path)
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def lesson(path: str = "", asked: str = "{}") -> None:
    """Tells of each start how many workers it had and where it went on, and in the end what was trained."""
    here = nb.here()
    tell(f"epoch {here.epoch}", [list(nb.resumed() or ())[:1], sum(c == "npu" for c in _clusters())])
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
    asks = Asks(path, json.loads(asked))
    seen = (x[: 2 * BATCH], y[: 2 * BATCH])
    history = model.fit(
        x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[asks], validation_data=seen, validation_batch_size=BATCH
    )
    tell("history", history.history)


def _clusters() -> list[str]:
    from whale_nebula.runtime.run import current_run

    return list(current_run().workers.values())


if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    with nb.init(checkpoint={"folder": folder, "memory": 1, "every": 6}):
        lesson(*arguments)
