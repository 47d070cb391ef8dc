"""Worker: train a model apart from the other clusters, in the ways that its arguments name; tell what is left.

The processes begin with unlike weights, on purpose.
"""

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import whale_nebula as nb
from tests.processes.telling import bits, tell

RNG = np.random.default_rng(0)
X = RNG.random((48, 8)).astype("float32")
Y = np.tanh(X @ RNG.random((8, 2)).astype("float32"))
WAYS: dict[str, dict[str, Any]] = {
    "sync": {"sync_every": 4, "fragments": 2, "delay": 1},
    "each": {"sync_every": 1, "outer": "average"},
    "async": {"sync_every": 3, "mode": "async"},
}


def model(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(1200, activation="tanh")(inputs)
    hidden = keras.layers.Dropout(0.2)(hidden)
    made = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    made.compile(keras.optimizers.Adam(0.002), "mse")
    return made


def trained(way: str, seed: int = 1) -> keras.Model:
    """Two epochs with validation, and the same in all clusters then."""
    made = model(seed)
    with nb.cluster(), nb.compress(int4=True), nb.replica(**WAYS[way]):
        history = made.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0, validation_data=(X, Y)).history
        meetings = nb.last_report(f"{made.name}.train_step").meetings
    tell(f"{way} meetings", None if meetings is None else [list(meetings.others), meetings.steps])
    tell(f"{way} losses", history["loss"])
    tell(f"{way} validation", history["val_loss"])
    tell(f"{way} weights", bits(made.get_weights()))
    return made


class Told(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        tell("steps", self.steps)


def endless() -> None:
    """Until somebody ends it."""
    made = model(1)
    with nb.cluster(), nb.replica(sync_every=10):
        made.fit(X, Y, batch_size=12, epochs=10**6, verbose=0, shuffle=False, callbacks=[Told()])
    sys.exit("nobody left")


def main() -> None:
    folder, *ways = sys.argv[1:]
    nb.init()
    if ways == ["endless"]:
        endless()
    here = nb.here().worker
    unlike = 1 if here == "c0/0" else 2
    for way in ways:
        made = trained(way, unlike)
        path = Path(folder) / f"{way}.weights.h5"
        made.save_weights(path)
        with nb.gathered():
            saved = bits(made.get_weights())
        made.fit(X, Y, batch_size=12, shuffle=False, verbose=0)
        made.load_weights(path)
        tell(f"{way} loaded", bits(made.get_weights()) == saved)

    @nb.function
    def step(x: Any) -> Any:
        with nb.cluster(), nb.replica(sync_every=2, outer="average", delay=0):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((x - weight) ** 2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

    weight = tf.Variable([0.0 if here == "c0/0" else 5.0])
    for _ in range(4):
        step(tf.ones((6, 1)))
    with nb.gathered():
        tell("loop", float(weight.numpy()[0]).hex())


if __name__ == "__main__":
    main()
