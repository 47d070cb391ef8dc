"""Train under `nb.auto_parallel` for `resize.py`, ask for other numbers of workers, and print what each start costs."""

import http.client
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from process_start import find_start

import whale_nebula as nb
from whale_nebula.planner.stored_plans import find_digest, read_plans
from whale_nebula.runtime import auto_parallel
from whale_nebula.runtime.checkpoint.checkpoints import Checkpoints
from whale_nebula.runtime.run import current_run

STEPS, BATCH, ASKED = 12, 32, {0: (4, 1), 1: (8, 2)}
Part = tuple[float, float]


def read_clocks() -> Part:
    """The wall-clock time, and the seconds of a core that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.time(), used.ru_utime + used.ru_stime


class Parts:
    """The parts of a start: wall-clock seconds and seconds of a core of each."""

    def __init__(self) -> None:
        self.last: Part = (find_start(), 0.0)
        self.found: dict[str, Part] = {}

    def end(self, name: str) -> None:
        """End a part, and begin the next one."""
        now = read_clocks()
        self.found[name] = (now[0] - self.last[0], now[1] - self.last[1])
        self.last = now

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Count the first call of a function as a part of its own."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = read_clocks()
            result = call(*args, **kwargs)
            after = read_clocks()
            self.found.setdefault(part, (after[0] - before[0], after[1] - before[1]))
            return result

        setattr(owner, name, timed)


class Requester(keras.callbacks.Callback):
    """Prints the parts of a start after its first step, and requests other numbers of workers."""

    def __init__(self, path: str, parts: Parts) -> None:
        super().__init__()
        self._path, self._parts = path, parts

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        here, resumed = nb.here(), nb.resumed()
        if batch + 1 == (resumed.step if resumed else 0) + 1:
            self._parts.end("first step, with its traces")
            print(f"PARTS {here.worker} {here.epoch} {json.dumps(self._parts.found)}", flush=True)
        step, count = ASKED.get(here.epoch, (-1, 0))
        if here.lead and batch + 1 == step:
            limit, decision = time.monotonic() + 240, current_run().decisions[0]
            wanted = {find_digest(own) for _, own in decision.list_resize_problems()}
            while not wanted <= read_plans().keys() and time.monotonic() < limit:
                time.sleep(0.1)
            connection = http.client.HTTPConnection("run", timeout=60)
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(self._path)
            connection.request("POST", f"/resize?npu={count}")
            connection.getresponse().read()
            print(f"ASKED {here.worker} {here.epoch} {time.time():.3f}", flush=True)


def main(folder: str, path: str) -> None:
    """Train a model that needs several workers."""
    parts = Parts()
    parts.end("imports of TensorFlow, Keras and the library")
    parts.wrap(auto_parallel, "decide", "of the first step: the plan")
    parts.wrap(Checkpoints, "restore_if_requested", "of the first step: the state, from memory")
    nb.init(checkpoint={"folder": folder, "memory": 1})
    parts.end("connections, and the choice of a checkpoint")
    nb.auto_parallel(memory="12MiB")
    hidden = inputs = keras.Input((256,))
    for _ in range(8):
        hidden = keras.layers.Dense(256, activation="relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("adam", "mse")
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(BATCH * STEPS, 256)).astype("float32"), draw.normal(size=(BATCH * STEPS, 1))
    parts.end("the model")
    model.fit(x, y.astype("float32"), batch_size=BATCH, epochs=1, verbose=0, callbacks=[Requester(path, parts)])


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(*sys.argv[1:])
