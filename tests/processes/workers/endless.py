"""Worker: three clusters train until one of them is killed."""

from typing import Any

import keras

import whale_nebula as nb
from tests.processes.telling import tell
from tests.same import data
from whale_nebula.errors import NebulaError


class Told(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            tell("training", True)


nb.init()
inputs = keras.Input((6,))
hidden = inputs
with nb.cluster(), nb.pipeline(2):
    for name in nb.here().clusters:
        with nb.stage(cluster=name):
            hidden = keras.layers.Dense(6)(hidden)
model = keras.Model(inputs, hidden)
model.compile("sgd", "mse")
try:
    model.fit(data(64, 6), data(64, 6), batch_size=2, epochs=10**6, verbose=0, callbacks=[Told()])
except NebulaError as failure:
    tell("error", str(failure))
    raise
