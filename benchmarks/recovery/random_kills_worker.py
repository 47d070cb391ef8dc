"""Train in two clusters under `random_kills.py`, with prolonged steps, and print the digest of the weights."""

import hashlib
import sys
import time

import keras
import numpy as np

import whale_nebula as nb


class PauseCallback(keras.callbacks.Callback):
    """Callback that prolongs each step and prints the progress."""

    def __init__(self, rest: float) -> None:
        super().__init__()
        self._rest = rest

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch % 5 == 0:
            print(f"at step {batch}", flush=True)
        time.sleep(self._rest)


def main(folder: str, steps: str, rest: str) -> None:
    """Train a few layers in each cluster, with dropout, and a codec with state."""
    nb.init(seed=1, checkpoint=None if folder == "-" else {"folder": folder, "every": 20, "memory": 4})
    with nb.cluster(), nb.pipeline(2):
        with nb.stage(cluster="gpu"):
            inputs = keras.Input((16,))
            hidden = keras.layers.Dropout(0.2)(keras.layers.Dense(64, activation="relu")(inputs))
            with nb.compress(rank=8, int8=True):
                hidden = keras.layers.Dense(32)(hidden)
        with nb.stage(cluster="npu"):
            outputs = keras.layers.Dense(1)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    draw = np.random.default_rng(0)
    x, y = (draw.normal(size=(16 * int(steps), width)).astype("float32") for width in (16, 1))
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[PauseCallback(float(rest))])
    weights = b"".join(np.ascontiguousarray(each).tobytes() for each in model.get_weights())
    print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
