"""Train in two clusters under `kills.py`, print the times of events, and die after the given step."""

import os
import signal
import sys
import time

import keras
import numpy as np
from process_start import find_start

import whale_nebula as nb

STARTED, IMPORTED = find_start(), time.time()
STEPS, SETTLED = 40, 10


class EventCallback(keras.callbacks.Callback):
    """Callback that prints when each step ends, and when the first one was requested."""

    def __init__(self, dies: int, pause: float) -> None:
        super().__init__()
        self._dies, self._pause, self._asked = dies, pause, 0.0

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self._asked = self._asked or time.time()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        now, here = time.time(), nb.here()
        step = int(self.params["steps"]) * self.epoch + batch + 1
        skipped = nb.resumed() is not None and step <= nb.resumed().step
        if not skipped:
            times = " ".join(f"{each:.3f}" for each in (now, self._asked, STARTED, IMPORTED))
            print(f"EVENT step {here.worker} {here.epoch} {step} {times}", flush=True)
        if step == self._dies and here.worker == "gpu/0" and here.epoch == 0:
            print(f"EVENT dies {time.time():.3f}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._pause if step == SETTLED and here.epoch == 0 else 0.05)

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self.epoch = epoch


def main(folder: str, dies: str, pause: str) -> None:
    """Train a few layers in each cluster, with a pause of so many seconds before the kill."""
    nb.init(checkpoint={"folder": folder, "every": 10, "memory": 2})
    with nb.cluster(), nb.pipeline(4):
        inputs = hidden = keras.Input((256,))
        for cluster in ("gpu", "npu"):
            with nb.stage(cluster=cluster):
                for _ in range(3):
                    hidden = keras.layers.Dense(256, activation="relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("adam", "mse")
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(32 * STEPS, 256)).astype("float32"), draw.normal(size=(32 * STEPS, 1)).astype("float32")
    try:
        model.fit(x, y, batch_size=32, epochs=1, verbose=0, callbacks=[EventCallback(int(dies), float(pause))])
    except nb.errors.NebulaError:
        print(f"EVENT hears {time.time():.3f}", flush=True)
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
