"""Worker: saves in memory every two steps, and ends with an error that a restart would repeat."""

import sys

import keras
import numpy as np

import whale_nebula as nb
from tests.processes.workers.restart import build_model
from tests.processes.workers.resume import StepReporter
from whale_nebula.errors import ConfigError

LAST_STEP = 7
"""The step after which the script fails."""


class ErrorAtLastStep(keras.callbacks.Callback):
    """Raises an error after the last step."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch + 1 == LAST_STEP:
            raise ConfigError("the script ends here")


if __name__ == "__main__":
    with nb.init(checkpoint={"folder": sys.argv[1], "every": 1000, "memory": 2}):
        model = build_model()
        x, y = np.ones((8 * LAST_STEP + 8, 6), "float32"), np.ones((8 * LAST_STEP + 8, 3), "float32")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[StepReporter(0.0), ErrorAtLastStep()])
