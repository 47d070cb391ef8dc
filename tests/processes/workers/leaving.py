"""Worker: two clusters train until one of them is asked to end."""

import sys
from typing import Any

import keras

import whale_nebula as nb
from tests.processes.telling import tell
from tests.same import data


class Told(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        tell("steps", self.steps)


inputs = keras.Input((6,))
hidden = inputs
with nb.cluster(), nb.pipeline(2):
    for name in nb.here().clusters:
        with nb.stage(cluster=name):
            hidden = keras.layers.Dense(6)(hidden)
model = keras.Model(inputs, hidden)
model.compile("sgd", "mse")
model.fit(data(64, 6), data(64, 6), batch_size=2, epochs=10**6, verbose=0, callbacks=[Told()])
sys.exit("nobody left")
