"""Two clusters train to the same result although workers are killed during training.

    python examples/survive.py                                                                  # without failures
    whale-nebula run --all --clusters gpu,npu --restarts 5 examples/survive.py --kills 3 --folder runs/survive

The second command kills a worker three times, at random steps. Both commands print the same digest of the weights,
bit for bit.
"""

import argparse
import hashlib
import os
import random
import signal

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb

ROWS, BATCH, EPOCHS = 512, 32, 5


class WorkerKills(keras.callbacks.Callback):
    """Callback that kills one of the workers in each of the first starts, like `kill -9`."""

    def __init__(self, starts: int) -> None:
        super().__init__()
        here, draw, self._seen = nb.here(), random.Random(nb.here().epoch), 0
        chosen = draw.choice(here.clusters)
        self._after = draw.randint(8, 24) if here.epoch < starts and here.runs(chosen) and not here.alone else 0

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Kill this worker at its step."""
        self._seen += 1
        if self._seen == self._after:
            print(f"{nb.here().worker} is killed in start {nb.here().epoch}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train, and print the digest."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kills", type=int, default=0, metavar="N", help="starts in which a worker is killed")
    arguments.add_argument("--folder", help="folder of checkpoints; without it nothing is saved")
    given = arguments.parse_args()

    nb.init(seed=1, checkpoint=given.folder and {"folder": given.folder, "every": 4})
    if nb.here().lead and nb.resumed() is not None:
        print(f"resumes after step {nb.resumed().step}", flush=True)
    with nb.cluster(), nb.pipeline(micro_batch=4):
        with nb.stage(cluster="gpu"):
            inputs = keras.Input((16,))
            hidden = keras.layers.Dropout(0.2)(keras.layers.Dense(64, activation="relu")(inputs))
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1)(keras.layers.Dense(64, activation="relu")(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), "mse")

    draw = np.random.default_rng(0)
    x = draw.normal(size=(ROWS, 16)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, np.sin(x.sum(1, keepdims=True)))).shuffle(ROWS, seed=1).batch(BATCH)
    history = model.fit(data, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=[WorkerKills(given.kills)]).history

    weights = b"".join(np.ascontiguousarray(each).tobytes() for each in model.get_weights())
    if nb.here().lead:
        print(f"loss {history['loss'][-1]:.6f}, weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
